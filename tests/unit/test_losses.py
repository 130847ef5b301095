"""Loss parts against numbers worked out by hand, autograd, and poisoned padding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_gigpo.losses import (
    clipped_surrogate,
    correction_weights,
    entropy,
    kl_estimate,
    sequence_log_ratio,
    token_log_ratio,
    token_weights,
)

LN2 = math.log(2.0)
AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
)


def row(*values: float) -> torch.Tensor:
    """One row of tokens [1, T] in float64."""
    return torch.tensor([values], dtype=torch.float64)


def all_true(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tensor, dtype=torch.bool)


def surrogate(ratios, advantage, **bounds):
    """Surrogate of a row of given ratios, with the gradient of its sum by the log-ratios."""
    log_ratio = row(*ratios).log().requires_grad_()
    advantage = torch.tensor([advantage], dtype=torch.float64)
    result = clipped_surrogate(log_ratio, advantage, all_true(log_ratio), **bounds)
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_ratio)
    return result, gradient[0]


class TestTokenRatio:
    def test_is_the_difference_of_log_probabilities(self):
        ratio = token_log_ratio(row(-1.0, -3.0), row(-1.5, -2.0), all_true(row(0, 0)))
        assert ratio[0].tolist() == [0.5, -1.0]

    def test_is_held_where_its_exponential_would_overflow(self):
        logp = row(0.0, -900.0).requires_grad_()
        ratio = token_log_ratio(logp, row(-900.0, 0.0), all_true(logp))
        assert ratio[0].tolist() == [20.0, -20.0]
        (gradient,) = torch.autograd.grad(ratio.exp().sum(), logp)
        assert gradient[0].tolist() == [0.0, 0.0]


class TestSequenceRatio:
    # Differences 0.3, -0.1 and 0.4 over three tokens: mean 0.2; the fourth is padding.
    logp = row(-1.0, -2.0, -0.5, 7.0)
    old = row(-1.3, -1.9, -0.9, -7.0)
    mask = torch.tensor([[True, True, True, False]])

    def test_value_is_the_mean_over_the_row(self):
        ratio = sequence_log_ratio(self.logp, self.old, self.mask)
        assert ratio[0].tolist() == pytest.approx([0.2, 0.2, 0.2, 0.0])

    def test_gradient_equals_that_of_the_sequence_objective(self):
        # GSPO maximises A s with s = exp(mean log-ratio): d(-A s) / d logp_t = -A s / 3.
        logp = self.logp.clone().requires_grad_()
        log_ratio = sequence_log_ratio(logp, self.old, self.mask)
        term = clipped_surrogate(
            log_ratio, torch.tensor([2.0]).double(), self.mask, clip_low=0.5, clip_high=0.5
        ).loss
        weights = token_weights(self.mask, "seq_mean_token_mean", total_rows=1, total_tokens=3)
        (gradient,) = torch.autograd.grad((weights * term).sum(), logp)
        expected = -2.0 * math.exp(0.2) / 3
        assert gradient[0].tolist() == pytest.approx([expected] * 3 + [0.0], rel=1e-6)

    def test_clips_whole_rows(self):
        # exp(0.2) = 1.22 > 1 + 4e-4: every token of the row is clipped and has no gradient.
        logp = self.logp.clone().requires_grad_()
        log_ratio = sequence_log_ratio(logp, self.old, self.mask)
        result = clipped_surrogate(
            log_ratio, torch.tensor([1.0]).double(), self.mask, clip_low=3e-4, clip_high=4e-4
        )
        (gradient,) = torch.autograd.grad(result.loss.sum(), logp)
        assert result.clipped_high[0].tolist() == [True, True, True, False]
        assert gradient[0].tolist() == [0.0] * 4

    def test_is_capped_at_ten(self):
        ratio = sequence_log_ratio(row(0.0, 0.0), row(-40.0, -20.0), all_true(row(0, 0)))
        assert ratio[0].tolist() == [10.0, 10.0]

    def test_an_empty_row_is_zero(self):
        mask = torch.zeros(1, 2, dtype=torch.bool)
        assert sequence_log_ratio(row(1.0, 2.0), row(0.0, 0.0), mask)[0].tolist() == [0.0, 0.0]


class TestClippedSurrogate:
    def test_positive_advantage_is_clipped_above_only(self):
        # A = 2, bounds 0.8 and 1.3. rho 0.5: max(-1, -1.6) = -1. rho 1.1: -2.2.
        # rho 1.5: max(-3, -2.6) = -2.6, without gradient. d(-A rho) / d log rho = -A rho.
        result, gradient = surrogate([0.5, 1.1, 1.5], 2.0, clip_low=0.2, clip_high=0.3)
        assert result.loss[0].tolist() == pytest.approx([-1.0, -2.2, -2.6])
        assert gradient.tolist() == pytest.approx([-1.0, -2.2, 0.0])
        assert result.clipped_high[0].tolist() == [False, False, True]
        assert not result.clipped_low.any()

    def test_negative_advantage_is_clipped_below_only(self):
        # A = -2. rho 0.5: max(1, 1.6) = 1.6, without gradient. rho 1.1: 2.2. rho 1.5: max(3, 2.6).
        result, gradient = surrogate([0.5, 1.1, 1.5], -2.0, clip_low=0.2, clip_high=0.3)
        assert result.loss[0].tolist() == pytest.approx([1.6, 2.2, 3.0])
        assert gradient.tolist() == pytest.approx([0.0, 2.2, 3.0])
        assert result.clipped_low[0].tolist() == [True, False, False]
        assert not result.clipped_high.any()

    def test_dual_clip_bounds_the_loss_of_negative_advantages(self):
        # A = -1, c = 3. rho 2: 2. rho 5: min(5, 3) = 3, without gradient.
        result, gradient = surrogate([2.0, 5.0], -1.0, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
        assert result.loss[0].tolist() == pytest.approx([2.0, 3.0])
        assert gradient.tolist() == pytest.approx([2.0, 0.0])
        assert result.dual_clipped[0].tolist() == [False, True]

    def test_dual_clip_leaves_positive_advantages_alone(self):
        result, _ = surrogate([5.0], 1.0, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
        assert result.loss[0].tolist() == pytest.approx([-1.2])
        assert not result.dual_clipped.any()

    def test_at_ratio_one_the_gradient_is_minus_the_advantage(self):
        result, gradient = surrogate([1.0, 1.0], 0.7, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
        assert gradient.tolist() == pytest.approx([-0.7, -0.7])
        assert not (result.clipped_low | result.clipped_high | result.dual_clipped).any()

    def test_advantages_per_token(self):
        log_ratio = torch.zeros(2, 2)
        advantage = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        result = clipped_surrogate(
            log_ratio, advantage, all_true(log_ratio), clip_low=0.2, clip_high=0.2
        )
        assert result.loss.tolist() == [[-1.0, -2.0], [-3.0, -4.0]]

    def test_the_advantage_of_a_row_goes_to_all_its_tokens(self):
        # Two rows of two tokens: a square shape must not turn rows into columns.
        log_ratio = torch.zeros(2, 2)
        result = clipped_surrogate(
            log_ratio, torch.tensor([1.0, 5.0]), all_true(log_ratio), clip_low=0.2, clip_high=0.2
        )
        assert result.loss.tolist() == [[-1.0, -1.0], [-5.0, -5.0]]

    @pytest.mark.parametrize(
        "bounds",
        [
            {"clip_low": -0.1, "clip_high": 0.2},
            {"clip_low": 1.1, "clip_high": 0.2},
            {"clip_low": 0.2, "clip_high": -0.2},
            {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0},
        ],
    )
    def test_bounds_out_of_range(self, bounds):
        with pytest.raises(ValueError, match="clip_low is"):
            surrogate([1.0], 1.0, **bounds)


class TestKl:
    # d = log ref - log pi = ln 2: the reference is twice as likely.
    logp, ref = row(-1.0), row(-1.0 + LN2)

    @pytest.mark.parametrize(
        ("estimator", "value", "slope"),
        [
            # k1 = -d, dk1/dlogp = 1.
            ("k1", -LN2, 1.0),
            # k2 = d^2 / 2, dk2/dlogp = -d.
            ("k2", LN2**2 / 2, -LN2),
            # k3 = 2 - ln 2 - 1, dk3/dlogp = 1 - 2.
            ("k3", 1 - LN2, -1.0),
        ],
    )
    def test_value_and_gradient_by_hand(self, estimator, value, slope):
        logp = self.logp.clone().requires_grad_()
        estimate = kl_estimate(logp, self.ref, all_true(logp), estimator)
        (gradient,) = torch.autograd.grad(estimate.sum(), logp)
        assert estimate.item() == pytest.approx(value)
        assert gradient.item() == pytest.approx(slope)

    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
    def test_equal_policies_give_zero(self, estimator):
        assert kl_estimate(self.logp, self.logp, all_true(self.logp), estimator).item() == 0.0

    def test_k3_is_at_most_ten_and_finite_for_any_gap(self):
        logp = torch.tensor([[-500.0, 0.0, -1.0]], requires_grad=True)
        ref = torch.tensor([[0.0, -500.0, -1.0]])
        estimate = kl_estimate(logp, ref, all_true(logp), "k3")
        # d = 500 is held at 20 and k3 at 10; d = -500 is held at -20: e^-20 + 20 - 1, at most 10.
        assert estimate[0].tolist() == [10.0, 10.0, 0.0]
        (gradient,) = torch.autograd.grad(estimate.sum(), logp)
        assert gradient[0].tolist() == [0.0, 0.0, 0.0]

    def test_k3_keeps_its_precision_for_small_gaps(self):
        # d = 1e-3: k3 = d^2 / 2 + d^3 / 6 = 5.00167e-7; e^d - d - 1 in float32 is 20 % off.
        logp, ref = torch.tensor([[0.0]]), torch.tensor([[1e-3]])
        estimate = kl_estimate(logp, ref, all_true(logp), "k3").item()
        assert estimate == pytest.approx(5.0017e-7, rel=1e-3)

    def test_k1_and_k3_are_unbiased(self):
        policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
        exact = (policy * (policy / reference).log()).sum().item()
        logp, ref = policy.log()[None], reference.log()[None]
        for estimator in ("k1", "k3"):
            estimate = kl_estimate(logp, ref, all_true(logp), estimator)
            assert (policy * estimate[0]).sum().item() == pytest.approx(exact)

    def test_unknown_estimator(self):
        with pytest.raises(ValueError, match="KL estimator is 'k4', expected 'k1', 'k2' or 'k3'"):
            kl_estimate(self.logp, self.ref, all_true(self.logp), "k4")


class TestEntropy:
    def test_by_hand(self):
        # Probabilities 1/2, 1/4, 1/4: 0.5 ln 2 + 2 x 0.25 x 2 ln 2 = 1.5 ln 2. Uniform: ln 3.
        logits = torch.tensor([[[LN2, 0.0, 0.0], [5.0, 5.0, 5.0]]], dtype=torch.float64)
        result = entropy(logits, torch.ones(1, 2, dtype=torch.bool))
        assert result[0].tolist() == pytest.approx([1.5 * LN2, math.log(3.0)])

    def test_forbidden_tokens_take_no_part(self):
        logits = torch.tensor([[[0.0, 0.0, -torch.inf]]], requires_grad=True)
        result = entropy(logits, torch.ones(1, 1, dtype=torch.bool))
        assert result.item() == pytest.approx(LN2)
        (gradient,) = torch.autograd.grad(result.sum(), logits)
        assert gradient.isfinite().all()

    def test_gradient_agrees_with_finite_differences(self):
        logits = torch.tensor([[[0.3, -1.0, 0.7, 0.0]]], dtype=torch.float64, requires_grad=True)
        mask = torch.ones(1, 1, dtype=torch.bool)
        assert torch.autograd.gradcheck(lambda x: entropy(x, mask), (logits,))


class TestTokenWeights:
    # Rows of 3, 1 and 0 tokens; the optimizer step holds 5 rows and 10 tokens in all.
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])

    @pytest.mark.parametrize(
        ("aggregation", "long", "short"),
        [
            ("token_mean", 1 / 10, 1 / 10),
            ("seq_mean_token_sum", 1 / 5, 1 / 5),
            ("seq_mean_token_mean", 1 / 15, 1 / 5),
            ("seq_mean_token_sum_norm", 1 / 20, 1 / 20),
        ],
    )
    def test_by_hand(self, aggregation, long, short):
        weights = token_weights(
            self.mask, aggregation, total_rows=5, total_tokens=10, norm_tokens=4
        )
        expected = torch.tensor([[long, long, long], [short, 0.0, 0.0], [0.0, 0.0, 0.0]])
        assert torch.allclose(weights, expected)

    def test_constant_must_be_given(self):
        with pytest.raises(ValueError, match="norm_tokens is None"):
            token_weights(self.mask, "seq_mean_token_sum_norm", total_rows=5, total_tokens=10)

    def test_unknown_aggregation(self):
        with pytest.raises(ValueError, match="aggregation is 'mean'"):
            token_weights(self.mask, "mean", total_rows=5, total_tokens=10)

    def test_a_step_without_responses(self):
        with pytest.raises(ValueError, match="0 rows and 0 response tokens"):
            token_weights(self.mask, "token_mean", total_rows=0, total_tokens=0)


def full_loss(logp, old, ref, advantage, mask, aggregation, ratio, totals):
    """A loss with every part, as a learner puts it together."""
    log_ratio = ratio(logp, old, mask)
    term = clipped_surrogate(
        log_ratio, advantage, mask, clip_low=0.2, clip_high=0.28, dual_clip=3.0
    ).loss
    term = term + 0.1 * kl_estimate(logp, ref, mask, "k3")
    term = term * correction_weights(old, ref, mask)
    weights = token_weights(mask, aggregation, norm_tokens=16, **totals)
    return (weights * term).sum()


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=2, max_size=7).filter(any),
    aggregation=st.sampled_from(AGGREGATIONS),
    ratio=st.sampled_from([token_log_ratio, sequence_log_ratio]),
    data=st.data(),
)
def test_splitting_into_micro_batches_changes_neither_loss_nor_gradient(
    lengths, aggregation, ratio, data
):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    rows, longest = len(lengths), max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    logp, old, ref = (0.3 * torch.randn(3, rows, longest, dtype=torch.float64)).unbind()
    advantage = torch.randn(rows, dtype=torch.float64)
    totals = {"total_rows": sum(map(bool, lengths)), "total_tokens": sum(lengths)}

    def loss_and_gradient(chosen: slice, width: int):
        leaf = logp[chosen, :width].clone().requires_grad_()
        loss = full_loss(
            leaf,
            old[chosen, :width],
            ref[chosen, :width],
            advantage[chosen],
            mask[chosen, :width],
            aggregation,
            ratio,
            totals,
        )
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss, torch.nn.functional.pad(gradient, (0, longest - width))

    whole_loss, whole_gradient = loss_and_gradient(slice(None), longest)
    cut = data.draw(st.integers(1, rows - 1))
    # Each part is padded to its own longest row only.
    parts = [
        loss_and_gradient(chosen, max(1, max(lengths[chosen])))
        for chosen in (slice(0, cut), slice(cut, None))
    ]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole_loss.item(), abs=1e-12)
    split_gradient = torch.cat([gradient for _, gradient in parts])
    assert torch.allclose(split_gradient, whole_gradient, rtol=0, atol=1e-12)


class TestPadding:
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])

    def poisoned(self, poison: float) -> torch.Tensor:
        values = torch.tensor([[-0.5, 0.0, -0.2, 0.0], [0.0, 0.0, 0.0, 0.0]])
        return values.masked_fill(~self.mask, poison).requires_grad_()

    @pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
    @pytest.mark.parametrize(
        "term",
        [
            lambda x, m: token_log_ratio(x, x.detach() - 0.1, m),
            lambda x, m: token_log_ratio(x, x.detach() - 0.1, m).exp(),
            lambda x, m: sequence_log_ratio(x, x.detach() - 0.1, m),
            lambda x, m: kl_estimate(x, x.detach() - 0.1, m, "k1"),
            lambda x, m: kl_estimate(x, x.detach() - 0.1, m, "k2"),
            lambda x, m: kl_estimate(x, x.detach() - 0.1, m, "k3"),
            lambda x, m: entropy(torch.stack([x, 2 * x, 0 * x], dim=-1), m),
            lambda x, m: (
                clipped_surrogate(x, x.detach(), m, clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss
            ),
        ],
    )
    def test_holds_no_value_and_no_gradient_whatever_it_holds(self, term, poison):
        values = self.poisoned(poison)
        clean = self.poisoned(0.0)
        weights = token_weights(self.mask, "token_mean", total_rows=1, total_tokens=2)
        loss = (weights * term(values, self.mask)).sum()
        expected = (weights * term(clean, self.mask)).sum()
        assert loss.item() == expected.item()
        (gradient,) = torch.autograd.grad(loss, values)
        (expected_gradient,) = torch.autograd.grad(expected, clean)
        assert gradient[self.mask].equal(expected_gradient[self.mask])
        assert gradient[~self.mask].tolist() == [0.0] * 6

    @pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("level", ["token", "sequence"])
    @pytest.mark.parametrize("mode", ["truncate", "mask"])
    def test_correction_ignores_it(self, poison, level, mode):
        values = self.poisoned(poison)
        weights = correction_weights(values, values - 0.1, self.mask, level=level, mode=mode)
        assert weights[~self.mask].tolist() == [0.0] * 6
        assert weights[self.mask].isfinite().all()

    def test_a_bound_outside_the_mask_is_not_counted(self):
        log_ratio = torch.full((2, 4), 3.0)
        result = clipped_surrogate(log_ratio, torch.ones(2), self.mask, clip_low=0.2, clip_high=0.2)
        assert result.clipped_high.equal(self.mask)


class TestCorrection:
    # Ratios 4, 1/2 and 1: the row's product is 2.
    old = row(math.log(4.0), -LN2, 0.0)
    engine = row(0.0, 0.0, 0.0)

    def weights(self, **chosen):
        return correction_weights(self.old, self.engine, all_true(self.old), **chosen)[0].tolist()

    def test_token_truncate(self):
        assert self.weights(level="token", mode="truncate", upper=2.0) == pytest.approx([2, 0.5, 1])

    def test_token_mask(self):
        masked = self.weights(level="token", mode="mask", upper=2.0, lower=0.6)
        assert masked == pytest.approx([0, 0, 1])

    def test_sequence_truncate(self):
        assert self.weights(level="sequence", upper=5.0) == pytest.approx([2, 2, 2])
        assert self.weights(level="sequence", upper=1.5) == pytest.approx([1.5, 1.5, 1.5])

    def test_sequence_mask(self):
        assert self.weights(level="sequence", mode="mask", upper=3.0) == pytest.approx([2, 2, 2])
        assert self.weights(level="sequence", mode="mask", upper=1.9) == [0.0, 0.0, 0.0]

    def test_has_no_gradient(self):
        old = self.old.clone().requires_grad_()
        assert not correction_weights(old, self.engine, all_true(old)).requires_grad

    def test_unknown_level_and_mode(self):
        with pytest.raises(ValueError, match="correction level is 'turn'"):
            self.weights(level="turn")
        with pytest.raises(ValueError, match="correction mode is 'drop'"):
            self.weights(mode="drop")
