"""Literal numbers of the estimators, and what must hold for every table."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo.advantages import (
    StepTable,
    gigpo,
    grpo,
    rloo,
)
from tests.step_tables import make_table, permuted, properties, settings_of_gigpo, tables


class TestParity:
    def test_two_episodes_of_one_step_with_std(self):
        # mean 5, unbiased std sqrt((25 + 25) / 1) = 7.0710678; 5 / 7.0710688 = 0.7071067.
        result = gigpo(make_table({"rewards": [10.0]}, {"rewards": [0.0]}), f_norm="std")
        assert result.episode == pytest.approx([0.7071067, -0.7071067], abs=1e-6)
        # The 1e-6 in the divisor shows in the seventh digit.
        assert result.episode[0] == pytest.approx(5 / (math.sqrt(50) + 1e-6), rel=1e-12)

    def test_two_episodes_of_one_step_without_std(self):
        result = gigpo(make_table({"rewards": [10.0]}, {"rewards": [0.0]}), f_norm="none")
        assert result.episode.tolist() == [5.0, -5.0]

    def test_mean_over_episodes_ignores_their_lengths(self):
        table = make_table({"rewards": [0.0, 10.0]}, {"rewards": [0.0] * 6})
        # (10 + 0) / 2 = 5.
        result = gigpo(table, f_norm="none", group_mean_over="episodes")
        assert result.episode == pytest.approx([5.0] * 2 + [-5.0] * 6, abs=1e-12)

    def test_mean_over_steps_counts_every_row(self):
        table = make_table({"rewards": [0.0, 10.0]}, {"rewards": [0.0] * 6})
        # (2 x 10 + 6 x 0) / 8 = 2.5.
        result = gigpo(table, f_norm="none", group_mean_over="steps")
        assert result.episode == pytest.approx([7.5] * 2 + [-2.5] * 6, abs=1e-12)

    @pytest.mark.parametrize("f_norm", ["std", "none"])
    @pytest.mark.parametrize("group_mean_over", ["episodes", "steps"])
    @pytest.mark.parametrize("penalty_scope", ["return", "step"])
    def test_a_lone_episode_gets_zero(self, f_norm, group_mean_over, penalty_scope):
        table = make_table({"rewards": [0.0, 0.0, 10.0], "valid": [True, False, True]})
        result = gigpo(
            table,
            f_norm=f_norm,
            group_mean_over=group_mean_over,
            invalid_action_penalty=0.1,
            penalty_scope=penalty_scope,
        )
        assert result.episode.tolist() == [0.0] * 3
        assert result.step.tolist() == [0.0] * 3
        assert result.total.tolist() == [0.0] * 3

    def test_an_anchor_group_of_three(self):
        # gamma 0.95: G = 0.9025 x 10 = 9.025, 0.95 x 10 = 9.5 and 10 in the first episode, 0 in the
        # second. The state 7 is met three times: mean (9.025 + 9.5 + 0) / 3 = 6.175.
        table = make_table(
            {"rewards": [0.0, 0.0, 10.0], "anchors": [7, 7, 8]}, {"rewards": [0.0], "anchors": [7]}
        )
        result = gigpo(table, gamma=0.95, omega=1.0, f_norm="none")
        assert result.step_return == pytest.approx([9.025, 9.5, 10.0, 0.0])
        assert result.step == pytest.approx([2.85, 3.325, 0.0, -6.175])
        assert result.step_group_size.tolist() == [3, 3, 1, 3]
        # A_E is +5 for the first episode and -5 for the second.
        assert result.total == pytest.approx([7.85, 8.325, 5.0, -11.175])
        half = gigpo(table, gamma=0.95, omega=0.5, f_norm="none")
        assert half.total == pytest.approx([6.425, 6.6625, 5.0, -8.0875])

    @properties
    @given(tables(), settings_of_gigpo)
    def test_omega_zero_is_grpo_bit_for_bit(self, table, chosen):
        chosen = {**chosen, "omega": 0.0}
        shared = {k: v for k, v in chosen.items() if k not in ("omega", "gamma")}
        assert np.array_equal(gigpo(table, **chosen).total, grpo(table, **shared).total)

    @properties
    @given(tables(max_groups=1, agents=1))
    def test_without_std_it_is_rloo_up_to_n_over_n_minus_one(self, table):
        n = len(set(table.episode))
        factor = n / (n - 1) if n > 1 else 1.0
        plain = gigpo(table, omega=0.0, f_norm="none").total
        assert rloo(table).total == pytest.approx(factor * plain, abs=1e-12)

    @properties
    @given(tables(), settings_of_gigpo)
    def test_without_repeated_states_it_is_grpo(self, table, chosen):
        unique = table._replace(anchor=np.arange(len(table.anchor)))
        result = gigpo(unique, **chosen)
        assert not result.step.any()
        assert np.array_equal(result.total, gigpo(table, **{**chosen, "omega": 0.0}).total)


def naive_gigpo(
    table, *, omega, gamma, f_norm, group_mean_over, invalid_action_penalty, penalty_scope
):
    """Eqs. 3 and 5-8 once more, row by row and with fractions of an episode written out."""
    rows = [dict(zip(StepTable._fields, row, strict=True)) for row in zip(*table, strict=True)]
    trajectories = defaultdict(list)
    for row in rows:
        cost = 0.0 if row["valid"] else invalid_action_penalty
        row["r"] = row["reward"] - (cost if penalty_scope == "return" else 0.0)
        row["cost"] = cost if penalty_scope == "step" else 0.0
        trajectories[row["episode"], row["agent"]].append(row)
    for members in trajectories.values():
        members.sort(key=lambda row: row["step"])
        for place, row in enumerate(members):
            later = members[place:]
            row["G"] = sum(gamma**k * x["r"] for k, x in enumerate(later)) - row["cost"]
            row["R"] = sum(x["r"] for x in members) - row["cost"]
            row["share"] = 1 / len(members) if group_mean_over == "episodes" else 1.0

    def normalise(members, value, share, alone):
        mean = sum(row[share] * row[value] for row in members) / sum(r[share] for r in members)
        degrees = sum(row[share] for row in members) - 1
        for row in members:
            row["A" + value] = row[value] - mean
        if alone:
            for row in members:
                row["A" + value] = 0.0
        elif f_norm == "std":
            squares = sum(row[share] * (row[value] - mean) ** 2 for row in members)
            for row in members:
                row["A" + value] /= math.sqrt(squares / degrees) + 1e-6

    groups, anchors = defaultdict(list), defaultdict(list)
    for row in rows:
        row["one"] = 1.0
        groups[row["group"], row["agent"]].append(row)
        anchors[row["group"], row["agent"], row["anchor"]].append(row)
    for members in groups.values():
        normalise(members, "R", "share", len({row["episode"] for row in members}) == 1)
    for members in anchors.values():
        normalise(members, "G", "one", len(members) == 1)
    return [row["AR"] + omega * row["AG"] for row in rows]


class TestEveryTable:
    @properties
    @given(tables(), settings_of_gigpo)
    def test_agrees_with_a_row_by_row_computation(self, table, chosen):
        assert gigpo(table, **chosen).total == pytest.approx(naive_gigpo(table, **chosen), abs=1e-8)

    @properties
    @given(tables(), settings_of_gigpo, st.randoms(use_true_random=False))
    def test_permuting_rows_permutes_advantages_bit_for_bit(self, table, chosen, random):
        order = np.array(random.sample(range(len(table.reward)), len(table.reward)))
        straight, shuffled = gigpo(table, **chosen), gigpo(permuted(table, order), **chosen)
        for before, after in zip(straight, shuffled, strict=True):
            assert np.array_equal(before[order], after)

    @properties
    @given(tables(), settings_of_gigpo, st.permutations(range(3)))
    def test_labels_do_not_matter(self, table, chosen, labels):
        renamed = table._replace(
            group=np.array(labels)[table.group] * 10**12, anchor=-7 * table.anchor
        )
        assert gigpo(renamed, **chosen).total == pytest.approx(
            gigpo(table, **chosen).total, abs=1e-12
        )

    @properties
    @given(tables(), settings_of_gigpo)
    def test_episode_level_sums_to_zero_over_the_episodes_of_a_group(self, table, chosen):
        result = gigpo(table, **{**chosen, "group_mean_over": "episodes"})
        sums = defaultdict(float)
        lengths = defaultdict(int)
        for key in zip(table.episode, table.agent, strict=True):
            lengths[key] += 1
        for row, gain in enumerate(result.episode):
            trajectory = (table.episode[row], table.agent[row])
            sums[table.group[row], table.agent[row]] += gain / lengths[trajectory]
        assert list(sums.values()) == pytest.approx([0.0] * len(sums), abs=1e-7)

    @properties
    @given(tables(), settings_of_gigpo, st.sampled_from([-3.0, 0.5, 100.0]))
    def test_adding_a_constant_to_all_returns_of_a_group_changes_nothing(
        self, table, chosen, constant
    ):
        last = np.array(
            [
                step == table.step[(table.episode == e) & (table.agent == a)].max()
                for e, a, step in zip(table.episode, table.agent, table.step, strict=True)
            ]
        )
        shifted = table._replace(reward=table.reward + constant * (last & (table.group == 0)))
        assert gigpo(shifted, **chosen).episode == pytest.approx(
            gigpo(table, **chosen).episode, abs=1e-6
        )

    @properties
    @given(tables(), settings_of_gigpo)
    def test_two_agents_do_not_mix(self, table, chosen):
        other = table._replace(reward=np.where(table.agent == 1, 77.0, table.reward))
        own = table.agent == 0
        assert np.array_equal(gigpo(table, **chosen).total[own], gigpo(other, **chosen).total[own])


def test_each_agent_has_its_own_baseline():
    # Agent 0 returns 4 and 0: mean 2. Agent 1 returns 10 and 0: mean 5. The anchor 3 is shared by
    # name only: agent 0 has returns 4 and 0 there, agent 1 10 and 0.
    table = make_table(
        {"episode": 0, "agent": 0, "rewards": [4.0], "anchors": [3]},
        {"episode": 0, "agent": 1, "rewards": [10.0], "anchors": [3]},
        {"episode": 1, "agent": 0, "rewards": [0.0], "anchors": [3]},
        {"episode": 1, "agent": 1, "rewards": [0.0], "anchors": [3]},
    )
    result = gigpo(table, f_norm="none")
    assert result.episode.tolist() == [2.0, 5.0, -2.0, -5.0]
    assert result.step.tolist() == [2.0, 5.0, -2.0, -5.0]
    assert result.step_group_size.tolist() == [2, 2, 2, 2]


def test_rows_of_two_episodes_may_interleave_and_skip_steps():
    # Episode 5 has rewards 1, 0, 8 at steps 0, 4, 9; episode 2 has rewards 2, 4 at steps 1, 2.
    # gamma 0.5: 1 + 0.5 x 0 + 0.25 x 8 = 3, 4, 8 and 2 + 0.5 x 4 = 4, 4.
    table = StepTable(
        group=np.zeros(5, dtype=int),
        episode=np.array([5, 2, 5, 2, 5]),
        agent=np.zeros(5, dtype=int),
        step=np.array([9, 2, 0, 1, 4]),
        anchor=np.arange(5),
        reward=np.array([8.0, 4.0, 1.0, 2.0, 0.0]),
        valid=np.ones(5, dtype=bool),
    )
    result = gigpo(table, gamma=0.5, f_norm="none")
    assert result.step_return.tolist() == [8.0, 4.0, 3.0, 4.0, 4.0]
    # R = 9 and 6, mean 7.5.
    assert result.episode == pytest.approx([1.5, -1.5, 1.5, -1.5, 1.5])


class TestPenalty:
    # Episode 0: rewards 0 and 10, the first action invalid. Episode 1: reward 0, valid. c = 0.1.
    table = make_table({"rewards": [0.0, 10.0], "valid": [False, True]}, {"rewards": [0.0]})

    def gigpo(self, **chosen):
        return gigpo(self.table, gamma=0.5, f_norm="none", invalid_action_penalty=0.1, **chosen)

    def test_return_scope_lowers_the_reward(self):
        result = self.gigpo(penalty_scope="return")
        # -0.1 + 0.5 x 10 = 4.9, then 10.
        assert result.step_return == pytest.approx([4.9, 10.0, 0.0])
        # R = 9.9 and 0, mean 4.95.
        assert result.episode == pytest.approx([4.95, 4.95, -4.95])

    def test_return_scope_reaches_earlier_steps(self):
        table = make_table({"rewards": [0.0, 0.0], "valid": [True, False]})
        result = gigpo(table, gamma=0.5, invalid_action_penalty=0.1, penalty_scope="return")
        assert result.step_return == pytest.approx([-0.05, -0.1])

    def test_step_scope_with_mean_over_episodes(self):
        result = self.gigpo(penalty_scope="step", group_mean_over="episodes")
        # Not discounted and not passed on: 0.5 x 10 - 0.1 = 4.9, 10, 0.
        assert result.step_return == pytest.approx([4.9, 10.0, 0.0])
        # Row scores 9.9, 10 and 0; the episodes average 9.95 and 0, mean 4.975.
        assert result.episode == pytest.approx([4.925, 5.025, -4.975])

    def test_step_scope_with_mean_over_steps(self):
        result = self.gigpo(penalty_scope="step", group_mean_over="steps")
        # (9.9 + 10 + 0) / 3 = 6.6333.
        assert result.episode == pytest.approx([3.266667, 3.366667, -6.633333], abs=1e-6)

    def test_step_scope_stays_on_its_row(self):
        table = make_table({"rewards": [0.0, 0.0], "valid": [True, False]})
        result = gigpo(table, gamma=0.5, invalid_action_penalty=0.1, penalty_scope="step")
        assert result.step_return == pytest.approx([0.0, -0.1])

    def test_step_scope_scales_by_the_spread_of_the_rows(self):
        # Both episodes fail and both have one invalid row of two: their mean scores are equal, but
        # the rows are not. Each row weighs 1/2: mean -0.05, variance 4 x 0.5 x 0.0025 / (2 - 1).
        table = make_table(
            {"rewards": [0.0, 0.0], "valid": [False, True]},
            {"rewards": [0.0, 0.0], "valid": [True, False]},
        )
        result = grpo(table, invalid_action_penalty=0.1, penalty_scope="step")
        expected = 0.05 / (math.sqrt(0.005) + 1e-6)
        assert result.total == pytest.approx([-expected, expected, expected, -expected])


class TestNoAmplifiedNoise:
    @pytest.mark.parametrize("f_norm", ["std", "none"])
    def test_equal_returns_give_exactly_zero(self, f_norm):
        # The mean of three 0.1 is not 0.1 in binary.
        table = make_table(*({"rewards": [0.1], "anchors": [0]} for _ in range(3)))
        result = gigpo(table, f_norm=f_norm)
        assert result.total.tolist() == [0.0] * 3

    def test_returns_that_differ_by_rounding_give_exactly_zero(self):
        # 0.1 + 0.2 + 0.3 = 0.6000000000000001 and 0.3 + 0.2 + 0.1 = 0.6.
        table = make_table({"rewards": [0.1, 0.2, 0.3]}, {"rewards": [0.3, 0.2, 0.1]})
        assert grpo(table).total.tolist() == [0.0] * 6
        assert rloo(table).total.tolist() == [0.0] * 6

    def test_returns_that_cancel_to_rounding_give_exactly_zero(self):
        # Ten times -0.1 and +1 is 1.1e-16, not 0.
        table = make_table({"rewards": [-0.1] * 10 + [1.0]}, {"rewards": [0.0]})
        assert grpo(table).total.tolist() == [0.0] * 12

    def test_a_small_difference_is_kept(self):
        table = make_table({"rewards": [10.0]}, {"rewards": [10.0 + 1e-9]})
        assert grpo(table, f_norm="none").total == pytest.approx([-5e-10, 5e-10], rel=1e-5)


class TestBadTables:
    good = make_table({"rewards": [0.0, 1.0]}, {"rewards": [0.0]})

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_reward_that_is_not_finite(self, value):
        bad = self.good._replace(reward=np.array([0.0, value, 0.0]))
        with pytest.raises(ValueError, match=rf"episode 0, agent 0, step 1 has reward {value}"):
            gigpo(bad)

    def test_step_that_repeats(self):
        bad = self.good._replace(step=np.array([3, 3, 0]))
        with pytest.raises(ValueError, match="episode 0, agent 0, step 3 is in the table twice"):
            gigpo(bad)

    def test_episode_in_two_groups(self):
        bad = self.good._replace(group=np.array([4, 5, 4]))
        with pytest.raises(ValueError, match="step 1 is in group 5 and its step before in group 4"):
            gigpo(bad)

    def test_column_of_another_length(self):
        bad = self.good._replace(anchor=np.array([1, 2]))
        with pytest.raises(ValueError, match=r"column anchor .* shape \[2\], expected \[3\]"):
            gigpo(bad)

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("omega", -1.0),
            ("omega", math.nan),
            ("gamma", 1.5),
            ("f_norm", "var"),
            ("group_mean_over", "rows"),
            ("invalid_action_penalty", -0.1),
            ("penalty_scope", "episode"),
        ],
    )
    def test_setting_out_of_range(self, setting, value):
        with pytest.raises(ValueError, match=f"{setting} is"):
            gigpo(self.good, **{setting: value})

    def test_empty_table_gives_empty_advantages(self):
        empty = StepTable(*(column[:0] for column in self.good))
        assert [len(column) for column in gigpo(empty)] == [0] * 5
