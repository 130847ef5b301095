"""Estimators beyond GiGPO, GRPO and RLOO, and what shapes their rewards: hand-computed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo.advantages import (
    ESTIMATORS,
    StepTable,
    adapted_kl_coeff,
    episode_scores,
    estimate,
    find_estimator,
    gae_over_steps,
    gae_over_tokens,
    gigpo,
    hgpo,
    needs_critic,
    overlong_cost,
    reinforce,
    settings_of,
)


def table(episode, step, anchor, reward, *, group=None, valid=None) -> StepTable:
    """Rows of one group and one agent, unless said otherwise."""
    n = len(episode)
    return StepTable(
        group=np.zeros(n, np.int64) if group is None else np.array(group),
        episode=np.array(episode),
        agent=np.zeros(n, np.int64),
        step=np.array(step),
        anchor=np.array(anchor),
        reward=np.array(reward, dtype=np.float64),
        valid=np.ones(n, bool) if valid is None else np.array(valid),
    )


# Two episodes of two steps through state 7, from different states, and one of one step at 7.
#   episode 0: state 1, 7, then reward 4    G = 2 (gamma .5), 4
#   episode 1: state 1, 7, then reward 0    G = 0, 0
#   episode 2: state 7, then reward 2       G = 2
STATES = table([0, 0, 1, 1, 2], [0, 1, 0, 1, 0], [1, 7, 1, 7, 7], [0, 4, 0, 0, 2])


class TestHgpo:
    def test_levels_are_averaged_by_their_depth(self):
        # Level 1 (weight 2): state 1 has G = 2, 0, mean 1: +1, -1. State 7 has 4, 0, 2, mean 2:
        # +2, -2, 0. Level 2 (weight 3): rows at 7 that came from 1 have 4, 0: +2, -2; row 4 has no
        # earlier state and is alone. Both levels of rows 1 and 3 agree: (2 * 2 + 3 * 2) / 5 = 2.
        found = hgpo(STATES, gamma=0.5, f_norm="none", history_length=1)
        np.testing.assert_allclose(found.total, [1, 2, -1, -2, 0], atol=1e-12)

    def test_deeper_groups_weigh_more(self):
        # As above with a third episode through 1 and 7, of G = 3, 6: level 1 at 7 has 4, 0, 2, 6 of
        # mean 3, level 2 has 4, 0, 6 of mean 10/3. Row 1: 4 - 3 = 1 and 4 - 10/3 = 2/3, weighed 2
        # and 3: (2 + 2) / 5 = 0.8; with alpha 2, 4 and 9: (4 + 6) / 13; with alpha 0, 5/6.
        rows = table(
            [0, 0, 1, 1, 2, 3, 3],
            [0, 1, 0, 1, 0, 0, 1],
            [1, 7, 1, 7, 7, 1, 7],
            [0, 4, 0, 0, 2, 0, 6],
        )
        for alpha, expected in ((1.0, 0.8), (2.0, 10 / 13), (0.0, 5 / 6)):
            found = hgpo(rows, gamma=0.5, f_norm="none", history_length=1, history_alpha=alpha)
            assert found.total[1] == pytest.approx(expected)

    def test_a_level_that_says_nothing_is_left_out(self):
        # Row 4 is alone at level 2 and 0 at level 1 above. Here G = 4, 0, 5 at 7: mean 3, and its
        # +2 is not shrunk by the level where it is alone.
        rows = STATES._replace(reward=np.array([0.0, 4, 0, 0, 5]))
        found = hgpo(rows, gamma=0.5, f_norm="none", history_length=1)
        assert found.total[4] == pytest.approx(2.0)

    def test_the_base_group_takes_part_as_level_0(self):
        # Returns 4, 0, 2 have mean 2: A_E = 2, -2, 0. Row 0: 1 * 2 + 2 * 1 over 3 = 4/3 (it is
        # alone at level 2). Row 1: (1 * 2 + 2 * 2 + 3 * 2) / 6 = 2.
        found = hgpo(STATES, gamma=0.5, f_norm="none", history_length=1, history_base_group=True)
        np.testing.assert_allclose(found.total, [4 / 3, 2, -4 / 3, -2, 0], atol=1e-12)
        np.testing.assert_allclose(found.episode, [2, 2, -2, -2, 0], atol=1e-12)

    def test_without_history_it_is_gigpos_step_level(self):
        found = hgpo(STATES, gamma=0.5, history_length=0)
        expected = gigpo(STATES, gamma=0.5).step
        np.testing.assert_allclose(found.total, expected, rtol=0, atol=1e-12)

    def test_a_step_before_belongs_to_the_same_trajectory(self):
        # Both rows at 7 come second in the table, but only one of them had a step before.
        rows = table([0, 0, 1, 2, 2], [0, 1, 0, 0, 1], [7, 7, 7, 7, 7], [0, 1, 5, 0, 3])
        # Level 2 holds rows 1 and 4 (7 after 7) with G = 1, 3: -1, +1.
        level_1 = gigpo(rows, gamma=1.0, f_norm="none").step
        found = hgpo(rows, gamma=1.0, f_norm="none", history_length=1)
        assert found.total[1] == pytest.approx((2 * level_1[1] - 3 * 1) / 5)
        assert found.total[4] == pytest.approx((2 * level_1[4] + 3 * 1) / 5)
        np.testing.assert_allclose(found.total[[0, 2, 3]], level_1[[0, 2, 3]])

    @given(st.permutations(range(5)))
    def test_permuting_rows_permutes_advantages(self, order):
        shuffled = StepTable(*(column[order] for column in STATES))
        expected = hgpo(STATES, gamma=0.5, history_length=2).total
        found = hgpo(shuffled, gamma=0.5, history_length=2).total
        np.testing.assert_array_equal(found, expected[order])

    @pytest.mark.parametrize("wrong", [{"history_length": -1}, {"history_alpha": -0.5}])
    def test_settings_out_of_range_raise(self, wrong):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            hgpo(STATES, **wrong)


class TestReinforce:
    def test_is_the_return_to_go(self):
        # Rewards 1, 2 and 4, 0 with gamma 0.5: 1 + 1 = 2, 2; 4, 0.
        rows = table([0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 3], [1, 2, 4, 0])
        np.testing.assert_allclose(reinforce(rows, gamma=0.5).total, [2, 2, 4, 0])

    def test_counts_an_invalid_action_by_its_scope(self):
        # A cost of 1 at the second step. "return": 3 - 1 and 2 - 1. "step": 3 and 2 - 1.
        rows = table([0, 0], [0, 1], [0, 1], [1, 2], valid=[True, False])
        for scope, expected in (("return", [2, 1]), ("step", [3, 1])):
            found = reinforce(rows, gamma=1.0, invalid_action_penalty=1.0, penalty_scope=scope)
            np.testing.assert_allclose(found.total, expected)


class TestGae:
    def test_over_steps_passes_credit_along_the_episode(self):
        # gamma .5, lambda .5, rewards 0, 4, values 1, 2. delta_1 = 4 - 2 = 2;
        # delta_0 = 0 + .5 * 2 - 1 = 0; A_1 = 2, A_0 = 0 + .25 * 2 = .5.
        rows = table([0, 0], [0, 1], [0, 1], [0, 4])
        found = gae_over_steps(rows, value=np.array([1.0, 2.0]), gamma=0.5, lambda_=0.5)
        np.testing.assert_allclose(found.total, [0.5, 2.0])

    def test_over_steps_goes_on_after_a_truncation(self):
        # The state after the truncation is worth 6: delta_1 = 4 + .5 * 6 - 2 = 5, A_0 = 1.25.
        rows = table([0, 0], [0, 1], [0, 1], [0, 4])
        found = gae_over_steps(
            rows,
            value=np.array([1.0, 2.0]),
            bootstrap=np.array([0.0, 6.0]),
            gamma=0.5,
            lambda_=0.5,
        )
        np.testing.assert_allclose(found.total, [1.25, 5.0])

    def test_over_steps_reads_the_columns_in_the_rows_order(self):
        rows = table([0, 0], [1, 0], [1, 0], [4, 0])
        found = gae_over_steps(rows, value=np.array([2.0, 1.0]), gamma=0.5, lambda_=0.5)
        np.testing.assert_allclose(found.total, [2.0, 0.5])

    def test_over_tokens_stays_inside_a_response(self):
        # Values 1, 3 and a score of 2 at the end, gamma 1, lambda .5: delta = 3 - 1 = 2, 2 - 3 =
        # -1; A = 2 - .5 = 1.5, -1; targets 2.5, 2. One token of value 4 and score 1: -3, target 1.
        found = gae_over_tokens(
            np.array([2.0, 1.0]), [np.array([1.0, 3.0]), np.array([4.0])], gamma=1.0, lambda_=0.5
        )
        np.testing.assert_allclose(found.advantage[0], [1.5, -1.0])
        np.testing.assert_allclose(found.value_target[0], [2.5, 2.0])
        np.testing.assert_allclose(found.advantage[1], [-3.0])
        np.testing.assert_allclose(found.value_target[1], [1.0])

    def test_over_tokens_takes_costs_off_each_token(self):
        # Lambda 1, gamma 1: A_t = return-to-go - V. Costs .5, .25 and a score of 2: 1.25, 1.75.
        found = gae_over_tokens(
            np.array([2.0]), [np.zeros(2)], [np.array([0.5, 0.25])], gamma=1.0, lambda_=1.0
        )
        np.testing.assert_allclose(found.advantage[0], [1.25, 1.75])

    def test_over_tokens_of_no_row_is_nothing(self):
        assert gae_over_tokens(np.zeros(0), []) == ([], [])

    def test_the_score_of_a_row_is_its_episodes_return(self):
        rows = table([0, 0, 1], [0, 1, 0], [0, 1, 2], [1, 2, 5], valid=[True, False, True])
        np.testing.assert_allclose(episode_scores(rows), [3, 3, 5])
        for scope, expected in (("return", [2, 2, 5]), ("step", [3, 2, 5])):
            found = episode_scores(rows, invalid_action_penalty=1.0, penalty_scope=scope)
            np.testing.assert_allclose(found, expected)


class TestShaping:
    def test_overlong_cost_rises_over_the_buffer(self):
        # Limit 100 and a buffer of 20: 80 is free, 85 costs a quarter, 100 all.
        found = overlong_cost(
            np.array([10, 80, 85, 90, 100]), max_tokens=100, buffer=0.2, penalty=2.0
        )
        np.testing.assert_allclose(found, [0, 0, 0.5, 1.0, 2.0], atol=1e-12)

    def test_no_buffer_costs_nothing(self):
        found = overlong_cost(np.array([100]), max_tokens=100, buffer=0.0, penalty=2.0)
        assert found.tolist() == [0.0]

    @pytest.mark.parametrize(
        ("kl", "expected"),
        # Target .1, horizon 1000, 100 rows: errors +.1 and, held at .2, +.2 and -.2; exp(.01) is
        # 1.0100502, exp(.02) 1.0202013 and exp(-.02) .9801987.
        [(0.11, 0.5050251), (0.1, 0.5), (0.5, 0.5101007), (0.0, 0.4900993)],
    )
    def test_the_kl_coefficient_moves_towards_its_target(self, kl, expected):
        found = adapted_kl_coeff(0.5, kl, target=0.1, horizon=1000, num_rows=100)
        assert found == pytest.approx(expected, abs=1e-7)

    @pytest.mark.parametrize(("kl", "factor"), [(0.0, math.exp(-1)), (9.0, math.e)])
    @pytest.mark.parametrize("num_rows", [5, 6, 10_000])
    def test_the_kl_coefficient_stays_positive_whatever_the_number_of_rows(
        self, num_rows, kl, factor
    ):
        # With 1 + error * rows / horizon it is 0 for ever from 5 rows, and negative beyond.
        coeff = adapted_kl_coeff(0.01, kl, target=0.1, horizon=1, num_rows=num_rows)
        assert coeff == pytest.approx(0.01 * factor)
        for _ in range(1000):
            coeff = adapted_kl_coeff(coeff, 0.0, target=0.1, horizon=1, num_rows=num_rows)
        assert coeff > 0


class TestRegistry:
    def test_a_function_of_the_users_own_gets_what_it_names(self):
        def constant(table, *, gamma, response_tokens):
            return reinforce(table)._replace(total=gamma * response_tokens)

        found = estimate(
            find_estimator(constant),
            STATES,
            settings={"gamma": 0.5, "omega": 1.0},
            columns={"response_tokens": np.arange(5), "value": np.zeros(5)},
        )
        assert settings_of(constant) == ("gamma",)
        assert not needs_critic(constant)
        np.testing.assert_allclose(found.total, [0, 0.5, 1, 1.5, 2])

    def test_what_is_neither_setting_nor_column_is_refused(self):
        def odd(table, *, temperature):
            raise AssertionError

        with pytest.raises(ValueError, match="'odd' asks for 'temperature'"):
            settings_of(odd)

    def test_only_gae_asks_a_critic(self):
        assert [name for name, f in ESTIMATORS.items() if needs_critic(f)] == ["gae"]

    def test_an_unknown_name_is_answered_with_what_there_is(self):
        with pytest.raises(ValueError, match="estimator='gripo': expected one of 'gigpo'"):
            find_estimator("gripo")
