"""Checks of the settings that make an algorithm: which of them go together.

A setting that the chosen estimator does not read, or that another one switches off, would do
nothing: it is refused instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rllib_gigpo.advantages import (
    find_estimator,
    gae_over_steps,
    needs_critic,
    reinforce,
    settings_of,
)

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

# Of each setting that only some estimators read, the value that asks for nothing.
_SILENT = {
    "omega": 0.0,
    "episode_weight": 1.0,
    "gamma": 0.95,
    "lambda_": 1.0,
    "group_mean_over": "episodes",
    "history_length": 2,
    "history_alpha": 1.0,
    "history_base_group": False,
    "penalty_scope": "return",
}
# Estimators under which an episode needs no group.
_WITHOUT_GROUPS = (reinforce, gae_over_steps)


def check_family(config: GiGPOConfig) -> Iterator[str]:
    """Yield what does not go together in the settings of advantages, critic and loss."""
    for check in (_check_estimator, _check_critic, _check_loss, _check_kl, _check_anchor):
        yield from check(config)


def _check_estimator(config: GiGPOConfig) -> Iterator[str]:
    estimator = find_estimator(config.estimator)
    read = settings_of(estimator)
    name = config.estimator if isinstance(config.estimator, str) else "of your own"
    is_token_level = config.critic is not None and config.gae_level == "token"
    for setting, silent in _SILENT.items():
        value = getattr(config, setting)
        if setting in read or (setting == "penalty_scope" and is_token_level):
            continue
        if value != silent:
            yield (
                f"{setting}={value!r} has no effect with estimator={name!r}: leave it at "
                f"{silent!r}, or choose an estimator that reads it"
            )
    if config.omega == 0 and config.episode_weight == 0:
        yield (
            "omega=0 with episode_weight=0: every advantage is 0 and nothing is learned; raise one "
            "of them"
        )
    if config.group_size == 1 and estimator not in _WITHOUT_GROUPS:
        yield (
            f"group_size=1 with estimator={name!r}: an episode alone in its group has advantage 0 "
            "and nothing is learned; use at least 2"
        )
    if config.dynamic_sampling and config.group_size == 1:
        yield (
            "dynamic_sampling=True with group_size=1: the returns of a group of one are always "
            "equal, so every group would be left out; use dynamic_sampling=False or larger groups"
        )


def _check_critic(config: GiGPOConfig) -> Iterator[str]:
    asks = needs_critic(find_estimator(config.estimator))
    if asks and config.critic is None:
        yield (
            "this estimator reads a critic's values and critic=None: set critic='head' (on the "
            "policy's body) or critic='model' (a body of its own)"
        )
    if config.critic is not None and not asks:
        yield (
            f"critic={config.critic!r} with estimator={config.estimator!r}: this estimator asks no "
            "critic, which would be trained for nothing; set critic=None or estimator='gae'"
        )
    if config.gae_level == "token" and config.estimator != "gae":
        yield (
            f"gae_level='token' with estimator={config.estimator!r}: only 'gae' works on tokens; "
            "leave gae_level at 'step'"
        )
    if config.critic == "model" and config.lora is not None:
        yield (
            "critic='model' with lora: a body of its own would be trained in full beside the "
            "adapter; use critic='head'"
        )


def _check_loss(config: GiGPOConfig) -> Iterator[str]:
    if config.ratio_level == "sequence" and config.gae_level == "token":
        yield (
            "ratio_level='sequence' with gae_level='token': one ratio for a response cannot weigh "
            "advantages of its tokens; use gae_level='step' or ratio_level='token'"
        )
    correction = config.correction
    if config.ratio_level == "sequence" and correction is not None and correction.level == "token":
        yield (
            "ratio_level='sequence' with a rollout correction of tokens: the ratio and its "
            "correction must be of one kind; use RolloutCorrection(level='sequence') or "
            "rollout_correction=None"
        )
    if config.dual_clip is not None and config.dual_clip <= 1.0 + config.clip_range[1]:
        yield (
            f"dual_clip={config.dual_clip} with clip_param={config.clip_param!r}: the dual bound "
            f"must lie above the upper clip bound {1.0 + config.clip_range[1]:g}; 3 is usual"
        )


def _check_kl(config: GiGPOConfig) -> Iterator[str]:
    if config.kl_target is not None and config.kl_coeff == 0:
        yield (
            f"kl_target={config.kl_target} with kl_coeff=0: there is no coefficient to adapt; set "
            "kl_coeff to its first value, or kl_target=None"
        )
    if config.kl_in == "loss" and config.kl_estimator == "k1" and config.kl_coeff > 0:
        yield (
            "kl_estimator='k1' with kl_in='loss': its gradient is 0 on average, so it would hold "
            "nothing; use 'k2' or 'k3', or kl_in='reward'"
        )


def _check_anchor(config: GiGPOConfig) -> Iterator[str]:
    if config.anchor == "embedding" and not callable(config.anchor_encoder):
        yield (
            f"anchor='embedding' with anchor_encoder={config.anchor_encoder!r}: set a function "
            "from a list of texts to one vector each, such as SentenceTransformer(...).encode"
        )
    if config.anchor != "embedding" and config.anchor_encoder is not None:
        yield (
            f"anchor_encoder with anchor={config.anchor!r} has no effect: set anchor='embedding'"
        )
    for setting, silent, readers in (
        ("similarity_threshold", 0.9, ("similarity", "embedding")),
        ("similarity_measure", "rapidfuzz", ("similarity",)),
    ):
        value = getattr(config, setting)
        if config.anchor not in readers and value != silent:
            yield (
                f"{setting}={value!r} with anchor={config.anchor!r} has no effect: leave it at "
                f"{silent!r}, or set anchor='similarity'"
            )
