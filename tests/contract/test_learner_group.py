"""One learner and two learner processes (gloo) take the same optimizer steps."""

from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch

from tests.learner_pairs import Pair
from tests.ray_runs import weights_of
from tests.tiny_runs import build_learner, parameters, random_rows, update

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

# The reference is there in every case, so that two processes can serve them all.
BASE = {"kl_coeff": 0.5, "lr": 0.1}


@pytest.fixture(scope="module")
def pair(local_ray):
    pair = Pair(BASE, num_minibatches=2, invalid_action_penalty=0.1)
    yield pair
    pair.algorithm.stop()


def lopsided_rows() -> SampleBatch:
    """One row with as many tokens as all others together, and 13 rows in all."""
    batch = random_rows(13, steps=1, group_size=13)
    batch["prompt_ids"][4] = np.arange(60, dtype=np.int32) % 30
    return batch


CASES: dict[str, dict[str, Any]] = {
    "everything on": {
        "entropy_coeff": 0.1,
        "num_epochs": 2,
        "num_minibatches": 3,
        "grad_clip": 0.5,
    },
    "rows without advantage are skipped": {"kl_coeff": 0.0, "num_minibatches": 2},
    "micro-batches differ in number": {"micro_batch_tokens": 1, "num_epochs": 2},
    "engine log-probabilities": {"kl_coeff": 0.0, "old_logp": "engine"},
}
BATCHES = {
    "13 rows": lambda: random_rows(13, steps=1, group_size=13),
    "one long row": lopsided_rows,
    "half without advantage": lambda: random_rows(12, zeros=6),
    "one row": lambda: random_rows(1, steps=1),
}


def test_an_algorithm_trains_like_with_one_learner(pair):
    # First of all, because the cases below leave the learners with weights of their own.
    alone = pair.config.copy().build_algo()
    for _ in range(2):
        expected, found = alone.train(), pair.algorithm.train()
        assert found["env_runners"]["num_env_steps_sampled"] > 0
        for name in ("gradient_norm", "kl", "entropy", "ratio_max", "num_rows", "optimizer_steps"):
            one = expected["learners"][DEFAULT_MODULE_ID][name]
            assert found["learners"][DEFAULT_MODULE_ID][name] == pytest.approx(one, rel=1e-4), name
        assert found["learners"][DEFAULT_MODULE_ID]["gradient_norm"] > 0.0
    one, *others = [weights_of(alone), *pair.weights()]
    for other in others:
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    alone.stop()


@pytest.mark.parametrize("case", CASES)
def test_two_learners_step_like_one(pair, case):
    pair.begin(**CASES[case])
    alone = build_learner(**{**BASE, **CASES[case]})
    for iteration, make_rows in enumerate(BATCHES.values()):
        rows = make_rows()
        expected = update(alone, rows, iteration)
        reports = pair.update(rows, iteration)
        assert len(reports) == 2
        for report in reports:
            for name in ("gradient_norm", "kl", "entropy", "policy_loss", "ratio_mean"):
                close = pytest.approx(expected[name], rel=1e-5, abs=1e-6, nan_ok=True)
                assert report[name] == close, name
            for name in ("optimizer_steps", "num_rows", "advantage_std"):
                assert report[name] == expected[name], name
        for name in ("ratio_max", "engine_logp_gap_max"):
            assert pair.together[name] == pytest.approx(expected[name], rel=1e-5), name
        for weights in pair.weights():
            torch.testing.assert_close(weights, parameters(alone), rtol=1e-5, atol=1e-6)
    assert expected["optimizer_steps"] > 0


def test_no_row_is_trained_twice_or_left_out(pair):
    # 26 rows over two epochs: each learner counts those it holds.
    pair.begin(num_epochs=2, num_minibatches=3)
    reports = pair.update(random_rows(13, steps=1, group_size=13), 0)
    trained = [report["num_module_steps_trained"] for report in reports]
    assert sum(trained) == 2 * 13
    assert min(trained) > 0


def test_both_learners_compute_all_advantages(pair):
    pair.begin()
    rows = random_rows(12)
    pair.update(rows, 0)
    alone = build_learner(**BASE)
    update(alone, rows)
    expected = alone.advantages[DEFAULT_MODULE_ID].total
    for found in pair.each(lambda learner: learner.advantages[DEFAULT_MODULE_ID].total):
        np.testing.assert_array_equal(found, expected)


def test_a_gradient_that_is_not_finite_is_skipped_by_both(pair):
    pair.begin(kl_coeff=0.0, omega=0.0, f_norm="none")
    before = pair.weights()
    rows = random_rows(4, steps=1, group_size=4)
    rows["reward"] = np.array([1e30, 0.0, 0.0, 0.0])
    reports = pair.update(rows, 0)
    assert [report["skipped_steps"] for report in reports] == [1, 1]
    torch.testing.assert_close(pair.weights(), before, rtol=0, atol=0)


def test_a_batch_that_rllib_would_tear_apart_is_refused(pair):
    pair.begin()
    rows = random_rows(8)
    with pytest.raises(Exception, match=r"RowData\(batch, config.minibatch_plan\)"):
        pair.group.update(
            batch=rows.as_multi_agent(), timesteps={"num_env_steps_sampled_lifetime": 0}
        )
