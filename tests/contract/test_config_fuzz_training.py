"""Random configurations that validation takes: they train one step, or end in one sentence.

What only a built environment or model can tell (an argument that the environment does not know, a
prompt over the limit) is told in one sentence too, without a traceback of Ray's workers in it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings

from rllib_gigpo import GiGPOConfig
from tests.config_space import Change, apply, names_one_of, sensible_changes

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

_QUICK = settings(
    max_examples=5,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
_LONG = settings(_QUICK, max_examples=300)


def is_valid(config: GiGPOConfig) -> bool:
    """Whether validation takes it; that it says why not is tested beside the unit tests."""
    try:
        config.validate()
    except ValueError:
        return False
    return True


def train_or_say_why(changes: list[Change]) -> None:
    # One engine of vLLM starts in half a minute; `validate` is what is asked of them here.
    assume(("engine", "vllm") not in changes)
    config = apply(changes)
    assume(is_valid(config))
    algorithm: Any = None
    try:
        algorithm = config.build_algo()
        result = algorithm.train()
    except (ValueError, RuntimeError) as error:
        told, result = str(error), {}
    else:
        told = None
    finally:
        if algorithm is not None:
            algorithm.stop()
    if told is not None:
        assert "\n" not in told
        assert names_one_of(told, changes), told
        return
    assert result["training_iteration"] == 1
    assert result["env_runners"]["num_episodes"] >= config.num_groups
    assert math.isfinite(result["env_runners"]["episode_return_mean"])


@_QUICK
@given(sensible_changes())
@example([("num_env_runners", 1)])
@example([("num_learners", 1)])
def test_what_is_valid_trains(changes):
    train_or_say_why(changes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@_LONG
@given(sensible_changes())
def test_what_is_valid_trains_many_times(changes):
    train_or_say_why(changes)


def train_once(config: GiGPOConfig) -> None:
    algorithm = config.build_algo()
    try:
        algorithm.train()
    finally:
        algorithm.stop()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            [("env_config", {"siez": 3})],
            "environment 'KeyDoor' could not be made: TypeError: KeyDoor.__init__() got an "
            "unexpected keyword argument 'siez'",
        ),
        (
            [("num_env_runners", 1), ("env_config", {"siez": 3})],
            "environment 'KeyDoor' could not be made: TypeError: KeyDoor.__init__() got an "
            "unexpected keyword argument 'siez'",
        ),
        (
            [("env_config", {"horizon": 0})],
            "environment 'KeyDoor' could not be made: ValueError: horizon must be at least 1 step",
        ),
        (
            [("max_prompt_tokens", 1)],
            "the rollout failed: PromptTooLongError: the prompt has 13 tokens without any history, "
            "max_prompt_tokens is 1: raise llm(max_prompt_tokens=...)",
        ),
        (
            [("num_env_runners", 1), ("max_prompt_tokens", 1)],
            "the rollout failed: PromptTooLongError: the prompt has 13 tokens without any history, "
            "max_prompt_tokens is 1: raise llm(max_prompt_tokens=...)",
        ),
    ],
)
def test_what_only_a_built_run_can_tell_is_one_sentence(changes, sentence):
    with pytest.raises(RuntimeError) as error:
        train_once(apply(changes))
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)
