"""A real run that is made to collapse, by a learning rate that destroys its weights at once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_gigpo import GiGPO
from rllib_gigpo.recording.folder import RunFolder, read_json, read_lines
from rllib_gigpo.report import report_html
from rllib_gigpo.watching import CollapseError
from tests.ray_runs import run_config, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

# AdamW moves every weight by about the learning rate, and those of the model are about 0.1.
DESTROYING = 0.5


def config_of(model, folder, **watchdog: Any):
    config = run_config(model, lr=DESTROYING, lr_warmup_steps=0, num_groups=4, kl_coeff=0.01)
    return config.watchdog(**watchdog).recording(folder=str(folder))


def rate_of(algorithm) -> float:
    learner: Any = algorithm.learner_group._learner
    return learner.get_optimizer(DEFAULT_MODULE_ID).param_groups[0]["lr"]


def test_it_is_told_counted_and_written_down(warm_model, tmp_path, caplog):
    algorithm = config_of(warm_model, tmp_path / "run").build_algo()
    with caplog.at_level(logging.WARNING):
        results = [algorithm.train() for _ in range(3)]
    algorithm.stop()
    # The first iteration plays the good weights, the second and the third play destroyed ones.
    assert [result["watchdog"]["num_alarms"] > 0 for result in results] == [False, False, True]
    assert results[0]["env_runners"]["valid_action_rate"] > 0.7
    assert results[2]["watchdog"]["invalid_actions"] == 1.0
    assert "iteration 3: collapse: " in caplog.text
    assert "of the actions are invalid, since iteration 2; at its best before that: " in caplog.text

    folder = RunFolder(tmp_path / "run")
    events = read_lines(folder.events)
    assert len(events) == results[2]["watchdog"]["num_alarms"]
    event = next(event for event in events if event["signal"] == "invalid_actions")
    assert (event["kind"], event["action"]) == ("collapse", "warn")
    assert (event["iteration"], event["since"]) == (3, 2)
    lines = read_lines(folder.metrics)
    assert [line["watchdog"]["num_alarms"] for line in lines][:2] == [0.0, 0.0]

    # The five worst episodes: none of the others earned less.
    rows = read_lines(folder.collapse / "000003.jsonl")
    every = read_lines(folder.rollout_file(3))
    worst = {(row["group"], row["member"]): row["episode_return"] for row in rows}
    others = [row for row in every if (row["group"], row["member"]) not in worst]
    assert len(worst) == len(event["worst"]) == 5
    assert max(worst.values()) <= min(row["episode_return"] for row in others)
    assert [row for row in every if (row["group"], row["member"]) in worst] == sorted(
        rows, key=lambda row: (row["group"], row["member"], row["step"])
    )
    assert event["message"] in report_html(folder)


def test_it_can_end_the_run(warm_model, tmp_path):
    algorithm = config_of(warm_model, tmp_path / "run", on_collapse="stop").build_algo()
    algorithm.train()
    algorithm.train()
    with pytest.raises(CollapseError, match=r"collapsed in iteration 3: .* since iteration 2"):
        algorithm.train()
    algorithm.stop()
    # What it ended with is written.
    folder = RunFolder(tmp_path / "run")
    assert [line["iteration"] for line in read_lines(folder.metrics)] == [1, 2, 3]
    assert {event["action"] for event in read_lines(folder.events)} == {"stop"}


def test_it_can_go_back_to_the_best_weights_and_learn_more_slowly(warm_model, tmp_path):
    how = {"on_collapse": "rollback", "best_every": 1, "rollback_lr_factor": 1e-4}
    algorithm = config_of(warm_model, tmp_path / "run", max_rollbacks=1, **how).build_algo()
    first = weights_of(algorithm)
    for _ in range(3):
        algorithm.train()
    # The weights before the first update are the only ones that have played well.
    assert algorithm.num_updates == 0
    assert algorithm.watchdog.rollbacks == 1
    torch.testing.assert_close(weights_of(algorithm), first, rtol=0, atol=0)

    again = [algorithm.train() for _ in range(2)]
    assert algorithm.num_updates == 2
    assert rate_of(algorithm) == pytest.approx(DESTROYING * 1e-4)
    assert [result["watchdog"]["num_rollbacks"] for result in again] == [1, 1]
    assert again[1]["env_runners"]["valid_action_rate"] > 0.7

    folder = RunFolder(tmp_path / "run")
    assert [line["iteration"] for line in read_lines(folder.metrics)] == [1, 2]
    assert [event["kind"] for event in read_lines(folder.events)][-1] == "rollback"
    assert len(read_lines(folder.path / "superseded" / "1" / "metrics.jsonl")) == 3
    # Weights are judged by what they play: those of before the last update, or earlier ones.
    best = read_json(folder.path / "watchdog" / "best.json")
    assert best["iteration"] in (0, 1)
    kept = {path.name for path in (folder.path / "watchdog").glob("after_*")}
    assert f"after_{best['iteration']:06d}" in kept
    assert len(kept) <= 2

    # A run that goes on from a checkpoint goes on at the lower rate.
    algorithm.save_to_path(tmp_path / "saved")
    algorithm.stop()
    restored = GiGPO.from_checkpoint(tmp_path / "saved")
    restored.train()
    assert rate_of(restored) == pytest.approx(DESTROYING * 1e-4)
    assert restored.watchdog.rollbacks == 1
    restored.stop()


def test_without_rollbacks_left_it_ends(warm_model, tmp_path):
    how = {"on_collapse": "rollback", "max_rollbacks": 0}
    algorithm = config_of(warm_model, tmp_path / "run", **how).build_algo()
    algorithm.train()
    algorithm.train()
    with pytest.raises(CollapseError, match=r"it was rolled back 0 times \(max_rollbacks=0\)"):
        algorithm.train()
    algorithm.stop()
