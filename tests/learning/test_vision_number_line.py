"""NumberLine from pictures alone: a tiny random image-text model learns to read and to walk.

The warm start sees random legal actions, so it teaches the format of an answer and nothing about
the picture. A random policy wins about 61 % of the games: it reaches the target by chance.
"""

from __future__ import annotations

from typing import Any

import pytest

from rllib_gigpo import GiGPO, GiGPOConfig
from rllib_gigpo.agent import AgentProfile, ChatTemplate, NoMemory, TagParser
from rllib_gigpo.models import materialize
from rllib_gigpo.record import record
from rllib_gigpo.sft import WarmStart, warm_start

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

# The picture is the whole prompt.
PROFILE = AgentProfile(
    prompt=ChatTemplate(user="{observation}"),
    memory=NoMemory(),
    parser=TagParser(fallback_chars=0),
    respond="<action> {action} </action>",
)
_MOST_ITERATIONS = 40


def number_line(model: str = "tiny-vision") -> GiGPOConfig:
    return (
        GiGPOConfig()
        .environment("NumberLine", env_config={"view": "rgb"})
        .agent(profile=PROFILE)
        .llm(model=model, max_prompt_tokens=64, max_response_tokens=8, eval_temperature=1.0)
        .training(
            num_groups=24,
            group_size=8,
            # Every step is paid at once, so near rewards weigh more than in the paper.
            omega=1.0,
            gamma=0.5,
            f_norm="std",
            # Twice as much falls back again and again.
            lr=5e-4,
            adam_betas=(0.9, 0.99),
            weight_decay=0.0,
            kl_coeff=0.0,
            entropy_coeff=0.03,
            num_minibatches=6,
            # As bad as a wrong move: an answer without an action is not to be a way out.
            invalid_action_penalty=1.0,
            old_logp="engine",
        )
        .evaluation(evaluation_duration=128)
        .debugging(seed=0)
    )


def success(algorithm: GiGPO) -> float:
    """Success on 128 tasks, with fresh draws at every call."""
    found: dict[str, Any] = algorithm.evaluate()["env_runners"]
    return float(found["success_rate"])


def test_it_learns_number_line_from_pictures(tmp_path):
    config = number_line()
    examples = record(lambda: config.env_spec.make(config.env_config), PROFILE, episodes=60, seed=0)
    folder = warm_start(
        materialize(config.model_spec),
        examples,
        tmp_path / "warm_start",
        settings=WarmStart(steps=30, batch_size=32, warmup_steps=5),
    )
    algorithm = number_line(str(folder)).build_algo()
    before = success(algorithm)
    for _ in range(_MOST_ITERATIONS):
        trained = algorithm.train()["env_runners"]["success_rate"]
        if trained >= 0.9 and success(algorithm) >= 0.95:
            break
    after = success(algorithm)
    algorithm.stop()
    assert before < 0.7
    assert after > 0.9
