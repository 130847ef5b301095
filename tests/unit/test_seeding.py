"""Where every draw comes from: task seeds of training and evaluation, and what an outcome keeps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo import seeding
from rllib_gigpo.collect import Collected
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.evaluation import evaluate_panel, panel_seeds, panel_tasks
from rllib_gigpo.group_player import spread
from rllib_gigpo.sampler import training_tasks
from rllib_gigpo.seeding import derive_seed
from tests.child import run_python
from tests.episodes import Step, solo, team


@given(
    seed=st.integers(0, 2**40),
    stream=st.sampled_from(["task", "response", "minibatch", "evaluation"]),
    place=st.lists(st.integers(0, 2**31), max_size=5),
)
def test_a_seed_fits_everywhere(seed, stream, place):
    drawn = derive_seed(seed, stream, *place)
    assert isinstance(drawn, int)
    assert 0 <= drawn < 2**31
    assert drawn == derive_seed(seed, stream, *place)


def test_every_part_of_the_place_counts():
    places = [
        (seed, stream, *place)
        for seed in (0, 1, 11)
        for stream in ("task", "response")
        for place in ((), (1,), (1, 1), (11,), (1, 2), (2, 1), (0,), (0, 0))
    ]
    assert len({derive_seed(*place) for place in places}) == len(places)


@pytest.mark.parametrize(
    ("stream", "low", "high"),
    [("response", 0, 2**31), ("task", 0, 2**30), ("evaluation", 2**30, 2**31)],
)
def test_seeds_are_spread_over_the_whole_range(stream, low, high):
    drawn = [derive_seed(0, stream, number) for number in range(4000)]
    assert len(set(drawn)) == 4000
    # Of 4000 draws an eighth falls into each eighth of the range: 500 +- 21.
    bounds = [low + (high - low) * eighth // 8 for eighth in range(9)]
    for start, end in pairwise(bounds):
        assert 400 < sum(start <= seed < end for seed in drawn) < 600
    assert all(low <= seed < high for seed in drawn)


def test_an_unknown_stream_is_refused():
    with pytest.raises(ValueError, match="unknown seed stream 'tasks': expected one of"):
        derive_seed(0, "tasks", 1)


def test_another_process_draws_the_same():
    code = "import seeding; print(seeding.derive_seed(7, 'response', 3, 1, 4))"
    told = run_python("-c", code, cwd=Path(seeding.__file__).parent)
    assert int(told.stdout) == derive_seed(7, "response", 3, 1, 4)


# Tasks -------------------------------------------------------------------------------------------


def config(seed: int = 0, **training) -> GiGPOConfig:
    return GiGPOConfig().environment("KeyDoor").debugging(seed=seed).training(**training)


def test_the_tasks_of_an_iteration():
    tasks = training_tasks(config(num_groups=5, group_size=3), iteration=2)
    assert [task.group for task in tasks] == [0, 1, 2, 3, 4]
    assert {(task.size, task.iteration, task.stream) for task in tasks} == {(3, 2, "response")}
    assert len({task.env_seed for task in tasks}) == 5
    assert tasks == training_tasks(config(num_groups=5, group_size=3), iteration=2)


def test_tasks_differ_by_run_and_iteration():
    seeds = [
        task.env_seed
        for seed in (0, 1)
        for iteration in (0, 1)
        for task in training_tasks(config(seed, num_groups=20), iteration)
    ]
    assert len(set(seeds)) == 80


@pytest.fixture(scope="module")
def drawn():
    """Seeds of 1,600 training tasks and of 1,600 evaluation tasks."""
    training = [task.env_seed for i in range(100) for task in training_tasks(config(), i)]
    return {
        "training": training,
        "evaluation": panel_seeds(config().evaluation(evaluation_duration=len(training))),
    }


def test_training_and_evaluation_never_meet(drawn):
    assert not set(drawn["training"]) & set(drawn["evaluation"])
    # Training resets with seeds of the lower half of [0, 2^31), evaluation with those of the upper.
    assert max(drawn["training"]) < 2**30 <= min(drawn["evaluation"])


@pytest.mark.parametrize("kind", ["training", "evaluation"])
@pytest.mark.parametrize("num_tasks", [1, 2, 6, 7, 64])
def test_the_seed_modulo_n_reaches_each_of_n_tasks(drawn, kind, num_tasks):
    # How users' environments choose a task. Of 64 tasks by 1,600 draws one is missed with a
    # probability of about 64 (63/64)^1600 = 7e-10.
    assert len(drawn[kind]) == 1600
    assert {seed % num_tasks for seed in drawn[kind]} == set(range(num_tasks))


def test_the_panel_is_the_same_for_every_run_and_grows_at_its_end():
    short = panel_seeds(config(seed=0).evaluation(evaluation_duration=8))
    long = panel_seeds(config(seed=9).evaluation(evaluation_duration=32))
    assert len(set(long)) == 32
    assert long[:8] == short


def test_every_task_of_the_panel_is_played_k_times():
    chosen = config().evaluation(evaluation_task_seeds=[5, 6, 9], evaluation_samples_per_task=4)
    tasks = panel_tasks(chosen)
    assert [(t.group, t.env_seed, t.size, t.stream) for t in tasks] == [
        (0, 5, 4, "evaluation"),
        (1, 6, 4, "evaluation"),
        (2, 9, 4, "evaluation"),
    ]


@given(items=st.integers(0, 40), parts=st.integers(1, 12))
def test_groups_are_spread_over_the_runners(items, parts):
    shares = spread(range(items), parts)
    assert len(shares) == parts
    assert [item for share in shares for item in share] == list(range(items))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


# Outcomes ----------------------------------------------------------------------------------------


class Panel:
    """As much of an algorithm as an evaluation uses."""

    class _Metrics:
        def aggregate(self, stats, key):
            self.key = key

    def __init__(self, *episodes):
        self.config = config().evaluation(evaluation_task_seeds=[5])
        self.env_runner_group = "the training runners"
        self.metrics = self._Metrics()
        self.last_evaluation = None
        self._episodes = episodes

    def play(self, runners, tasks):
        assert runners == "the training runners"
        assert [task.env_seed for task in tasks] == [5]
        return Collected(list(self._episodes), (3,), 2, (), 1, 0, metrics=[])


def test_an_evaluation_keeps_what_every_episode_came_to():
    algorithm = Panel(
        solo(
            0,
            0,
            Step("a", 1.0),
            Step("b", 2.0),
            env_seed=5,
            task_id="t5",
            won=True,
            numbers={"score": 0.5},
        ),
        team(0, 1, Step("a", 1.0, agent="x"), Step("b", 4.0, agent="y"), env_seed=5, won=False),
    )
    results, env_steps, _ = evaluate_panel(algorithm, None)
    assert results["success_rate"] == 0.5
    assert env_steps == 4
    assert (results["num_groups_dropped"], results["num_replays"]) == (1, 2)
    assert algorithm.metrics.key == ("evaluation", "env_runners")
    assert algorithm.last_evaluation == [
        {
            "env_seed": 5,
            "task_id": "t5",
            "member": 0,
            "won": True,
            "score": 0.5,
            "return": 3.0,
            "steps": 2,
        },
        # A team's return is the mean over its agents, as in the metrics: (1 + 4) / 2.
        {"env_seed": 5, "member": 1, "won": False, "return": 2.5, "steps": 2},
    ]
    # Success and return are those of the metrics.
    assert results["episode_return_mean"] == pytest.approx(2.75)
