"""The same run with 0 and with 2 EnvRunner actors, through their deaths and from a checkpoint."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from rllib_gigpo.sampler import training_tasks
from tests.ray_runs import continued, facts_of, run_config, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


class Run:
    """Five iterations of one run, and a checkpoint after the third.

    Runs with actors lose one between iterations 3 and 4, and another inside iteration 5.
    """

    def __init__(self, model: Path, folder: Path, num_env_runners: int):
        self.flag = folder / "flag"
        config = run_config(model, flag=self.flag).env_runners(num_env_runners=num_env_runners)
        self.algorithm = config.build_algo()
        tasks = training_tasks(self.algorithm.config, 0)
        self.episodes = self.algorithm.play(self.algorithm.env_runner_group, tasks).episodes
        self.facts = [facts_of(self.algorithm.train()) for _ in range(3)]
        self.checkpoint = self.algorithm.save_to_path(str(folder / "checkpoint"))
        if num_env_runners:
            self.kill_one()
        self.facts.append(facts_of(self.algorithm.train()))
        if num_env_runners:
            self.flag.write_text("exit")
        self.facts.append(facts_of(self.algorithm.train()))
        self.weights = weights_of(self.algorithm)

    def kill_one(self) -> None:
        """Kill an actor and wait until Ray has restarted it, unnoticed by RLlib."""
        actor = self.algorithm.env_runner_group._worker_manager.actors()[1]

        def process() -> int:
            return ray.get(actor.apply.remote(lambda runner: os.getpid()))

        before = process()
        ray.kill(actor, no_restart=False)
        for _ in range(600):
            try:
                if process() != before:
                    return
            except ray.exceptions.RayActorError:
                pass
            time.sleep(0.1)
        raise AssertionError("Ray has not restarted the actor")


@pytest.fixture(scope="module")
def local_run(local_ray, warm_model, tmp_path_factory):
    run = Run(warm_model, tmp_path_factory.mktemp("local"), 0)
    yield run
    run.algorithm.stop()


@pytest.fixture(scope="module")
def remote_run(local_ray, warm_model, tmp_path_factory):
    run = Run(warm_model, tmp_path_factory.mktemp("remote"), 2)
    yield run
    run.algorithm.stop()


@pytest.fixture(scope="module")
def restored(local_run, remote_run, tmp_path_factory):
    """Two iterations from each run's checkpoint, in a new process."""
    folder = tmp_path_factory.mktemp("restored")
    runs = {"local": local_run, "remote": remote_run}
    return continued([(run.checkpoint, folder / f"{name}.pt") for name, run in runs.items()])


def assert_equal_facts(found: list[dict], expected: list[dict]) -> None:
    """Compare what iterations report.

    Engines that serve other requests beside them round differently in the last bits, and only the
    gap between engine and learner shows it.
    """
    for one, other in zip(found, expected, strict=True):
        gaps = [key for key in one if "engine_logp_gap" in key]
        assert {k: v for k, v in one.items() if k not in gaps} == {
            k: v for k, v in other.items() if k not in gaps
        }
        assert all(max(one[key], other[key]) < 1e-4 for key in gaps)


def test_the_run_learns_something(local_run):
    # Else all comparisons below would be of runs that stand still.
    for facts in local_run.facts:
        assert facts["learners/default_policy/gradient_norm"] > 0.0
        assert facts["learners/default_policy/nonzero_advantage_share"] > 0.2
        assert facts["env_runners/num_episodes"] == 9
    assert local_run.facts[-1]["learners/default_policy/kl"] > 0.0


def test_actors_play_the_episodes_of_a_local_run(local_run, remote_run):
    assert len(local_run.episodes) == 9
    for one, other in zip(local_run.episodes, remote_run.episodes, strict=True):
        assert one.custom_data == other.custom_data
        assert len(one) == len(other)
        for step in range(len(one)):
            np.testing.assert_array_equal(one.observations[step], other.observations[step])
            np.testing.assert_array_equal(one.actions[step], other.actions[step])
            np.testing.assert_allclose(
                one.extra_model_outputs["action_logp"][step],
                other.extra_model_outputs["action_logp"][step],
                atol=1e-5,
            )


def test_a_run_with_actors_is_the_local_run_whoever_dies(local_run, remote_run):
    assert not remote_run.flag.exists()  # removed by the process that then ended itself
    assert_equal_facts(remote_run.facts, local_run.facts)
    torch.testing.assert_close(remote_run.weights, local_run.weights, rtol=0, atol=0)


@pytest.mark.parametrize("place", [0, 1], ids=["local", "remote"])
def test_a_restored_run_goes_on_exactly(place, local_run, remote_run, restored):
    run = (local_run, remote_run)[place]
    found = restored[place]
    assert found["tasks"] == [t.env_seed for t in training_tasks(run.algorithm.config, 3)]
    assert_equal_facts(found["facts"], run.facts[3:])
    torch.testing.assert_close(found["weights"], run.weights, rtol=0, atol=0)


def test_an_error_in_an_actor_names_its_environment(remote_run):
    # The last test of this run: it ends here.
    remote_run.flag.write_text("raise")
    with pytest.raises(RuntimeError, match=r"Fragile.*ZeroDivisionError: the key broke"):
        remote_run.algorithm.train()
