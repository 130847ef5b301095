"""The critic in the learner: where it looks, what it learns, and what follows from its values."""

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch

from rllib_gigpo.critic import ValueHead, value_loss
from rllib_gigpo.learner import GiGPOTorchLearner
from rllib_gigpo.rows import object_array
from rllib_gigpo.sequences import pack
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

PPO = {
    "estimator": "gae",
    "omega": 0.0,
    "critic": "head",
    "gamma": 0.5,
    "lambda_": 0.5,
    "critic_lr": 0.1,
    "vf_clip_param": None,
}


def ppo(**training) -> GiGPOTorchLearner:
    return build_learner(**{**PPO, **training})


def say(learner: GiGPOTorchLearner, value: float) -> GiGPOTorchLearner:
    """Make the critic say one number of every state."""
    with torch.no_grad():
        module_of(learner).value_head.out.bias.fill_(value)
    return learner


def truncated_rows() -> SampleBatch:
    """Two episodes of one step and reward 1; the second is truncated and has a prompt to go on."""
    batch = one_step_rows([1.0, 1.0])
    batch["truncated"] = np.array([False, True])
    nothing, prompt = np.zeros(0, np.int32), np.arange(4, dtype=np.int32)
    batch["next_prompt_ids"] = object_array([nothing, prompt])
    return batch


class TestValues:
    def test_are_read_before_each_response_token(self):
        learner = ppo()
        module = module_of(learner)
        torch.nn.init.normal_(module.value_head.out.weight)
        prompt, response = np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)
        (batch,) = pack([prompt], [response], 100)
        with torch.no_grad():
            values = module.score(batch, values=True).values
            ids = torch.tensor([[3, 1, 4, 1, 5]])
            hidden = module.lm.base_model(input_ids=ids).last_hidden_state[0]
            # At the last prompt token and at the first response token.
            expected = module.value_head(hidden[[2, 3]])
        torch.testing.assert_close(values[0], expected)

    def test_of_a_separate_model_start_as_the_policys_and_go_their_own_way(self):
        head, model = ppo(), ppo(critic="model")
        torch.testing.assert_close(
            module_of(model).value_body.state_dict(), module_of(model).lm.base_model.state_dict()
        )
        rows = random_rows()
        with_head, with_model = update(head, rows), update(model, rows)
        assert with_head["vf_loss"] == pytest.approx(with_model["vf_loss"], rel=1e-5)
        body = module_of(model).value_body.state_dict()
        policy = module_of(model).lm.base_model.state_dict()
        assert any(not torch.equal(body[name], policy[name]) for name in body)

    def test_without_a_critic_cannot_be_asked(self):
        (batch,) = pack([np.array([1], np.int32)], [np.array([2], np.int32)], 10)
        with pytest.raises(ValueError, match="no critic"):
            module_of(build_learner()).score(batch, values=True)

    def test_start_at_zero(self):
        assert ValueHead(4)(torch.randn(3, 4)).abs().max().item() == 0.0


class TestAdvantages:
    def test_credit_the_steps_of_an_episode(self):
        # V = 1, gamma = lambda = .5, rewards 0, 4. delta_1 = 4 - 1 = 3, delta_0 = .5 - 1 = -.5;
        # A_0 = -.5 + .25 * 3 = .25.
        batch = random_rows(2)
        batch["reward"] = np.array([0.0, 4.0])
        learner = say(ppo(), 1.0)
        report = update(learner, batch)
        found = learner.advantages[DEFAULT_MODULE_ID].total
        np.testing.assert_allclose(found, [0.25, 3.0], atol=1e-6)
        # Targets are A + V = 1.25, 4: 0.5 * (.25^2 + 3^2) / 2.
        assert report["vf_loss"] == pytest.approx(0.5 * (0.0625 + 9) / 2, rel=1e-5)
        # Values that are all equal explain nothing.
        assert report["vf_explained_var"] == pytest.approx(0.0, abs=1e-6)

    def test_go_on_with_the_value_after_a_truncation(self):
        # V = 2 everywhere: 1 - 2 = -1 for the episode that ended, 1 + .5 * 2 - 2 = 0 for the other.
        learner = say(ppo(), 2.0)
        update(learner, truncated_rows())
        found = learner.advantages[DEFAULT_MODULE_ID].total
        np.testing.assert_allclose(found, [-1.0, 0.0], atol=1e-6)

    def test_of_tokens_stay_inside_a_response(self):
        # V = 1, two tokens, episode return 4 at the last. delta = .5 - 1 = -.5 and 4 - 1 = 3;
        # A = -.5 + .25 * 3 = .25, 3: mean 1.625; the truncation counts for nothing.
        batch = truncated_rows()
        batch["reward"] = np.array([4.0, 4.0])
        learner = say(ppo(gae_level="token"), 1.0)
        report = update(learner, batch)
        found = learner.advantages[DEFAULT_MODULE_ID].total
        np.testing.assert_allclose(found, [1.625, 1.625], atol=1e-6)
        assert report["vf_loss"] == pytest.approx(0.5 * (0.0625 + 9) / 2, rel=1e-5)

    def test_whitening_of_tokens_counts_each_token_once(self):
        # Token advantages .25, 3 twice over: mean 1.625, unbiased deviation sqrt(4 * 1.375^2 / 3).
        batch = truncated_rows()
        batch["reward"] = np.array([4.0, 0.0])
        learner = say(ppo(gae_level="token", whiten_advantages=True), 0.0)
        update(learner, batch)
        # Token advantages 1, 4 (lambda gamma = .25 passes 4 back as 1) and 0, 0: mean 1.25,
        # squares .0625 + 7.5625 + 2 * 1.5625 = 10.75, deviation sqrt(10.75 / 3) = 1.892969.
        found = learner.advantages[DEFAULT_MODULE_ID].total
        expected = [(2.5 - 1.25) / 1.892969, -1.25 / 1.892969]
        np.testing.assert_allclose(found, expected, atol=1e-5)

    def test_kl_in_the_reward_is_charged_per_token(self):
        # The policy has moved off its reference by a constant shift of logits: KL k1 of each token
        # is old - ref; a coefficient of 2 takes twice their sum off the row's return.
        learner = build_learner(
            estimator="reinforce",
            omega=0.0,
            gamma=1.0,
            kl_coeff=2.0,
            kl_in="reward",
            kl_estimator="k1",
        )
        with torch.no_grad():
            for parameter in module_of(learner).lm.parameters():
                parameter += 0.05
        batch = one_step_rows([1.0, 1.0], response_lengths=[2, 3])
        module = module_of(learner)
        gaps = []
        for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
            (one,) = pack([prompt], [response], 100)
            with torch.no_grad():
                gap = module.score(one).logps - module.score(one, reference=True).logps
            gaps.append(float(gap.sum()))
        report = update(learner, batch)
        found = learner.advantages[DEFAULT_MODULE_ID].total
        np.testing.assert_allclose(found, [1 - 2 * gap for gap in gaps], rtol=1e-4)
        assert report["kl"] == pytest.approx(sum(gaps) / 5, rel=1e-4)
        assert abs(sum(gaps)) > 0.01


class TestSteps:
    def test_the_critic_has_its_own_learning_rate(self):
        # Only the critic moves at a policy rate of 0, by rate * gradient: 2 * mean over rows of
        # (V - R) = 0 - 1 is -1 for the bias.
        learner = ppo(lr=0.0, critic_lr=0.25)
        before = parameters(learner)
        update(learner, one_step_rows([1.0, 1.0]))
        torch.testing.assert_close(parameters(learner), before, rtol=0, atol=0)
        assert module_of(learner).value_head.out.bias.item() == pytest.approx(0.25, rel=1e-5)

    def test_gradients_of_policy_and_critic_are_clipped_apart(self):
        learner = ppo(critic="model", grad_clip=0.5, lr=0.0, critic_lr=0.0)
        report = update(learner, one_step_rows([10.0, 0.0]))
        assert report["critic_gradient_norm"] > 5.0
        assert float(gradient(learner).norm()) == pytest.approx(
            min(0.5, report["gradient_norm"]), rel=1e-4
        )

    def test_rows_without_advantage_still_teach_the_critic(self):
        learner = say(ppo(), 1.0)
        batch = one_step_rows([1.0, 1.0])  # A = 1 - 1 = 0
        report = update(learner, batch)
        assert report["nonzero_advantage_share"] == 0.0
        assert report["num_module_steps_trained"] == 2

    def test_the_state_holds_the_critic(self):
        learner = ppo(critic="model")
        update(learner, random_rows())
        again = ppo(critic="model")
        again.set_state(learner.get_state())
        torch.testing.assert_close(
            module_of(again).state_dict(), module_of(learner).state_dict(), rtol=0, atol=0
        )

    def test_explains_returns_after_some_updates(self):
        learner = ppo(gamma=1.0, lambda_=1.0, optimizer_name="adamw", critic_lr=0.01, lr=0.0)
        batch = one_step_rows([3.0, -3.0, 3.0, -3.0])
        batch["prompt_ids"] = object_array([np.full(3, 1 + i % 2, np.int32) for i in range(4)])
        for iteration in range(60):
            report = update(learner, batch, iteration)
        assert report["vf_explained_var"] > 0.9


class TestAdaptiveKl:
    def learner(self) -> GiGPOTorchLearner:
        return build_learner(kl_coeff=0.5, kl_target=0.1, kl_horizon=100, lr=0.0)

    def test_a_kl_below_target_lowers_the_coefficient(self):
        # KL 0 is 100 % below: held at -20 %, over 12 rows of 100: exp(-.024) is .9762857.
        learner = self.learner()
        coefficients = [update(learner, random_rows(), i)["kl_coeff"] for i in range(3)]
        assert coefficients == pytest.approx([0.5, 0.5 * 0.9762857, 0.5 * 0.9762857**2])

    def test_the_coefficient_is_part_of_the_state(self):
        learner = self.learner()
        update(learner, random_rows())
        again = self.learner()
        again.set_state(learner.get_state())
        assert update(again, random_rows(), 1)["kl_coeff"] == pytest.approx(0.5 * 0.9762857)

    def test_a_kl_that_is_no_number_leaves_it(self):
        learner = self.learner()
        reference = module_of(learner).reference
        assert reference is not None
        weight = next(reference.parameters()).data
        kept = weight.clone()
        weight.fill_(float("nan"))
        broken = update(learner, random_rows())
        assert np.isnan(broken["kl"])
        weight.copy_(kept)
        again = [update(learner, random_rows(), i) for i in (1, 2)]
        # 0.5, then one step below the target as above.
        assert [r["kl_coeff"] for r in again] == pytest.approx([0.5, 0.5 * 0.9762857])

    def test_a_fixed_one_stays(self):
        learner = build_learner(kl_coeff=0.5, lr=0.3)
        assert [update(learner, random_rows(), i)["kl_coeff"] for i in range(2)] == [0.5, 0.5]


def test_a_value_clip_below_zero_raises():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="the value clip is 0"):
        value_loss(one, one, one, one.bool(), clip=0.0)


def test_config_passes_the_critic_on():
    assert tiny_config(**PPO).get_default_rl_module_spec().model_config["critic"] == "head"


@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_reported_losses_are_those_of_an_optimizer_step_on_average(num_minibatches):
    # V = 0 and reward 1 in every episode of one step: advantages and targets are 1, so each
    # minibatch has policy loss -1 and critic loss .5, however many minibatches there are.
    learner = ppo(lr=0.0, critic_lr=1e-12, num_minibatches=num_minibatches)
    report = update(learner, one_step_rows([1.0] * 6))
    assert report["policy_loss"] == pytest.approx(-1.0, abs=1e-5)
    assert report["vf_loss"] == pytest.approx(0.5, abs=1e-5)
