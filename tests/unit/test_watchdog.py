"""Detectors of collapse on hand-made histories: what is bad, and since when."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo import GiGPOConfig, watchdog
from rllib_gigpo.recording.rollout_rows import worst_episodes
from rllib_gigpo.repetition import is_repeating
from rllib_gigpo.watchdog import SIGNALS, History, Limits
from rllib_gigpo.watching import limits_of
from tests.histories import GOOD, LEARNED, history


def find_alarms(lines, *limits, **how):
    """What is wrong at the end of lines of metrics."""
    return watchdog.find_alarms(History.of(lines), *limits, **how)


def only(lines, **limits):
    (alarm,) = find_alarms(lines, Limits(**limits))
    return alarm


def test_a_run_that_learns_raises_no_alarm_at_any_time():
    for count in range(7):
        assert find_alarms(history(count)) == []


# What stays as it is while one number goes wrong.
CALM = {
    "uniform_group_share": [0.2] * 6,
    "response_tokens_mean": [20.0] * 6,
    "entropy": [1.0] * 6,
    "kl": [0.1] * 6,
}


def gone_wrong(count: int = 6, **changes):
    return history(count, **{**CALM, **changes})


FALLEN = [0.2, 0.6, 0.8, 0.8, 0.3, 0.1]  # below 0.8 - 0.5 * 0.8 = 0.4 since the fifth

CASES = {
    # Lowest median before: 0.0. Two iterations at 30 % or more, and 20 points above it.
    "repetition": ({"repeated_response_rate": [0.05, 0.0, 0.0, 0.1, 0.4, 0.7]}, 5, 0.7, 0.0),
    # Shares of invalid actions: 0.1, 0.1, 0.1, 0.6, 0.7, 0.9.
    "invalid_actions": ({"valid_action_rate": [0.9, 0.9, 0.9, 0.4, 0.3, 0.1]}, 4, 0.9, 0.1),
    "zero_variance": (
        {"uniform_group_share": [0.2, 0.1, 0.2, 0.2, 0.9, 1.0], "episode_return_mean": FALLEN},
        5,
        1.0,
        # Medians of up to three: 0.2, 0.15, 0.2, 0.2.
        0.15,
    ),
    # A tenth of the highest median, 1.5, is 0.15.
    "entropy": (
        {"entropy": [1.5, 1.5, 1.4, 1.2, 0.1, 0.01], "episode_return_mean": FALLEN},
        5,
        0.01,
        1.5,
    ),
    "kl": ({"kl": [0.0, 0.1, 0.2, 0.3, 4.0, 9.0], "episode_return_mean": FALLEN}, 5, 9.0, 0.0),
    "engine_gap": ({"engine_logp_gap": [1e-6, 1e-6, 1e-6, 0.5, 0.5, 0.4]}, 4, 0.4, 1e-6),
    # The first three responses had 20 tokens in the middle; 2.5 times 20 is 50.
    "length": (
        {
            "response_tokens_mean": [20.0, 21.0, 19.0, 20.0, 60.0, 80.0],
            "episode_return_mean": FALLEN,
        },
        5,
        80.0,
        20.0,
    ),
}


@pytest.mark.parametrize("signal", CASES)
def test_every_signal_is_seen_with_its_beginning(signal):
    changes, since, value, before = CASES[signal]
    alarm = only(gone_wrong(**changes))
    assert (alarm.signal, alarm.since, alarm.iteration) == (signal, since, 6)
    assert (alarm.value, alarm.before) == pytest.approx((value, before))
    assert f"since iteration {since}; at its best before that: " in alarm.message
    assert len(alarm.message.splitlines()) == 1


@pytest.mark.parametrize("signal", CASES)
def test_one_bad_iteration_is_none(signal):
    changes, since, *_ = CASES[signal]
    first = gone_wrong(since, **changes)
    assert find_alarms(first) == []
    # Unless nobody wants to wait for a second one.
    assert [a.signal for a in find_alarms(first, Limits(patience=1))] == [signal]


@pytest.mark.parametrize("signal", CASES)
def test_only_the_signals_that_are_asked_for_count(signal):
    changes, *_ = CASES[signal]
    others = [name for name in SIGNALS if name != signal]
    assert find_alarms(gone_wrong(**changes), signals=others) == []
    assert len(find_alarms(gone_wrong(**changes), signals=[signal])) == 1


@pytest.mark.parametrize("signal", ["zero_variance", "entropy", "kl", "length"])
def test_what_changes_in_good_runs_too_counts_with_a_fallen_return_alone(signal):
    changes, *_ = CASES[signal]
    kept = {name: column for name, column in changes.items() if name != "episode_return_mean"}
    assert find_alarms(history(**kept)) == []


def test_messages_say_what_happened():
    changes, *_ = CASES["invalid_actions"]
    assert only(gone_wrong(**changes)).message == (
        "90% of the actions are invalid, since iteration 4; at its best before that: 10%"
    )
    changes, *_ = CASES["kl"]
    assert only(gone_wrong(**changes)).message == (
        "the KL to the reference is 9 nat per token, since iteration 5; at its best before that: 0"
    )


def test_an_entropy_that_rises_while_the_return_falls():
    # Three times the lowest, 0.5, is 1.5; and it must have risen by 1.
    rising = [0.5, 0.5, 0.5, 0.6, 3.0, 3.2]
    alarm = only(gone_wrong(entropy=rising, episode_return_mean=FALLEN))
    assert (alarm.signal, alarm.value, alarm.before) == ("entropy", 3.2, 0.5)


def test_responses_that_are_cut_off():
    alarm = only(history(response_cut_rate=[0.0, 0.0, 0.0, 0.0, 0.9, 1.0]))
    assert alarm.message.startswith("100% of the responses are cut at max_response_tokens, since")


def test_what_was_bad_from_the_beginning_is_no_collapse():
    assert find_alarms(history(valid_action_rate=[0.1] * 6)) == []
    assert find_alarms(history(repeated_response_rate=[0.9] * 6)) == []


def test_groups_without_variance_and_success_from_the_beginning_are_told_once_it_lasts():
    flat = {"uniform_group_share": [1.0] * 6, "success_rate": [0.0] * 6}
    flat["episode_return_mean"] = [0.0] * 6
    assert find_alarms(history(**flat)) == []
    alarm = only(history(**flat), stalled=6)
    assert alarm.message == (
        "the episodes of 100% of the groups all end alike, without success, since iteration 1"
    )


def test_patience():
    changes, *_ = CASES["invalid_actions"]
    assert only(gone_wrong(**changes), patience=3).since == 4
    assert find_alarms(gone_wrong(**changes), Limits(patience=4)) == []
    assert find_alarms(gone_wrong(4, **changes), Limits(patience=1))[0].since == 4


def test_the_gap_counts_only_where_it_is_comparable():
    changes, *_ = CASES["engine_gap"]
    assert find_alarms(gone_wrong(**changes), Limits(engine_gap=None)) == []


def test_the_module_of_a_team_is_named():
    changes, *_ = CASES["engine_gap"]
    alarm = only(gone_wrong(module="solver", **changes))
    assert alarm.module == "solver"
    assert " (module 'solver'), since" in alarm.message


def test_iterations_without_a_number_are_passed_over():
    changes, *_ = CASES["engine_gap"]
    lines = gone_wrong(**changes)
    # No row had an advantage: there is no gap to tell, in JSON null, in the process NaN.
    lines[4]["learners"]["default_policy"]["engine_logp_gap"] = math.nan
    assert only(lines).since == 4
    lines[4]["learners"]["default_policy"]["engine_logp_gap"] = None
    assert only(lines).since == 4
    assert find_alarms([{"iteration": 1}, {"iteration": 2, "learners": {}}]) == []


def test_a_run_that_went_back_has_numbers_that_do_not_begin_at_one():
    changes, *_ = CASES["invalid_actions"]
    assert only(gone_wrong(first=41, **changes)).since == 44


def stored(history: History) -> History:
    """The same history out of a checkpoint."""
    return History.from_state(pickle.loads(pickle.dumps(history.get_state())))


def test_what_is_kept_of_an_iteration_is_all_that_the_detectors_read():
    for changes, *_ in CASES.values():
        lines = gone_wrong(**changes)
        more = {"episodes": list(range(1000)), "success_rate_of_a_task": 0.5}
        told = [
            {
                **line,
                "timers": more,
                "env_runners": {**line["env_runners"], **more},
                "learners": {
                    **{module: {**v, **more} for module, v in line["learners"].items()},
                    "__all_modules__": 3,
                },
            }
            for line in lines
        ]
        found = find_alarms(lines)
        assert found == find_alarms(told) == watchdog.find_alarms(stored(History.of(told)))
        # Seven numbers of the rollouts and three of the learner, nothing of the rest.
        numbers = History.of(told).get_state()["numbers"]
        assert set(numbers) == {"", "default_policy"}
        assert set(numbers[""]) == set(GOOD)
        assert set(numbers["default_policy"]) == set(LEARNED)
    assert find_alarms([{"iteration": 1}, {"iteration": 2, "learners": None}]) == []


def test_an_iteration_costs_a_checkpoint_less_than_a_hundred_bytes():
    short, long = (
        len(pickle.dumps(History.of(history(6) * times).get_state())) for times in (1, 1001)
    )
    # The iteration and ten numbers of 8 bytes each.
    assert (long - short) / 6000 <= 90


def test_a_number_that_comes_late_has_the_iterations_of_its_own():
    lines = [{"iteration": 1}, *history(first=2)]
    late = stored(History.of(lines))
    late.forget_after(3)
    assert late.points("kl", "default_policy") == [(2, 0.0), (3, 0.1)]
    late.add({"iteration": 4, "learners": {"default_policy": {"kl": 7}}})
    assert late.points("kl", "default_policy") == [(2, 0.0), (3, 0.1), (4, 7.0)]
    assert late.points("success_rate") == [(2, 0.2), (3, 0.3)]
    assert len(late) == 4
    late.forget_after(0)
    assert stored(late).points("kl", "default_policy") == []


numbers = st.floats(-10, 10) | st.just(math.nan) | st.none()


@given(st.lists(st.fixed_dictionaries(dict.fromkeys((*GOOD, *LEARNED), numbers)), max_size=12))
def test_any_history_can_be_looked_at(rows):
    lines = [
        {"iteration": n, "env_runners": row, "learners": {"m": row}} for n, row in enumerate(rows)
    ]
    for alarm in find_alarms(lines):
        assert 0 <= alarm.since <= alarm.iteration < len(rows)
        assert math.isfinite(alarm.value)


class TestRepetition:
    @pytest.mark.parametrize(
        "ids",
        [
            [7] * 6,
            [1, 2, 3, 4, 5, 6, *[7] * 6],  # half of it
            [5, 6] * 3,
            [*[5, 6] * 3, 2],  # and an end token
            [9, *range(10, 26), *range(10, 26), *range(10, 26)],  # period 16
            [5, 6, 5, 6, 5, 6, 5],  # the loop broke off
        ],
    )
    def test_loops(self, ids):
        assert is_repeating(ids)

    @pytest.mark.parametrize(
        "ids",
        [
            [],
            [7],
            [7] * 5,  # five tokens are none
            [1, 2, 3, 4, 5, 6, 7, 8, *[9] * 6],  # less than half
            [5, 6, 5, 6, 5, 7],
            [*[7] * 6, 1, 2, 3],  # it went on after the loop
            list(range(50)),
            [*range(17), *range(17), *range(17)],  # period 17
        ],
    )
    def test_no_loops(self, ids):
        assert not is_repeating(ids)

    @given(st.lists(st.integers(0, 2), max_size=30))
    def test_as_defined(self, ids):
        def ends_in_loop(ids):
            return any(
                ids[-size:] == [ids[-size:][n % period] for n in range(size)]
                for period in range(1, 17)
                for size in range(max(3 * period, 6), len(ids) + 1)
                if 2 * size >= len(ids)
            )

        assert is_repeating(ids) == (ends_in_loop(ids) or ends_in_loop(ids[:-1]))


def test_the_worst_episodes():
    def row(group, member, returned, valid, response="go"):
        place = {"group": group, "member": member, "episode_return": returned}
        return {**place, "valid": valid, "response": response}

    rows = [
        row(0, 0, 1.0, True),
        row(0, 1, 0.0, True),
        row(1, 0, 0.0, False, "one"),
        row(1, 0, 0.0, False, "two"),
        row(1, 1, 0.0, True),
    ]
    worst = worst_episodes(rows, 3)
    assert [(e["group"], e["member"]) for e in worst] == [(1, 0), (0, 1), (1, 1)]
    assert worst[0] == {
        "group": 1,
        "member": 0,
        "return": 0.0,
        "steps": 2,
        "invalid_actions": 2,
        "last_response": "two",
    }


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"signals": ["speed"]}, r"watchdog\(signals=\['speed'\]\): expected a list of 'repet"),
            ({"signals": "kl"}, r"watchdog\(signals='kl'\): expected a list"),
            ({"signals": []}, r"watchdog\(enabled=False\) looks at none"),
            ({"on_collapse": "explode"}, "on_collapse='explode': expected one of 'warn', 'stop'"),
            ({"patience": 0}, "watch_patience=0: expected a whole number of at least 1"),
            ({"rollback_lr_factor": 2.0}, "rollback_lr_factor=2.0: expected a finite number"),
            ({"enabled": False, "on_collapse": "stop"}, "without the watchdog nothing sees"),
        ],
    )
    def test_faults_are_named(self, settings, message):
        config = GiGPOConfig().environment("KeyDoor").llm(model="tiny").watchdog(**settings)
        with pytest.raises(ValueError, match=message):
            config.validate()

    def test_the_gap_follows_the_probes_tolerance_where_it_says_something(self):
        def gap(**settings):
            return limits_of(GiGPOConfig().training(**settings)).engine_gap

        # Twice the probe's 2e-3 in fp32.
        assert gap() == pytest.approx(4e-3)
        assert gap(old_logp="engine") is None
        assert gap(max_staleness=1) is None
        bf16 = GiGPOConfig().llm(dtype="bfloat16").watchdog(patience=3)
        assert limits_of(bf16) == Limits(patience=3, engine_gap=pytest.approx(0.24))
