"""Which tasks an evaluation panel plays: those that the environment lists, none drawn twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import pytest

from envs.catalog import make
from rllib_gigpo import register_llm_env
from rllib_gigpo.env_runner import LLMEnvRunner
from rllib_gigpo.evaluate.main import _panel, _Player
from rllib_gigpo.evaluate.panel import Panel, evaluate, read_episodes
from rllib_gigpo.evaluation import panel_order, panel_tasks, task_at, with_task_ids
from rllib_gigpo.registry import LLMEnvSpec, get_env_spec
from rllib_gigpo.rollout_types import GroupTask, Rollout
from rllib_gigpo_cli.parsers import evaluate_parser
from tests.chat_server import Echo, echo_profile
from tests.child import run_python
from tests.missing import skip_or_fail
from tests.tiny_runs import tiny_config

CITIES = ["Rome", "Oslo", "Lima", "Bern", "Kyiv"]


class Quiz(Echo):
    """Echo with a list of tasks; without an id, the seed draws one."""

    cities: ClassVar = CITIES

    def task_ids(self):
        return list(self.cities)

    def reset(self, *, seed=None, options=None):
        self._city = (options or {}).get("task_id", self.cities[(seed or 0) % len(self.cities)])
        return super().reset(seed=seed)

    def _info(self, won):
        return {**super()._info(won), "task_id": self._city}


class Backwards(Quiz):
    """The same tasks on a machine that sorts them otherwise."""

    cities: ClassVar = [*reversed(CITIES)]


register_llm_env("Quiz", Quiz, echo_profile)


def say(messages, pictures, seed):
    return f"<action> {messages[-1]['content'].rsplit('say ', 1)[-1]} </action>"


def config(env: str = "Quiz", **evaluation):
    settings = tiny_config().environment(env).evaluation(**evaluation)
    settings.env_config = {}
    return settings


def tasks_of_a_runner(monkeypatch, settings) -> list:
    """Return the tasks that `algorithm.evaluate()` has its EnvRunners play."""
    played = []

    async def play_groups(tasks, **more):
        played.extend(tasks)
        return Rollout([])

    monkeypatch.setattr("rllib_gigpo.env_runner.play_groups", play_groups)
    monkeypatch.setattr(LLMEnvRunner, "engine", None)
    runner = LLMEnvRunner(config=settings, worker_index=0)
    error = runner.play(panel_tasks(settings)).error
    runner.stop()
    assert error is None
    return played


def panel_of_the_command(env: str, tasks: int) -> Panel:
    args = evaluate_parser().parse_args([env, "--model=m", f"--tasks={tasks}"])
    return _panel(args, _Player("m", env, get_env_spec(env), None, {}, None, {}, None))


# Bundled environments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ALFWorld", {"games": "shipped", "split": "valid_unseen"}),
        ("WebShop", {"split": "test"}),
        ("Search", {"split": "test"}),
        ("SearchTeam", {"split": "test"}),
        ("AppWorld", {"world": "shipped"}),
    ],
)
def test_a_panel_of_all_tasks_plays_each_once(name, settings):
    try:
        env = make(name, **settings)
    except ImportError as error:
        skip_or_fail(str(error))
        raise
    order = panel_order(env)
    settings = config(evaluation_duration=len(order))
    tasks = with_task_ids(panel_tasks(settings), order)
    assert Counter(task.options["task_id"] for task in tasks) == Counter(env.task_ids())
    for task in tasks[:3]:
        _, info = env.reset(seed=task.env_seed, options=dict(task.options))
        info = info.get("searcher", info)
        assert info["task_id"] == task.options["task_id"]
    # Shuffled: a short panel is not the start of a sorted list.
    assert order != sorted(order)
    env.close()


@pytest.mark.parametrize("name", ["Search", "SearchTeam"])
def test_a_question_by_its_id(name):
    env = make(name, split="test")
    wanted = env.task_ids()[7]
    told = {json.dumps(env.reset(seed=s, options={"task_id": wanted})[1]) for s in (0, 1)}
    assert len(told) == 1
    assert wanted in told.pop()
    with pytest.raises(ValueError, match=r"'none' is not one of this split's 338 questions"):
        env.reset(seed=0, options={"task_id": "none"})


# The order ---------------------------------------------------------------------------------------


def test_the_order_is_that_of_the_ids_alone():
    assert panel_order(Quiz()) == panel_order(Backwards())
    assert sorted(panel_order(Quiz())) == sorted(CITIES)
    code = (
        "from rllib_gigpo.evaluation import panel_order\n"
        "from tests.unit.test_panel_tasks import Quiz\n"
        "print(*panel_order(Quiz()))"
    )
    assert run_python("-c", code, cwd=Path(__file__).parents[2]).stdout.split() == panel_order(
        Quiz()
    )


class Fewer(gym.Wrapper):
    """A wrapper that lists some of the tasks."""

    def task_ids(self):
        return CITIES[:2]


class Attribute(Echo):
    """Something else of the name."""

    task_ids: ClassVar = CITIES


def test_the_outermost_list_holds():
    assert panel_order(gym.wrappers.TimeLimit(Quiz(), 5)) == panel_order(Quiz())
    assert sorted(panel_order(gym.wrappers.TimeLimit(Fewer(Quiz()), 5))) == sorted(CITIES[:2])
    assert panel_order(Attribute()) == []


def test_where_two_tasks_have_one_id_seeds_choose(monkeypatch, caplog):
    monkeypatch.setattr(Quiz, "cities", [*CITIES, "Oslo"])
    assert panel_order(Quiz()) == []
    assert "Quiz.task_ids() lists 6 ids, 5 of them different" in caplog.text


def test_a_longer_panel_begins_with_the_shorter_one_and_begins_again_after_the_last():
    order = panel_order(Quiz())
    twelve = [task_at(order, place) for place in range(12)]
    assert twelve == [*order, *order, *order[:2]]


# Both commands -----------------------------------------------------------------------------------


def test_both_commands_play_the_same_tasks(monkeypatch, capsys):
    tasks = tasks_of_a_runner(monkeypatch, config(evaluation_duration=7))
    panel = panel_of_the_command("Quiz", 7)
    assert tuple(task.options["task_id"] for task in tasks) == panel.task_ids
    assert tuple(task.env_seed for task in tasks) == panel.seeds
    assert set(panel.task_ids[:5]) == set(CITIES)
    assert "Quiz lists 5 tasks, so some of the 7 are the same" in capsys.readouterr().out
    # The second round of a task has another seed, and none is one of training.
    assert len(set(panel.seeds)) == 7
    assert min(panel.seeds) >= 2**30


def test_an_environment_without_a_list_is_played_by_seeds(monkeypatch):
    tasks = tasks_of_a_runner(monkeypatch, config("Echo", evaluation_duration=3))
    panel = panel_of_the_command("Echo", 3)
    assert [task.options for task in tasks] == [None] * 3
    assert panel.task_ids is None
    assert tuple(task.env_seed for task in tasks) == panel.seeds


def test_seeds_of_ones_own_choose_the_tasks(monkeypatch):
    tasks = tasks_of_a_runner(monkeypatch, config(evaluation_task_seeds=[4, 9]))
    assert [(task.env_seed, task.options) for task in tasks] == [(4, None), (9, None)]


def test_tasks_of_training_keep_their_options():
    chosen = GroupTask(0, 1, 1, options={"task_id": "Lima"})
    (placed,) = panel_tasks(config(evaluation_duration=1))
    named = with_task_ids([chosen, placed], ["Oslo"])
    assert [task.options for task in named] == [{"task_id": "Lima"}, {"task_id": "Oslo"}]


def test_a_panel_asks_for_no_environment_but_the_first(monkeypatch):
    # What is made during an evaluation follows on_env_failure, as any other environment.
    settings = config(evaluation_duration=7)
    made = []
    monkeypatch.setattr(Quiz, "__init__", lambda self, *a, **k: made.append(self) or None)
    tasks_of_a_runner(monkeypatch, settings)
    assert len(made) == 1


# Files -------------------------------------------------------------------------------------------

SEEDS = (0, 5, 10)  # all of them draw Rome


def play(folder: Path, chat=say, **more) -> list:
    spec = LLMEnvSpec("Quiz", lambda env_config: Quiz())
    return evaluate(Panel("m", "Quiz", {}, SEEDS, **more), chat, spec, echo_profile(), folder)


def test_the_episodes_of_a_panel_are_those_of_its_ids(tmp_path: Path):
    records = play(tmp_path, task_ids=("Oslo", "Lima", "Rome"))
    assert [record["task_id"] for record in records] == ["Oslo", "Lima", "Rome"]
    assert json.loads((tmp_path / "settings.json").read_text())["task_ids"] == [
        "Oslo",
        "Lima",
        "Rome",
    ]
    with pytest.raises(ValueError, match="holds an evaluation with task_ids="):
        play(tmp_path, task_ids=("Oslo", "Lima", "Bern"))
    with pytest.raises(ValueError, match="2 task ids with 3 seeds"):
        play(tmp_path, task_ids=("Oslo", "Lima"))


def test_an_evaluation_of_an_older_version_goes_on_as_it_was_begun(tmp_path: Path, caplog):
    play(tmp_path)
    path = tmp_path / "settings.json"
    settings = json.loads(path.read_text())
    del settings["task_ids"]
    path.write_text(json.dumps(settings))
    episodes = tmp_path / "episodes.jsonl"
    episodes.write_text("".join(episodes.read_text().splitlines(keepends=True)[:2]))
    before = read_episodes(episodes)

    records = play(tmp_path, task_ids=("Oslo", "Lima", "Rome"))
    assert [record["task_id"] for record in records] == ["Rome"] * 3
    assert all(record in records for record in before)
    assert "an evaluation of an older version" in caplog.text
    # Finished, it is read and not played.
    assert play(tmp_path, lambda *asked: pytest.fail("played"), task_ids=tuple("abc")) == records
