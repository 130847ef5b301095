"""A run that is resumed in a fresh process is the run that was never interrupted, bit for bit.

Beside tests/contract/test_runners.py (one learner, with and without EnvRunner actors) and
tests/contract/test_family.py (in the same process).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rllib_gigpo.lora import LoRASettings
from tests.ray_runs import continued, facts_of, run_config, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def sharded_critic(model: Path) -> Any:
    """FSDP2 over two learners, a critic, an adaptive KL, tasks played again where all are alike."""
    settings = {
        "estimator": "gae",
        "omega": 0.0,
        "critic": "head",
        "critic_lr": 3e-3,
        "whiten_advantages": True,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "kl_target": 0.01,
        "dynamic_sampling": True,
        "max_sampling_rounds": 3,
    }
    return run_config(model, **settings).learners(num_learners=2, sharding="fsdp")


def adapters_ahead(model: Path) -> Any:
    """Two learners with LoRA and dropout; EnvRunners play one iteration ahead of them."""
    return (
        run_config(model, max_staleness=1)
        .llm(lora=LoRASettings(rank=4, dropout=0.1))
        .learners(num_learners=2)
        .env_runners(num_env_runners=1)
    )


CASES = {"FSDP2 and a critic": sharded_critic, "LoRA with dropout, one ahead": adapters_ahead}


@pytest.fixture(scope="module")
def runs(local_ray, warm_model, tmp_path_factory) -> dict[str, tuple[dict, dict]]:
    """Per case, what an uninterrupted run and a resumed one did in iterations 3 and 4."""
    found, saved = {}, []
    for number, (case, make) in enumerate(CASES.items()):
        folder = tmp_path_factory.mktemp(f"run{number}")
        algorithm = make(warm_model).stepping(lockstep=True).build_algo()
        for _ in range(2):
            algorithm.train()
        saved.append((algorithm.save_to_path(folder / "checkpoint"), folder / "resumed.pt"))
        facts = [facts_of(algorithm.train()) for _ in range(2)]
        found[case] = {"facts": facts, "weights": weights_of(algorithm)}
        algorithm.stop()
    return dict(zip(CASES, zip(found.values(), continued(saved), strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_run_that_was_never_interrupted(case, runs):
    expected, found = runs[case]
    for one, other in zip(expected["facts"], found["facts"], strict=True):
        assert other == one
        assert one["learners/default_policy/gradient_norm"] > 0.0
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)


# Counters of the whole run, which a process that goes on must not begin anew.
GROWING = (
    "training_iteration",
    "env_runners/num_env_steps_sampled_lifetime",
    "learners/__all_modules__/num_env_steps_trained_lifetime",
    "learners/default_policy/num_module_steps_trained_lifetime",
    "learners/default_policy/optimizer_steps",
    "learners/default_policy/weights_seq_no",
)


@pytest.mark.parametrize("case", CASES)
def test_counters_of_the_run_go_on(case, runs):
    for run in runs[case]:
        third, fourth = run["facts"]
        assert (third["training_iteration"], fourth["training_iteration"]) == (3, 4)
        for name in GROWING:
            assert fourth[name] > third[name] > 0, name
        # More than the two iterations of the resumed process.
        name = "env_runners/num_env_steps_sampled_lifetime"
        assert fourth[name] > sum(
            facts["env_runners/num_env_steps_sampled"] for facts in run["facts"]
        )
        assert third["watchdog/num_alarms"] <= fourth["watchdog/num_alarms"]


def test_what_was_played_ahead_is_trained_once(runs):
    # Rows of iterations 3 and 4 were played with the weights of the iteration before.
    for run in runs["LoRA with dropout, one ahead"]:
        assert [facts["env_runners/staleness"] for facts in run["facts"]] == [1.0, 1.0]


def test_the_cases_are_what_they_claim_to_be(runs):
    _, found = runs["FSDP2 and a critic"]
    last = found["facts"][-1]
    assert last["learners/default_policy/kl_coeff"] != pytest.approx(0.05)
    assert last["learners/default_policy/critic_gradient_norm"] > 0.0
    assert sum(facts["env_runners/num_sampling_rounds"] for facts in found["facts"]) > 2
