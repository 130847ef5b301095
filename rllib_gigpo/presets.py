"""The algorithms of the family, each as the settings in which it differs from GiGPO.

Everything else is GiGPO's default, for every preset alike: how episodes are played, the optimizer,
the KL to the reference. `GiGPOConfig.preset(name)`, `<Name>Config()` and `tune.Tuner(label, ...)`
start from these settings; each of them can be changed afterwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One algorithm.

    Attributes:
        name: Its key, such as "dr_grpo".
        label: What the literature calls it, without blanks; also its name for Tune, where "PPO" is
            taken by RLlib.
        formula: Its advantage and whatever else is its own, in one line.
        source: Paper and equation, or the code that it follows.
        settings: The settings in which it differs from GiGPO.
    """

    name: str
    label: str
    formula: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_GRPO = {"omega": 0.0}
_DYNAMIC = {"dynamic_sampling": True, "clip_param": (0.2, 0.28)}
_NO_GROUPS = {"omega": 0.0, "f_norm": "none"}
_PPO = {
    **_NO_GROUPS,
    "estimator": "gae",
    "critic": "model",
    "whiten_advantages": True,
    "gamma": 1.0,
    "num_groups": 128,
    "group_size": 1,
}

_ALL = (
    Preset("gigpo", "GiGPO", "A_E + ω A_S, F = std", "arXiv 2505.10978, Eqs. 3-9"),
    Preset(
        "gigpo_no_std",
        "GiGPO-NoStd",
        "A_E + ω A_S, F = 1",
        "arXiv 2505.10978, Sec. 4.1",
        {"f_norm": "none"},
    ),
    Preset(
        "gigpo_no_episode",
        "GiGPO-NoEpisode",
        "ω A_S",
        "arXiv 2505.10978, Figure 4 (without A_E)",
        {"episode_weight": 0.0},
    ),
    Preset(
        "gigpo_no_step",
        "GiGPO-NoStep",
        "A_E",
        "arXiv 2505.10978, Figure 4 (without A_S)",
        {"omega": 0.0},
    ),
    Preset("grpo", "GRPO", "(R - mean R) / std", "arXiv 2402.03300, Sec. 4.1.2", _GRPO),
    Preset(
        "dr_grpo",
        "Dr.GRPO",
        "R - mean R; loss per row / token limit",
        "arXiv 2503.20783, Sec. 3.2",
        {**_GRPO, "f_norm": "none", "aggregation": "seq_mean_token_sum_norm"},
    ),
    Preset(
        "rloo",
        "RLOO",
        "R - mean R of the others",
        "arXiv 2402.14740, Eq. 8",
        {**_NO_GROUPS, "estimator": "rloo"},
    ),
    Preset(
        "reinforce_pp",
        "REINFORCE++",
        "whiten(G_t), γ = 1",
        "arXiv 2501.03262, Sec. 3",
        {
            **_NO_GROUPS,
            "estimator": "reinforce",
            "gamma": 1.0,
            "whiten_advantages": True,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
    Preset(
        "reinforce_pp_baseline",
        "REINFORCE++-Baseline",
        "whiten(R - mean R)",
        "arXiv 2501.03262, Sec. 3 (baseline variant)",
        {**_GRPO, "f_norm": "none", "whiten_advantages": True, "kl_estimator": "k2"},
    ),
    Preset(
        "ppo",
        "LLM-PPO",
        "GAE over the steps of an episode, whitened",
        "arXiv 1707.06347, Eqs. 7 and 11; 1506.02438",
        _PPO,
    ),
    Preset(
        "ppo_token",
        "LLM-PPO-Token",
        "GAE over the tokens of each response, whitened",
        "verl-agent's PPO",
        {**_PPO, "gae_level": "token"},
    ),
    Preset(
        "dapo",
        "DAPO",
        "GRPO; clip 0.2 / 0.28, dynamic sampling, overlong cost",
        "arXiv 2503.14476, Eqs. 8-13",
        {**_GRPO, **_DYNAMIC, "overlong_buffer": 0.25, "kl_coeff": 0.0},
    ),
    Preset(
        "gspo",
        "GSPO",
        "GRPO; ratio exp(mean log-ratio of a row), clip 3e-4 / 4e-4",
        "arXiv 2507.18071, Eqs. 5-7",
        {
            **_GRPO,
            "ratio_level": "sequence",
            "clip_param": (3e-4, 4e-4),
            "aggregation": "seq_mean_token_mean",
        },
    ),
    Preset(
        "gigpo_dynamic",
        "GiGPO-Dynamic",
        "GiGPO; clip 0.2 / 0.28, dynamic sampling",
        "arXiv 2505.10978, Sec. 5.2; 2503.14476",
        _DYNAMIC,
    ),
    Preset(
        "hgpo",
        "HGPO",
        "mean of the advantages of nested history groups",
        "arXiv 2602.22817",
        {"estimator": "hgpo", "omega": 0.0},
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def get_preset(name: str) -> Preset:
    """Return a preset by its name or label, in any spelling.

    Raises:
        ValueError: There is none.
    """
    wanted = _plain(name)
    for preset in _ALL:
        if wanted in (_plain(preset.name), _plain(preset.label)):
            return preset
    raise ValueError(f"no preset is named {name!r}: choose one of {', '.join(PRESETS)}")


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().replace("++", "pp") if c.isalnum())
