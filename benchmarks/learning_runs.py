"""One run of the learning benchmark: a task, a preset and a seed, from warm start to evaluation.

Every run of a (task, seed) pair starts from the same model, which a supervised warm start has
taught the response format (KeyDoor) or a little of an expert's play (Sokoban).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rllib_gigpo import AgentProfile, ChatTemplate, GiGPOConfig, NoMemory
from rllib_gigpo.compare.main import TINY_TRAINING
from rllib_gigpo.models import materialize
from rllib_gigpo.presets import PRESETS
from rllib_gigpo.record import record
from rllib_gigpo.recording.folder import write_bytes
from rllib_gigpo.scripted import expert, random_legal
from rllib_gigpo.sft import WarmStart, warm_start

FAMILY = tuple(PRESETS)
CORE = ("gigpo", "gigpo_no_std", "gigpo_no_episode", "gigpo_no_step", "grpo", "rloo")

# The tiny model's prompt needs no instructions.
_OBSERVATION = AgentProfile(ChatTemplate(user="{observation}"), memory=NoMemory())


@dataclass(frozen=True)
class Task:
    """An environment and how the tiny model learns it.

    Attributes:
        name: Name in tables and files.
        env: Registered environment.
        presets: Which algorithms play it.
        budget: Environment steps of a run.
        env_config: The environment's arguments.
        profile: The agent; None is the environment's own.
        teacher: Whose play the warm start copies.
        warm_episodes: Episodes of the teacher.
        warm_steps: Optimizer steps of the warm start.
        max_prompt_tokens: Limit of a prompt.
        model: Shape of the tiny model.
        training: Settings that differ from `TINY_TRAINING`.
    """

    name: str
    env: str
    presets: tuple[str, ...]
    budget: int
    env_config: Mapping[str, Any] = field(default_factory=dict)
    profile: AgentProfile | None = None
    teacher: Literal["random", "expert"] = "random"
    warm_episodes: int = 400
    warm_steps: int = 60
    max_prompt_tokens: int = 64
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


EPISODES = 128

TASKS = {
    task.name: task
    for task in (
        # With ten minibatches, or twice the rate, some runs have not left their start when the
        # budget ends, and the seed decides instead of the preset.
        Task(
            "KeyDoor",
            "KeyDoor",
            FAMILY,
            budget=50_000,
            training={"num_minibatches": 20, "lr": 5e-4},
        ),
        # Different cells look alike, so one anchor state mixes several and A_S alone misleads.
        Task(
            "KeyDoorLocal",
            "KeyDoorLocal",
            CORE,
            budget=70_000,
            env_config={"size": 3, "horizon": 20},
        ),
        # A few steps of imitation leave room above the start; sixteen rooms, told in words, are
        # what so small a model can learn in so few steps.
        Task(
            "Sokoban",
            "Sokoban",
            CORE,
            budget=60_000,
            env_config={"view": "words", "num_levels": 16},
            profile=_OBSERVATION,
            teacher="expert",
            warm_steps=40,
            training={"lr": 3e-4, "num_minibatches": 4},
        ),
    )
}


def twin_of(preset: str) -> str:
    """Return the first preset whose settings are equal: its runs are the same, bit for bit."""
    settings = PRESETS[preset].settings
    return next(name for name, other in PRESETS.items() if other.settings == settings)


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        task: Name of the task.
        preset: Name of the preset.
        seed: Seed of everything.
        budget: Environment steps, at least.
    """

    task: str
    preset: str
    seed: int
    budget: int

    @property
    def file(self) -> str:
        """Name of its result file, which changes with the settings of the run."""
        return f"{self.task}-{self.preset}-{self.seed}-{self._fingerprint()}.json"

    def _fingerprint(self) -> str:
        task = replace(TASKS[self.task], presets=(), budget=self.budget, profile=None)
        settings = (task, TINY_TRAINING, EPISODES, PRESETS[self.preset].settings)
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:8]


def base_config(task: Task, seed: int) -> GiGPOConfig:
    """Return the settings that all presets share, with the untrained model."""
    return _with_task(GiGPOConfig(), task, seed)


def config_of(run: Run, task: Task, model: Path) -> GiGPOConfig:
    """Return the settings of a run: its preset over what all presets share."""
    config = _with_task(GiGPOConfig.preset(run.preset), task, run.seed)
    config.llm(model=str(model), options={})
    group_size = 1 if config.group_size == 1 else 8
    config.training(group_size=group_size, num_groups=EPISODES // group_size)
    # No KL, whatever the preset says: what is compared is credit assignment.
    return config.training(**{**TINY_TRAINING, **task.training})


def _with_task(config: GiGPOConfig, task: Task, seed: int) -> GiGPOConfig:
    config.environment(task.env, env_config=dict(task.env_config))
    if task.profile is not None:
        config.agent(profile=task.profile)
    return (
        config.llm(
            model="tiny",
            options=dict(task.model),
            max_prompt_tokens=task.max_prompt_tokens,
            max_response_tokens=8,
            eval_temperature=1.0,
        )
        .evaluation(evaluation_duration=128)
        .debugging(seed=seed)
    )


def warm_model(task: Task, seed: int, folder: Path) -> Path:
    """Return the model that every run of a task and a seed starts from, made where needed."""
    target = folder / f"{task.name}-{seed}"
    if (target / "done").exists():
        return target
    config = base_config(task, seed)
    examples = record(
        lambda: config.env_spec.make(config.env_config),
        config.agent_profile,
        policy=expert if task.teacher == "expert" else random_legal,
        episodes=task.warm_episodes,
        seed=seed * 10_000,
    )
    warm_start(
        materialize(config.model_spec),
        examples,
        target,
        settings=WarmStart(seed=seed, steps=task.warm_steps),
        max_prompt_tokens=task.max_prompt_tokens,
    )
    (target / "done").touch()
    return target


def train(run: Run, output: Path) -> dict[str, Any]:
    """Train one run and write its result; a run that is finished is read instead.

    Returns:
        The run, `before` and `success` (of 128 held-out tasks, before and after), and `curve`: per
        iteration its environment steps so far, success and episode length.
    """
    torch.set_num_threads(1)
    path = output / run.file
    if path.exists():
        return json.loads(path.read_text())
    task = TASKS[run.task]
    algorithm = config_of(run, task, warm_model(task, run.seed, output / "models")).build_algo()
    before = _evaluate(algorithm)
    curve: list[dict[str, float]] = []
    while not curve or curve[-1]["env_steps"] < run.budget:
        found = algorithm.train()["env_runners"]
        curve.append(
            {
                "env_steps": int(found["num_env_steps_sampled_lifetime"]),
                "success": float(found["success_rate"]),
                "length": float(found["episode_len_mean"]),
            }
        )
    after = _evaluate(algorithm)
    algorithm.stop()
    result = {
        **vars(run),
        "before": before["success_rate"],
        "success": after["success_rate"],
        "length": after["episode_len_mean"],
        "curve": curve,
    }
    write_bytes(path, json.dumps(result).encode())
    return result


def _evaluate(algorithm: Any) -> dict[str, float]:
    found = algorithm.evaluate()["env_runners"]
    return {name: float(found[name]) for name in ("success_rate", "episode_len_mean")}
