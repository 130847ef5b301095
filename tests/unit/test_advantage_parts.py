"""Parts of the estimators: returns, normalisation, whitening, GAE; by hand and for all tables."""

import math

import numpy as np
import pytest
from hypothesis import given

from rllib_gigpo.advantages import (
    discounted_returns,
    gae,
    group_normalize,
    leave_one_out,
    rloo,
    whiten,
)
from tests.step_tables import make_table, properties, tables


class TestParts:
    def test_discounted_returns_by_hand(self):
        # Trajectory 9: 1 + 0.5 x (2 + 0.5 x 4) = 3, 2 + 0.5 x 4 = 4, 4. Trajectory 1: 7.
        returns = discounted_returns(
            np.array([4.0, 7.0, 1.0, 2.0]),
            trajectory=np.array([9, 1, 9, 9]),
            step=np.array([2, 0, 0, 1]),
            gamma=0.5,
        )
        assert returns.tolist() == [4.0, 7.0, 3.0, 4.0]

    def test_discounted_returns_name_a_repeated_step(self):
        twice = np.array([0, 0])
        with pytest.raises(ValueError, match="trajectory 6 has step 0 twice"):
            discounted_returns(np.zeros(2), np.array([6, 6]), twice, 0.9)

    def test_group_normalize_with_weights_by_hand(self):
        # Weights 1 and 3: mean (8 + 0) / 4 = 2, variance (36 + 3 x 4) / 3 = 16.
        gains = group_normalize(
            np.array([8.0, 0.0]), np.array([5, 5]), "std", weights=np.array([1.0, 3.0])
        )
        assert gains == pytest.approx([6 / 4, -2 / 4], rel=1e-6)

    def test_group_normalize_survives_a_large_offset(self):
        gains = group_normalize(np.array([1e9 + 1, 1e9]), np.array([0, 0]), "none")
        assert gains.tolist() == [0.5, -0.5]

    def test_group_normalize_rejects_nan(self):
        with pytest.raises(ValueError, match="values of row 1 is nan"):
            group_normalize(np.array([0.0, math.nan]), np.array([0, 0]), "std")

    def test_leave_one_out_by_hand(self):
        # 6 - (3 + 0) / 2 = 4.5, 3 - 3 = 0, 0 - 4.5 = -4.5; a lone value has no baseline: 0.
        gains = leave_one_out(np.array([6.0, 3.0, 8.0, 0.0]), np.array([0, 0, 1, 0]))
        assert gains == pytest.approx([4.5, 0.0, 0.0, -4.5])

    def test_rloo_over_steps_leaves_one_row_out(self):
        # Three rows with R 10, 10 and 1: 10 - (10 + 1) / 2 = 4.5, 1 - 10 = -9.
        table = make_table({"rewards": [0.0, 10.0]}, {"rewards": [1.0]})
        assert rloo(table, group_mean_over="steps").total == pytest.approx([4.5, 4.5, -9.0])

    def test_whiten_by_hand(self):
        # mean 2, unbiased variance (4 + 0 + 4) / 2 = 4.
        assert whiten(np.array([0.0, 2.0, 4.0])) == pytest.approx([-1.0, 0.0, 1.0])
        kept = whiten(np.array([0.0, 2.0, 4.0]), shift_mean=False)
        assert kept == pytest.approx([1.0, 2.0, 3.0])

    def test_whiten_over_tokens_equals_whitening_the_tokens(self):
        tokens = np.array([1, 4, 2])
        values = np.array([3.0, -1.0, 0.5])
        spread_out = whiten(np.repeat(values, tokens))
        weighted = whiten(values, weights=tokens.astype(float))
        assert np.repeat(weighted, tokens) == pytest.approx(spread_out)

    def test_whiten_gives_zero_for_equal_values(self):
        assert whiten(np.full(7, 0.1)).tolist() == [0.0] * 7


class TestGae:
    reward = np.array([0.0, 1.0, 2.0])
    value = np.array([0.5, 1.0, -1.0])
    trajectory = np.array([0, 0, 1])
    step = np.array([0, 1, 0])

    def test_by_hand(self):
        # gamma 0.5, lambda 0.5. Trajectory 0: delta_1 = 1 - 2 = -1, delta_0 = 0.5 x 2 - 0.1 = 0.9,
        # A_0 = 0.9 + 0.25 x -1 = 0.65. Trajectory 1: 2 + 1 = 3.
        value = np.array([0.1, 2.0, -1.0])
        result = gae(self.reward, value, self.trajectory, self.step, gamma=0.5, lambda_=0.5)
        assert result.advantage == pytest.approx([0.65, -1.0, 3.0])
        assert result.value_target == pytest.approx([0.75, 1.0, 2.0])

    def test_truncation_bootstraps_from_the_state_after(self):
        # Trajectory 0 is cut with V = 4 after it: delta_1 = 1 + 0.5 x 4 - 1 = 2,
        # delta_0 = 0.5 x 1 - 0.5 = 0, A_0 = 0 + 0.25 x 2 = 0.5.
        result = gae(
            self.reward,
            self.value,
            self.trajectory,
            self.step,
            gamma=0.5,
            lambda_=0.5,
            bootstrap=np.array([0.0, 4.0, 0.0]),
        )
        assert result.advantage == pytest.approx([0.5, 2.0, 3.0])

    @properties
    @given(tables())
    def test_without_values_it_is_the_discounted_return(self, table):
        trajectory = table.episode * 2 + table.agent
        zeros = np.zeros(len(trajectory))
        result = gae(table.reward, zeros, trajectory, table.step, gamma=0.9, lambda_=1.0)
        expected = discounted_returns(table.reward, trajectory, table.step, 0.9)
        assert result.advantage == pytest.approx(expected, abs=1e-12)

    @properties
    @given(tables())
    def test_lambda_one_targets_are_the_returns_whatever_the_values(self, table):
        trajectory = table.episode * 2 + table.agent
        values = np.sin(np.arange(len(trajectory)) + 1.0)
        result = gae(table.reward, values, trajectory, table.step, gamma=0.9, lambda_=1.0)
        expected = discounted_returns(table.reward, trajectory, table.step, 0.9)
        assert result.value_target == pytest.approx(expected, abs=1e-9)

    def test_bootstrap_inside_a_trajectory_is_an_error(self):
        with pytest.raises(ValueError, match="not the last of its trajectory"):
            gae(
                self.reward,
                self.value,
                self.trajectory,
                self.step,
                gamma=1.0,
                lambda_=1.0,
                bootstrap=np.array([1.0, 0.0, 0.0]),
            )
