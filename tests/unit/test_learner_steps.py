"""The learner's optimizer steps: KL, entropy, clipping, warm-up, faults, epochs, types, state."""

from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from rllib_gigpo.engines.packing import unpack
from rllib_gigpo.learner import GiGPOTorchLearner
from rllib_gigpo.optimizers import build_optimizer, with_own_options
from rllib_gigpo.rows import object_array
from tests.tiny_runs import (
    build_learner,
    gradient,
    module_of,
    one_step_rows,
    parameters,
    random_rows,
    tiny_config,
    update,
)


def without_advantage(num_rows: int = 8) -> SampleBatch:
    return random_rows(num_rows, zeros=num_rows)


def moved(learner: GiGPOTorchLearner, before: dict[str, torch.Tensor]) -> float:
    """Length of the step from `before`."""
    now = parameters(learner)
    return float(torch.cat([(now[n] - before[n]).reshape(-1) for n in before]).norm())


class TestKl:
    def test_is_zero_before_the_first_step_and_grows(self):
        learner = build_learner(kl_coeff=0.01, lr=0.3)
        batch = random_rows()
        values = [update(learner, batch, iteration)["kl"] for iteration in range(4)]
        assert abs(values[0]) < 1e-6
        assert values[0] < values[1] < values[2] < values[3]

    @pytest.mark.parametrize("kl_estimator", ["k2", "k3"])
    def test_pulls_back_to_the_reference(self, kl_estimator):
        learner = build_learner(kl_coeff=1.0, kl_estimator=kl_estimator, lr=0.05)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for parameter in module_of(learner).lm.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        values = [update(learner, without_advantage(), i)["kl"] for i in range(6)]
        assert values[0] > 0.05
        assert values[-1] < 0.5 * values[0]

    def test_the_reference_stays_as_it_was_and_is_not_trained(self):
        learner = build_learner(kl_coeff=0.1, lr=0.3)
        module = module_of(learner)
        frozen = {n: p.clone() for n, p in module.reference.named_parameters()}
        torch.testing.assert_close(parameters(learner), frozen, rtol=0, atol=0)
        update(learner, random_rows())
        torch.testing.assert_close(
            dict(module.reference.named_parameters()), frozen, rtol=0, atol=0
        )
        assert moved(learner, frozen) > 0.01
        optimizer = learner.get_optimizer(DEFAULT_MODULE_ID)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert trained == {id(p) for p in module.lm.parameters()}

    def test_no_reference_is_kept_without_it(self):
        assert module_of(build_learner(kl_coeff=0.0)).reference is None


class TestEntropy:
    def test_the_bonus_raises_it(self):
        learner = build_learner(entropy_coeff=1.0, lr=0.5)
        values = [update(learner, without_advantage(), i)["entropy"] for i in range(5)]
        assert values[-1] > values[0] + 0.001

    def test_its_gradient_is_scaled_by_the_coefficient(self):
        one, three = build_learner(entropy_coeff=1.0), build_learner(entropy_coeff=3.0)
        for learner in (one, three):
            update(learner, without_advantage())
        assert gradient(one).norm() > 1e-3
        torch.testing.assert_close(gradient(three), 3 * gradient(one), rtol=1e-4, atol=1e-7)


class TestClippingTheGradient:
    def test_cuts_a_long_gradient_to_the_limit(self):
        learner = build_learner(grad_clip=0.25, lr=2.0)
        before = parameters(learner)
        report = update(learner, random_rows())
        assert report["gradient_norm"] > 0.25  # reported as it was
        assert moved(learner, before) == pytest.approx(2.0 * 0.25, rel=1e-3)

    def test_leaves_a_short_gradient_alone(self):
        learner = build_learner(grad_clip=1000.0, lr=2.0)
        before = parameters(learner)
        report = update(learner, random_rows())
        assert moved(learner, before) == pytest.approx(2.0 * report["gradient_norm"], rel=1e-3)


class TestWarmUp:
    def rates(self, learner: GiGPOTorchLearner, updates: range) -> list[float]:
        reports = [update(learner, random_rows(), i) for i in updates]
        return [r["default_optimizer_learning_rate"] for r in reports]

    def test_counts_optimizer_steps(self):
        # Two steps per update: after them the rate is that of step 2, 4, 6 (of 4), 8.
        learner = build_learner(lr=0.1, lr_warmup_steps=4, num_minibatches=2)
        assert self.rates(learner, range(4)) == pytest.approx([0.05, 0.1, 0.1, 0.1])

    def test_the_first_step_already_moves(self):
        learner = build_learner(lr=0.4, lr_warmup_steps=4)
        before = parameters(learner)
        report = update(learner, random_rows())
        assert moved(learner, before) == pytest.approx(0.1 * report["gradient_norm"], rel=1e-3)

    def test_is_off_by_default(self):
        assert self.rates(build_learner(lr=0.1), range(1)) == pytest.approx([0.1])


class Poisoned(GiGPOTorchLearner):
    """The loss of the row with this advantage is NaN."""

    advantage: float | None = None

    def compute_loss_for_module(self, *, batch, **kwargs):
        loss = super().compute_loss_for_module(batch=batch, **kwargs)
        found = self.advantage is not None and (batch["advantage"] == self.advantage).any()
        return loss * float("nan") if found else loss


class TestFaults:
    def learner(self, **training) -> Poisoned:
        config = tiny_config(f_norm="none", omega=0.0, **training)
        config.learners(learner_class=Poisoned)
        learner = build_learner(config)
        assert isinstance(learner, Poisoned)
        return learner

    # Returns 1, 2, 6 have mean 3: advantages -2, -1, 3.
    batch = one_step_rows([1.0, 2.0, 6.0])

    def test_a_gradient_that_is_not_finite_is_not_taken_and_counted(self):
        learner = self.learner(optimizer_name="adamw", lr=0.01, lr_warmup_steps=10)
        good = update(learner, self.batch)
        assert (good["skipped_steps"], good["optimizer_steps"]) == (0, 1)
        before = parameters(learner)
        learner.advantage = -1.0
        bad = update(learner, self.batch, 1)
        assert (bad["skipped_steps"], bad["optimizer_steps"]) == (1, 1)
        assert moved(learner, before) == 0.0
        learner.advantage = None
        again = update(learner, self.batch, 2)
        assert (again["skipped_steps"], again["optimizer_steps"]) == (0, 2)
        assert 0.0 < moved(learner, before) < 1.0

    def test_only_its_own_minibatch_is_lost(self):
        learner = self.learner(num_minibatches=3)
        learner.advantage = 3.0
        before = parameters(learner)
        report = update(learner, self.batch)
        assert (report["skipped_steps"], report["optimizer_steps"]) == (1, 2)
        assert 0.0 < moved(learner, before) < 10.0

    def test_a_run_that_goes_on_counts_on(self):
        one, other = self.learner(), self.learner()
        one.advantage = other.advantage = -1.0
        for _ in range(2):
            update(one, self.batch)
        other.set_state(one.get_state())
        assert update(other, self.batch)["skipped_steps_in_a_row"] == 3

    @pytest.mark.parametrize("ending", ["taken", "skipped", "broken"])
    def test_no_gradient_outlives_its_step(self, ending, monkeypatch):
        """It would lie beside an engine's cache until the next update."""
        learner = self.learner()
        learner.advantage = -1.0 if ending == "skipped" else None
        if ending == "broken":
            monkeypatch.setattr(learner, "_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) if ending == "broken" else nullcontext():
            update(learner, self.batch)
        assert all(p.grad is None for p in module_of(learner).parameters())

    def test_a_gradient_too_long_for_float32_is_one(self):
        learner = self.learner()
        before = parameters(learner)
        report = update(learner, one_step_rows([1e30, 0.0]))
        assert report["skipped_steps"] == 1
        assert moved(learner, before) == 0.0


class Recorder(GiGPOTorchLearner):
    """Notes the advantage of every row that a loss is computed for."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps: list[list[float]] = []

    def _uncompiled_update(self, batch, **kwargs):
        self.steps.append([])
        return super()._uncompiled_update(batch, **kwargs)

    def compute_loss_for_module(self, *, batch, **kwargs):
        self.steps[-1] += batch["advantage"].tolist()
        return super().compute_loss_for_module(batch=batch, **kwargs)


def recorded(**training) -> list[list[float]]:
    config = tiny_config(**training)
    config.learners(learner_class=Recorder)
    learner = build_learner(config)
    # One group of random rewards: every row has an advantage of its own.
    update(learner, random_rows(14, group_size=7))
    assert isinstance(learner, Recorder)
    expected = learner.advantages[DEFAULT_MODULE_ID].total.astype(np.float32)
    assert len(set(expected.tolist())) == 14
    assert {value for step in learner.steps for value in step} == set(expected.tolist())
    return learner.steps


class TestEpochs:
    def test_two_epochs_use_every_row_twice(self):
        steps = recorded(num_epochs=2)
        assert [len(step) for step in steps] == [14, 14]
        assert set(Counter(steps[0] + steps[1]).values()) == {2}

    @pytest.mark.parametrize(
        ("setting", "sizes"),
        # 14 rows: in 4 steps, or in as few steps as keep them at 6 rows or fewer.
        [({"num_minibatches": 4}, [3, 3, 4, 4]), ({"minibatch_size": 6}, [4, 5, 5])],
    )
    def test_minibatches_part_each_epoch(self, setting, sizes):
        steps = recorded(num_epochs=2, **setting)
        half = len(steps) // 2
        for epoch in (steps[:half], steps[half:]):
            assert sorted(map(len, epoch)) == sizes
            assert len({value for step in epoch for value in step}) == 14
        assert steps[:half] != steps[half:]  # drawn anew

    def test_minibatches_larger_than_the_batch_are_one_step(self):
        assert [len(step) for step in recorded(minibatch_size=1000)] == [14]

    def test_the_draw_depends_on_the_iteration(self):
        draws = []
        for iteration in (0, 1, 0):
            learner = build_learner(tiny_config(num_minibatches=2))
            update(learner, random_rows(14), iteration)
            draws.append(gradient(learner))
        torch.testing.assert_close(draws[0], draws[2])
        assert not torch.allclose(draws[0], draws[1])


class TestBfloat16:
    def test_parameters_and_optimizer_state_stay_float32(self):
        config = tiny_config(optimizer_name="adamw", kl_coeff=0.1, lr=0.01)
        learner = build_learner(config.llm(dtype="bfloat16"))
        before = parameters(learner)
        update(learner, random_rows())
        module = module_of(learner)
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        state = learner.get_optimizer(DEFAULT_MODULE_ID).state
        kinds = {v.dtype for entry in state.values() for v in entry.values()}
        assert kinds == {torch.float32}
        assert moved(learner, before) > 0.0

    def test_its_gradient_is_near_that_of_float32_but_not_it(self):
        full = build_learner(lr=0.0)
        half = build_learner(tiny_config(lr=0.0, rollout_correction=None).llm(dtype="bfloat16"))
        for learner in (full, half):
            update(learner, random_rows())
        one, other = gradient(full), gradient(half)
        assert torch.cosine_similarity(one, other, dim=0) > 0.99
        assert not torch.equal(one, other)


class TestState:
    def test_a_new_learner_goes_on_exactly(self):
        settings = {
            "optimizer_name": "adamw",
            "lr": 0.01,
            "lr_warmup_steps": 6,
            "num_minibatches": 2,
            "kl_coeff": 0.1,
        }
        first = build_learner(**settings)
        for iteration in range(2):
            update(first, random_rows(seed=iteration), iteration)
        second = build_learner(**settings)
        second.set_state(first.get_state())
        torch.testing.assert_close(parameters(second), parameters(first), rtol=0, atol=0)
        reports = []
        for learner in (first, second):
            reports.append([update(learner, random_rows(seed=i), i) for i in (2, 3)])
        # Steps 5 to 8 of a warm-up of 6.
        rates = [r["default_optimizer_learning_rate"] for r in reports[0]]
        assert rates == pytest.approx([0.01, 0.01])
        assert reports[0] == reports[1]
        torch.testing.assert_close(parameters(second), parameters(first), rtol=0, atol=0)

    def test_an_earlier_one_may_be_set_in_place(self):
        learner = build_learner(optimizer_name="adamw", lr=0.01)
        update(learner, random_rows())
        state, before = deepcopy(learner.get_state()), parameters(learner)
        expected = update(learner, random_rows(seed=1), 1)
        after = parameters(learner)
        for _ in range(2):
            learner.set_state(deepcopy(state))
            torch.testing.assert_close(parameters(learner), before, rtol=0, atol=0)
            assert learner.get_state()[WEIGHTS_SEQ_NO] == state[WEIGHTS_SEQ_NO] > 0
            assert update(learner, random_rows(seed=1), 1) == expected
            torch.testing.assert_close(parameters(learner), after, rtol=0, atol=0)

    def test_one_without_weights_leaves_them_and_their_number(self):
        learner = build_learner()
        update(learner, random_rows())
        state, before = learner.get_state(), parameters(learner)
        learner.set_state({"optimizer": state["optimizer"]})
        assert learner.get_state()[WEIGHTS_SEQ_NO] == state[WEIGHTS_SEQ_NO] > 0
        torch.testing.assert_close(parameters(learner), before, rtol=0, atol=0)

    def test_the_optimizers_options_are_those_of_this_run(self):
        settings = {"optimizer_name": "adamw", "lr": 0.01}
        first = build_learner(**settings, weight_decay=0.0)
        update(first, random_rows())
        second = build_learner(**settings, weight_decay=0.5, adam_betas=(0.5, 0.6))
        second.set_state(first.get_state())
        (group,) = second.get_optimizer(DEFAULT_MODULE_ID).param_groups
        assert (group["weight_decay"], group["betas"]) == (0.5, (0.5, 0.6))
        moments = [
            learner.get_optimizer(DEFAULT_MODULE_ID).state_dict()["state"]
            for learner in (first, second)
        ]
        torch.testing.assert_close(moments[1], moments[0], rtol=0, atol=0)
        for learner in (first, second):
            update(learner, random_rows(seed=1), 1)
        assert moved(second, parameters(first)) > 1e-3

    @pytest.mark.parametrize("saved", ["adamw", "sgd"])
    def test_it_fits_the_other_optimizer(self, saved):
        first = build_learner(optimizer_name=saved)
        update(first, random_rows())
        second = build_learner(optimizer_name="sgd" if saved == "adamw" else "adamw")
        second.set_state(first.get_state())
        assert update(second, random_rows(), 1)["skipped_steps"] == 0

    @pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
    def test_how_parameters_are_stepped_depends_on_this_runs_sharding(self, optimizer_name):
        # Those of a critic's body are sharded beside a value head that is whole.
        config = tiny_config(optimizer_name=optimizer_name, critic="model")
        groups = [[torch.nn.Parameter(torch.zeros(2))] for _ in range(2)]
        whole = build_optimizer(groups, config)
        sharded = build_optimizer(groups, config.copy().learners(sharding="fsdp"))
        for optimizer, other, foreach in ((sharded, whole, False), (whole, sharded, None)):
            optimizer.load_state_dict(with_own_options(optimizer, other.state_dict()))
            assert [group["foreach"] for group in optimizer.param_groups] == [foreach] * 2

    def test_one_of_a_run_with_a_critic_is_refused_without(self):
        groups = [[torch.nn.Parameter(torch.zeros(2))] for _ in range(2)]
        saved = build_optimizer(groups, tiny_config(critic="model")).state_dict()
        with pytest.raises(ValueError, match=r"2 groups of parameters, this run's has 1: .*critic"):
            with_own_options(build_optimizer(groups[:1], tiny_config()), saved)

    def test_the_warm_up_goes_on_where_it_was(self):
        first = build_learner(lr=0.1, lr_warmup_steps=10)
        for iteration in range(3):
            update(first, random_rows(), iteration)
        second = build_learner(lr=0.1, lr_warmup_steps=10)
        second.set_state(first.get_state())
        report = update(second, random_rows(), 3)
        assert report["default_optimizer_learning_rate"] == pytest.approx(0.04)
        assert report["optimizer_steps"] == 4

    def test_the_reference_is_part_of_it(self):
        # A restored run is held to the policy it began with, wherever that came from.
        first = build_learner(kl_coeff=0.1)
        with torch.no_grad():
            for parameter in module_of(first).reference.parameters():
                parameter += 1.0
        second = build_learner(kl_coeff=0.1)
        second.set_state(first.get_state())
        torch.testing.assert_close(
            module_of(second).reference.state_dict(), module_of(first).reference.state_dict()
        )

    def test_weights_for_engines_are_those_of_the_policy_alone(self):
        learner = build_learner(kl_coeff=0.1)
        update(learner, random_rows())
        weights = unpack(learner.packed_weights()[DEFAULT_MODULE_ID])
        torch.testing.assert_close(weights, parameters(learner), rtol=0, atol=0)


class TestDeviceMemory:
    @pytest.fixture
    def asked(self, monkeypatch) -> list[str]:
        """What torch is asked for on a machine whose learner is on a GPU."""
        asked: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        for name in ("ipc_collect", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, partial(asked.append, name))
        return asked

    @pytest.mark.parametrize("sleeps", [True, False])
    def test_is_given_back_after_the_update_where_engines_sleep(self, asked, sleeps):
        learner = build_learner()
        learner.config.engine_sleep = sleeps
        update(learner, random_rows())
        assert asked == (["ipc_collect", "empty_cache"] if sleeps else [])

    def test_is_of_no_concern_to_a_learner_on_the_cpu(self, asked, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        learner = build_learner()
        learner.config.engine_sleep = True
        update(learner, random_rows())
        assert asked == []


def test_report_of_one_update():
    batch = one_step_rows([1.0, 0.0, 5.0], response_lengths=[2, 3, 4])
    batch["group"] = np.array([0, 0, 1])
    batch["response_logps"] = object_array([np.zeros(n, dtype=np.float32) for n in (2, 3, 4)])
    report = update(build_learner(f_norm="none"), batch)
    assert report["num_rows"] == 3
    # The third episode is alone in its group.
    assert report["nonzero_advantage_share"] == pytest.approx(2 / 3)
    assert report["nonzero_step_advantage_share"] == 0.0
    # +-0.5 and 0: the square root of (0.25 + 0.25 + 0) / 3.
    assert report["advantage_std"] == pytest.approx((0.5 / 3) ** 0.5)
    # At ratio 1: -(2 * 0.5 - 3 * 0.5) / 9 tokens.
    assert report["policy_loss"] == pytest.approx(0.5 / 9, abs=1e-6)
    assert report["total_loss"] == report["policy_loss"]
