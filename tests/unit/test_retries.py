"""When an algorithm plays groups again, waits for EnvRunners, and gives up."""

from types import SimpleNamespace

import pytest

from rllib_gigpo import group_player
from rllib_gigpo.env_runner import Played
from rllib_gigpo.group_player import GroupPlayer
from rllib_gigpo.rollout_types import GroupTask, Rollout

TASKS = [GroupTask(group=number, env_seed=number, size=2) for number in range(3)]


class Stage(GroupPlayer):
    """Plays by a script instead of with EnvRunners.

    Args:
        rounds: What comes back from each round, groups per runner; the last one repeats.
        is_up: Whether a runner is up after each round; the last one repeats.
        start_limit_s: Seconds that a runner may take to be made.
    """

    def __init__(self, rounds, is_up=(True,), start_limit_s=0.0):
        config = SimpleNamespace(
            delay_between_env_runner_restarts_s=0.0,
            max_abandoned_threads=0,
            runner_start_limit_s=start_limit_s,
        )
        super().__init__(config, SimpleNamespace(repeat=self._repeat), self._restore)
        self.rounds, self.is_up = list(rounds), list(is_up)
        self.asked, self.repeats = [], 0

    def play_round(self, runners, tasks):
        self.asked.append([task.group for task in tasks])
        groups = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
        return [Played(tuple(share), Rollout([])) for share in groups]

    def _repeat(self):
        self.repeats += 1

    def _restore(self, runners):
        up = self.is_up.pop(0) if len(self.is_up) > 1 else self.is_up[0]
        return [1] if up else []

    def perform(self) -> None:
        self.play(SimpleNamespace(healthy_worker_ids=list), TASKS)


def test_all_groups_in_one_round():
    stage = Stage([[(0, 1), (2,)]])
    stage.perform()
    assert (stage.asked, stage.repeats) == ([[0, 1, 2]], 0)


def test_the_groups_of_a_dead_runner_are_played_again():
    stage = Stage([[(0, 1)], [(2,)]])
    stage.perform()
    assert stage.asked == [[0, 1, 2], [2]]


def test_a_runner_without_the_weights_gets_them():
    stage = Stage([[(), (0, 1)], [(2,)]])
    stage.perform()
    assert (stage.asked, stage.repeats) == ([[0, 1, 2], [2]], 1)


def test_a_slow_restart_is_waited_for():
    stage = Stage([*[[]] * 50, [(0, 1, 2)]], is_up=[*[False] * 49, True])
    stage.perform()
    assert len(stage.asked) == 51


def test_a_restart_that_takes_for_ever_is_not(monkeypatch):
    monkeypatch.setattr(group_player, "_RESTART_S", 0.0)
    with pytest.raises(RuntimeError, match="3 groups could not be played"):
        Stage([[]], is_up=[False]).perform()


@pytest.mark.parametrize("start_limit_s", [3600.0, None])
def test_all_runners_at_once_have_the_time_that_one_has_to_be_made(
    start_limit_s, monkeypatch, caplog
):
    clock = iter(range(0, 100_000, 600))
    monkeypatch.setattr(group_player, "time", SimpleNamespace(monotonic=clock.__next__, sleep=id))
    # Two looks at the clock per round, which add up to an hour after the third.
    stage = Stage([*[[]] * 3, [(0, 1, 2)]], [False, False, False, True], start_limit_s)
    stage.perform()
    limit = "4200 s" if start_limit_s else "inf s"
    assert caplog.messages == [
        f"no EnvRunner is left for 3 groups: waiting until Ray has made one again, {limit} at most"
    ]
    stage = Stage([[]], [False], start_limit_s=600.0)
    with pytest.raises(RuntimeError, match="3 groups could not be played"):
        stage.perform()


def test_a_run_that_ends_plays_no_further_round():
    stage = Stage([[(0,)], [(1,)], [(2,)]])
    stage.close()
    with pytest.raises(RuntimeError, match="the run has ended while this was being played"):
        stage.perform()
    assert len(stage.asked) == 1


def test_dying_at_every_try_ends_the_run():
    stage = Stage([[(0,)], []])
    with pytest.raises(RuntimeError, match=r"2 groups could not be played.*failed 10 times"):
        stage.perform()
    assert len(stage.asked) == 11


def test_an_error_ends_the_run_with_its_sentence():
    stage = Stage([[(0, 1, 2)]])
    stage.play_round = lambda runners, tasks: [Played((0,), error="ValueError: no such shop")]
    with pytest.raises(RuntimeError, match="the rollout failed: ValueError: no such shop"):
        stage.perform()


@pytest.mark.parametrize(
    ("hung", "worker", "replaced"),
    [(3, 2, ["second"]), (2, 2, []), (3, 0, [])],
    ids=["too many", "as many as allowed", "the local runner"],
)
def test_a_runner_with_too_many_hung_calls_is_replaced(monkeypatch, hung, worker, replaced):
    killed = []
    monkeypatch.setattr(group_player.ray, "kill", lambda actor, no_restart: killed.append(actor))
    actors = SimpleNamespace(actors=lambda: {1: "first", 2: "second"})
    stage = Stage([[(0, 1, 2)]])
    stage.config.max_abandoned_threads = 2
    stage.play_round = lambda runners, tasks: [
        Played((0, 1, 2), Rollout([]), counts={"abandoned_threads": hung}, worker_index=worker)
    ]
    stage.play(SimpleNamespace(_worker_manager=actors), TASKS)
    assert killed == replaced
