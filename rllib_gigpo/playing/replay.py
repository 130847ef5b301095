"""Recorded episodes, played again up to a step, and then on by someone else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.commands import json_object
from rllib_gigpo.games import Game
from rllib_gigpo.playing.desk import Asked, KnownResponse, Player, Watch
from rllib_gigpo.playing.play import Played, WatchError, play
from rllib_gigpo.recording.folder import RunFolder, read_json, read_lines
from rllib_gigpo.recording.rollout_rows import read_rows, shown_state
from rllib_gigpo.strangers import check_name, check_settings

Row = Mapping[str, Any]


class ReplayError(WatchError):
    """The environment did not do again what was recorded."""


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode out of a run folder.

    Attributes:
        rows: Its rows, of all agents.
        run: Content of the run's `run.json`; empty where there is none.
    """

    rows: tuple[Row, ...]
    run: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """Reset seed of the environment."""
        return int(self.rows[0]["env_seed"])

    @property
    def length(self) -> int:
        """Steps of the environment."""
        return 1 + max(row["turn"] for row in self.rows)


def load_episode(path: str | Path, *, group: int = 0, member: int = 0) -> RecordedEpisode:
    """Read one episode of an iteration's rollouts.

    Args:
        path: A file below `rollouts/` of a run folder, JSON lines or Parquet.
        group: Its group.
        member: Its place in the group.

    Raises:
        ValueError: The file is none of the two kinds, is damaged, or has no such episode.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file: expected RUN/rollouts/000001.jsonl or .parquet")
    rows = _read(path)
    found = [row for row in rows if row.get("group") == group and row.get("member") == member]
    if not found:
        known = sorted({str((row.get("group"), row.get("member"))) for row in rows})
        raise ValueError(
            f"{path} has no member {member} of group {group}: it has (group, member) "
            f"{', '.join(known[:20])}"
        )
    for row in found:
        _check_row(row, path)
    return RecordedEpisode(
        tuple(sorted(found, key=lambda row: (row["turn"], row["agent"]))), _run_of(path)
    )


def _run_of(path: Path) -> dict[str, Any]:
    """Return the content of the `run.json` that belongs to a file of rollouts."""
    file = RunFolder(path.absolute().parents[1]).run
    run = read_json(file) if file.is_file() else {}
    if not isinstance(run, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return run


def recorded_env(
    recorded: RecordedEpisode,
    source: str | Path,
    env: str | None = None,
    env_config: str | None = None,
    *,
    trust: bool = False,
) -> tuple[str, Mapping[str, Any]]:
    """Return name and settings of the environment that an episode is re-created in.

    Args:
        recorded: The episode.
        source: The file that it was read from, for errors.
        env: The name that the user gave; None takes the recorded one.
        env_config: The same of the settings, as JSON.
        trust: Take what is recorded, whatever that runs.

    Raises:
        ValueError: No environment is named, or what is recorded may run code of its author's (see
            `rllib_gigpo.strangers`).
    """
    named_by, otherwise = f"the run of {source}", "or say --trust-run if you trust its author"
    name = env or recorded.run.get("env")
    if not isinstance(name, str):
        raise ValueError(f"{source} lies in no run folder: say --env and --env-config")
    if not (env or trust):
        check_name(name, named_by=named_by, cure=f"name it yourself with --env, {otherwise}")
    if env_config is not None:
        return name, json_object(env_config, "--env-config")
    settings = recorded.run.get("env_config") or {}
    if not trust:
        cure = f"give the settings yourself with --env-config, {otherwise}"
        check_settings(settings, named_by=named_by, cure=cure)
    return name, settings


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return read_lines(path)
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: expected a .jsonl or .parquet file")
    import pyarrow

    try:
        return read_rows(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is no Parquet file ({error})") from error


_NEEDED = {
    "turn": int,
    "step": int,
    "agent": str,
    "action": str,
    "response": str,
    "format_valid": bool,
    "env_seed": int,
    "reward": int | float,
}


def _check_row(row: Row, path: Path) -> None:
    for name, kind in _NEEDED.items():
        if not isinstance(row.get(name), kind):
            raise ValueError(
                f"{path}: {name!r} of a row is {row.get(name)!r}; it was not written by a run, or "
                "is damaged"
            )


def check_start(recorded: RecordedEpisode, start: int) -> None:
    """Refuse a step that a recorded episode does not have.

    Raises:
        ValueError: The episode is shorter.
    """
    if not 0 <= start <= recorded.length:
        raise ValueError(
            f"step {start} is not in the episode, which has {recorded.length} steps (0 to "
            f"{recorded.length - 1})"
        )


def replay(
    recorded: RecordedEpisode,
    env: Any,
    profile: AgentProfile,
    player: Player,
    *,
    start: int,
    name: str = "the environment",
    max_steps: int | None = None,
    watch: Watch | None = None,
) -> Played:
    """Re-create a recorded episode up to a step, and let a player go on from there.

    The environment is reset with the recorded seed and gets the recorded actions; what it shows
    and, where one agent plays, what it rewards is compared at every step.

    Args:
        recorded: The episode.
        env: A new environment, made with the recorded settings.
        profile: The agent; its memory takes the recorded steps in.
        player: Plays from the step on.
        start: Steps of the environment that are re-created, 0 to the length of the episode.
        name: The environment's name, for messages.
        max_steps: Steps of an agent after which the episode is truncated.
        watch: Called after the reset and every step.

    Raises:
        ValueError: The episode is shorter.
        ReplayError: The environment showed or rewarded something else; the step is named.
    """
    check_start(recorded, start)
    known = {(row["agent"], row["step"]): row for row in recorded.rows if row["turn"] < start}
    check = _Check(recorded.rows, start)

    def answer(asked: Asked) -> Any:
        row = known.get((asked.agent, asked.step))
        if row is None:
            return player(asked)
        return KnownResponse(row["response"], row["action"], row["format_valid"])

    def see(turn: int, actions: Any, observations: Any, rewards: Any, infos: Any, g: Game) -> None:
        check(turn, observations, rewards)
        if watch is not None:
            watch(turn, actions, observations, rewards, infos, g)

    return play(
        env,
        profile,
        answer,
        name=name,
        seed=recorded.seed,
        max_steps=max_steps,
        watch=see,
    )


class _Check:
    """Compares what the environment does with what was recorded."""

    def __init__(self, rows: Sequence[Row], start: int):
        self._start = start
        self._is_solo = len({row["agent"] for row in rows}) == 1
        self._rows = {(row["turn"], row["agent"]): row for row in rows}

    def __call__(self, turn: int, observations: Any, rewards: Any) -> None:
        if turn > self._start:
            return
        for agent, observation in observations.items():
            row = self._rows.get((turn, str(agent)))
            if row is None:
                continue
            text, picture = shown_state(observation)
            self._same(turn, "observation", row.get("observation"), text)
            self._same(turn, "picture", row.get("picture"), picture)
        if self._is_solo and turn > 0:
            for agent, reward in rewards.items():
                self._same(turn - 1, "reward", self._rows[turn - 1, str(agent)]["reward"], reward)

    def _same(self, turn: int, what: str, recorded: Any, found: Any) -> None:
        if recorded != found:
            raise ReplayError(
                f"step {turn}: the recorded {what} is {recorded!r}, and the environment gave "
                f"{found!r}; it is not the recorded one, was made with other settings or data, or "
                "does not depend on its seed alone"
            )
