"""Settings of the family that do nothing together, or nothing good, are refused."""

import pytest

from rllib_gigpo import GiGPOConfig, LoRASettings, RolloutCorrection


def fault(preset: str = "gigpo", **training) -> str:
    config = GiGPOConfig.preset(preset).environment("KeyDoor").llm(model="tiny")
    if "lora" in training:
        config.llm(lora=training.pop("lora"))
    with pytest.raises(ValueError) as error:  # noqa: PT011 - callers check the message
        config.training(**training).validate()
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("preset", "training", "expected"),
    [
        ("rloo", {"omega": 0.5}, "omega=0.5 has no effect with estimator='rloo': leave it at 0.0"),
        ("ppo", {"omega": 1.0}, "omega=1.0 has no effect with estimator='gae'"),
        ("hgpo", {"episode_weight": 0.5}, "episode_weight=0.5 has no effect"),
        ("gigpo", {"lambda_": 0.9}, "lambda_=0.9 has no effect with estimator='gigpo'"),
        ("gigpo", {"history_length": 4}, "history_length=4 has no effect"),
        ("ppo", {"penalty_scope": "step"}, "penalty_scope='step' has no effect"),
        ("reinforce_pp", {"group_mean_over": "steps"}, "group_mean_over='steps' has no effect"),
        ("gigpo", {"omega": 0.0, "episode_weight": 0.0}, "every advantage is 0"),
        ("gigpo", {"estimator": "gripo"}, "estimator='gripo': expected one of 'gigpo', 'rloo'"),
        ("gigpo", {"group_size": 1}, "group_size=1 with estimator='gigpo'"),
        ("ppo", {"dynamic_sampling": True}, "dynamic_sampling=True with group_size=1"),
        ("ppo", {"critic": None}, "critic=None: set critic='head'"),
        ("grpo", {"critic": "head"}, "this estimator asks no critic"),
        ("grpo", {"gae_level": "token"}, "gae_level='token' with estimator='gigpo'"),
        ("ppo", {"lora": LoRASettings()}, "critic='model' with lora"),
        ("ppo_token", {"ratio_level": "sequence"}, "ratio_level='sequence' with gae_level='token'"),
        (
            "gspo",
            {"rollout_correction": RolloutCorrection()},
            "ratio_level='sequence' with a rollout correction of tokens",
        ),
        ("gigpo", {"dual_clip": 1.1}, "dual_clip=1.1 with clip_param=0.2"),
        ("gigpo", {"dual_clip": 0.5}, "dual_clip=0.5: expected a finite number of at least 1"),
        ("dapo", {"kl_target": 0.1}, "kl_target=0.1 with kl_coeff=0"),
        ("gigpo", {"kl_estimator": "k1"}, "kl_estimator='k1' with kl_in='loss'"),
        ("gigpo", {"anchor": "embedding"}, "anchor='embedding' with anchor_encoder=None"),
        ("gigpo", {"anchor_encoder": len}, "anchor_encoder with anchor='exact' has no effect"),
        (
            "gigpo",
            {"similarity_threshold": 0.8},
            "similarity_threshold=0.8 with anchor='exact' has",
        ),
        (
            "gigpo",
            {"similarity_measure": "difflib_reference"},
            "similarity_measure='difflib_reference' with anchor='exact' has no effect: leave it at",
        ),
        ("rloo", {"gamma": 0.9}, "gamma=0.9 has no effect with estimator='rloo': leave it at 0.95"),
        ("gigpo", {"overlong_buffer": 1.5}, "overlong_buffer=1.5: expected a finite number from 0"),
        ("gigpo", {"max_sampling_rounds": 0}, "max_sampling_rounds=0: expected a whole number"),
        ("gigpo", {"aggregation": "mean"}, "aggregation='mean': expected one of 'token_mean'"),
        ("gigpo", {"dynamic_sampling": 1}, "dynamic_sampling=1: expected one of True, False"),
        ("gigpo", {"vf_clip_param": 0.0}, "vf_clip_param=0.0: expected a finite number"),
    ],
)
def test_is_refused_in_one_sentence(preset, training, expected):
    assert expected in fault(preset, **training)


@pytest.mark.parametrize(
    ("preset", "training"),
    [
        ("grpo", {"aggregation": "seq_mean_token_mean", "dual_clip": 3.0, "entropy_coeff": 0.01}),
        ("grpo", {"kl_in": "reward", "kl_estimator": "k1", "kl_target": 0.1}),
        ("gspo", {"rollout_correction": RolloutCorrection(level="sequence")}),
        ("ppo", {"critic": "head", "lambda_": 0.95, "vf_clip_param": None}),
        ("ppo_token", {"penalty_scope": "step"}),
        ("ppo", {"group_size": 4, "num_groups": 4, "dynamic_sampling": True}),
        ("rloo", {"whiten_advantages": True, "dynamic_sampling": True}),
        ("hgpo", {"history_length": 4, "history_base_group": True, "f_norm": "none"}),
        ("gigpo", {"estimator": lambda table, *, gamma: None, "omega": 0.0}),
    ],
)
def test_parts_go_with_any_preset(preset, training):
    config = GiGPOConfig.preset(preset).environment("KeyDoor").llm(model="tiny")
    config.training(**training).validate()
