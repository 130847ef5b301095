"""A small recorded run, made without Ray: two groups, hand-computed advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rllib_gigpo.advantages import gigpo
from rllib_gigpo.grouping import AnchorRule
from rllib_gigpo.recording.folder import RunFolder, append_line, write_json
from rllib_gigpo.recording.recorder import write_rollouts
from rllib_gigpo.recording.rollout_rows import Iteration, Rollouts, rollouts_of
from rllib_gigpo.rows import episodes_to_batch, modules_of, step_table
from tests.episodes import Step, solo

# Group 0: R = 1 and 0, so A_E = +0.5 and -0.5. With gamma 0.5 the returns are 0.5, 1 and 0; at "a"
# they are 0.5 and 0 with mean 0.25, so A_S = +0.25 and -0.25; "b" is alone, so A_S = 0.
# Group 1: equal returns and different states, so everything is 0.
EPISODES = [
    solo(0, 0, Step("a", response=(3,)), Step("b", 1.0, response=(4, 5)), won=True, env_seed=6),
    solo(0, 1, Step("a", well_formed=False), won=False, env_seed=6, task_id="t0", task="Go."),
    solo(1, 0, Step("c"), env_seed=8),
    solo(1, 1, Step("d"), env_seed=8),
]


def decode(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


def iteration_of(episodes: list[Any], number: int = 1, module_of: Any = None) -> Iteration:
    kwargs = {} if module_of is None else {"module_of": module_of}
    batch = episodes_to_batch(episodes, AnchorRule("exact"), **kwargs)
    advantages = {
        module: gigpo(step_table(rows), omega=1.0, gamma=0.5, f_norm="none")
        for module, rows in modules_of(batch)
    }
    return Iteration(number, episodes, batch, advantages)


def recorded_rows(**kwargs: Any) -> Rollouts:
    return rollouts_of(iteration_of(EPISODES), decode, kwargs.get("max_groups"))


RUN = {
    "format": 1,
    "run_id": "abc",
    "created": "2026-01-01T00:00:00+00:00",
    "algorithm": "GiGPO",
    "env": "KeyDoor",
    "env_config": {},
    "model": "tiny",
    "seeds": {"root": 3},
    "changed": {"omega": 0.5},
    "settings": {"omega": 0.5, "gamma": 0.95},
    "versions": {"python": "3.11"},
    "commits": {},
    "machine": {},
    "data": [],
    "command": "python train.py",
    "price_per_hour": 4.0,
    "starts": [{"time": "2026-01-01T00:00:00+00:00", "after_iteration": 0}],
}


def metrics_line(iteration: int, **changes: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "seconds": 3600.0,
        "env_runners": {
            "success_rate": 0.25 * iteration,
            "episode_return_mean": 0.5,
            "num_episodes": 4,
            "num_env_steps_sampled": 5,
            "num_prompt_tokens": 10,
            "num_response_tokens": 6,
            "step_groups/group_share/1": 0.75,
            "step_groups/group_share/2-5": 0.25,
        },
        "timers": {"rollout": 1800.0, "update": 900.0, "learn": 1000.0},
        "learners": {"default_policy": {"kl": 0.01 * iteration}},
        "advantages": {"default_policy": {"episode_mean_abs": 0.3, "step_mean_abs": 0.1}},
        **changes,
    }


def write_run(path: Path, *, iterations: int = 2, run: dict[str, Any] | None = None) -> RunFolder:
    folder = RunFolder(path)
    write_json(folder.run, run or RUN)
    for number in range(1, iterations + 1):
        add_iteration(folder, number)
    return folder


def add_iteration(folder: RunFolder, number: int, episodes: list[Any] | None = None) -> None:
    append_line(folder.metrics, metrics_line(number))
    rollouts = rollouts_of(iteration_of(episodes or EPISODES, number), decode, None)
    write_rollouts(folder, number, rollouts)
