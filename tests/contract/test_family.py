"""The family as RLlib Algorithms: dynamic sampling, a critic, Tune's names, exact resumption."""

import pytest
import torch
from ray import tune

from rllib_gigpo import GiGPO, GiGPOConfig
from rllib_gigpo.presets import PRESETS
from tests.ray_runs import facts_of, run_config, weights_of
from tests.tiny_runs import tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

PPO = {
    "estimator": "gae",
    "omega": 0.0,
    "critic": "head",
    "whiten_advantages": True,
    "kl_in": "reward",
    "kl_estimator": "k1",
    "kl_target": 0.01,
    "critic_lr": 3e-3,
}
CASES = {
    "dynamic sampling": {"dynamic_sampling": True, "max_sampling_rounds": 4},
    "a critic and an adaptive KL": PPO,
}


@pytest.mark.parametrize("case", CASES)
def test_a_restored_run_goes_on_exactly(case, warm_model, tmp_path):
    config = run_config(warm_model, **CASES[case])
    first = config.copy().build_algo()
    first.train()
    checkpoint = first.save_to_path(str(tmp_path / "checkpoint"))
    expected = [facts_of(first.train()) for _ in range(2)]
    weights = weights_of(first)
    first.stop()
    second = GiGPO.from_checkpoint(checkpoint)
    assert [facts_of(second.train()) for _ in range(2)] == expected
    assert [facts["training_iteration"] for facts in expected] == [2, 3]
    torch.testing.assert_close(weights_of(second), weights, rtol=0, atol=0)
    second.stop()
    found = expected[-1]
    if case == "dynamic sampling":
        assert sum(facts["env_runners/num_sampling_rounds"] for facts in expected) > 2
    else:
        # Far from its target, the coefficient has moved twice.
        assert found["learners/default_policy/kl_coeff"] != pytest.approx(config.kl_coeff)


def test_dynamic_sampling_counts_all_that_was_played(warm_model):
    algorithm = run_config(warm_model, **CASES["dynamic sampling"]).build_algo()
    result = algorithm.train()
    algorithm.stop()
    found, learned = result["env_runners"], result["learners"]["default_policy"]
    played = found["num_episodes"] / 3
    left_out = found["num_groups_left_out"]
    assert played - left_out == 3
    assert left_out > 0
    assert learned["num_rows"] < found["num_env_steps_sampled"]
    # Tokens and success are of all that was played, so that they compare with other runs'.
    per_step = found["response_tokens_mean"] * found["num_env_steps_sampled"]
    assert found["num_response_tokens"] == pytest.approx(per_step)


def test_dynamic_sampling_does_not_depend_on_who_plays(warm_model):
    told = []
    for num_env_runners in (0, 1):
        config = run_config(warm_model, **CASES["dynamic sampling"])
        algorithm = config.env_runners(num_env_runners=num_env_runners).build_algo()
        told.append(
            [
                (e.custom_data["group"], e.custom_data["env_seed"], len(e), e.get_return())
                for e in algorithm.sampler.sample(0).training_episodes
            ]
        )
        algorithm.stop()
    assert told[0] == told[1]


def test_tune_trains_presets_by_their_names(warm_model, tmp_path):
    """A plain dict of settings starts from the preset that the trainable is named after."""
    shared = {
        "env": "KeyDoor",
        "env_config": {"size": 3, "horizon": 6},
        "llm_model": str(warm_model),
        "max_prompt_tokens": 64,
        "max_response_tokens": 6,
        "num_groups": 2,
        "minibatch_size": None,
    }
    for name, grown in (("rloo", "rloo"), ("ppo", "gae")):
        results = tune.Tuner(
            PRESETS[name].label,
            param_space=shared,
            run_config=tune.RunConfig(
                name=name, storage_path=str(tmp_path), stop={"training_iteration": 1}, verbose=0
            ),
        ).fit()
        assert not results.errors
        (result,) = results
        assert result.metrics["config"]["estimator"] == grown
        assert result.metrics["env_runners"]["num_episodes"] == (2 if name == "ppo" else 16)


def test_a_named_trainable_refuses_other_settings(warm_model):
    grpo = GiGPOConfig.preset("grpo").algo_class
    with pytest.raises(ValueError, match="trainable of 'grpo' was given the settings of 'gigpo'"):
        grpo(config=run_config(warm_model))


def test_a_team_has_a_critic_for_every_agents_own_steps():
    config = (
        tiny_config(**{**PPO, "kl_coeff": 0.01, "invalid_action_penalty": 0.1})
        .environment("KeyDoorTeam", env_config={"size": 3, "horizon": 6})
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, *_, **__: "shared")
    )
    algorithm = config.build_algo()
    found = algorithm.train()["learners"]["shared"]
    episodes = algorithm.sampler.sample(1).training_episodes
    algorithm.stop()
    assert found["critic_gradient_norm"] > 0.0
    # Untrained, it plays to the horizon: every agent ends with the prompt that would come next.
    for episode in episodes:
        assert episode.is_truncated
        assert all(len(e.get_observations(-1)) > 0 for e in episode.agent_episodes.values())
