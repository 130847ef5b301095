"""Rollouts as flat rows: one per environment step of one agent, as JSON lines and as Parquet."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.policy.sample_batch import MultiAgentBatch

from rllib_gigpo.advantages import Advantages
from rllib_gigpo.metrics import episode_return
from rllib_gigpo.observations import state_key
from rllib_gigpo.recording.pictures import png
from rllib_gigpo.rows import agent_episodes, modules_of

Episode = SingleAgentEpisode | MultiAgentEpisode
Decode = Callable[[np.ndarray], str]

# What a row holds, with its type in Parquet. docs/report.md explains each.
FIELDS = {
    "iteration": "int64",
    "module": "string",
    "group": "int64",
    "member": "int64",
    "episode": "int64",
    "agent": "string",
    "step": "int64",
    "turn": "int64",
    "env_seed": "int64",
    "task_id": "string",
    "task_type": "string",
    "task": "string",
    "observation": "string",
    "picture": "string",
    "prompt_pictures": "string",
    "anchor": "int64",
    "anchor_text": "string",
    "prompt": "string",
    "response": "string",
    "action": "string",
    "format_valid": "bool_",
    "valid": "bool_",
    "finish_reason": "string",
    "weight_version": "int64",
    "prompt_tokens": "int64",
    "response_tokens": "int64",
    "engine_logp": "float64",
    "reward": "float64",
    "step_return": "float64",
    "episode_return": "float64",
    "advantage_episode": "float64",
    "advantage_step": "float64",
    "advantage": "float64",
    "anchor_size": "int64",
    "terminated": "bool_",
    "truncated": "bool_",
    "won": "bool_",
    "last_observation": "string",
    "last_picture": "string",
}
# Only in Parquet, where lists of numbers are small.
TOKEN_FIELDS = ("prompt_ids", "response_ids")


@dataclass(frozen=True)
class Iteration:
    """What one iteration was trained on.

    Attributes:
        number: From 1, as RLlib counts.
        episodes: All episodes.
        batch: Their rows, as the learners got them.
        advantages: Per module of each row, as the learners computed them.
    """

    number: int
    episodes: Sequence[Episode]
    batch: MultiAgentBatch
    advantages: Mapping[str, Advantages]


@dataclass(frozen=True)
class Rollouts:
    """The rows of an iteration in the order (module, group, member, step).

    Attributes:
        rows: Values of `FIELDS`.
        tokens: Values of `TOKEN_FIELDS`, row for row.
        pictures: PNG files by the digest that rows name.
    """

    rows: list[dict[str, Any]]
    tokens: list[dict[str, np.ndarray]]
    pictures: dict[str, bytes]


def rollouts_of(iteration: Iteration, decode: Decode, max_groups: int | None) -> Rollouts:
    """Describe the rows of the first groups of an iteration.

    Args:
        iteration: The iteration.
        decode: From token ids to their text, special tokens included.
        max_groups: Number of groups that are kept, or None for all.
    """
    found = Rollouts([], [], {})
    ordered = sorted(
        iteration.episodes, key=lambda e: (e.custom_data["group"], e.custom_data["member"])
    )
    groups = sorted({episode.custom_data["group"] for episode in ordered})[:max_groups]
    seats: dict[tuple[int, str], _Seat] = {}
    texts = _Texts(decode)
    for module, columns in modules_of(iteration.batch):
        advantages = iteration.advantages.get(module)
        for place in np.flatnonzero(np.isin(columns["group"], groups)).tolist():
            seat = int(columns["episode"][place]), str(columns["agent_id"][place])
            if seat not in seats:
                seats[seat] = _seat(ordered[seat[0]], *seat)
            row = {
                "iteration": iteration.number,
                "module": module,
                **_played(seats[seat], columns, place, found.pictures),
                "prompt": texts(columns["prompt_ids"][place]),
                "response": texts(columns["response_ids"][place]),
                **_judged(advantages, place),
            }
            found.rows.append({name: row[name] for name in FIELDS})
            found.tokens.append({name: columns[name][place] for name in TOKEN_FIELDS})
    return found


class _Texts:
    """Decodes each distinct sequence once: many rows of a group see the same prompt."""

    def __init__(self, decode: Decode):
        self._decode = decode
        self._known: dict[bytes, str] = {}

    def __call__(self, ids: np.ndarray) -> str:
        key = ids.tobytes()
        if key not in self._known:
            self._known[key] = self._decode(ids)
        return self._known[key]


class _Seat(NamedTuple):
    """One agent's side of an episode, and what all of its rows say alike."""

    single: SingleAgentEpisode
    turns: list[int]
    facts: dict[str, Any]


def _seat(episode: Episode, number: int, agent: str) -> _Seat:
    facts = episode.custom_data
    return _Seat(
        single=next(single for name, single in agent_episodes(episode) if str(name) == agent),
        turns=_turns(episode, agent),
        facts={
            "group": facts["group"],
            "member": facts["member"],
            "episode": number,
            "agent": agent,
            "env_seed": facts.get("env_seed"),
            "task_id": _text(facts.get("task_id")),
            "task_type": _text(facts.get("task_type")),
            "task": _text(facts.get("task")),
            "episode_return": episode_return(episode),
            "won": bool(facts["won"]) if "won" in facts else None,
            "terminated": bool(episode.is_terminated),
            "truncated": bool(episode.is_truncated),
        },
    )


def _played(
    seat: _Seat, columns: Mapping[str, np.ndarray], place: int, pictures: dict[str, bytes]
) -> dict[str, Any]:
    """Return what the rollout says of a row."""
    single, step = seat.single, int(columns["step"][place])
    extras, info = single.extra_model_outputs, single.infos[step]
    is_last = step == len(single) - 1
    text, picture = shown_state(info["observation"], pictures)
    last = (None, None)
    if is_last:
        last = shown_state(single.infos[step + 1]["observation"], pictures)
    return {
        **seat.facts,
        "step": step,
        "turn": seat.turns[step],
        "observation": text,
        "picture": picture,
        "prompt_pictures": _prompt_pictures(info.get("images", ()), pictures),
        "anchor": int(columns["anchor"][place]),
        "anchor_text": _anchor_text(info["anchor"], text),
        "action": extras["action_text"][step],
        "format_valid": bool(extras["format_is_valid"][step]),
        "valid": bool(columns["valid"][place]),
        "finish_reason": str(extras["finish_reason"][step]),
        "weight_version": int(columns["weight_version"][place]),
        "prompt_tokens": int(columns["num_prompt_tokens"][place]),
        "response_tokens": int(columns["num_response_tokens"][place]),
        "engine_logp": float(columns["engine_logp"][place]),
        "reward": float(columns["reward"][place]),
        "terminated": seat.facts["terminated"] and is_last,
        "truncated": seat.facts["truncated"] and is_last,
        "last_observation": last[0],
        "last_picture": last[1],
    }


def _judged(advantages: Advantages | None, place: int) -> dict[str, Any]:
    """Return what the learner says of a row; None where its module was not trained."""
    names = {
        "step_return": "step_return",
        "advantage_episode": "episode",
        "advantage_step": "step",
        "advantage": "total",
        "anchor_size": "step_group_size",
    }
    if advantages is None:
        return dict.fromkeys(names)
    return {name: getattr(advantages, field)[place].item() for name, field in names.items()}


def _turns(episode: Episode, agent: str) -> list[int]:
    """Return the environment step of each of an agent's steps."""
    if isinstance(episode, SingleAgentEpisode):
        return list(range(len(episode)))
    mapping = next(m for name, m in episode.env_t_to_agent_t.items() if str(name) == agent)
    return [turn for turn, own in enumerate(_items(mapping)) if own != episode.SKIP_ENV_TS_TAG]


def _items(buffer: Any) -> Iterator[Any]:
    return iter(getattr(buffer, "data", buffer))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _anchor_text(anchor: Any, shown: str | None) -> str | None:
    """Return an anchor that is neither the observation itself nor the digest of a picture."""
    is_told = isinstance(anchor, str | int | tuple) and anchor != shown
    has_digest = isinstance(anchor, tuple) and any(isinstance(part, bytes) for part in anchor)
    return str(anchor) if is_told and not has_digest else None


def shown_state(
    observation: Any, pictures: dict[str, bytes] | None = None
) -> tuple[str | None, str | None]:
    """Return the text of an observation and the digest of its picture, those there are.

    Args:
        observation: A text, a picture, or a mapping of "text" and "image".
        pictures: Takes the picture in, as a PNG file.
    """
    if isinstance(observation, str):
        return observation, None
    text, image = None, observation
    if isinstance(observation, Mapping):
        text, image = observation["text"], observation["image"]
    digest = state_key(image).hex()
    if pictures is not None and digest not in pictures:
        pictures[digest] = png(image)
    return text, digest


def _prompt_pictures(placed: Sequence[Any], pictures: dict[str, bytes]) -> str | None:
    """Return the digests of the pictures that the prompt shows, in order."""
    names = [shown_state(each.picture.pixels, pictures)[1] or "" for each in placed]
    return " ".join(names) or None


def worst_episodes(rows: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return what the worst episodes came to: least return first, then most invalid actions.

    Args:
        rows: Rows of an iteration.
        count: How many episodes.
    """
    found: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["group"], row["member"]), []).append(row)
    episodes = [
        {
            "group": group,
            "member": member,
            "return": played[0]["episode_return"],
            "steps": len(played),
            "invalid_actions": sum(not row["valid"] for row in played),
            "last_response": played[-1]["response"],
        }
        for (group, member), played in found.items()
    ]
    episodes.sort(key=lambda e: (e["return"], -e["invalid_actions"], e["group"], e["member"]))
    return episodes[:count]


def parquet_of(rollouts: Rollouts) -> bytes:
    """Return the rows as a Parquet file: `FIELDS`, and the token ids as lists of int32."""
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = {
        name: pyarrow.array(
            [_storable(row[name]) for row in rollouts.rows], getattr(pyarrow, kind)()
        )
        for name, kind in FIELDS.items()
    }
    for name in TOKEN_FIELDS:
        ids = [tokens[name] for tokens in rollouts.tokens]
        columns[name] = pyarrow.array(ids, pyarrow.list_(pyarrow.int32()))
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer, compression="zstd")
    return buffer.getvalue()


def _storable(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 cannot hold."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def read_rows(path: Any) -> list[dict[str, Any]]:
    """Read the rows of a Parquet file, as dictionaries of plain values."""
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()
