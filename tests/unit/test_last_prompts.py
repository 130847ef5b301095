"""The prompt after a truncation: kept for a critic, and only there."""

from dataclasses import replace

import numpy as np

from rllib_gigpo.grouping import AnchorRule
from rllib_gigpo.rows import MinibatchPlan, RowData, episodes_to_batch
from tests.episodes import Step, solo
from tests.stage import Stage, task, words


def played(*, keep: bool = True, start: int = 3, limit: int | None = 2, **settings):
    stage = Stage(max_episode_steps=limit, **settings)
    stage.settings = replace(stage.settings, keep_last_prompts=keep)
    (episode,) = stage.play(task(start=start))
    return episode, stage


class TestRollouts:
    def test_keep_the_prompt_that_would_have_come_next(self):
        # Three steps to go and two allowed: the third prompt is "left 1", and nobody answers it.
        episode, stage = played()
        assert episode.is_truncated
        assert words(episode.observations[2]) == "<user> left 1 <assistant>"
        assert len(stage.engine.requests) == 2

    def test_keep_nothing_of_an_episode_that_terminated(self):
        episode, _ = played(limit=None)
        assert episode.is_terminated
        assert len(episode.observations[3]) == 0

    def test_keep_nothing_where_nobody_asks(self):
        episode, _ = played(keep=False)
        assert episode.is_truncated
        assert len(episode.observations[2]) == 0

    def test_keep_nothing_where_the_prompt_would_be_too_long(self):
        # Every prompt has four tokens, so the episode ends before its first step.
        episode, _ = played(max_prompt_tokens=3, on_long_prompt="end_episode")
        assert episode.is_truncated
        assert len(episode) == 0


class TestRows:
    def batch(self, last_prompt: list[int]):
        episode = solo(0, 0, Step("s"), Step("t"), truncated=True)
        episode.observations.data[2] = np.array(last_prompt, dtype=np.int32)
        return episodes_to_batch([episode, solo(0, 1, Step("s"))], AnchorRule())

    def test_have_it_on_the_last_row_of_the_truncated_episode(self):
        rows = self.batch([1, 2, 3]).policy_batches["default_policy"]
        assert [ids.tolist() for ids in rows["next_prompt_ids"]] == [[], [1, 2, 3], []]

    def test_have_no_such_column_without_any(self):
        assert "next_prompt_ids" not in self.batch([]).policy_batches["default_policy"]

    def test_give_it_to_the_learner_that_holds_the_row(self):
        data = RowData(self.batch([1, 2, 3]), MinibatchPlan(None, None, 0))
        shards = [training.batch.policy_batches["default_policy"] for training, _ in data.shard(2)]
        owner = int(shards[0]["learner"][1])
        assert shards[owner]["next_prompt_ids"][1].tolist() == [1, 2, 3]
        assert shards[1 - owner]["next_prompt_ids"][1] is None
