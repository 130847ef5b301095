"""What training does with every kind of environment that misbehaves: docs/faults.md.

One algorithm with everything in this process plays three groups of two per iteration; the fault is
in the episodes of group 1. Whatever it is, not one row of the group is trained on.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter

import numpy as np
import pytest

from envs.key_door import KeyDoor
from rllib_gigpo import episode_player, register_llm_env
from rllib_gigpo.sampler import training_tasks
from tests.misbehaving_envs import (
    MEGABYTE,
    Misbehaving,
    child_dies,
    child_forks_on,
    forks_many,
    hangs,
    never_ends,
    part,
    raises,
    returns,
    told,
)
from tests.tiny_runs import tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

NAN, INF = float("nan"), float("inf")


def build(on_long_prompt: str):
    config = (
        tiny_config(num_groups=3)
        .environment("Misbehaving", env_config={"horizon": 3})
        .agent(on_long_prompt=on_long_prompt)
        .stepping(step_threads=2, step_timeout_s=0.4, on_env_failure="drop")
        .recording(enabled=False)
    )
    algorithm = config.build_algo()
    seen = []
    to_rows = algorithm._to_rows

    def noting(episodes):
        seen.append(to_rows(episodes))
        return seen[-1]

    algorithm._to_rows = noting
    algorithm.seen_rows = seen
    return algorithm


@pytest.fixture(scope="module")
def algorithm(local_ray):
    built = build("end_episode")
    yield built
    built.stop()


@pytest.fixture(autouse=True)
def well_behaved_again():
    yield
    Misbehaving.behave()


def tasks_of(algorithm):
    return training_tasks(algorithm.config, algorithm.num_updates)


def seed_of(algorithm, group: int = 1) -> set[int]:
    return {tasks_of(algorithm)[group].env_seed}


def train(algorithm):
    """One iteration: what it reports of the rollout, and how many rows of each group it trained."""
    result = algorithm.train()
    rows = algorithm.seen_rows[-1]["default_policy"]
    assert result["learners"]["default_policy"]["num_rows"] == len(rows["group"])
    return result["env_runners"], Counter(rows["group"].tolist())


RAISING = {
    "reset raises": {"reset": raises(OSError("the server is away"))},
    "step raises": {"step": raises(ZeroDivisionError("the key broke"))},
    "step exits": {"step": raises(SystemExit(3))},
    "step runs out of an iterator": {"step": raises(StopIteration())},
    "reset returns the observation alone": {"reset": returns("at 0 0 .")},
    "step returns four things": {"step": lambda env, answer: answer[:4]},
    "reward NaN": {"step": part(1, NAN)},
    "reward infinite": {"step": part(1, -INF)},
    "reward a text": {"step": part(1, "1.0")},
    "reward None": {"step": part(1, None)},
    "observation None": {"step": part(0, None)},
    "observation a number": {"reset": part(0, 7)},
    "observation bytes": {"step": part(0, b"at 0 0 .")},
    "observation with a lone surrogate": {"step": part(0, "at \ud800 .")},
    "terminated a text": {"step": part(2, "no")},
    "truncated None": {"step": part(3, None)},
    "info None": {"step": part(-1, None)},
    "info a list": {"reset": part(-1, ["task"])},
    "won a text": {"step": told(won="no")},
    "task a number": {"reset": told(task=3)},
    "admissible actions one text": {"step": told(admissible_actions="go up")},
    "admissible actions numbers": {"step": told(admissible_actions=[1, 2])},
    "is_action_valid a text": {"step": told(is_action_valid="yes")},
    "score NaN": {"step": told(score=NAN)},
    "anchor a list": {"step": told(anchor=["at", 0, 0])},
    "anchor with what has no hash": {"step": told(anchor=("at", [0, 0]))},
    "event a list": {"step": told(event=["fell"])},
    "tools texts": {"reset": told(tools=["up", "down"])},
    "task_id with a lone surrogate": {"reset": told(task_id="\ud800")},
    "never ends": {"step": never_ends},
    "its child process dies": {"step": child_dies},
    "it forks until it cannot": {"step": forks_many},
    "its child forks until it cannot": {"step": child_forks_on},
}
HANGING = {"reset hangs": {"reset": hangs}, "step hangs": {"step": hangs}}


@pytest.mark.parametrize("kind", [*RAISING, *HANGING])
def test_a_faulty_episode_is_counted_and_not_one_row_of_its_group_is_trained(
    algorithm, kind, monkeypatch
):
    monkeypatch.setattr(episode_player, "_ENDLESS_STEPS", 20)
    Misbehaving.misbehave((RAISING | HANGING)[kind], seed_of(algorithm))
    report, trained = train(algorithm)
    assert set(trained) == {0, 2}
    assert report["num_groups_dropped"] == 1
    # Both episodes of the group fail, each once.
    counted = {"num_env_errors": 0, "num_env_timeouts": 0}
    counted["num_env_errors" if kind in RAISING else "num_env_timeouts"] = 2
    assert {name: report[name] for name in counted} == counted
    # Nor does it count in any mean: four of six episodes are left.
    assert report["num_episodes"] == 4
    assert np.isfinite(report["episode_return_mean"])
    assert report["num_env_close_errors"] == 0


@pytest.mark.parametrize("kind", RAISING)
def test_by_default_it_ends_the_run_with_one_sentence(algorithm, kind, monkeypatch):
    monkeypatch.setattr(episode_player, "_ENDLESS_STEPS", 20)
    runner = algorithm.env_runner_group.local_env_runner
    rule = type(runner._stepper.settings)(threads=2, step_timeout_s=0.4, on_failure="raise")
    monkeypatch.setattr(runner._stepper, "settings", rule)
    Misbehaving.misbehave(RAISING[kind], seed_of(algorithm))
    updates = algorithm.num_updates
    with pytest.raises(RuntimeError, match="the rollout failed: EnvFailure: ") as error:
        algorithm.train()
    sentence = str(error.value).splitlines()[0]
    assert "environment 'Misbehaving'" in sentence
    assert len(sentence) < 400
    assert algorithm.num_updates == updates


@pytest.mark.parametrize("happens", [raises(OSError("no licence left")), hangs])
def test_one_that_cannot_be_made_drops_its_group(algorithm, happens):
    runner = algorithm.env_runner_group.local_env_runner
    while runner._idle:
        runner._idle.pop().close()
    Misbehaving.misbehave({"make": happens}, left=1)
    report, trained = train(algorithm)
    assert len(trained) == 2
    assert report["num_groups_dropped"] == 1
    assert report["num_env_errors"] + report["num_env_timeouts"] == 1


def test_one_that_cannot_be_made_at_all_ends_the_run_before_it_starts():
    Misbehaving.misbehave({"make": raises(OSError("no licence left"))})
    with pytest.raises(RuntimeError, match="'Misbehaving' could not be made: OSError: no licence"):
        build("error")


@pytest.mark.parametrize("threads", [0, 2])
def test_one_that_hangs_when_it_is_made_ends_the_run_before_it_starts(threads):
    config = tiny_config().environment("Misbehaving")
    config.stepping(step_threads=threads, start_timeout_s=0.5)
    Misbehaving.misbehave({"make": hangs})
    with pytest.raises(RuntimeError) as error:
        config.build_algo()
    assert str(error.value) == (
        "environment 'Misbehaving' could not be made: TimeoutError: it took over 0.5 s; if it "
        "needs longer, raise stepping(start_timeout_s=...)"
    )


@pytest.mark.parametrize("threads", [0, 2])
def test_one_that_hangs_when_an_actor_makes_it_ends_the_run_before_it_starts(threads):
    class Hangs(KeyDoor):
        def __init__(self, **arguments):
            time.sleep(600)

    register_llm_env("Hangs", Hangs)
    config = tiny_config().environment("Hangs")
    config.stepping(step_threads=threads, start_timeout_s=2.0).env_runners(num_env_runners=2)
    with pytest.raises(RuntimeError) as error:
        config.build_algo()
    assert str(error.value) == (
        "environment 'Hangs' could not be made: TimeoutError: it took over 2 s; if it needs "
        "longer, raise stepping(start_timeout_s=...)"
    )


def test_one_without_spaces_ends_the_run_before_it_starts():
    Misbehaving.misbehave({"make": lambda env, _: env.__delattr__("observation_space")})
    with pytest.raises(RuntimeError, match="'Misbehaving' could not be made: AttributeError"):
        build("error")


@pytest.mark.parametrize(
    "happens", [raises(OSError("the door is stuck")), raises(SystemExit(1)), hangs]
)
def test_one_that_cannot_be_closed_is_counted_and_left(algorithm, happens, caplog):
    fault = {"step": raises(ValueError("broken")), "close": happens}
    Misbehaving.misbehave(fault, seed_of(algorithm))
    report, trained = train(algorithm)
    assert set(trained) == {0, 2}
    assert report["num_env_errors"] == report["num_env_close_errors"] == 2
    assert caplog.text.count("environment 'Misbehaving' could not be closed") == 2


@pytest.mark.parametrize("forks", [forks_many, child_forks_on])
def test_no_process_of_a_failed_environment_is_left(algorithm, forks):
    def sleepers() -> int:
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        return listed.stdout.splitlines().count("sleep 600")

    before = sleepers()
    Misbehaving.misbehave({"step": forks}, seed_of(algorithm))
    report, _ = train(algorithm)
    assert report["num_env_errors"] == 2
    # What is no child of this process is gone a moment after it was killed.
    until = time.monotonic() + 10
    while sleepers() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert sleepers() == before


def played(algorithm) -> list:
    """The tokens of this iteration's episodes, without training on them."""
    collected = algorithm.play(algorithm.env_runner_group, tasks_of(algorithm))
    return [[ids.tolist() for ids in e.actions] for e in collected.episodes], collected


@pytest.mark.parametrize("kind", ["step raises", "reward NaN", "step hangs"])
def test_a_replayed_episode_is_the_one_that_was_lost(algorithm, kind, monkeypatch):
    undisturbed, _ = played(algorithm)
    runner = algorithm.env_runner_group.local_env_runner
    rule = type(runner._stepper.settings)(threads=2, step_timeout_s=0.4, on_failure="replay")
    monkeypatch.setattr(runner._stepper, "settings", rule)
    Misbehaving.misbehave((RAISING | HANGING)[kind], seed_of(algorithm), left=1)
    again, collected = played(algorithm)
    assert again == undisturbed
    assert (collected.replays, collected.dropped) == (1, ())
    assert collected.env_errors + collected.env_timeouts == 1


def test_too_large_a_share_of_failures_ends_the_run(algorithm):
    Misbehaving.misbehave({"step": raises(ZeroDivisionError("the key broke"))})
    updates = algorithm.num_updates
    with pytest.raises(
        RuntimeError, match=r"3 of 3 groups were dropped .*max_dropped_share=0.5"
    ) as e:
        algorithm.train()
    assert "step of environment 'Misbehaving' raised ZeroDivisionError: the key broke" in str(
        e.value
    )
    assert algorithm.num_updates == updates


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (
            {"reset": lambda env, a: (f"at {env.start} {a[0]}", a[1])},
            r"the observation was '.*' and",
        ),
        ({"reset": lambda env, a: (a[0], {**a[1], "task_id": env.start})}, r"the task_id was \d"),
    ],
)
def test_members_that_start_differently_end_the_run(algorithm, fault, what, monkeypatch):
    starts = iter(range(100))
    monkeypatch.setattr(Misbehaving, "start", property(lambda env: next(starts)), raising=False)
    (seed,) = seed_of(algorithm)
    Misbehaving.misbehave(fault, {seed})
    message = (
        rf"members of group 1 start from different states although reset\(seed={seed}\) of "
        rf"environment 'Misbehaving' was the same for them: {what}"
    )
    with pytest.raises(RuntimeError, match=message):
        algorithm.train()


def test_an_episode_of_one_step_is_an_episode(algorithm):
    Misbehaving.misbehave({"step": part(2, True)}, seed_of(algorithm))
    report, trained = train(algorithm)
    assert trained[1] == 2  # two episodes of one row
    assert report["num_groups_dropped"] == report["num_empty_episodes"] == 0


def test_a_megabyte_ends_the_episode_where_it_is_met(algorithm):
    Misbehaving.misbehave({"step": part(0, MEGABYTE)}, seed_of(algorithm))
    report, trained = train(algorithm)
    # The rows before it are whole; the state that cannot be shown is not acted on.
    assert trained[1] == 2
    assert report["num_groups_dropped"] == 0
    # The other groups end at their horizon, these at the limit.
    assert report["truncated_rate"] > 0


def test_a_megabyte_at_the_start_makes_an_episode_of_no_steps(algorithm):
    Misbehaving.misbehave({"reset": part(0, MEGABYTE)}, seed_of(algorithm))
    report, trained = train(algorithm)
    assert set(trained) == {0, 2}
    assert report["num_empty_episodes"] == 2
    assert report["num_episodes"] == 6


def test_no_step_in_any_episode_ends_the_run(algorithm):
    Misbehaving.misbehave({"reset": part(0, "at 0 0 . " * 99)})
    with pytest.raises(ValueError, match=r"none of the 6 episodes has a step.*max_prompt_tokens"):
        algorithm.train()


def test_a_megabyte_can_be_shortened(caplog):
    algorithm = build("shorten_observation")
    fault = {"step": part(0, MEGABYTE), "reset": part(0, MEGABYTE)}
    Misbehaving.misbehave(fault, seed_of(algorithm))
    report, trained = train(algorithm)
    assert set(trained) == {0, 1, 2}
    rows = algorithm.seen_rows[-1]["default_policy"]
    longest = max(len(ids) for ids in rows["prompt_ids"][rows["group"] == 1])
    # Words are tokens: the limit is 64, and what is left of the observation fills it.
    assert longest == 64
    assert report["num_empty_episodes"] == 0

    # At the end of a run, what cannot be closed is told and does not keep the rest from closing.
    runner = algorithm.env_runner_group.local_env_runner
    idle = len(runner._idle)
    assert idle == 6
    Misbehaving.misbehave({"close": raises(OSError("the door is stuck"))})
    algorithm.stop()
    assert caplog.text.count("could not be closed (OSError: the door is stuck)") == idle
    assert runner._engine is None


def test_a_megabyte_is_refused_by_default_with_both_lengths(algorithm, monkeypatch):
    runner = algorithm.env_runner_group.local_env_runner
    monkeypatch.setattr(runner._voices["default_policy"][0], "on_long_prompt", "error")
    Misbehaving.misbehave({"step": part(0, "at 0 0 . " * 99)}, seed_of(algorithm))
    with pytest.raises(RuntimeError, match=r"prompt has \d+ tokens .*max_prompt_tokens is 64"):
        algorithm.train()
