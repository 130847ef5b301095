"""Teams on vLLM engines: models of their own, one of them frozen, and an adapter for each role."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from rllib_gigpo import GiGPO, GiGPOConfig, LoRASettings
from rllib_gigpo.sampler import training_tasks
from tests.tiny_runs import SHAPE, tiny_config
from tests.with_vllm import skip_without_vllm

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.usefixtures("local_ray")]

WIDER = {**SHAPE, "hidden_size": 64, "num_heads": 2}


def own(agent: Any, *_: Any, **__: Any) -> str:
    return str(agent)


def team(**multi_agent: Any) -> GiGPOConfig:
    skip_without_vllm()
    # The entropy alone moves the weights, whatever a random model is paid.
    config = tiny_config(entropy_coeff=0.1)
    config.env_config = {}
    return (
        config.environment("ArithmeticTeam", env_config={"largest": 2, "tries": 1})
        .llm(max_prompt_tokens=32)
        .multi_agent(policies={"solver", "verifier"}, policy_mapping_fn=own, **multi_agent)
        .engines(engine="vllm", engine_options={"kv_cache_memory_bytes": 1 << 24})
    )


def served(algorithm: GiGPO) -> dict[str, dict[str, int]]:
    """What the engine of each policy computes with."""
    fleet = algorithm.weights.fleet
    return {policy: fleet.checksums(policy) for policy in ("solver", "verifier")}


def versions(algorithm: GiGPO) -> dict[str, set[int]]:
    """Weight versions that play each policy now."""
    tasks = training_tasks(algorithm.config, 50)
    episodes: Any = algorithm.play(algorithm.env_runner_group, tasks).episodes
    found: dict[str, set[int]] = {"solver": set(), "verifier": set()}
    for episode in episodes:
        for agent, single in episode.agent_episodes.items():
            found[str(agent)] |= set(map(int, single.extra_model_outputs["weight_version"]))
    return found


def test_models_of_their_own_and_a_frozen_one_that_is_sent_once(monkeypatch):
    config = team(
        policies_to_train=["solver"],
        algorithm_config_overrides_per_module={"verifier": {"llm_options": WIDER}},
    )
    algorithm: Any = config.build_algo()
    try:
        fleet, sent = algorithm.weights.fleet, Counter()
        publish = fleet.publish

        def counted(policy: str, *rest: Any) -> None:
            sent[policy] += 1
            publish(policy, *rest)

        monkeypatch.setattr(fleet, "publish", counted)
        before = served(algorithm)
        result = {}
        for _ in range(2):
            result = algorithm.train()
            # Recomputed old log-probabilities against the engine's own, fp32.
            assert result["learners"]["solver"]["engine_logp_gap"] < 1e-4
        # Both were sent when the run began; both proofs have passed after every iteration since.
        assert sent == {"solver": 2}
        assert result["env_runners"]["staleness"] == 0.0
        after = served(algorithm)
        assert after["verifier"] == before["verifier"]
        assert after["solver"] != before["solver"]
        assert versions(algorithm) == {"solver": {2}, "verifier": {0}}
        # Whoever changes a frozen policy by hand, as in self-play, finds it served.
        algorithm.first_learner(_halve_the_verifier)
        algorithm.train()
        assert sent == {"solver": 3, "verifier": 1}
        assert versions(algorithm) == {"solver": {3}, "verifier": {3}}
    finally:
        algorithm.stop()


def _halve_the_verifier(learner: Any) -> None:
    with torch.no_grad():
        for parameter in learner.module["verifier"].lm.parameters():
            parameter.mul_(0.5)


def test_an_adapter_for_each_role():
    pytest.importorskip("peft")
    algorithm: Any = team().llm(lora=LoRASettings(rank=4, alpha=8)).build_algo()
    try:
        before = served(algorithm)
        for _ in range(2):
            learned = algorithm.train()["learners"]
            for policy in ("solver", "verifier"):
                assert learned[policy]["engine_logp_gap"] < 1e-4
        after = served(algorithm)
        for policy in ("solver", "verifier"):
            assert all("lora_" in name for name in after[policy])
            changed = [
                name for name in after[policy] if after[policy][name] != before[policy][name]
            ]
            assert any("lora_B" in name for name in changed)
        assert after["solver"] != after["verifier"]
        assert versions(algorithm) == {"solver": {2}, "verifier": {2}}
    finally:
        algorithm.stop()
