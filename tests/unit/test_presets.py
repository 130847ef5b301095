"""Every preset by hand: what its first update makes of the same four rows."""

import pickle
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch

import rllib_gigpo
from rllib_gigpo import GiGPO, GiGPOConfig
from rllib_gigpo.family import ALGORITHMS, CONFIGS
from rllib_gigpo.gigpo import check_name
from rllib_gigpo.learner import GiGPOTorchLearner
from rllib_gigpo.presets import PRESETS, get_preset
from rllib_gigpo.rows import object_array
from tests.tiny_runs import SHAPE, build_learner, module_of, parameters, random_rows, update

LENGTHS = [1, 2, 3, 4]


def rows() -> SampleBatch:
    """One group of two episodes of two steps, both through the states 1 and 7.

    The first earns 4 at its end, the second nothing. Responses have 1, 2, 3 and 4 tokens.
    """
    return SampleBatch(
        {
            "group": np.zeros(4, dtype=np.int64),
            "episode": np.array([0, 0, 1, 1]),
            "step": np.array([0, 1, 0, 1]),
            "anchor": np.array([1, 7, 1, 7]),
            "reward": np.array([0.0, 4.0, 0.0, 0.0]),
            "prompt_ids": object_array([np.arange(3 + i, dtype=np.int32) for i in range(4)]),
            "response_ids": object_array(
                [np.arange(5, 5 + length, dtype=np.int32) for length in LENGTHS]
            ),
            "response_logps": object_array([np.full(n, -3.5, np.float32) for n in LENGTHS]),
        }
    )


def config_of(preset: str, **training: Any) -> GiGPOConfig:
    """A preset with the smallest model, SGD and one step over all rows."""
    config = GiGPOConfig.preset(preset)
    return (
        config.environment("KeyDoor", env_config={"horizon": 6})
        .llm(model="tiny", options=SHAPE, max_prompt_tokens=64, max_response_tokens=16)
        .training(
            **{
                "num_groups": 2,
                "group_size": max(2, config.group_size) if config.group_size > 1 else 1,
                "lr": 0.1,
                "critic_lr": 0.1,
                "optimizer_name": "sgd",
                "grad_clip": None,
                "minibatch_size": None,
                "invalid_action_penalty": 0.0,
                **training,
            }
        )
    )


@cache
def first_update(preset: str, **training: Any) -> tuple[GiGPOTorchLearner, dict[str, float]]:
    learner = build_learner(config_of(preset, **training))
    return learner, update(learner, rows())


# Returns 4 and 0: mean 2, deviation sqrt(8) = 2.8284, so A_E = +-2 / 2.8284 = +-0.70711.
# Discounted by 0.95: 3.8 and 0 at state 1, 4 and 0 at state 7; two values a, 0 are always
# +-0.70711 apart from their mean in deviations, and +-a/2 in themselves.
Z = 0.7071067
# Over tokens, 4 counts 1 + 2 times and 0 counts 3 + 4 times: mean 12 / 10 = 1.2, variance
# (3 * 2.8^2 + 7 * 1.2^2) / 9 = 3.73333, deviation 1.932184.
WHITE = [2.8 / 1.932184] * 2 + [-1.2 / 1.932184] * 2

ADVANTAGES = {
    "gigpo": [2 * Z, 2 * Z, -2 * Z, -2 * Z],
    "gigpo_no_std": [2 + 1.9, 2 + 2, -2 - 1.9, -2 - 2],
    "gigpo_no_episode": [Z, Z, -Z, -Z],
    "gigpo_no_step": [Z, Z, -Z, -Z],
    "grpo": [Z, Z, -Z, -Z],
    "dr_grpo": [2, 2, -2, -2],
    # The others of a group of two are one: 4 - 0 and 0 - 4.
    "rloo": [4, 4, -4, -4],
    "reinforce_pp": WHITE,
    # 2 and -2 are 4 and 0 less 2: whitening takes the 2 out.
    "reinforce_pp_baseline": WHITE,
    # A new critic says 0, so the advantages are the returns.
    "ppo": WHITE,
    # The episode's return is on the last token of each response, and gamma = lambda = 1.
    "ppo_token": WHITE,
    "dapo": [Z, Z, -Z, -Z],
    "gspo": [Z, Z, -Z, -Z],
    "gigpo_dynamic": [2 * Z, 2 * Z, -2 * Z, -2 * Z],
    # Level 1 says +-Z everywhere; level 2 repeats it at state 7, which both reached from 1.
    "hgpo": [Z, Z, -Z, -Z],
}


def test_every_preset_has_its_numbers():
    assert set(ADVANTAGES) == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_advantages_of_the_first_update(preset):
    learner, _ = first_update(preset)
    found = learner.advantages[DEFAULT_MODULE_ID].total
    np.testing.assert_allclose(found, ADVANTAGES[preset], atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_loss_of_the_first_update(preset):
    # The ratio is 1 and the KL 0, so the loss is -sum(weight * A) over tokens.
    _, report = first_update(preset)
    good, _, bad, _ = ADVANTAGES[preset]
    by_token = -sum(a * n for a, n in zip(ADVANTAGES[preset], LENGTHS, strict=True)) / 10
    expected = {
        # -(2 * 3 - 2 * 7) / (4 rows * 16 tokens at most) = 8 / 64
        "dr_grpo": 0.125,
        # Each row counts once: (2 good and 2 bad rows) / 4.
        "gspo": -(2 * good + 2 * bad) / 4,
    }.get(preset, by_token)
    assert report["policy_loss"] == pytest.approx(expected, abs=1e-5)
    assert report["ratio_max"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("preset", ["ppo", "ppo_token"])
@pytest.mark.parametrize("critic", ["head", "model"])
def test_the_critics_loss_of_the_first_update(preset, critic):
    # Values 0 against targets 4, 4, 0, 0. Over rows: 0.5 * (16 + 16) / 4 = 4; over tokens, of
    # which 3 have target 4: 0.5 * 3 * 16 / 10 = 2.4.
    learner, report = first_update(preset, critic=critic)
    assert report["vf_loss"] == pytest.approx({"ppo": 4.0, "ppo_token": 2.4}[preset], rel=1e-5)
    assert report["critic_gradient_norm"] > 0.1
    assert module_of(learner).value_head.out.bias.abs() > 0.0


def test_dapo_charges_long_responses():
    # Of at most 4 tokens the last quarter is charged: the one of 4 costs 1, the others nothing.
    # Returns 4 and -1 have mean 1.5.
    config = config_of("dapo", f_norm="none").llm(max_response_tokens=4)
    learner = build_learner(config)
    update(learner, rows())
    found = learner.advantages[DEFAULT_MODULE_ID].total
    np.testing.assert_allclose(found, [2.5, 2.5, -2.5, -2.5], atol=1e-9)


def test_omega_0_of_gigpo_and_the_presets_grpo_and_no_step_are_one():
    trained = []
    for preset, omega in (("gigpo", 0.0), ("grpo", 0.0), ("gigpo_no_step", 0.0)):
        learner = build_learner(config_of(preset, omega=omega))
        update(learner, random_rows())
        trained.append(parameters(learner))
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=0)
    torch.testing.assert_close(trained[2], trained[0], rtol=0, atol=0)


# Names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_by_name_and_label_and_survives_pickling(name):
    preset = PRESETS[name]
    for spelling in (name, preset.label, preset.label.upper(), name.replace("_", "-")):
        assert get_preset(spelling) is preset
    config = GiGPOConfig.preset(preset.label)
    assert type(config) is CONFIGS[name]
    assert config.algorithm_name == name
    for setting, value in preset.settings.items():
        assert getattr(config, setting) == value
    again = pickle.loads(pickle.dumps(config))
    assert again.to_dict() == config.to_dict()
    assert again.algo_class is config.algo_class is ALGORITHMS[name]
    assert ALGORITHMS[name].get_default_config().to_dict() == config.to_dict()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_registered_with_tune_under_its_label(name):
    from ray.tune.registry import TRAINABLE_CLASS, _global_registry

    found = _global_registry.get(TRAINABLE_CLASS, PRESETS[name].label)
    assert found is ALGORITHMS[name]


def test_an_unknown_preset_is_answered_with_what_there_is():
    with pytest.raises(ValueError, match="no preset is named 'grop': choose one of gigpo, "):
        GiGPOConfig.preset("grop")


def test_config_classes_have_the_names_of_their_papers():
    assert rllib_gigpo.GRPOConfig().omega == 0.0
    assert rllib_gigpo.DrGRPOConfig().aggregation == "seq_mean_token_sum_norm"
    assert rllib_gigpo.REINFORCEppConfig().whiten_advantages
    assert rllib_gigpo.LLMPPOConfig().critic == "model"


def test_a_trainable_of_a_name_takes_no_other_presets_settings():
    with pytest.raises(ValueError, match=r"trainable of 'grpo' was given the settings of 'gigpo'"):
        check_name(rllib_gigpo.GRPO.get_default_config(), GiGPOConfig())
    check_name(rllib_gigpo.GRPO.get_default_config(), rllib_gigpo.GRPOConfig())
    check_name(GiGPO.get_default_config(), rllib_gigpo.GRPOConfig())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_as_it_stands(name):
    GiGPOConfig.preset(name).environment("KeyDoor").llm(model="tiny").validate()


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_and_its_config_are_imported_from_the_package(name):
    for made in (CONFIGS[name], ALGORITHMS[name]):
        assert getattr(rllib_gigpo, made.__name__) is made
        assert made.__name__ in rllib_gigpo.__all__
