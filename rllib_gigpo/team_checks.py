"""Checks of the settings of several policies: what each may have of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

# What is read policy by policy. Everything else is of the run: how much is played, the number of
# optimizer steps, what engines and learners are.
OWN_SETTINGS = (
    "adam_betas",
    "base_dtype",
    "clip_param",
    "critic_lr",
    "dual_clip",
    "entropy_coeff",
    "episode_weight",
    "eval_temperature",
    "f_norm",
    "gamma",
    "grad_clip",
    "invalid_action_penalty",
    "kl_coeff",
    "llm_model",
    "llm_options",
    "lora",
    "lr",
    "lr_warmup_steps",
    "omega",
    "profile",
    "temperature",
    "weight_decay",
)


def check_teams(config: GiGPOConfig) -> None:
    """Refuse settings of single policies that nobody would read.

    Raises:
        ValueError: One sentence that names the policy, the setting and the cure.
    """
    overrides = config.algorithm_config_overrides_per_module
    for module_id, own in overrides.items():
        prefix = f"algorithm_config_overrides_per_module[{module_id!r}]"
        if module_id not in config.module_ids:
            raise ValueError(
                f"{prefix}: there is no such policy, only {', '.join(config.module_ids)}; name it "
                "in multi_agent(policies=...)"
            )
        unknown = sorted(set(own or ()) - set(OWN_SETTINGS))
        if unknown:
            raise ValueError(
                f"{prefix} sets {unknown[0]!r}, which all policies share: set it for the run; a "
                f"policy's own are {', '.join(OWN_SETTINGS)}"
            )
    to_train = config.policies_to_train
    if isinstance(to_train, list | tuple | set):
        if not to_train:
            raise ValueError(
                f"policies_to_train={to_train!r}: nothing would be trained; name one of "
                f"{', '.join(config.module_ids)}, or set None for all"
            )
        strangers = sorted(set(map(str, to_train)) - set(config.module_ids))
        if strangers:
            raise ValueError(
                f"policies_to_train={to_train!r}: there is no policy {strangers[0]!r}, only "
                f"{', '.join(config.module_ids)}"
            )
    adapted = {m: config.get_config_for_module(m).lora is not None for m in config.module_ids}
    if config.engine == "vllm" and len(set(adapted.values())) > 1:
        raise ValueError(
            "lora for some policies and not for others with engine='vllm': engines serve adapters "
            "or whole weights; give all policies LoRASettings (an untrained adapter changes "
            "nothing), or use engine='transformers'"
        )
