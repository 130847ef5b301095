"""EnvRunners that are stopped (SIGSTOP): found by their silence, and nothing of the run changes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import ray
import torch
from ray._private.state import actors

from rllib_gigpo.recording.folder import RunFolder, read_lines
from rllib_gigpo.settings import derived
from tests.ray_runs import facts_of, run_config, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def test_a_stopped_runner_is_replaced_and_every_group_trained_once(warm_model, tmp_path):
    told = []
    for name, num_env_runners in (("local", 0), ("remote", 2)):
        flag = tmp_path / "flag"
        algorithm = (
            run_config(warm_model, flag=flag)
            .env_runners(num_env_runners=num_env_runners)
            .recording(folder=str(tmp_path / name), groups=None)
            .fault_tolerance(heartbeat_timeout_s=15.0)
            .build_algo()
        )
        facts = [facts_of(algorithm.train())]
        if num_env_runners:
            flag.write_text("stop")
        facts.append(facts_of(algorithm.train()))
        assert not flag.exists()
        told.append((facts, weights_of(algorithm)))
        if num_env_runners:
            assert algorithm.env_runner_group._worker_manager.num_silent >= 1
        algorithm.stop()
    (expected, weights), (found, after) = told
    for one, other in zip(expected, found, strict=True):
        exact = {key for key in one if "engine_logp_gap" not in key}
        assert {key: other[key] for key in exact} == {key: one[key] for key in exact}
    torch.testing.assert_close(after, weights, rtol=0, atol=0)
    for iteration in (1, 2):
        rows = read_lines(RunFolder(tmp_path / "remote").rollout_file(iteration))
        starts = [(row["group"], row["member"]) for row in rows if row["step"] == 0]
        assert sorted(starts) == [(group, member) for group in range(3) for member in range(3)]


def test_a_runner_that_stops_while_it_is_made_ends_the_start(warm_model, tmp_path, monkeypatch):
    monkeypatch.setattr(derived, "START_LIMIT_S", 10.0)
    (tmp_path / "flag.made").write_text(f"SIGSTOP {os.getpid()}")
    before = set(actors())
    config = (
        run_config(warm_model, flag=tmp_path / "flag")
        .env_runners(num_env_runners=2)
        .stepping(start_timeout_s=10.0)
        .fault_tolerance(heartbeat_timeout_s=10.0)
    )
    # Ten seconds for its environment, and ten for its process and its model.
    with pytest.raises(RuntimeError, match=r"an EnvRunner was not made within 20 s") as error:
        config.build_algo()
    assert "\n" not in str(error.value)
    made = [entry for actor_id, entry in actors().items() if actor_id not in before]
    assert len(made) == 2
    for entry in made:
        assert entry["State"] == "DEAD"
        while Path(f"/proc/{entry['Pid']}").exists():  # pytest-timeout limits it
            time.sleep(0.1)


def test_a_runner_that_is_killed_while_it_is_made_is_made_again(warm_model, tmp_path):
    flag = tmp_path / "flag.made"
    flag.write_text(f"SIGKILL {os.getpid()}")
    config = run_config(warm_model, flag=tmp_path / "flag").env_runners(num_env_runners=1)
    algorithm = config.build_algo()
    assert not flag.exists()
    assert algorithm.train()["env_runners"]["num_episodes"] == 9
    algorithm.stop()


def test_a_runner_that_stops_while_it_is_made_again_is_replaced(warm_model, tmp_path):
    algorithm = (
        run_config(warm_model, flag=tmp_path / "flag").env_runners(num_env_runners=2).build_algo()
    )
    algorithm.train()
    runners = algorithm.env_runner_group
    manager = runners._worker_manager
    flag = tmp_path / "flag.made"
    flag.write_text(f"SIGSTOP {os.getpid()}")
    ray.kill(manager._actors[1], no_restart=False)
    iterations = 1
    # pytest-timeout limits it.
    while manager.num_silent == 0 or runners.num_healthy_remote_workers() < 2:
        result = algorithm.train()
        iterations += 1
        assert result["training_iteration"] == iterations
        assert result["env_runners"]["num_episodes"] == 9  # the other one plays what it cannot
        # Short for one that has stopped; the next may take its time on a busy machine.
        manager.start_limit_s = None if flag.exists() or manager.num_silent else 5.0
    assert manager.num_silent == 1
    algorithm.stop()
