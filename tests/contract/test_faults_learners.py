"""Learners that fail: nothing hangs, one sentence says what to do, a full disk is survived."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from ray._private.state import actors
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch

from envs.spaces import TextSpace
from rllib_gigpo import learner_group
from rllib_gigpo.checkpoints import CheckpointError
from rllib_gigpo.rows import RowData, complete_batch
from rllib_gigpo.watched_actors import LearnerError
from tests.faulty_learner import FaultyLearner
from tests.ray_runs import run_config
from tests.tiny_runs import random_rows

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def faulty_config(folder: Path, *, sharding: str = "replicate", limit_s: float = 60.0) -> Any:
    return (
        run_config("tiny", flag=folder / "flag")
        .learners(num_learners=2, sharding=sharding, learner_class=FaultyLearner)
        .fault_tolerance(heartbeat_timeout_s=limit_s)
    )


def build(config: Any) -> Any:
    spaces = dict.fromkeys(config.module_ids, (TextSpace(), TextSpace()))
    return config.build_learner_group(spaces=spaces)


def update(group: Any, config: Any) -> list[dict]:
    rows = complete_batch(random_rows(12))
    everything = MultiAgentBatch({DEFAULT_MODULE_ID: rows}, env_steps=len(rows))
    return group.update(
        training_data=RowData(everything, config.minibatch_plan),
        timesteps={"num_env_steps_sampled_lifetime": 0},
        iteration=0,
    )


def test_a_learner_that_stops_at_its_start_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(learner_group, "START_LIMIT_S", 15.0)
    flag = tmp_path / "flag.learner"
    flag.write_text("start")
    before = set(actors())
    with pytest.raises(LearnerError, match="a learner died or stopped while it was started: not"):
        build(faulty_config(tmp_path, limit_s=15.0))
    learners = [entry for actor_id, entry in actors().items() if actor_id not in before]
    assert len(learners) == 2
    for learner in learners:
        while Path(f"/proc/{learner['Pid']}").exists():  # pytest-timeout limits it
            time.sleep(0.1)


def test_a_learner_that_cannot_be_built_ends_the_start(tmp_path):
    # The other one waits for its part of the sharded model.
    flag = tmp_path / "flag.learner"
    flag.write_text("build")
    with pytest.raises(LearnerError, match=r"learner 1 of 2 failed: ZeroDivisionError: learner 1"):
        build(faulty_config(tmp_path, sharding="fsdp"))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", "failed: ZeroDivisionError: learner 1 broke"),
        ("kill", "died: its process was killed"),
        ("stop", "gave no sign of life for 15 s"),
    ],
)
def test_a_learner_that_fails_in_the_middle_of_an_update_ends_the_others(tmp_path, fault, told):
    flag = tmp_path / "flag.learner"
    # Busy machines let a process starve for seconds.
    config = faulty_config(tmp_path, limit_s=15.0 if fault == "stop" else 60.0)
    group = build(config)
    update(group, config)
    processes = [answer.get() for answer in group.foreach_learner(lambda _: os.getpid())]
    if fault == "raise":  # the first of the three: a disk without room is nobody's death
        flag.write_text("full")
        with pytest.raises(CheckpointError, match=r"learner 0: .*No space left on device"):
            group.save_to_path(str(tmp_path / "state"))
        update(group, config)
        group.save_to_path(str(tmp_path / "state"))
    flag.write_text(fault)
    with pytest.raises(LearnerError, match=f"learner 1 of 2 {told}.*restore the run from its last"):
        update(group, config)
    with pytest.raises(LearnerError, match="learner 1 of 2"):  # no later call hangs either
        update(group, config)
    group.shutdown()
    for process in processes:
        while Path(f"/proc/{process}").exists():  # Ray takes its time; pytest-timeout limits it
            time.sleep(0.1)
