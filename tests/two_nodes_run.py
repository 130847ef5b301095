"""Train on a local cluster of two node processes, in a process of its own.

    python -m tests.two_nodes_run <folder for a checkpoint> <output file>

Writes what was found as JSON: `facts` in `main`.
"""

import json
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.rllib.core import DEFAULT_MODULE_ID

from tests.tiny_runs import tiny_config


def main(folder: str, output: str) -> None:
    """Learn on one node from what is played on the other; each kind fits on one node only."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "resources": {"learning": 2}, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=4, resources={"playing": 2})
    ray.init(address=cluster.address, log_to_driver=False)
    config = (
        tiny_config(num_groups=4, invalid_action_penalty=0.1)
        .learners(num_learners=2, sharding="fsdp", custom_resources_per_learner={"learning": 1})
        .env_runners(num_env_runners=1, custom_resources_per_env_runner={"playing": 1})
    )
    algorithm = config.build_algo()

    def node_of(_) -> str:  # inside, so that it travels by value: nodes do not import tests
        return ray.get_runtime_context().get_node_id()

    def gradient_norm(result) -> float:
        return float(result["learners"][DEFAULT_MODULE_ID]["gradient_norm"])

    learners = {found.get() for found in algorithm.learner_group.foreach_learner(node_of)}
    players = set(algorithm.env_runner_group.foreach_env_runner(node_of, local_env_runner=False))
    for _ in range(2):
        result = algorithm.train()
    facts = {
        "learners": sorted(learners),
        "players": sorted(players),
        "version": algorithm.weights.version,
        "gradient_norm": gradient_norm(result),
        "staleness": float(result["env_runners"]["staleness"]),
        "num_episodes": int(result["env_runners"]["num_episodes"]),
    }
    saved = algorithm.save_to_path(folder)
    facts["third"] = gradient_norm(algorithm.train())
    algorithm.restore_from_path(saved)
    facts["third_again"] = gradient_norm(algorithm.train())
    algorithm.stop()
    ray.shutdown()
    cluster.shutdown()
    Path(output).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
