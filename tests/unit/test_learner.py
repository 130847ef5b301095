"""The learner's update: which advantages it uses, and what its gradient is."""

import asyncio

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_gigpo.engines import build_engine
from rllib_gigpo.engines.base import Request, Sampling, generate_batch
from rllib_gigpo.rows import object_array
from tests.tiny_runs import (
    VOCABULARY,
    build_learner,
    gradient,
    gradients,
    module_of,
    one_step_rows,
    parameters,
    random_rows,
    tiny_config,
    update,
)


def advantages_used(batch: SampleBatch, **training):
    learner = build_learner(**training)
    update(learner, batch)
    return learner.advantages[DEFAULT_MODULE_ID]


class TestAdvantages:
    def test_two_returns_divided_by_their_deviation(self):
        # Mean 5, unbiased deviation sqrt(25 + 25) = 7.0710678: (10 - 5) / 7.0710688 = 0.7071067.
        used = advantages_used(one_step_rows([10.0, 0.0]), f_norm="std", omega=0.0)
        np.testing.assert_allclose(used.total, [0.7071067, -0.7071067], atol=1e-6)

    def test_two_returns_undivided(self):
        used = advantages_used(one_step_rows([10.0, 0.0]), f_norm="none", omega=0.0)
        np.testing.assert_allclose(used.total, [5.0, -5.0], atol=1e-12)

    @pytest.mark.parametrize(
        ("group_mean_over", "success", "failure"),
        # Over episodes the mean is (10 + 0) / 2 = 5; over steps (2 * 10 + 6 * 0) / 8 = 2.5.
        [("episodes", 5.0, -5.0), ("steps", 7.5, -2.5)],
    )
    def test_success_in_two_steps_against_failure_in_six(self, group_mean_over, success, failure):
        batch = random_rows(8)
        batch["group"] = np.zeros(8, dtype=np.int64)
        batch["episode"] = np.array([0, 0, 1, 1, 1, 1, 1, 1])
        batch["step"] = np.array([0, 1, 0, 1, 2, 3, 4, 5])
        batch["reward"] = np.array([0.0, 10.0, 0, 0, 0, 0, 0, 0])
        used = advantages_used(batch, f_norm="none", omega=0.0, group_mean_over=group_mean_over)
        np.testing.assert_allclose(used.total, [success] * 2 + [failure] * 6, atol=1e-12)

    def test_an_anchor_group_adds_its_step_advantage(self):
        # Three episodes meet state 7: two and one steps before a reward of 10, and never. Their
        # discounted returns there are 10 * 0.95^2 = 9.025, 10 * 0.95 = 9.5 and 0, of mean 6.175:
        # A_S = 2.85, 3.325, -6.175. Returns 10, 10, 0 have mean 6.6667: A_E = 3.3333, .., -6.6667.
        # With omega 2: 3.3333 + 5.7, 3.3333 + 6.65, -6.6667 - 12.35. The rows behind are alone.
        batch = random_rows(6)
        batch["group"] = np.zeros(6, dtype=np.int64)
        batch["episode"] = np.array([0, 0, 0, 1, 1, 2])
        batch["step"] = np.array([0, 1, 2, 0, 1, 0])
        batch["anchor"] = np.array([7, 1, 2, 7, 3, 7])
        batch["reward"] = np.array([0.0, 0, 10, 0, 10, 0])
        used = advantages_used(batch, f_norm="none", omega=2.0, gamma=0.95)
        np.testing.assert_allclose(used.step, [2.85, 0, 0, 3.325, 0, -6.175], atol=1e-12)
        third = 10 / 3
        expected = [third + 5.7, third, third, third + 6.65, third, -2 * third - 12.35]
        np.testing.assert_allclose(used.total, expected, atol=1e-12)

    def test_a_lone_episode_has_none(self):
        used = advantages_used(one_step_rows([10.0]))
        assert (used.total, used.step) == (0.0, 0.0)

    def test_the_penalty_of_an_invalid_action_counts(self):
        # Returns 10 and 9.5 - 0.5 = 9 under the penalty: mean 9.5.
        batch = one_step_rows([10.0, 9.5])
        batch["valid"] = np.array([True, False])
        used = advantages_used(batch, f_norm="none", omega=0.0, invalid_action_penalty=0.5)
        np.testing.assert_allclose(used.total, [0.5, -0.5], atol=1e-12)


def gradient_by_hand(learner, batch, advantages) -> torch.Tensor:
    """Row by row, whole sequence through the plain model: -sum(A_row * log p) / all tokens.

    At the first step of an update the ratio is 1, so its gradient is that of log p.
    """
    model = module_of(learner).lm
    model.zero_grad()
    total_tokens = sum(map(len, batch["response_ids"]))
    for prompt, response, advantage in zip(
        batch["prompt_ids"], batch["response_ids"], advantages, strict=True
    ):
        ids = torch.tensor([[*prompt, *response]], dtype=torch.long)
        logps = model(input_ids=ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        chosen = logps.gather(1, ids[0, len(prompt) :, None]).sum()
        (-advantage * chosen / total_tokens).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


class TestGradient:
    def test_is_the_policy_gradient_over_all_response_tokens(self):
        # Lengths differ, so padding is there; two of twelve rows have advantage 0 and still count
        # in the token total.
        batch = random_rows(12, zeros=2)
        learner = build_learner(lr=0.0)
        report = update(learner, batch)
        advantages = learner.advantages[DEFAULT_MODULE_ID].total
        assert (advantages == 0).sum() == 2
        found = gradient(learner)
        torch.testing.assert_close(
            found, gradient_by_hand(learner, batch, advantages), rtol=1e-4, atol=1e-7
        )
        assert report["gradient_norm"] == pytest.approx(float(found.norm()), rel=1e-5)

    def test_is_not_zero_and_sgd_follows_it(self):
        learner = build_learner(lr=0.25)
        before = parameters(learner)
        update(learner, random_rows())
        grads = gradients(learner)
        assert gradient(learner).norm() > 0.1
        for name, value in parameters(learner).items():
            torch.testing.assert_close(value, before[name] - 0.25 * grads[name])

    def test_does_not_depend_on_the_micro_batch_budget(self):
        results = []
        for budget in (1, 40, 100_000):  # one row each, a few rows each, all rows at once
            learner = build_learner(
                micro_batch_tokens=budget,
                num_minibatches=3,
                num_epochs=2,
                kl_coeff=0.5,
                entropy_coeff=0.1,
            )
            report = update(learner, random_rows(14))
            results.append((report["gradient_norm"], gradient(learner), parameters(learner)))
        (norm, grad, values), *others = results
        for other_norm, other_grad, other_values in others:
            assert other_norm == pytest.approx(norm, rel=1e-5)
            torch.testing.assert_close(other_grad, grad, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(other_values, values, rtol=1e-5, atol=1e-6)

    def test_does_not_depend_on_the_order_of_the_rows(self):
        batch = random_rows(12)
        order = np.random.default_rng(1).permutation(12)
        shuffled = SampleBatch({name: batch[name][order] for name in batch})
        one, other = build_learner(), build_learner()
        update(one, batch)
        update(other, shuffled)
        torch.testing.assert_close(gradient(one), gradient(other), rtol=1e-4, atol=1e-6)

    # An entropy bonus too small to matter makes the learner compute the rows that it skips.
    @pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
    def test_skipping_rows_without_advantage_changes_nothing(self, optimizer_name):
        skipping = build_learner(optimizer_name=optimizer_name, num_minibatches=4, lr=0.01)
        computing = build_learner(
            optimizer_name=optimizer_name, num_minibatches=4, lr=0.01, entropy_coeff=1e-30
        )
        computed = []
        for learner in (skipping, computing):
            update(learner, random_rows(12, zeros=6))
            # Not one row has an advantage: only momentum and weight decay move AdamW.
            report = update(learner, random_rows(12, zeros=12, seed=1), iteration=1)
            computed.append(report["num_module_steps_trained"])
        assert computed == [0, 12]
        one, other = parameters(skipping), parameters(computing)
        for name in one:
            # Attention does not see the key bias: its gradient is rounding noise, which AdamW
            # scales up.
            if not name.endswith("k_proj.bias"):
                torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)

    def test_equal_rows_share_a_forward_pass_and_keep_their_weight(self):
        # The same two responses ten times over, with returns that differ.
        batch = one_step_rows([1.0, 0.0] * 5)
        batch["prompt_ids"] = object_array([np.array([1, 2, 3], dtype=np.int32)] * 10)
        learner = build_learner(lr=0.0, omega=0.0)
        update(learner, batch)
        found = gradient(learner)
        advantages = learner.advantages[DEFAULT_MODULE_ID].total
        torch.testing.assert_close(
            found, gradient_by_hand(learner, batch, advantages), rtol=1e-4, atol=1e-7
        )


class TestRatio:
    def engine_rows(self, config, num_rows: int = 8) -> SampleBatch:
        """Responses that the engine samples and scores with the learner's initial weights."""
        batch = random_rows(num_rows)
        engine = build_engine(config)
        sampling = Sampling(temperature=config.temperature, max_tokens=6)
        requests = [
            Request(prompt_ids=prompt, sampling=sampling, seed=row, request_id=str(row))
            for row, prompt in enumerate(batch["prompt_ids"])
        ]
        completions = asyncio.run(generate_batch(engine, requests))
        engine.close()
        batch["response_ids"] = object_array([c.token_ids for c in completions])
        batch["response_logps"] = object_array([c.logps for c in completions])
        return batch

    @pytest.mark.parametrize("old_logp", ["recompute", "engine"])
    @pytest.mark.parametrize("temperature", [1.0, 0.6, 0.4])
    def test_is_one_at_learning_rate_zero(self, old_logp, temperature):
        config = tiny_config(old_logp=old_logp, lr=0.0, num_epochs=2, num_minibatches=3)
        config.llm(temperature=temperature)
        learner = build_learner(config)
        report = update(learner, self.engine_rows(config))
        assert report["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert report["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert report["engine_logp_gap"] < 1e-5
        assert report["clip_low_fraction"] == report["clip_high_fraction"] == 0.0

    def test_is_taken_against_the_engine_where_asked(self):
        # Every engine log-probability is 0.5 too low, so every ratio is exp(0.5) = 1.6487: beyond
        # 1.2, cut where the advantage is positive (half the rows of a group of two).
        config = tiny_config(old_logp="engine", lr=0.0, omega=0.0)
        batch = self.engine_rows(config)
        batch["reward"] = np.array([1.0, 0.0] * 4)
        batch["episode"], batch["step"] = np.arange(8), np.zeros(8, dtype=np.int64)
        batch["group"] = np.arange(8) // 2
        batch["response_logps"] = object_array([p - 0.5 for p in batch["response_logps"]])
        report = update(build_learner(config), batch)
        assert report["ratio_mean"] == pytest.approx(np.exp(0.5), abs=1e-4)
        assert report["clip_low_fraction"] == 0.0
        tokens = np.array([len(r) for r in batch["response_ids"]])
        assert report["clip_high_fraction"] == pytest.approx(tokens[::2].sum() / tokens.sum())

    def test_moves_away_from_one_after_a_step(self):
        report = update(build_learner(num_epochs=2), random_rows())
        assert report["ratio_max"] > 1.001


class TestBatches:
    def test_a_bare_sample_batch_is_taken(self):
        learner = build_learner()
        learner.update(batch=one_step_rows([1.0, 0.0]), timesteps={})
        assert len(learner.advantages[DEFAULT_MODULE_ID].total) == 2

    def test_the_given_rows_stay_as_they_are(self):
        batch = random_rows()
        names = set(batch)
        build_learner().update(batch=batch, timesteps={})
        assert set(batch) == names

    def test_no_rows_raise(self):
        empty = SampleBatch({name: column[:0] for name, column in random_rows().items()})
        with pytest.raises(ValueError, match="no row"):
            build_learner().update(batch=empty, timesteps={})

    def test_episodes_raise(self):
        with pytest.raises(ValueError, match="learns from rows"):
            build_learner().update(training_data=TrainingData(episodes=[]), timesteps={})

    def test_a_run_that_trains_nobody_is_refused(self):
        config = tiny_config().multi_agent(policies_to_train=[])
        with pytest.raises(ValueError, match="nothing would be trained"):
            update(build_learner(config), random_rows())

    def test_an_unknown_module_raises(self):
        batch = MultiAgentBatch({"other": random_rows()}, env_steps=12)
        with pytest.raises(ValueError, match="other"):
            build_learner().update(batch=batch, timesteps={})

    def test_the_vocabulary_is_that_of_the_tests(self):
        assert module_of(build_learner()).lm.config.vocab_size == VOCABULARY
