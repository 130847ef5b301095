"""Evaluation over a fixed panel of tasks."""

from collections import Counter

import pytest
import torch

from envs.key_door import KeyDoor
from rllib_gigpo import GiGPOConfig, register_llm_env
from rllib_gigpo.agent.profiles.key_door import profile as key_door_profile
from rllib_gigpo.evaluation import panel_order, panel_seeds
from rllib_gigpo.sampler import training_tasks
from tests.ray_runs import run_config, weights_of


def config_of(model, **evaluation) -> GiGPOConfig:
    settings = {"evaluation_duration": 3, "evaluation_samples_per_task": 2}
    return run_config(model).evaluation(**{**settings, **evaluation})


def places(episodes) -> list[tuple[int, int]]:
    return [(episode["env_seed"], episode["member"]) for episode in episodes]


class Listed(KeyDoor):
    """Three layouts of KeyDoor, by their ids."""

    def task_ids(self) -> list[str]:
        return ["3x3-4", "3x3-77", "3x3-500"]

    def reset(self, *, seed=None, options=None):
        layout = int((options or {}).get("task_id", "3x3-4").partition("-")[2])
        return super().reset(seed=seed, options={"layout": layout})


class TestPanel:
    @pytest.mark.parametrize("seed", [0, 1, 12345])
    def test_never_meets_the_tasks_of_training(self, seed):
        config = run_config("tiny").debugging(seed=seed).evaluation(evaluation_duration=200)
        trained = {t.env_seed for i in range(300) for t in training_tasks(config, i)}
        panel = panel_seeds(config)
        assert len(set(panel)) == 200
        assert not trained & set(panel)

    def test_is_the_same_in_every_run(self):
        one, other = (
            run_config("tiny").debugging(seed=seed).evaluation(evaluation_duration=5)
            for seed in (0, 1)
        )
        assert panel_seeds(one) == panel_seeds(other)
        # A longer panel begins with the shorter one.
        assert panel_seeds(one.evaluation(evaluation_duration=8))[:5] == panel_seeds(other)

    def test_settings_that_nobody_would_read_are_refused(self):
        config = run_config("tiny").evaluation(evaluation_config={"env_config": {"size": 4}})
        with pytest.raises(ValueError, match="set evaluation_interval or evaluation_num_env_run"):
            config.validate()
        config.evaluation(evaluation_interval=3).validate()


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestEvaluate:
    def test_plays_every_task_k_times_and_lists_them(self, warm_model):
        config = config_of(warm_model, evaluation_task_seeds=[11, 5, 8])
        algorithm = config.evaluation(evaluation_interval=1).build_algo()
        found = algorithm.train()["evaluation"]
        algorithm.stop()
        expected = [(11, 0), (11, 1), (5, 0), (5, 1), (8, 0), (8, 1)]
        assert places(found["episodes"]) == expected
        assert found["env_runners"]["num_episodes"] == 6
        for episode in found["episodes"]:
            assert episode["task_id"].startswith("3x3-")
            assert episode["won"] == (episode["return"] > 0)
            assert 1 <= episode["steps"] <= 8
        wins = [episode["won"] for episode in found["episodes"]]
        assert found["env_runners"]["success_rate"] == pytest.approx(sum(wins) / 6)
        assert found["env_runners"]["num_groups_dropped"] == 0

    def test_plays_each_listed_task_before_any_twice(self, warm_model):
        register_llm_env("Listed", Listed, key_door_profile())
        config = config_of(warm_model, evaluation_duration=4).environment("Listed")
        config.env_config = {"size": 3, "horizon": 8}
        algorithm = config.evaluation(evaluation_interval=1).build_algo()
        found = algorithm.evaluate()["episodes"]
        algorithm.stop()
        first, second, third = panel_order(Listed())
        played = [task for task in (first, second, third, first) for _ in range(2)]
        assert [episode["task_id"] for episode in found] == played
        assert len({episode["env_seed"] for episode in found}) == 4

    def test_repeats_itself_and_leaves_training_alone(self, warm_model):
        evaluated = config_of(warm_model).evaluation(evaluation_interval=1).build_algo()
        plain = run_config(warm_model).build_algo()
        first, second = evaluated.evaluate(), evaluated.evaluate()
        assert first == second
        assert len(first["episodes"]) == 6
        for _ in range(2):
            evaluated.train()
            plain.train()
        torch.testing.assert_close(weights_of(evaluated), weights_of(plain), rtol=0, atol=0)
        # The same tasks for other weights.
        assert places(evaluated.evaluate()["episodes"]) == places(first["episodes"])
        assert set(Counter(seed for seed, _ in places(first["episodes"])).values()) == {2}
        evaluated.stop()
        plain.stop()

    # Without an interval RLlib builds no runners of evaluation, and those of training play.
    @pytest.mark.parametrize("interval", [None, 1])
    def test_samples_at_its_own_temperature(self, interval, warm_model):
        config = config_of(warm_model, evaluation_samples_per_task=4, evaluation_interval=interval)
        greedy = config.copy().llm(eval_temperature=0.0).build_algo()
        outcomes = greedy.evaluate()["episodes"]
        for task in range(3):
            members = [
                {k: v for k, v in e.items() if k != "member"}
                for e in outcomes[4 * task : 4 * task + 4]
            ]
            assert members == [members[0]] * 4
        training = training_tasks(greedy.config, 0)
        played = greedy.play(greedy.env_runner_group, training).episodes
        responses = {tuple(map(tuple, e.get_actions())) for e in played}
        assert len(responses) > len(training)  # members differ: training samples at temperature 1
        greedy.stop()

    def test_an_actor_plays_the_same(self, warm_model):
        local = config_of(warm_model).evaluation(evaluation_interval=1).build_algo()
        remote = config_of(warm_model).evaluation(evaluation_num_env_runners=1).build_algo()
        local.train()
        remote.train()
        assert remote.evaluate()["episodes"] == local.evaluate()["episodes"]
        local.stop()
        remote.stop()

    def test_may_play_other_games_than_training(self, warm_model):
        config = config_of(warm_model).evaluation(
            evaluation_interval=1,
            evaluation_config={"env_config": {"size": 4, "horizon": 8, "flag": ""}},
        )
        algorithm = config.build_algo()
        result = algorithm.train()
        assert all(e["task_id"].startswith("4x4-") for e in result["evaluation"]["episodes"])
        tasks = training_tasks(algorithm.config, 0)
        trained = algorithm.play(algorithm.env_runner_group, tasks).episodes
        assert all(e.custom_data["task_id"].startswith("3x3-") for e in trained)
        algorithm.stop()
