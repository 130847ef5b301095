"""Two agents learn: sums and their verification, with policies of every kind; search and answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.agent import AgentProfile, ChatTemplate, NoMemory
from rllib_gigpo.agent.profiles.search import ToolCallParser
from rllib_gigpo.engines.packing import unpack
from rllib_gigpo.models import materialize
from rllib_gigpo.record import record
from rllib_gigpo.scripted import half_expert
from rllib_gigpo.sft import WarmStart, warm_start

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

# Over the same model's success before RL, on 128 held-out tasks: three standard errors of the
# difference of two such shares near 1/2 are 0.19.
MARGIN = 0.2


def own(agent: str, *_: Any, **__: Any) -> str:
    return agent


def shared(agent: str, *_: Any, **__: Any) -> str:
    return "shared"


def arithmetic(model: Path | str = "tiny") -> GiGPOConfig:
    return (
        learner(model)
        .environment("ArithmeticTeam", env_config={"largest": 2, "tries": 1})
        .llm(max_prompt_tokens=32, max_response_tokens=6)
    )


def learner(model: Path | str) -> GiGPOConfig:
    return (
        GiGPOConfig()
        .llm(model=str(model), eval_temperature=1.0)
        .training(
            num_groups=16,
            group_size=8,
            lr=1e-3,
            adam_betas=(0.9, 0.99),
            weight_decay=0.0,
            kl_coeff=0.0,
            num_minibatches=4,
            invalid_action_penalty=0.0,
            old_logp="engine",
        )
        .evaluation(evaluation_duration=128)
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that has seen a team that tosses coins between an expert and chance."""
    config = arithmetic()
    examples = record(
        lambda: config.env_spec.make(config.env_config),
        config.agent_profile,
        policy=half_expert,
        episodes=300,
    )
    folder = tmp_path_factory.mktemp("team") / "model"
    return warm_start(
        materialize(config.model_spec), examples, folder, settings=WarmStart(steps=60)
    )


def learn(config: GiGPOConfig, iterations: int) -> tuple[float, float, Any]:
    algorithm = config.build_algo()
    before = float(algorithm.evaluate()["env_runners"]["success_rate"])
    for _ in range(iterations):
        result = algorithm.train()
        if result["env_runners"]["success_rate"] >= 0.97:
            break
    after = float(algorithm.evaluate()["env_runners"]["success_rate"])
    return before, after, algorithm


@pytest.mark.parametrize("kind", ["shared", "separate", "adapters"])
def test_a_solver_and_its_verifier_learn(kind, model):
    config = arithmetic(model)
    if kind == "shared":
        config.multi_agent(policies={"shared"}, policy_mapping_fn=shared)
    else:
        config.multi_agent(policies={"solver", "verifier"}, policy_mapping_fn=own)
    if kind == "adapters":
        pytest.importorskip("peft")
        from rllib_gigpo.lora import LoRASettings

        config.llm(lora=LoRASettings(rank=16)).training(lr=5e-3)
    before, after, algorithm = learn(config, 10)
    algorithm.stop()
    assert before < 0.6
    assert after >= before + MARGIN


def test_a_solver_learns_with_a_verifier_that_does_not(model):
    config = arithmetic(model).multi_agent(
        policies={"solver", "verifier"}, policy_mapping_fn=own, policies_to_train=["solver"]
    )
    algorithm = config.build_algo()

    def weights() -> dict[str, dict[str, torch.Tensor]]:
        packed = algorithm.first_learner(lambda learner: learner.packed_weights())
        return {name: {n: t.clone() for n, t in unpack(p).items()} for name, p in packed.items()}

    def solved() -> float:
        return algorithm.evaluate()["env_runners"]["agent_episode_return_mean/solver"]

    start, before = weights(), solved()
    for _ in range(8):
        learners = algorithm.train()["learners"]
        assert "verifier" not in learners or "gradient_norm" not in learners["verifier"]
    assert solved() >= before + MARGIN
    end = weights()
    torch.testing.assert_close(end["verifier"], start["verifier"], rtol=0, atol=0)
    assert any(not torch.equal(end["solver"][n], t) for n, t in start["solver"].items())
    algorithm.stop()


PEOPLE = {"Ada": "Rome", "Ben": "Oslo", "Cleo": "Lima", "Dan": "Bonn", "Eve": "Cairo"}


def search(folder: Path, model: Path | str = "tiny") -> GiGPOConfig:
    rows = [
        {
            "id": name,
            "question": f"Where was {name} born?",
            "golden_answers": [town],
            "supporting_facts": {"title": [name]},
            "context": {"title": [name], "sentences": [[f"{name} comes from {town}."]]},
        }
        for name, town in PEOPLE.items()
    ]
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, rows)))
    profile = AgentProfile(
        prompt=ChatTemplate("{task} {observation}"),
        memory=NoMemory(),
        parser=ToolCallParser(),
        stop=("</search>", "</answer>"),
        respond="{action}",
    )
    env_config = {"questions": str(questions), "split": "all", "topk": 1, "horizon": 2}
    return (
        learner(model)
        .environment("SearchTeam", env_config=env_config)
        .llm(max_prompt_tokens=48, max_response_tokens=8)
        .agent(profile=profile)
        .multi_agent(policies={"searcher", "answerer"}, policy_mapping_fn=own)
    )


def test_a_searcher_and_an_answerer_learn(tmp_path):
    pytest.importorskip("bm25s")
    config = search(tmp_path)
    examples = record(
        lambda: config.env_spec.make(config.env_config),
        config.agent_profile,
        policy=half_expert,
        episodes=200,
    )
    folder = warm_start(
        materialize(config.model_spec), examples, tmp_path / "model", settings=WarmStart(steps=60)
    )
    before, after, algorithm = learn(search(tmp_path, folder), 10)
    algorithm.stop()
    assert before < 0.7
    assert after >= before + MARGIN
