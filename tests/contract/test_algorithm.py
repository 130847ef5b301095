"""GiGPO as an RLlib Algorithm: reports, teams, callbacks, errors, and its end."""

import gc
import math

import numpy as np
import pytest
import torch
from ray.rllib.callbacks.callbacks import RLlibCallback

from envs.key_door import KeyDoor
from rllib_gigpo import GiGPO, GiGPOConfig, register_llm_env
from rllib_gigpo.agent.profiles.key_door import profile
from rllib_gigpo.rows import modules_of
from rllib_gigpo.sampler import training_tasks
from tests.ray_runs import Fragile, facts_of, run_config, weights_of
from tests.tiny_runs import SHAPE, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


class Keeper(GiGPO):
    """Keeps the rows of its last iteration."""

    def _update(self, batch):
        self.rows = dict(modules_of(batch))
        super()._update(batch)


def keeper(config: GiGPOConfig) -> Keeper:
    algorithm = Keeper(config=config.copy())
    assert isinstance(algorithm, Keeper)
    return algorithm


class TestReport:
    @pytest.fixture(scope="class")
    def results(self, local_ray, warm_model):
        algorithm = run_config(warm_model).build_algo()
        results = [algorithm.train() for _ in range(2)]
        algorithm.stop()
        return results

    def test_counts_episodes_and_steps(self, results):
        first, second = (result["env_runners"] for result in results)
        for found in (first, second):
            assert found["num_episodes"] == 9
            assert found["num_env_steps_sampled"] == 9 * found["episode_len_mean"]
        total = first["num_env_steps_sampled"] + second["num_env_steps_sampled"]
        assert second["num_env_steps_sampled_lifetime"] == total
        assert results[1]["num_env_steps_sampled_lifetime"] == total
        assert results[1]["training_iteration"] == 2

    def test_tells_what_the_paper_shows(self, results):
        for result in results:
            found = result["env_runners"]
            for name in ("success_rate", "valid_action_rate", "response_cut_rate"):
                assert 0.0 <= found[name] <= 1.0
            for kind in ("group", "step"):
                shares = [v for k, v in found.items() if k.startswith(f"step_groups/{kind}_share")]
                assert sum(shares) == pytest.approx(1.0)
            tokens = found["prompt_tokens_mean"] * found["num_env_steps_sampled"]
            assert found["num_prompt_tokens"] == pytest.approx(tokens)
            phases = ("rollout", "old_logp", "ref_logp", "grouping", "advantages", "update", "sync")
            for phase in phases:
                assert 0.0 <= result["timers"][phase] < 60.0

    def test_tells_what_the_update_did(self, results):
        for iteration, result in enumerate(results):
            found = result["learners"]["default_policy"]
            assert found["num_rows"] == result["env_runners"]["num_env_steps_sampled"]
            assert found["optimizer_steps"] == 2 * (iteration + 1)
            assert found["skipped_steps"] == 0
            # The warm-up reaches 3e-3 after 8 steps.
            rate = 3e-3 * 2 * (iteration + 1) / 8
            assert found["default_optimizer_learning_rate"] == pytest.approx(rate)
            assert found["engine_logp_gap"] < 1e-4
            names = ("gradient_norm", "entropy", "kl", "ratio_mean", "clip_low_fraction")
            assert all(math.isfinite(found[name]) for name in names)


class TestTeam:
    def config(self) -> GiGPOConfig:
        return (
            tiny_config(invalid_action_penalty=0.1, num_groups=2, group_size=3)
            .environment("KeyDoorTeam", env_config={"size": 3, "horizon": 6})
            .llm(model="tiny", options=SHAPE)
            .multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, *_, **__: "shared")
        )

    def test_two_agents_share_a_policy(self):
        algorithm = keeper(self.config())
        result = algorithm.train()
        (rows,) = algorithm.rows.values()
        algorithm.stop()
        assert list(algorithm.rows) == ["shared"]
        assert set(rows["module_id"]) == {"shared"}
        assert set(rows["agent_id"]) == {"agent_0", "agent_1"}
        assert result["learners"]["shared"]["gradient_norm"] > 0.0
        assert result["learners"]["shared"]["num_rows"] == len(rows["agent"])
        found = result["env_runners"]
        assert found["num_episodes"] == 6
        assert found["module_episode_return_mean/shared"] == pytest.approx(
            (
                found["agent_episode_return_mean/agent_0"]
                + found["agent_episode_return_mean/agent_1"]
            )
            / 2
        )
        # Turns alternate, agent_0 first, and every agent counts its own steps.
        for episode in set(rows["episode"]):
            mine = rows["episode"] == episode
            assert mine.sum() == 6  # untrained, so it plays to the horizon
            for agent in (0, 1):
                steps = rows["step"][mine & (rows["agent"] == agent)]
                np.testing.assert_array_equal(steps, np.arange(3))

    def test_two_policies_learn_side_by_side(self):
        config = self.config().multi_agent(
            policies={"first", "second"},
            policy_mapping_fn=lambda agent, *_, **__: "first" if agent == "agent_0" else "second",
        )
        algorithm = keeper(config)
        learners = algorithm.train()["learners"]
        assert {"first", "second"} <= set(learners)
        for module, agent in (("first", "agent_0"), ("second", "agent_1")):
            assert set(algorithm.rows[module]["agent_id"]) == {agent}
            assert learners[module]["gradient_norm"] > 0.0
            assert learners[module]["optimizer_steps"] == 1
        again = algorithm.train()
        assert again["env_runners"]["num_episodes"] == 6
        algorithm.stop()

    def test_without_a_row_to_train_on_the_learner_says_so(self):
        config = self.config().multi_agent(
            policies={"trained", "frozen"},
            policies_to_train=["trained"],
            policy_mapping_fn=lambda agent, *_, **__: "frozen",
        )
        algorithm = config.build_algo()
        with pytest.raises(ValueError, match="holds no row of a module that is to be trained"):
            algorithm.train()
        algorithm.stop()


def test_restoring_in_place_goes_back_exactly(warm_model, tmp_path, monkeypatch):
    algorithm = run_config(warm_model).build_algo()
    algorithm.train()
    checkpoint = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    first = [facts_of(algorithm.train()) for _ in range(2)]
    weights = weights_of(algorithm)
    push, versions = algorithm.weights.push, []
    monkeypatch.setattr(algorithm.weights, "push", lambda v: (versions.append(v), push(v)))
    algorithm.restore_from_path(checkpoint)
    assert versions == [1]  # engines load and check all weights, so once is enough
    restored = weights_of(algorithm)
    # A component alone is served too.
    newer = algorithm.train() and weights_of(algorithm)
    learners = f"{checkpoint}/learner_group"
    algorithm.restore_from_path(learners, component="learner_group")
    assert versions == [1, 2, 2]
    torch.testing.assert_close(weights_of(algorithm), restored, rtol=0, atol=0)
    assert any((newer[name] != restored[name]).any() for name in newer)
    algorithm.restore_from_path(checkpoint)
    second = [facts_of(algorithm.train()) for _ in range(2)]
    assert second == first
    torch.testing.assert_close(weights_of(algorithm), weights, rtol=0, atol=0)
    algorithm.stop()


class TestCallbacks:
    def test_are_called(self, warm_model):
        seen = []
        config = (
            run_config(warm_model)
            .evaluation(evaluation_interval=1, evaluation_duration=1)
            .callbacks(
                on_algorithm_init=lambda algorithm, **_: seen.append("init"),
                on_train_result=lambda algorithm, result, **_: seen.append(
                    ("train", result["env_runners"]["num_episodes"])
                ),
                on_evaluate_start=lambda algorithm, **_: seen.append("evaluate"),
                on_evaluate_end=lambda algorithm, evaluation_metrics, **_: seen.append(
                    ("evaluated", len(algorithm.last_evaluation))
                ),
            )
        )
        algorithm = config.build_algo()
        algorithm.train()
        algorithm.stop()
        assert seen == ["init", "evaluate", ("evaluated", 1), ("train", 9)]

    @pytest.mark.parametrize("num_env_runners", [0, 1])
    def test_of_episodes_log_metrics_of_their_own(self, num_env_runners, warm_model):
        def on_episode_end(*, episode, metrics_logger, **_):
            metrics_logger.log_value("steps_of_callback", len(episode), reduce="sum")
            metrics_logger.log_value("largest_seed", episode.custom_data["env_seed"], reduce="max")

        config = (
            run_config(warm_model)
            .env_runners(num_env_runners=num_env_runners)
            .evaluation(evaluation_interval=2, evaluation_task_seeds=[4, 6])
            .callbacks(
                on_episode_end=on_episode_end,
                on_sample_end=lambda *, samples, metrics_logger, **_: metrics_logger.log_value(
                    "samples", len(samples), reduce="sum"
                ),
                on_environment_created=lambda *, env, metrics_logger, **_: metrics_logger.log_value(
                    "sizes", env.size, reduce="max"
                ),
            )
        )
        algorithm = config.build_algo()
        for iteration in range(2):
            result = algorithm.train()
            found = result["env_runners"]
            assert found["steps_of_callback"] == found["num_env_steps_sampled"]
            assert found["samples"] == 9
            seeds = [task.env_seed for task in training_tasks(config, iteration)]
            assert found["largest_seed"] == max(seeds)
            if iteration == 0:
                assert found["sizes"] == 3
        evaluated = result["evaluation"]["env_runners"]
        assert evaluated["steps_of_callback"] == evaluated["num_env_steps_sampled"]
        assert evaluated["largest_seed"] == 6
        algorithm.stop()

    def test_that_would_never_be_called_are_refused(self):
        class Steps(RLlibCallback):
            def on_episode_step(self, **_): ...

        for config in (
            tiny_config().callbacks(on_episode_step=lambda **_: None),
            tiny_config().callbacks(Steps),
        ):
            with pytest.raises(ValueError, match=r"on_episode_step.*never called.*on_episode_end"):
                config.validate()


class TestErrors:
    def test_of_an_environment_name_it(self, warm_model, tmp_path):
        flag = tmp_path / "flag"
        algorithm = run_config(warm_model, flag=flag).build_algo()
        flag.write_text("raise")
        with pytest.raises(
            RuntimeError, match=r"Fragile.*ZeroDivisionError: the key broke"
        ) as caught:
            algorithm.train()
        assert 'raise ZeroDivisionError("the key broke")' in str(caught.value)  # where it was
        # It happens once, and nothing of the broken iteration is left behind.
        assert algorithm.train()["env_runners"]["num_episodes"] == 9
        algorithm.stop()

    @pytest.mark.parametrize("num_env_runners", [0, 1])
    def test_of_making_an_environment_name_it(self, num_env_runners):
        class Unbuilt(KeyDoor):
            def __init__(self, **arguments):
                raise OSError("no such shop")

        register_llm_env("Unbuilt", Unbuilt)
        config = tiny_config().environment("Unbuilt").llm(model="tiny")
        config.env_runners(num_env_runners=num_env_runners)
        with pytest.raises(
            RuntimeError, match="environment 'Unbuilt' could not be made: OSError: no such shop"
        ) as caught:
            config.build_algo()
        assert "Traceback" not in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_of_a_reset_that_is_not_a_function_of_its_seed(self, warm_model):
        class Moody(Fragile):
            resets = 0

            def reset(self, *, seed=None, options=None):
                Moody.resets += 1
                return super().reset(seed=seed + Moody.resets, options=options)

        register_llm_env("Moody", Moody, profile)
        algorithm = run_config(warm_model).environment("Moody").build_algo()
        with pytest.raises(RuntimeError, match="start from different states"):
            algorithm.train()
        algorithm.stop()


def test_stopping_is_quiet(warm_model, capfd):
    algorithm = run_config(warm_model).evaluation(evaluation_interval=1).build_algo()
    algorithm.train()
    algorithm.stop()
    del algorithm
    gc.collect()
    assert "Traceback" not in "".join(capfd.readouterr())
