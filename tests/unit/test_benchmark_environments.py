"""The environment benchmark's parts, on small numbers."""

from __future__ import annotations

import os
import random

import pytest

from benchmarks import environments as benchmark
from envs.catalog import ENVIRONMENTS, make
from envs.key_door import KeyDoor


def test_all_figures_of_an_environment(monkeypatch):
    monkeypatch.setattr(benchmark, "EPISODES", 8)
    monkeypatch.setattr(benchmark, "TASKS", 2)
    monkeypatch.setattr(benchmark, "ROUNDS", 3)
    found = benchmark.measure("KeyDoor", {"size": 3})
    assert found.steps_per_s > 0
    assert found.reset_ms > 0
    assert found.mb_per_episode >= 0
    assert found.reference_steps_per_s is None
    # 9 cells and a key held or not: 160 steps of a group cannot all be new.
    assert 0.5 < found.repeat_share <= 1.0
    assert found.solver_success == 1.0


@pytest.mark.parametrize("name", ["KeyDoor", "KeyDoorTeam"])
def test_rounds_count_steps_and_start_over(name):
    episodes = [benchmark.Episode(make(name, horizon=2), seed) for seed in range(3)]
    steps, seconds = benchmark.play_rounds(episodes, 5, random.Random(0))
    assert steps == 15
    assert seconds > 0
    assert not any(episode.is_over for episode in episodes)


def test_an_environment_without_a_solver_has_no_success():
    from tests.broken_envs import Silent

    assert benchmark.solved_by_expert("KeyDoor", Silent) is None


def test_the_tasks_are_fixed_and_spread_over_all():
    env = make("ALFWorld", **ENVIRONMENTS["ALFWorld"].contract_kwargs)
    tasks = benchmark.candidates(env)
    assert tasks == benchmark.candidates(env)
    assert {task["task_id"] for task in tasks[:100] if task} == set(env.task_ids())
    assert set(map(str, benchmark.candidates(make("KeyDoor")))) == {"None"}


def test_webshops_first_hundred_tasks_are_different():
    pytest.importorskip("bm25s", reason="WebShop needs the extra [webshop]")
    env = make("WebShop")
    ids = [task["task_id"] for task in benchmark.candidates(env)[:100] if task]
    assert len(set(ids)) == 100
    assert set(ids) <= set(env.task_ids())


class HalfLost(KeyDoor):
    """KeyDoor whose odd seeds nobody can win."""

    def reset(self, *, seed=None, options=None):
        self.is_lost = bool(seed is not None and seed % 2)
        return super().reset(seed=seed, options=options)

    def is_winnable(self):
        return not self.is_lost

    def expert_action(self):
        return "go nowhere" if self.is_lost else super().expert_action()


def test_tasks_that_nobody_can_win_are_counted_and_not_played():
    # Seeds 0, 2, ..., 198 can be won: 100 of the 199 that are looked at.
    found = benchmark.solved_by_expert("KeyDoor", HalfLost)
    assert found == (1.0, 100 / 199)


def test_too_few_tasks_to_win_are_told(monkeypatch):
    monkeypatch.setattr(benchmark, "LOOKED_AT", 50)
    with pytest.raises(RuntimeError, match="25 of 50 tasks can be won"):
        benchmark.solved_by_expert("KeyDoor", HalfLost)


def test_without_real_data_what_ships_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLIB_GIGPO_CACHE", "before")
    with benchmark.scratch_folder() as scratch:
        assert os.environ["RLLIB_GIGPO_CACHE"] == str(scratch)
        assert benchmark.real_configs(tmp_path, scratch) == {}
    assert os.environ["RLLIB_GIGPO_CACHE"] == "before"
    assert not scratch.exists()


def test_further_constructor_arguments_are_passed_on(monkeypatch, capsys):
    measured = {}

    def measure(work, name, config):
        measured[name] = config
        return benchmark.Figures(1.0, None, 1.0, 1.0, 1.0, None, None)

    monkeypatch.setattr(benchmark, "in_a_process", measure)
    arguments = ["environments", "Sokoban", "--env-config", '{"view": "rgb"}']
    monkeypatch.setattr("sys.argv", arguments)
    benchmark.main()
    assert measured == {"Sokoban": {"view": "rgb"}}
    assert "Sokoban" in capsys.readouterr().out
