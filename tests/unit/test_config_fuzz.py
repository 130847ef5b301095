"""Configurations of every kind: refused in one sentence that names the setting, or valid.

`tests/contract/test_config_fuzz_training.py` trains those that are valid.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_gigpo import GiGPOConfig, LoRASettings, RolloutCorrection
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.rllib_checks import as_sentence
from tests.config_space import (
    OWN,
    SPOKEN,
    STRANGE,
    Odd,
    any_changes,
    apply,
    names_one_of,
    sensible_changes,
)

# What is no setting of a user: RLlib and the config itself write it.
_WRITTEN = {"algo_class", "in_evaluation", "record_command"}


def verdict(changes) -> str | None:
    """The one sentence of validation, or None where it finds nothing; anything else fails."""
    config = apply(changes)
    try:
        config.validate()
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
        return message
    return None


def refusal(make, field: str, value: object) -> str | None:
    """What an object of settings says of a value, or None where it takes it."""
    try:
        make(**{field: value})
    except ValueError as error:
        return str(error)
    return None


def own_settings() -> list[str]:
    """Every setting that GiGPO adds to RLlib's."""
    added = set(vars(GiGPOConfig())) - set(vars(AlgorithmConfig()))
    return sorted(name for name in added if not name.startswith("_") and name not in _WRITTEN)


def test_the_space_has_every_setting():
    hidden = {"record", "record_folder", "algorithm_name"}
    assert set(own_settings()) - set(OWN) - hidden == set()


@pytest.mark.parametrize("name", own_settings())
def test_a_value_of_any_kind_is_taken_or_refused_by_name(name):
    for value in STRANGE:
        message = verdict([(name, value)])
        assert message is None or names_one_of(message, [(name, value)]), (value, message)


@pytest.mark.parametrize("name", own_settings())
def test_an_object_is_no_setting(name):
    assert verdict([(name, Odd())]) is not None


@pytest.mark.parametrize(
    "name",
    sorted(n for n in vars(AlgorithmConfig()) if not n.startswith("_") and n not in _WRITTEN),
)
def test_rllibs_settings_are_taken_or_refused_in_one_sentence(name):
    spoken = (*SPOKEN.get(name, ()), name.strip("_").removeprefix("callbacks_"))
    for value in (None, True, -1, 1.5, "x", [], {}, Odd(), np.array([1, 2])):
        message = verdict([(name, value)])
        assert message is None or any(part in message for part in spoken), (value, message)


@settings(max_examples=120, derandomize=True)
@given(sensible_changes())
@example([("policies_to_train", [])])
@example([("freeze_vision_tower", True)])
@example([("create_local_env_runner", False)])
@example([("algorithm_config_overrides_per_module", {"default_policy": {"omega": "much"}})])
@example([("algorithm_config_overrides_per_module", {"default_policy": {}})])
@example([("algorithm_config_overrides_per_module", {"default_policy": None})])
@example([("engine", "vllm"), ("engine_num_gpus", 1.5)])
@example([("engine", "vllm"), ("engine_options", {"block_size": "four"})])
def test_settings_that_make_sense_alone_are_taken_or_refused_by_name(changes):
    message = verdict(changes)
    assert message is None or names_one_of(message, changes), message


@settings(max_examples=120, derandomize=True)
@given(any_changes())
def test_settings_of_any_kind_together_are_taken_or_refused_by_name(changes):
    message = verdict(changes)
    assert message is None or names_one_of(message, changes), message


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ([("policies_to_train", [])], "policies_to_train=[]: nothing would be trained"),
        (
            [("freeze_vision_tower", True)],
            "freeze_vision_tower=True with model='tiny': it reads text",
        ),
        (
            [("create_local_env_runner", False)],
            "create_local_env_runner=False with num_env_runners=0: there is nobody to play",
        ),
        (
            [("num_gpus_per_learner", 1.5)],
            "num_gpus_per_learner=1.5: above 1 Ray gives whole ones only",
        ),
        ([("num_env_runners", "2")], "num_env_runners='2': expected a whole number of at least 0"),
        ([("lockstep", "yes")], "lockstep='yes': expected one of True, False"),
        ([("trackers", None)], "trackers=None: expected a list of 'wandb'"),
        ([("llm_options", [])], "options=[]: expected a dict from names to values"),
        ([("omega", 10**400)], f"omega={10**400}: expected a finite number of at least 0"),
        ([("num_groups", 10**30)], f"num_groups={10**30}: expected a whole number of at least 1 a"),
        ([("seed", 2**32)], "seed=4294967296: expected a whole number of at least 0 and at most"),
        (
            [("observation_filter", "MeanStdFilter")],
            "observation_filter='MeanStdFilter' has no effect: observations and actions are texts",
        ),
        ([("callbacks_class", print)], "callbacks(<built-in function print>): expected a subclass"),
        ([("policies", 3)], "multi_agent(policies=3): expected a set, list or dict of policy"),
        (
            [("algorithm_config_overrides_per_module", {"default_policy": {"omega": "much"}})],
            "algorithm_config_overrides_per_module['default_policy']: omega='much': expected a",
        ),
    ],
)
def test_each_find_is_told_by_its_sentence(changes, sentence):
    message = verdict(changes)
    assert message is not None
    assert message.startswith(sentence)


def test_what_rllib_alone_refuses_is_one_line_that_names_its_settings():
    config = apply([("rollout_fragment_length", "long"), ("lr", 0.1)])
    fallen = as_sentence(config, TypeError("'>' not supported"))
    assert fallen.startswith("RLlib refuses one of its settings ")
    assert "rollout_fragment_length='long'" in fallen
    told = "`lr` is\n wrong!\nTo suppress all validation errors, set x"
    assert as_sentence(config, ValueError(told)) == "`lr` is wrong!"


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (LoRASettings, ("rank", "alpha", "targets", "dropout")),
        (RolloutCorrection, ("level", "mode", "upper", "lower")),
        (
            VLLMSettings,
            (
                "dtype",
                "max_model_len",
                "max_num_seqs",
                "block_size",
                "kv_cache_memory_bytes",
                "gpu_memory_utilization",
                "tensor_parallel_size",
                "num_gpus",
                "num_cpus",
                "enforce_eager",
                "enable_lora",
                "max_lora_rank",
                "enable_sleep_mode",
                "weight_transfer",
                "seed",
            ),
        ),
    ],
)
def test_settings_in_objects_of_their_own_are_refused_by_name(make, fields):
    for field in fields:
        spoken = {"upper": "bounds", "lower": "bounds", "tensor_parallel_size": "num_gpus"}
        for value in [*STRANGE, Odd()]:
            told = refusal(make, field, value)
            assert told is None or field in told or spoken.get(field, "-") in told, (field, value)
        with pytest.raises(ValueError, match="Odd"):
            make(**{field: Odd()})
