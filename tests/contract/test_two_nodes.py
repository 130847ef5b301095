"""Learners and EnvRunners on different nodes: a local cluster of two node processes."""

from __future__ import annotations

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.rllib.core import DEFAULT_MODULE_ID

from tests.tiny_runs import tiny_config

pytestmark = pytest.mark.ray


@pytest.fixture
def two_nodes():
    """A head, which also learns, and a node that plays; each kind fits on one of them only."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "resources": {"learning": 2}, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=4, resources={"playing": 2})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_sharded_model_learns_on_one_node_from_players_on_another(two_nodes, tmp_path):
    config = (
        tiny_config(num_groups=4, invalid_action_penalty=0.1)
        .learners(num_learners=2, sharding="fsdp", custom_resources_per_learner={"learning": 1})
        .env_runners(num_env_runners=2, custom_resources_per_env_runner={"playing": 1})
    )
    algorithm = config.build_algo()

    def node_of(_) -> str:  # inside, so that it travels by value: nodes do not import tests
        return ray.get_runtime_context().get_node_id()

    learners = {a.get() for a in algorithm.learner_group.foreach_learner(node_of)}
    players = set(algorithm.env_runner_group.foreach_env_runner(node_of, local_env_runner=False))
    assert len(learners) == len(players) == 1
    assert learners != players
    for _ in range(2):
        result = algorithm.train()
    # Every sync proves by checksums and a probe that the other node serves the learners' weights.
    assert algorithm.weights.version == 2
    assert result["learners"][DEFAULT_MODULE_ID]["gradient_norm"] > 0.0
    assert result["env_runners"]["staleness"] == 0.0
    assert result["env_runners"]["num_episodes"] == 8
    folder = algorithm.save_to_path(tmp_path / "checkpoint")
    after = algorithm.train()["learners"][DEFAULT_MODULE_ID]["gradient_norm"]
    algorithm.restore_from_path(folder)
    again = algorithm.train()["learners"][DEFAULT_MODULE_ID]["gradient_norm"]
    assert again == after
    algorithm.stop()
