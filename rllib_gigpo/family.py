"""Config and Algorithm classes of the presets, for `GRPOConfig()` and `tune.Tuner("GRPO", ...)`.

They hold nothing of their own: a config class starts from its preset's settings, an Algorithm class
names it as its default.
"""

from __future__ import annotations

from typing import Any

from ray.tune.registry import register_trainable

from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.gigpo import GiGPO
from rllib_gigpo.presets import PRESETS, Preset


def _class_name(preset: Preset) -> str:
    """Return the label as a Python name: "Dr.GRPO" is DrGRPO, "REINFORCE++" is REINFORCEpp."""
    return "".join(c for c in preset.label.replace("++", "pp") if c.isalnum())


def _make(preset: Preset) -> tuple[type[GiGPOConfig], type[GiGPO]]:
    name = _class_name(preset)
    told = f"{preset.label}: {preset.formula} ({preset.source})."

    def start(self: GiGPOConfig, algo_class: type | None = None) -> None:
        GiGPOConfig.__init__(self, algo_class or algorithm)

    def default_config(cls: type) -> GiGPOConfig:
        return config(algo_class=cls)

    # Their module and name let pickle find them.
    place = {"__module__": __name__, "__doc__": told}
    config: Any = type(
        f"{name}Config",
        (GiGPOConfig,),
        {**place, "_preset": preset.name, "__init__": start},
    )
    algorithm: Any = type(
        name, (GiGPO,), {**place, "get_default_config": classmethod(default_config)}
    )
    return config, algorithm


_MADE = {name: _make(preset) for name, preset in PRESETS.items() if name != "gigpo"}
CONFIGS: dict[str, type[GiGPOConfig]] = {
    "gigpo": GiGPOConfig,
    **{name: config for name, (config, _) in _MADE.items()},
}
ALGORITHMS: dict[str, type[GiGPO]] = {
    "gigpo": GiGPO,
    **{name: algorithm for name, (_, algorithm) in _MADE.items()},
}

# The names under which they are imported, and found by pickle.
GiGPONoStdConfig, GiGPONoStd = _MADE["gigpo_no_std"]
GiGPONoEpisodeConfig, GiGPONoEpisode = _MADE["gigpo_no_episode"]
GiGPONoStepConfig, GiGPONoStep = _MADE["gigpo_no_step"]
GRPOConfig, GRPO = _MADE["grpo"]
DrGRPOConfig, DrGRPO = _MADE["dr_grpo"]
RLOOConfig, RLOO = _MADE["rloo"]
REINFORCEppConfig, REINFORCEpp = _MADE["reinforce_pp"]
REINFORCEppBaselineConfig, REINFORCEppBaseline = _MADE["reinforce_pp_baseline"]
LLMPPOConfig, LLMPPO = _MADE["ppo"]
LLMPPOTokenConfig, LLMPPOToken = _MADE["ppo_token"]
DAPOConfig, DAPO = _MADE["dapo"]
GSPOConfig, GSPO = _MADE["gspo"]
GiGPODynamicConfig, GiGPODynamic = _MADE["gigpo_dynamic"]
HGPOConfig, HGPO = _MADE["hgpo"]


def register_family() -> None:
    """Register every algorithm with Tune under its preset's label."""
    for name, algorithm in ALGORITHMS.items():
        register_trainable(PRESETS[name].label, algorithm)
