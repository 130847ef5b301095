"""Learners let go of what they hold for a checkpoint, also where none came of it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from rllib_gigpo.checkpoints import CheckpointError
from rllib_gigpo.learner_group import ShardedLearnerGroup
from rllib_gigpo.watched_actors import LearnerError


class Group(ShardedLearnerGroup):
    """Learners that do nothing, and how they were called."""

    def __init__(self):
        self.called: list[str] = []

    def __del__(self): ...

    def _all(self, method):
        self.called.append(method)
        return []


def called(error: Exception | None) -> list[str]:
    group = Group()
    with suppress(CheckpointError, LearnerError), group._gathered():
        if error is not None:
            raise error
    return group.called


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ["gather_state", "release_state"]),
        (CheckpointError("the disk is full"), ["gather_state", "release_state"]),
        (LearnerError("learner 1 of 2 died"), ["gather_state"]),
    ],
    ids=["saved", "refused", "dead"],
)
def test_state_is_let_go_of_while_there_are_learners(error, expected):
    assert called(error) == expected
