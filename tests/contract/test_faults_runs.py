"""One command that goes on: after an interruption, damage to a checkpoint, a killed learner."""

from __future__ import annotations

import json

import pytest
import torch

from rllib_gigpo.recording.folder import RunFolder, read_lines
from rllib_gigpo.resuming import newest_checkpoint, train_to
from tests.faulty_learner import FaultyLearner
from tests.ray_runs import run_config, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def iterations(folder) -> list[int]:
    return [line["iteration"] for line in read_lines(RunFolder(folder).metrics)]


def test_the_same_call_goes_on_from_the_newest_whole_checkpoint(warm_model, tmp_path):
    config = run_config(warm_model).stepping(lockstep=True)
    whole, folder = tmp_path / "whole", tmp_path / "interrupted"
    expected = train_to(config, whole, 3, then=weights_of)

    def interrupt(result):
        if iterations(folder) == [1, 2, 3]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_to(config, folder, 3, then=weights_of, on_result=interrupt)
    newest = newest_checkpoint(folder)
    assert newest == folder / "checkpoint_000002"
    # Somebody copied it in part: the one before it is taken.
    (newest / "learner_group" / "learner" / "state.pkl").unlink()
    assert newest_checkpoint(folder) == folder / "checkpoint_000001"
    found = train_to(config, folder, 3, then=weights_of)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert iterations(folder) == iterations(whole) == [1, 2, 3]
    assert sorted(path.name for path in folder.glob("checkpoint_*")) == [
        "checkpoint_000002",
        "checkpoint_000002.previous",
        "checkpoint_000003",
    ]
    # Nothing more is to be done, and nothing is.
    assert train_to(config, folder, 3, then=lambda algorithm: algorithm.num_updates) == 3
    assert iterations(folder) == [1, 2, 3]


@pytest.mark.slow
def test_a_run_goes_on_after_a_killed_learner(warm_model, tmp_path):
    flag, folder = tmp_path / "flag.learner", tmp_path / "run"
    config = run_config(warm_model, flag=tmp_path / "flag").learners(
        num_learners=2, learner_class=FaultyLearner
    )
    kills = []

    def kill_once(result):
        if not kills:
            kills.append(flag.write_text("kill"))

    steps = train_to(
        config,
        folder,
        3,
        then=lambda algorithm: json.loads(RunFolder(folder).metrics.read_text().split("\n")[2])[
            "learners"
        ]["default_policy"]["optimizer_steps"],
        on_result=kill_once,
    )
    assert kills
    assert not flag.exists()
    assert iterations(folder) == [1, 2, 3]
    assert steps == 6  # two in each of three iterations: none was trained twice
