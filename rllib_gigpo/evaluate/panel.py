"""Plays a fixed panel of tasks, several episodes at once, and goes on where it was stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import Message
from rllib_gigpo.evaluate.agents import Chat, PromptedAgent, reflect
from rllib_gigpo.one_at_a_time import alone
from rllib_gigpo.playing.play import Played, play
from rllib_gigpo.recording.folder import append_line, read_json, read_lines, write_json
from rllib_gigpo.recording.plain import jsonable, without_secrets
from rllib_gigpo.registry import LLMEnvSpec
from rllib_gigpo.rows import agent_episodes, step_is_valid
from rllib_gigpo.seeding import derive_seed
from rllib_gigpo.vision.pictures import Picture

EPISODES = "episodes.jsonl"
_SETTINGS = "settings.json"
_LOG = logging.getLogger(__name__)


class _InterruptedError(Exception):
    """The evaluation has ended: its episodes ask nothing more."""


@dataclass(frozen=True)
class Panel:
    """What is evaluated, and on which tasks.

    Attributes:
        model: Name of the model, for tables.
        env: Name of the environment.
        env_config: Its settings.
        seeds: Reset seed of every task, see `rllib_gigpo.evaluation.panel_seeds`.
        samples: Episodes per task (k).
        prompting: "plain", "react" or "reflexion".
        tries: Tries of one episode; only "reflexion" has more than one.
        max_steps: Steps after which an episode is cut off, or None for the environment's limit.
        seed: Of the responses.
        decoding: Temperature, limits and the checkpoint's fingerprint, for the record.
        task_ids: What every task plays, see `rllib_gigpo.evaluation.panel_order`; None lets its
            seed choose.
    """

    model: str
    env: str
    env_config: Mapping[str, Any]
    seeds: tuple[int, ...]
    samples: int = 1
    prompting: str = "plain"
    tries: int = 1
    max_steps: int | None = None
    seed: int = 0
    decoding: Mapping[str, Any] = field(default_factory=dict)
    task_ids: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.seeds:
            raise ValueError("a panel needs at least one task")
        if self.task_ids is not None and len(self.task_ids) != len(self.seeds):
            raise ValueError(f"{len(self.task_ids)} task ids with {len(self.seeds)} seeds")
        if self.tries > 1 and self.prompting != "reflexion":
            raise ValueError(
                f"tries={self.tries} with prompting={self.prompting!r}: only 'reflexion' tries "
                "again; use tries=1, or prompting='reflexion'"
            )


def evaluate(
    panel: Panel,
    chat: Chat,
    spec: LLMEnvSpec,
    profile: AgentProfile,
    folder: Path,
    *,
    workers: int = 8,
    told: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Play what is not played yet.

    An error of model, server or environment ends it once the episodes that are being played have
    ended, and Ctrl-C once each has its next answer; nothing is counted as a loss for it, and the
    next call goes on from there.

    Args:
        panel: The tasks.
        chat: The model; it is called from several threads.
        spec: Makes the environments, one per worker.
        profile: The agent.
        folder: Keeps the episodes.
        workers: Episodes at once.
        told: Called with the number of episodes that are played, and of all.

    Returns:
        One record per episode, by task and sample.

    Raises:
        ValueError: The folder holds another panel's episodes, or another process is at it.
        OSError: The disk refused an episode; those before are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / EPISODES
    busy = f"another evaluation is at work in {folder}: wait for it, or name another --output"
    with alone(file, busy):
        panel = _claimed(panel, folder)
        return _play_rest(panel, chat, spec, profile, file, workers, told)


def _play_rest(
    panel: Panel,
    chat: Chat,
    spec: LLMEnvSpec,
    profile: AgentProfile,
    file: Path,
    workers: int,
    told: Callable[[int, int], None] | None,
) -> list[dict[str, Any]]:
    """Play what a file of episodes lacks; return all of them."""
    records = read_episodes(file)
    done = {(record["task"], record["sample"]) for record in records}
    total = len(panel.seeds) * panel.samples
    waiting = [
        (task, sample)
        for sample in range(panel.samples)
        for task in range(len(panel.seeds))
        if (task, sample) not in done
    ]
    local, lock, interrupted = threading.local(), threading.Lock(), threading.Event()
    envs: list[Any] = []

    def ask(messages: Sequence[Message], pictures: Mapping[str, Picture], seed: int) -> str:
        if interrupted.is_set():
            raise _InterruptedError
        return chat(messages, pictures, seed)

    def run(task: int, sample: int) -> None:
        if not hasattr(local, "env"):
            local.env = spec.make()
            envs.append(local.env)
        record = jsonable(_episode(panel, ask, local.env, spec.name, profile, task, sample))
        with lock:
            append_line(file, record)
            records.append(record)
        if told is not None:
            told(len(records), total)

    try:
        with ThreadPoolExecutor(max(1, workers)) as pool:
            try:
                played = [pool.submit(run, *place) for place in waiting]
                wait(played, return_when=FIRST_EXCEPTION)
            except BaseException:
                interrupted.set()
                raise
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        for env in envs:
            _close(env, spec.name)
    for future in played:
        if not future.cancelled():
            future.result()
    return sorted(records, key=lambda record: (record["task"], record["sample"]))


def _close(env: Any, name: str) -> None:
    """Close an environment; one that cannot be closed is told of, and hides no other error."""
    try:
        env.close()
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {error}"
        _LOG.warning("environment %r could not be closed (%s)", name, told)


def read_episodes(file: Path) -> list[dict[str, Any]]:
    """Return the episodes of a file; a last line that was cut off is left out.

    Raises:
        ValueError: Another line is no JSON object; its number is named.
    """
    return read_lines(file) if file.exists() else []


def _claimed(panel: Panel, folder: Path) -> Panel:
    """Return the panel as it is played in a folder; one that is new there is written down."""
    settings = without_secrets(jsonable(asdict(panel)))
    path = folder / _SETTINGS
    if not path.exists():
        write_json(path, settings)
        return panel
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object")
    if panel.task_ids is not None and "task_ids" not in found:
        _LOG.warning(
            "%s holds an evaluation of an older version, whose seeds choose the tasks, some of "
            "them more than once: it stays as it is; name another --output for tasks that differ",
            folder,
        )
        return _claimed(replace(panel, task_ids=None), folder)
    different = [name for name in settings if found.get(name) != settings[name]]
    if different:
        name = different[0]
        old, new = found.get(name), settings[name]
        if isinstance(old, dict) and isinstance(new, dict):
            old, new = _beyond(old, new), _beyond(new, old)
        raise ValueError(
            f"{folder} holds an evaluation with {name}={old!r}, not {new!r}: name another "
            "--output, or repeat the old settings"
        )
    return panel


def _beyond(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what is not the same in the other one."""
    return {key: v for key, v in own.items() if key not in other or other[key] != v}


def _episode(
    panel: Panel,
    chat: Chat,
    env: Any,
    name: str,
    profile: AgentProfile,
    task: int,
    sample: int,
) -> dict[str, Any]:
    reflections: list[str] = []
    number = 0
    options = None if panel.task_ids is None else {"task_id": panel.task_ids[task]}
    while True:
        seed = derive_seed(panel.seed, "evaluation", task, sample, number)
        agent = PromptedAgent(chat, panel.prompting, profile, seed, reflections)
        played = play(
            env,
            profile,
            agent,
            name=name,
            seed=panel.seeds[task],
            options=options,
            max_steps=panel.max_steps,
        )
        number += 1
        if _won(played) or number == panel.tries:
            break
        reflections.append(reflect(chat, played, seed))
    return {
        "task": task,
        "sample": sample,
        "env_seed": panel.seeds[task],
        "tries": number,
        **_outcome(played),
    }


def _won(played: Played) -> bool:
    """Whether the environment says so; one that says nothing is won by a positive return."""
    return bool(played.verdict.get("won", played.total > 0))


def _outcome(played: Played) -> dict[str, Any]:
    verdict = played.verdict
    valid = [
        float(step_is_valid(single, step))
        for _, single in agent_episodes(played.episode)
        for step in range(len(single))
    ]
    return {
        "task_id": verdict.get("task_id"),
        "task_type": None if (kind := verdict.get("task_type")) is None else str(kind),
        "won": _won(played),
        "return": played.total,
        "steps": played.episode.env_steps(),
        "valid_action_rate": float(np.mean(valid)) if valid else 0.0,
        "numbers": {key: _finite(value) for key, value in verdict["numbers"].items()},
    }


def _finite(value: Any) -> float | None:
    """Return a number as JSON has it; None is one that is not finite, too large or not real."""
    try:
        return jsonable(float(value))
    except (OverflowError, TypeError):
        return None


def task_ids(records: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the task ids in the order of the panel."""
    return [record["task_id"] for record in records if record["sample"] == 0]
