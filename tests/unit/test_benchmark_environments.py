"""The environment benchmark's parts, on small numbers."""

from __future__ import annotations

import functools
import os
import random

import pytest

from benchmarks import environments as benchmark
from envs.catalog import ENVIRONMENTS, make


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

    assert benchmark.solver_success("KeyDoor", Silent) is None


def test_a_hundred_fixed_tasks_spread_over_all():
    env = make("ALFWorld", **ENVIRONMENTS["ALFWorld"].contract_kwargs)
    tasks = benchmark.fixed_tasks("ALFWorld", env)
    assert len(tasks) == 100
    assert {task["task_id"] for task in tasks if task} == set(env.task_ids())
    assert benchmark.fixed_tasks("KeyDoor", make("KeyDoor")) == [None] * 100


def test_webshops_tasks_are_different_and_can_be_won():
    pytest.importorskip("bm25s", reason="WebShop needs the extra [webshop]")
    env = make("WebShop")
    tasks = benchmark.fixed_tasks("WebShop", env)
    ids = [task["task_id"] for task in tasks if task]
    assert len(set(ids)) == 100
    assert set(ids) <= set(env.task_ids())
    assert benchmark.solver_success("WebShop", functools.partial(make, "WebShop")) == 1.0


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
        return benchmark.Figures(1.0, None, 1.0, 1.0, 1.0, None)

    monkeypatch.setattr(benchmark, "in_a_process", measure)
    arguments = ["environments", "Sokoban", "--env-config", '{"view": "rgb"}']
    monkeypatch.setattr("sys.argv", arguments)
    benchmark.main()
    assert measured == {"Sokoban": {"view": "rgb"}}
    assert "Sokoban" in capsys.readouterr().out
