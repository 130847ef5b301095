"""EnvRunners that are stopped (SIGSTOP): found by their silence, and nothing of the run changes."""

from __future__ import annotations

import pytest
import torch

from rllib_gigpo.recording.folder import RunFolder, read_lines
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
