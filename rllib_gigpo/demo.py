"""Trains a few iterations and prints everything that a reader wants to see of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rllib_gigpo.config import GiGPOConfig

_OWN_MEANS = frozenset(
    {"episode_return_mean", "episode_len_mean", "prompt_tokens_mean", "response_tokens_mean"}
)
_PHASES = ("rollout", "grouping", "advantages", "old_logp", "ref_logp", "update", "sync")


def report_iterations(config: GiGPOConfig, iterations: int) -> list[dict[str, Any]]:
    """Train and print each iteration.

    Args:
        config: What to train.
        iterations: How many iterations.

    Returns:
        The results of `Algorithm.train()`.
    """
    algorithm = config.build_algo()
    results = []
    for number in range(1, iterations + 1):
        result = algorithm.train()
        results.append(result)
        print(f"iteration {number}", flush=True)
        for line in describe(result):
            print(f"  {line}", flush=True)
    algorithm.stop()
    return results


def describe(result: Mapping[str, Any]) -> list[str]:
    """Return the lines that describe one iteration."""
    found, timers = result["env_runners"], result["timers"]
    won = found.get("success_rate", float("nan"))
    success = "not told" if math.isnan(won) else f"{won:.1%}"
    lines = [
        f"success {success}, return "
        f"{found['episode_return_mean']:.2f}, length {found['episode_len_mean']:.1f}, "
        f"valid actions {found['valid_action_rate']:.1%}",
        f"tokens: {int(found['num_prompt_tokens']):,} prompt, "
        f"{int(found['num_response_tokens']):,} response",
    ]
    told = _environment_numbers(found)
    if told:
        lines.append("environment: " + ", ".join(f"{name} {value:.3g}" for name, value in told))
    for module_id, learned in result["learners"].items():
        if "nonzero_advantage_share" not in learned:
            continue
        lines.append(
            f"{module_id}: advantage not zero in {learned['nonzero_advantage_share']:.1%} of rows "
            f"(step advantage {learned['nonzero_step_advantage_share']:.1%}), gradient norm "
            f"{learned['gradient_norm']:.4f}, KL {learned['kl']:.2e}, ratio "
            f"{learned['ratio_mean']:.4f}, entropy {learned['entropy']:.3f}"
        )
        if learned["nonzero_advantage_share"] == 0:
            lines.append(
                "no learning signal: all episodes of each group had the same return, and so had "
                "the steps at each anchor state; every advantage is 0"
            )
    lines.append("seconds: " + ", ".join(f"{phase} {timers[phase]:.2f}" for phase in _PHASES))
    return lines


def _environment_numbers(found: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The means of what the environment's infos say, such as score or tool calls."""
    names = sorted(name for name in found if name.endswith("_mean") and name not in _OWN_MEANS)
    return [(name.removesuffix("_mean").replace("_", " "), found[name]) for name in names]
