"""Environments that are slow, hang or raise: overlap, time limits, replays, drops, lockstep.

`Countdown` from s takes s steps down; its engine is scripted.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest

from rllib_gigpo.engines.base import Request
from rllib_gigpo.lockstep import Lockstep
from rllib_gigpo.stepping import EnvFailure, Stepper, StepSettings
from tests.fakes import Countdown
from tests.stage import Stage, task


class Counted(Countdown):
    """Counts the calls that run at the same time."""

    lock = threading.Lock()
    running = 0
    most = 0

    def step(self, action):
        with Counted.lock:
            Counted.running += 1
            Counted.most = max(Counted.most, Counted.running)
        # Long enough for every other episode to enter its own step meanwhile.
        time.sleep(0.05)
        with Counted.lock:
            Counted.running -= 1
        return super().step(action)


@pytest.mark.parametrize(("threads", "most"), [(0, 1), (3, 3), (8, 6)])
def test_slow_steps_overlap_as_far_as_there_are_threads(threads, most):
    Counted.most = 0
    stage = Stage(make=Counted, steps=StepSettings(threads=threads))
    episodes = stage.play(task(size=6, start=2))
    assert [len(e) for e in episodes] == [2] * 6
    assert Counted.most == most


def hanging(first: int, release: threading.Event):
    """Countdowns of which the first n hang in their first step."""
    made = []

    class Hanging(Countdown):
        def __init__(self):
            super().__init__()
            self.number = len(made)
            made.append(self)

        def step(self, action):
            if self.number < first:
                release.wait(20)
            return super().step(action)

    return Hanging, made


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


def test_a_hung_step_is_left_alone_and_its_episode_replayed_in_a_new_environment(release):
    make, made = hanging(1, release)
    steps = StepSettings(threads=4, step_timeout_s=0.2, on_failure="replay", max_replays=1)
    stage = Stage(make=make, steps=steps)
    rollout = stage.rollout(task(size=2, start=2))
    assert [len(e) for e in rollout.episodes] == [2, 2]
    assert rollout.replays == 1
    assert rollout.dropped == ()
    assert stage.stepper.counts == {"env_timeouts": 1, "abandoned_threads": 1}
    # Three environments were made; the hung one is not among those that may be played again.
    assert len(made) == 3
    assert [game.env.number for game in stage.returned] == [1, 2]


@pytest.mark.parametrize("stuck_in", ["reset", "step"])
@pytest.mark.parametrize("raises", [False, True])
def test_an_environment_whose_call_comes_back_too_late_is_closed(release, stuck_in, raises):
    closed = []

    class Stuck(Countdown):
        def _wait(self, where):
            if where == stuck_in:
                release.wait(20)
                if raises:
                    raise OSError("the line is dead")

        def reset(self, **kwargs):
            self._wait("reset")
            return super().reset(**kwargs)

        def step(self, action):
            self._wait("step")
            return super().step(action)

        def close(self):
            closed.append(self)

    steps = StepSettings(threads=2, step_timeout_s=0.1, on_failure="drop")
    stage = Stage(make=Stuck, steps=steps)

    async def play():
        rollout = await stage.start(task(start=1))
        assert closed == []  # the call is still inside
        release.set()
        while not closed:
            await asyncio.sleep(0.01)
        return rollout

    assert asyncio.run(asyncio.wait_for(play(), 20)).dropped == (0,)
    assert [game.env for game in stage.lent] == closed
    assert stage.returned == []


def test_more_hung_steps_than_threads_do_not_block_the_rest(release):
    make, _ = hanging(3, release)
    steps = StepSettings(threads=1, step_timeout_s=0.1, on_failure="drop")
    rollout = Stage(make=make, steps=steps).rollout(*(task(g, start=1) for g in range(5)))
    assert rollout.dropped == (0, 1, 2)
    assert [e.custom_data["group"] for e in rollout.episodes] == [3, 4]


class Broken(Countdown):
    """Raises at the step after `left 2`, always."""

    def step(self, action):
        if self.left == 2:
            raise OSError("no space left in the room")
        return super().step(action)


def test_an_error_that_comes_back_drops_the_whole_group_after_its_replays():
    steps = StepSettings(on_failure="replay", max_replays=2)
    stage = Stage(make=Broken, steps=steps)
    rollout = stage.rollout(task(0, size=2, start=1), task(1, size=2, start=4))
    # Group 1 passes "left 2" in both episodes: 3 tries each.
    assert rollout.dropped == (1,)
    assert rollout.replays == 4
    assert stage.stepper.counts == {"env_errors": 6}
    assert [e.custom_data["group"] for e in rollout.episodes] == [0, 0]
    assert "OSError: no space left in the room" in rollout.failures[0]


def test_a_group_goes_whole_when_one_episode_fails(release):
    make, _ = hanging(1, release)
    steps = StepSettings(threads=4, step_timeout_s=0.2, on_failure="drop")
    rollout = Stage(make=make, steps=steps).rollout(task(0, size=3, start=1), task(1, start=1))
    assert rollout.dropped == (0,)
    assert [e.custom_data["group"] for e in rollout.episodes] == [1]


def test_by_default_a_failure_ends_the_run_and_names_the_environment():
    with pytest.raises(EnvFailure, match=r"step of environment 'Test' raised OSError: no space"):
        Stage(make=Broken).rollout(task(start=3))


def test_a_failing_reset_counts_as_a_failure_too():
    class NoStart(Countdown):
        def reset(self, **kwargs):
            raise RuntimeError("the server is away")

    rollout = Stage(make=NoStart, steps=StepSettings(on_failure="drop")).rollout(task())
    assert rollout.episodes == []
    assert rollout.dropped == (0,)
    assert (
        "reset of environment 'Test' raised RuntimeError: the server is away"
        in (rollout.failures[0])
    )


def test_an_environments_own_timeout_error_is_an_error_not_a_hang():
    class Impatient(Countdown):
        def step(self, action):
            raise TimeoutError("the web shop did not answer")

    steps = StepSettings(threads=2, step_timeout_s=5.0, on_failure="drop")
    stage = Stage(make=Impatient, steps=steps)
    stage.rollout(task())
    assert stage.stepper.counts == {"env_errors": 1}


def slow_to_make(release: threading.Event):
    """Countdowns of which the first waits in its constructor."""
    begun = []

    class SlowToMake(Countdown):
        def __init__(self):
            super().__init__()
            begun.append(self)
            if len(begun) == 1:
                release.wait(20)

    return SlowToMake


def numbers(games) -> set[int]:
    return {id(game) for game in games}


def all_returned(stage: Stage, made: int) -> None:
    """Wait until as many environments were made, and every one of them came back."""
    until = time.monotonic() + 20
    while len(stage.returned) < made and time.monotonic() < until:
        time.sleep(0.01)
    assert len(stage.lent) == made
    assert numbers(stage.returned) == numbers(stage.lent)


def test_an_environment_that_is_made_too_late_is_kept_for_the_next_episode(release):
    steps = StepSettings(threads=4, step_timeout_s=0.2, on_failure="replay", max_replays=1)
    stage = Stage(make=slow_to_make(release), steps=steps)

    async def play():
        rollout = await stage.start(task(start=1))
        release.set()
        while len(stage.returned) < 2:
            await asyncio.sleep(0.01)
        return rollout

    rollout = asyncio.run(asyncio.wait_for(play(), 20))
    assert [len(e) for e in rollout.episodes] == [1]
    assert stage.stepper.counts == {"env_timeouts": 1, "abandoned_threads": 1}
    all_returned(stage, 2)


def test_an_environment_that_is_made_after_the_end_of_its_run_comes_back_too(release):
    steps = StepSettings(threads=4, step_timeout_s=0.2, on_failure="drop")
    stage = Stage(make=slow_to_make(release), steps=steps)
    assert stage.rollout(task(start=1)).dropped == (0,)
    release.set()
    all_returned(stage, 1)


def test_an_environment_that_is_made_while_another_ends_the_run_comes_back(release):
    async def scenario() -> list[str]:
        late, stepper = [], Stepper(StepSettings(threads=2))

        def make() -> str:
            release.wait(20)
            return "game"

        call = asyncio.ensure_future(stepper.call("Test", "make", make, math.inf, late=late.append))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        release.set()
        while not late:
            await asyncio.sleep(0.01)
        return late

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == ["game"]


def test_an_episode_that_takes_too_long_in_all_is_a_failure():
    class Slow(Countdown):
        def step(self, action):
            time.sleep(0.06 if self.left > 1 else 0.0)
            return super().step(action)

    steps = StepSettings(episode_timeout_s=0.5, on_failure="drop")
    stage = Stage(make=Slow, steps=steps)
    rollout = stage.rollout(task(0, start=1), task(1, start=30))
    assert rollout.dropped == (1,)
    assert stage.stepper.counts == {"env_timeouts": 1}
    # No call is inside when an episode's time is up.
    assert [game.env.closed for game in stage.lent] == [False, True]
    assert stage.returned == stage.lent[:1]


def test_an_environment_whose_episode_is_ended_between_two_calls_comes_back():
    """By another episode of the run, which fails while this one waits for its answer."""

    class Breaking(Countdown):
        def step(self, action):
            raise OSError("the line is dead")

    def turns(request: Request) -> int:
        return 1 if request.group_id == 1 else 100_000

    stage = Stage(make=Breaking, turns=turns, steps=StepSettings(threads=2, on_failure="raise"))
    with pytest.raises(EnvFailure, match="the line is dead"):
        stage.rollout(task(0, start=2), task(1, start=2))
    assert [game.env.closed for game in stage.returned] == [False]
    assert sorted(game.env.closed for game in stage.lent) == [False, True]


# Lockstep ----------------------------------------------------------------------------------------


def rounds(stage: Stage) -> list[int]:
    return [request.group_id for request in stage.engine.requests]


def test_in_lockstep_no_episode_goes_ahead():
    turns = lambda request: 50 if request.group_id == 0 else 1  # noqa: E731
    stage = Stage(turns=turns, lockstep=True)
    stage.play(task(0, start=2), task(1, start=4))
    # Round by round; the free mode would send [0, 1, 1, 1, 1, 0].
    assert rounds(stage) == [0, 1, 0, 1, 1, 1]


def test_lockstep_and_free_mode_play_the_same_episodes():
    def tokens(lockstep: bool):
        stage = Stage(lockstep=lockstep, turns=lambda request: 1 + request.seed % 5)
        episodes = stage.play(task(0, size=2, start=3), task(1, size=2, start=1))
        return [[a.tolist() for a in episode.actions] for episode in episodes]

    assert tokens(True) == tokens(False)


def test_lockstep_goes_on_when_an_episode_is_dropped(release):
    make, _ = hanging(1, release)
    steps = StepSettings(threads=4, step_timeout_s=0.2, on_failure="drop")
    stage = Stage(make=make, lockstep=True, steps=steps)
    rollout = stage.rollout(task(0, start=2), task(1, start=2))
    assert [e.custom_data["group"] for e in rollout.episodes] == [1]


def test_lockstep_releases_in_order_of_the_numbers():
    async def scenario() -> list[int]:
        gate, order = Lockstep(3), []

        async def episode(place: int, delay: int) -> None:
            for _ in range(delay):
                await asyncio.sleep(0)
            await gate.wait(place)
            order.append(place)

        await asyncio.gather(episode(2, 0), episode(0, 3), episode(1, 1))
        return order

    assert asyncio.run(scenario()) == [0, 1, 2]
