"""Two learners that share one model by FSDP take the steps of one learner, and save what it would.

One pair of processes serves all cases: settings are read at every update.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch

from rllib_gigpo.rows import object_array
from rllib_gigpo.sharding import is_sharded
from tests.learner_pairs import Pair
from tests.tiny_runs import (
    build_learner,
    module_of,
    parameters,
    random_rows,
    tiny_config,
    update,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

# The reference and the critic are there in every case, so that one pair can serve them all.
BASE: dict[str, Any] = {
    "kl_coeff": 0.5,
    "lr": 0.01,
    "optimizer_name": "adamw",
    "estimator": "gae",
    "critic": "model",
    "critic_lr": 0.01,
    "omega": 0.0,
    "gamma": 0.9,
    "lambda_": 0.8,
    "num_minibatches": 2,
}
PLAIN = {"estimator": "gigpo", "critic": None, "omega": 1.0, "gamma": 0.95, "lambda_": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "critic, KL, entropy, two epochs": {"entropy_coeff": 0.1, "num_epochs": 2, "grad_clip": 0.5},
    "micro-batches differ in number": {**PLAIN, "micro_batch_tokens": 1},
    "rows without advantage are skipped": {**PLAIN, "kl_coeff": 0.0},
    "gradients are cut": {**PLAIN, "grad_clip": 0.01},
}


@pytest.fixture(scope="module")
def pair(local_ray):
    # Layers that are computed again gather their weights again.
    how = {"sharding": "fsdp", "activation_checkpointing": True}
    pair = Pair(BASE, learners=how, invalid_action_penalty=0.1)
    yield pair
    pair.algorithm.stop()


def rows(seed: int) -> SampleBatch:
    """13 rows, one of them with as many tokens as all the others, four without advantage.

    One episode was truncated: a learner alone has a state to value that comes after it.
    """
    batch = random_rows(13, steps=1, group_size=13, seed=seed, zeros=4)
    batch["prompt_ids"][4] = np.arange(60, dtype=np.int32) % 30
    batch["truncated"] = np.arange(13) == 2
    batch["next_prompt_ids"] = object_array(
        [np.arange(7 if row == 2 else 0, dtype=np.int32) for row in range(13)]
    )
    return batch


def test_an_algorithm_trains_saves_and_goes_on_like_one_learner(pair, tmp_path):
    # First of all, because the cases below leave the learners with settings of their own.
    alone = pair.config.copy().build_algo()
    for _ in range(2):
        expected, found = alone.train(), pair.algorithm.train()
        for name in ("gradient_norm", "critic_gradient_norm", "kl", "entropy", "num_rows"):
            one = expected["learners"][DEFAULT_MODULE_ID][name]
            close = pytest.approx(one, rel=1e-3, abs=1e-5)
            assert found["learners"][DEFAULT_MODULE_ID][name] == close, name
    pair.algorithm.save_to_path(tmp_path / "sharded")
    once = [pair.algorithm.train() for _ in range(2)]

    # What two learners saved is what one learner needs to go on, and the other way round.
    alone.restore_from_path(tmp_path / "sharded")
    alone.save_to_path(tmp_path / "whole")
    for folder in ("sharded", "whole"):
        pair.algorithm.restore_from_path(tmp_path / folder)
        for result in once:
            again = pair.algorithm.train()["learners"][DEFAULT_MODULE_ID]
            for name in ("gradient_norm", "policy_loss", "entropy", "vf_loss"):
                assert again[name] == result["learners"][DEFAULT_MODULE_ID][name], (folder, name)
    result = alone.train()["learners"][DEFAULT_MODULE_ID]
    close = pytest.approx(once[0]["learners"][DEFAULT_MODULE_ID]["gradient_norm"], rel=1e-4)
    assert result["gradient_norm"] == close
    alone.stop()


def test_learners_agree_on_what_engines_have(pair):
    # Only the first holds whole tensors; one that packed alone would wait for the others for ever.
    pair.begin()
    first, _ = pair.each(lambda learner: learner.published(0))
    known = {module_id: parcel.checksums for module_id, parcel in first.items()}
    assert pair.each(lambda learner: list(learner.published(1, known))) == [[], []]
    changed = {module_id: dict.fromkeys(sums, -1) for module_id, sums in known.items()}
    found = pair.each(lambda learner: list(learner.published(1, changed)))
    assert found == [[DEFAULT_MODULE_ID]] * 2


def test_each_learner_holds_a_part(pair):
    def shares(learner: Any) -> tuple[int, int, int]:
        lm = learner.module[DEFAULT_MODULE_ID].lm
        held = [p for p in lm.parameters() if is_sharded(p)]
        state = learner.get_optimizer(DEFAULT_MODULE_ID).state
        return (
            sum(p.to_local().numel() for p in held),
            sum(p.numel() for p in lm.parameters()),
            sum(state[p]["exp_avg"].to_local().numel() for p in held if p in state),
        )

    pair.begin()
    pair.update(random_rows(12), 0)
    (first, whole, first_state), (second, _, second_state) = pair.each(shares)
    assert first + second == whole
    assert (first_state, second_state) == (first, second)
    assert abs(first - second) < 0.1 * whole


@pytest.mark.parametrize("case", CASES)
def test_two_learners_step_like_one(pair, case):
    pair.begin(**CASES[case])
    alone = build_learner(**{**BASE, **CASES[case]})
    for iteration in range(3):
        batch = rows(iteration)
        expected = update(alone, batch, iteration)
        for report in pair.update(batch, iteration):
            for name in ("gradient_norm", "critic_gradient_norm", "kl", "policy_loss", "vf_loss"):
                if name in expected:
                    close = pytest.approx(expected[name], rel=1e-3, abs=1e-5)
                    assert report[name] == close, name
            for name in ("optimizer_steps", "num_rows"):
                assert report[name] == expected[name], name
    first, second = pair.weights()
    # Adam divides by the size of the gradient, so that rounding shows where that is tiny.
    torch.testing.assert_close(first, parameters(alone), rtol=1e-3, atol=3e-4)
    assert second == {}
    assert expected["gradient_norm"] > 0.0


def test_a_gradient_that_is_not_finite_is_skipped_by_both(pair):
    # Squares of 1e30 are beyond float32, in which the norm of whole gradients is added up.
    pair.begin(**{**PLAIN, "kl_coeff": 0.0, "omega": 0.0, "f_norm": "none", "num_minibatches": 1})
    before = pair.weights()[0]
    batch = random_rows(4, steps=1, group_size=4)
    batch["reward"] = np.array([1e30, 0.0, 0.0, 0.0])
    for report in pair.update(batch, 0):
        assert (report["skipped_steps"], report["skipped_steps_in_a_row"]) == (1, 1)
    torch.testing.assert_close(pair.weights()[0], before, rtol=0, atol=0)
    # The next good step is taken by both, and ends the row.
    for report in pair.update(random_rows(4, steps=1, group_size=4), 1):
        assert (report["skipped_steps"], report["skipped_steps_in_a_row"]) == (0, 0)
    after = pair.weights()[0]
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_engines_get_the_whole_weights(pair):
    pair.begin(**PLAIN)
    before = pair.weights()[0]
    pair.update(rows(0), 0)
    pair.algorithm._sync_weights()  # raises where checksums or the probe disagree
    after = pair.weights()[0]
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert {n: t.shape for n, t in after.items()} == {
        n: p.shape for n, p in module_of(build_learner()).policy_weights().items()
    }


# Products in bf16 are rounded otherwise where weights are cast before them.
@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_an_adapter_on_a_sharded_base_trains_saves_and_reaches_the_engines(
    local_ray, tmp_path, dtype, gap
):
    pytest.importorskip("peft")
    from rllib_gigpo.lora import LoRASettings

    base = {"kl_coeff": 0.5, "lr": 0.01, "num_minibatches": 2, "invalid_action_penalty": 0.1}
    config = tiny_config(**base).llm(lora=LoRASettings(rank=4), dtype=dtype, base_dtype=dtype)
    alone, sharded = (
        config.copy().learners(num_learners=n, sharding=kind).build_algo()
        for n, kind in ((0, "replicate"), (2, "fsdp"))
    )
    expected, found = (a.train()["learners"][DEFAULT_MODULE_ID] for a in (alone, sharded))
    for name in ("gradient_norm", "kl", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=gap, abs=gap / 100), name
    assert found["gradient_norm"] > 0.0
    folder = sharded.save_to_path(tmp_path / "adapter")
    one = sharded.train()
    sharded.restore_from_path(folder)
    two = sharded.train()
    for name in ("gradient_norm", "kl"):
        assert two["learners"][DEFAULT_MODULE_ID][name] == one["learners"][DEFAULT_MODULE_ID][name]
    alone.stop()
    sharded.stop()


def test_a_team_shares_the_models_of_both(local_ray):
    base = {"kl_coeff": 0.5, "num_minibatches": 2, "invalid_action_penalty": 0.1}
    config = tiny_config(**base).environment("ArithmeticTeam")
    config.env_config = {"largest": 4}  # and nothing of KeyDoor's
    agents = {"solver", "verifier"}
    config.multi_agent(policies=agents, policy_mapping_fn=lambda agent, *_, **__: agent)
    alone, sharded = (
        config.copy().learners(num_learners=n, sharding=kind).build_algo()
        for n, kind in ((0, "replicate"), (2, "fsdp"))
    )
    for _ in range(2):
        expected, found = (a.train()["learners"] for a in (alone, sharded))
        for agent in agents:
            for name in ("gradient_norm", "kl", "entropy", "num_rows"):
                close = pytest.approx(expected[agent][name], rel=1e-3, abs=1e-5)
                assert found[agent][name] == close, (agent, name)
    # Without rows that differ in advantage there would be nothing to compare.
    assert any(expected[agent]["gradient_norm"] > 1e-3 for agent in agents)
    alone.stop()
    sharded.stop()
