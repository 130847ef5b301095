"""Policy-loss parts in pure torch: ratios, clipped surrogate, KL, entropy, aggregation, correction.

Every function takes padded tensors and a mask, True on the tokens that count. A position outside
the mask gives exactly 0 in value and gradient, whatever it holds, inf and nan too.

A loss is put together as a weighted sum of terms,

    log_ratio = token_log_ratio(logp, old_logp, mask)
    term = clipped_surrogate(log_ratio, advantage, mask, clip_low=0.2, clip_high=0.2).loss
    loss = (token_weights(mask, "token_mean", total_rows=n, total_tokens=m) * term).sum()

where the totals are those of the whole optimizer step over all learners. Losses of micro-batches
and of learners then simply add up, and so do their gradients.

Shapes: N rows (environment steps), T response tokens, V vocabulary.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
RatioLevel = Literal["token", "sequence"]
Aggregation = Literal[
    "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]
CorrectionLevel = Literal["token", "sequence"]
CorrectionMode = Literal["truncate", "mask"]


class Surrogate(NamedTuple):
    """The clipped policy loss and where its bounds held, each of shape [N, T].

    Attributes:
        loss: Loss of each token, to be minimised.
        clipped_low: The ratio is below 1 - clip_low and its gradient is cut.
        clipped_high: The ratio is above 1 + clip_high and its gradient is cut.
        dual_clipped: The advantage is negative and the loss is held at its dual bound.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor


def token_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, *, cap: float = 20.0) -> Tensor:
    """Return log pi(token) - log pi_old(token), the exponent of PPO's ratio.

    Args:
        logp: Log-probabilities under the current policy [N, T].
        old_logp: Log-probabilities under the policy that the data are taken to come from [N, T].
        mask: Response tokens, bool [N, T].
        cap: The result is held in [-cap, cap], without gradient at the bounds, so that its
            exponential stays finite.

    Returns:
        Log-ratios [N, T], 0 outside the mask.
    """
    return _keep(logp - old_logp, mask).clamp(-cap, cap)


def sequence_log_ratio(
    logp: Tensor, old_logp: Tensor, mask: Tensor, *, cap: float = 10.0
) -> Tensor:
    """Return GSPO's length-normalised sequence log-ratio at every token (arXiv 2507.18071, 4.3).

    Its value is s = mean_t (log pi - log pi_old) over the row; written as
    log pi - sg[log pi] + sg[s], its gradient at a token is that of the token's own log-probability.
    A sequence is one row, the response of one environment step.

    Args:
        logp: Log-probabilities under the current policy [N, T].
        old_logp: Log-probabilities under the old policy [N, T].
        mask: Response tokens, bool [N, T].
        cap: The result is at most this, without gradient there.

    Returns:
        Log-ratios [N, T], the same at all tokens of a row, 0 outside the mask.
    """
    logp, old_logp = _keep(logp, mask), _keep(old_logp, mask)
    length = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    mean = ((logp - old_logp).sum(dim=-1, keepdim=True) / length).detach()
    return _keep((logp - logp.detach() + mean).clamp(max=cap), mask)


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Return PPO's clipped loss per token, max(-A rho, -A clip(rho, 1 - low, 1 + high)).

    Source: Schulman et al., arXiv 1707.06347, Eq. 7; two bounds: DAPO, 2503.14476, Sec. 3.1.
    With `dual_clip` c the loss of a negative advantage is at most -A c (Ye et al., arXiv
    1912.09729).

    Args:
        log_ratio: Exponents of rho [N, T].
        advantage: Advantages per row [N] or per token [N, T], without gradient.
        mask: Response tokens, bool [N, T].
        clip_low: How far below 1 the ratio may go, in [0, 1].
        clip_high: How far above 1 the ratio may go, at least 0.
        dual_clip: The dual bound, above 1; none by default.

    Returns:
        Losses and which bound held, 0 and False outside the mask.

    Raises:
        ValueError: A bound is out of its range.
    """
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0 and (dual_clip is None or dual_clip > 1.0)):
        raise ValueError(
            f"clip_low is {clip_low}, clip_high {clip_high} and dual_clip {dual_clip}, expected "
            "0 to 1, at least 0, and None or above 1."
        )
    advantage = advantage.unsqueeze(-1) if advantage.dim() == 1 else advantage
    advantage = _keep(advantage.expand_as(log_ratio), mask)
    ratio = _keep(log_ratio, mask).exp()
    free = -advantage * ratio
    bounded = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, bounded)
    held = mask & (bounded > free)
    dual = torch.zeros_like(held)
    if dual_clip is not None:
        ceiling = -advantage * dual_clip
        dual = mask & (advantage < 0) & (loss > ceiling)
        loss = torch.where(dual, ceiling, loss)
    return Surrogate(
        loss=_keep(loss, mask),
        clipped_low=held & (advantage < 0),
        clipped_high=held & (advantage > 0),
        dual_clipped=dual,
    )


def kl_estimate(
    logp: Tensor, ref_logp: Tensor, mask: Tensor, estimator: KlEstimator = "k3"
) -> Tensor:
    """Estimate KL(pi || pi_ref) at each sampled token.

    With d = log pi_ref - log pi: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (Schulman,
    "Approximating KL Divergence", 2020). k3 takes d in [-20, 20] and is itself at most 10, without
    gradient beyond. k1 is unbiased but its gradient is 0 on average: use it in the reward, and k2
    or k3 in the loss.

    Args:
        logp: Log-probabilities under the current policy [N, T].
        ref_logp: Log-probabilities under the reference policy [N, T].
        mask: Response tokens, bool [N, T].
        estimator: Which estimate.

    Returns:
        Estimates [N, T], 0 outside the mask.

    Raises:
        ValueError: The estimator is unknown.
    """
    difference = _keep(ref_logp - logp, mask)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        difference = difference.clamp(-20.0, 20.0)
        return (difference.expm1() - difference).clamp(max=10.0)
    raise ValueError(f"KL estimator is {estimator!r}, expected 'k1', 'k2' or 'k3'.")


def entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy of the distribution that the logits give for each token, in nats.

    Args:
        logits: Logits [N, T, V]; -inf forbids a token.
        mask: Response tokens, bool [N, T].

    Returns:
        Entropies [N, T], 0 outside the mask.
    """
    logp = _keep(logits, mask.unsqueeze(-1)).log_softmax(dim=-1)
    # A forbidden token has probability 0 and log-probability -inf, whose product is nan.
    finite = logp.masked_fill(logp == -torch.inf, 0.0)
    return _keep(-(logp.exp() * finite).sum(dim=-1), mask)


def token_weights(
    mask: Tensor,
    aggregation: Aggregation,
    *,
    total_rows: float,
    total_tokens: float,
    norm_tokens: float | None = None,
) -> Tensor:
    """Return the weight of each token's term in the loss, so that loss = sum(weight * term).

    The totals count the whole optimizer step, over all learners and micro-batches: response tokens,
    and rows that have any.

        token_mean                 1 / total_tokens
        seq_mean_token_sum         1 / total_rows
        seq_mean_token_mean        1 / (total_rows * tokens of the row)
        seq_mean_token_sum_norm    1 / (total_rows * norm_tokens)   (Dr.GRPO, arXiv 2503.20783)

    Args:
        mask: Response tokens of the rows at hand, bool [N, T].
        aggregation: How terms become a loss.
        total_rows: Rows of the optimizer step.
        total_tokens: Response tokens of the optimizer step.
        norm_tokens: The constant of "seq_mean_token_sum_norm", usually the response limit.

    Returns:
        Weights [N, T] in float32, 0 outside the mask.

    Raises:
        ValueError: The aggregation is unknown, a total is not positive, or the constant is missing.
    """
    if min(total_rows, total_tokens) <= 0:
        raise ValueError(
            f"the optimizer step has {total_rows} rows and {total_tokens} response tokens, "
            "expected some of both: skip a step without responses."
        )
    if aggregation == "token_mean":
        return mask / total_tokens
    if aggregation == "seq_mean_token_sum":
        return mask / total_rows
    if aggregation == "seq_mean_token_mean":
        return mask / (total_rows * mask.sum(dim=-1, keepdim=True).clamp(min=1))
    if aggregation != "seq_mean_token_sum_norm":
        raise ValueError(f"aggregation is {aggregation!r}, expected one of the four modes.")
    if norm_tokens is None or norm_tokens <= 0:
        raise ValueError(
            f"norm_tokens is {norm_tokens}, expected the constant that "
            "'seq_mean_token_sum_norm' divides by, for instance the response token limit."
        )
    return mask / (total_rows * norm_tokens)


def correction_weights(
    old_logp: Tensor,
    engine_logp: Tensor,
    mask: Tensor,
    *,
    level: CorrectionLevel = "token",
    mode: CorrectionMode = "truncate",
    upper: float = 2.0,
    lower: float = 0.0,
) -> Tensor:
    """Return importance weights for rollouts whose engine differs from the learner's policy.

    w = pi_old / pi_engine, per token or as the product over a row. "truncate" takes min(w, upper);
    "mask" drops, with weight 0, what lies outside [lower, upper]. Source: Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025 (truncated).

    Args:
        old_logp: Log-probabilities recomputed by the learner before its update [N, T].
        engine_logp: Log-probabilities that the engine sampled with [N, T].
        mask: Response tokens, bool [N, T].
        level: Ratio of each token, or of the whole row at each of its tokens.
        mode: What happens to a ratio out of bounds.
        upper: Largest weight.
        lower: Smallest weight that "mask" keeps.

    Returns:
        Weights without gradient [N, T], 0 outside the mask.

    Raises:
        ValueError: The level or mode is unknown.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"correction level is {level!r}, expected 'token' or 'sequence'.")
    log_ratio = _keep(old_logp - engine_logp, mask).detach()
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.clamp(max=20.0).exp()
    if mode == "truncate":
        return _keep(ratio.clamp(max=upper), mask)
    if mode == "mask":
        return _keep(ratio, mask & (ratio >= lower) & (ratio <= upper))
    raise ValueError(f"correction mode is {mode!r}, expected 'truncate' or 'mask'.")


def _keep(values: Tensor, mask: Tensor) -> Tensor:
    """Put 0 where the mask is False; unlike a product, this also silences inf and nan."""
    return values.masked_fill(~mask, 0.0)
