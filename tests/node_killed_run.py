"""Train on a local cluster of three node processes, one of which is killed meanwhile.

    python -m tests.node_killed_run <output file>

Writes what was found as JSON.
"""

import json
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.rllib.core import DEFAULT_MODULE_ID

from tests.tiny_runs import tiny_config

# Ray gives a node up after this many checks without an answer.
FAST = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}


def main(output: str) -> None:
    """Learn on one node from what two others play, and kill one of these while it plays."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "resources": {"learning": 1},
            "include_dashboard": False,
            "_system_config": {**FAST, "health_check_failure_threshold": 4},
        },
    )
    players = [cluster.add_node(num_cpus=2, resources={"playing": 1}) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    config = (
        tiny_config(num_groups=8, invalid_action_penalty=0.1)
        .env_runners(num_env_runners=2, custom_resources_per_env_runner={"playing": 1})
        .fault_tolerance(heartbeat_timeout_s=10)
    )
    algorithm = config.build_algo()
    algorithm.train()
    killer = threading.Thread(target=lambda: (time.sleep(0.3), cluster.remove_node(players[0])))
    killer.start()
    found = [algorithm.train() for _ in range(2)]
    killer.join()
    found.append(algorithm.train())
    played = algorithm.sampler.sample(4).training_episodes
    facts = {
        "episodes": [int(result["env_runners"]["num_episodes"]) for result in found],
        "groups": len({episode.custom_data["group"] for episode in played}),
        "norms": [float(r["learners"][DEFAULT_MODULE_ID]["gradient_norm"]) for r in found],
        "nodes": sum(node["Alive"] for node in ray.nodes()),
    }
    algorithm.stop()
    # The same run on this process alone.
    alone = config.copy(copy_frozen=False).env_runners(num_env_runners=0).build_algo()
    results = [alone.train() for _ in range(4)][1:]
    facts["expected"] = [float(r["learners"][DEFAULT_MODULE_ID]["gradient_norm"]) for r in results]
    alone.stop()
    ray.shutdown()
    cluster.shutdown()
    Path(output).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
