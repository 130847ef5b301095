"""When the correction of the rollouts is in force."""

from __future__ import annotations

from typing import Any

import pytest

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.correction import RolloutCorrection

OWN = RolloutCorrection(level="sequence", mode="mask", upper=3.0, lower=0.5)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize(
    ("dtype", "training", "expected"),
    [
        ("float32", {}, None),
        ("bfloat16", {}, RolloutCorrection()),
        ("bfloat16", {"rollout_correction": None}, None),
        ("bfloat16", {"rollout_correction": OWN}, OWN),
        ("float32", {"rollout_correction": OWN}, OWN),
        ("float32", {"max_staleness": 1}, RolloutCorrection()),
    ],
)
def test_it_is_on_where_engine_and_learner_differ(
    engine: str, dtype: str, training: dict[str, Any], expected: RolloutCorrection | None
):
    config = (
        GiGPOConfig()
        .environment("KeyDoor")
        .llm(model="tiny", dtype=dtype, max_prompt_tokens=64, max_response_tokens=8)
        .training(**training)
        .env_runners(num_env_runners=1)
        .engines(engine=engine)
    )
    config.validate()
    assert config.correction == expected
    assert config.objective.correction == expected
