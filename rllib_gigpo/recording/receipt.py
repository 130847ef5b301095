"""The receipt of a run: what it was, what it cost, and how to repeat it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rllib_gigpo.recording.folder import RunFolder, read_json, read_lines

# The parts of an iteration that follow one another (the paper's Figure 6).
PHASES = (
    "rollout",
    "grouping",
    "old_logp",
    "ref_logp",
    "advantages",
    "update",
    "wait_for_rollout",
    "sync",
)


def seconds_by_phase(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of one iteration's phases; "other" is what none of them counts."""
    timers = _mapping(line.get("timers"))
    found = {name: _number(timers[name]) for name in PHASES if timers.get(name) is not None}
    other = _number(line.get("seconds")) - sum(found.values())
    return {**found, "other": max(0.0, other)}


@dataclass
class Costs:
    """What the iterations of a run came to, however many there are.

    Attributes:
        hours: By phase.
        tokens: By kind.
        env_steps: All that were played.
        episodes: All that were played.
        last: Metrics of the last iteration.
    """

    hours: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "response": 0})
    env_steps: int = 0
    episodes: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, metrics: Iterable[Mapping[str, Any]]) -> Self:
        """Return the costs of iterations, in order."""
        costs = cls()
        for line in metrics:
            costs.add(line)
        return costs

    def add(self, line: Mapping[str, Any]) -> None:
        """Count the next iteration in."""
        for phase, seconds in seconds_by_phase(line).items():
            self.hours[phase] = self.hours.get(phase, 0.0) + seconds / 3600.0
        found = _mapping(line.get("env_runners"))
        for kind in self.tokens:
            self.tokens[kind] += int(_number(found.get(f"num_{kind}_tokens")))
        self.env_steps += int(_number(found.get("num_env_steps_sampled")))
        self.episodes += int(_number(found.get("num_episodes")))
        self.last = line

    @property
    def iterations(self) -> int:
        """Number of the last iteration; 0 where there is none."""
        return int(_number(self.last.get("iteration")))


def receipt_of(run: Mapping[str, Any], costs: Costs) -> dict[str, Any]:
    """Put a run's receipt together.

    Args:
        run: Content of `run.json`.
        costs: Of the lines of `metrics.jsonl`.

    Returns:
        `run` (what it was), `cost` (hours by phase, tokens by kind, price), `result` (of the last
        iteration) and `repeat` (the command).
    """
    total = sum(costs.hours.values())
    rate = None if run.get("price_per_hour") is None else _number(run["price_per_hour"])
    played = _mapping(costs.last.get("env_runners"))
    kept = ("success_rate", "episode_return_mean", "episode_len_mean", "valid_action_rate")
    named = ("algorithm", "env", "env_config", "model", "seeds", "changed", "versions", "commits")
    return {
        "run": {
            "run_id": run.get("run_id"),
            **{name: run.get(name) for name in (*named, "machine", "data")},
            "started": [str(_mapping(start).get("time")) for start in _list(run.get("starts"))],
            "iterations": costs.iterations,
        },
        "cost": {
            "hours": {name: round(value, 6) for name, value in costs.hours.items()},
            "hours_total": round(total, 6),
            "tokens": dict(costs.tokens),
            "env_steps": costs.env_steps,
            "episodes": costs.episodes,
            "price_per_hour": rate,
            "price": None if rate is None else round(rate * total, 4),
        },
        "result": {name: played[name] for name in kept if name in played},
        "repeat": run.get("command"),
    }


def read_receipt(path: Any) -> dict[str, Any]:
    """Return the receipt of a run folder, from the files that it was made of.

    Raises:
        FileNotFoundError: The folder holds no run.
    """
    folder = RunFolder(path)
    run = read_json(folder.inside(folder.run))
    metrics = folder.inside(folder.metrics)
    return receipt_of(run, Costs.of(read_lines(metrics) if metrics.exists() else ()))


def receipt_text(receipt: Mapping[str, Any]) -> str:
    """Return a receipt as Markdown."""
    run, cost = receipt["run"], receipt["cost"]
    lines = [
        f"# Receipt of {_code(run['algorithm'])} on {_code(run['env'])}",
        "",
        "## What it was",
        "",
        f"- run {_code(run['run_id'])}, {run['iterations']} iterations, started "
        f"{', '.join(run['started']) or 'at an unknown time'}",
        f"- model {_code(run['model'])}",
        *(f"- seed: {name} {value}" for name, value in _mapping(run["seeds"]).items()),
        *_commits(_mapping(run["commits"])),
        f"- versions: {_pairs(_mapping(run['versions']))}",
    ]
    for data in map(_mapping, _list(run["data"])):
        size = f"{data.get('files')} files, {_number(data.get('bytes')):,.0f} bytes"
        digest = _code(data.get("sha256"))
        lines.append(f"- data: {_code(data.get('path'))}, {size}, sha256 {digest}")
    lines.append("- settings that differ from the defaults:")
    lines += [f"  - {name} = {_code(value)}" for name, value in _mapping(run["changed"]).items()]
    lines += [
        "",
        "## What it cost",
        "",
        f"- {cost['hours_total']:.3f} hours: "
        + ", ".join(f"{name} {hours:.3f}" for name, hours in cost["hours"].items()),
        f"- tokens: {cost['tokens']['prompt']:,} prompt, {cost['tokens']['response']:,} response",
        f"- {cost['episodes']:,} episodes, {cost['env_steps']:,} environment steps",
    ]
    if cost["price"] is not None:
        lines.append(f"- price: {cost['price']:.2f} at {cost['price_per_hour']} an hour")
    if receipt["result"]:
        result = receipt["result"].items()
        told = ", ".join(f"{name} {_number(value):.4g}" for name, value in result)
        lines += ["", "## What came of it", "", f"- last iteration: {told}"]
    lines += ["", "## How to repeat it", ""]
    if receipt["repeat"]:
        lines.append(f"    {receipt['repeat']}")
    else:
        lines.append("- no command is known: the settings above were given by a Python program")
    return "\n".join(lines) + "\n"


def _commits(commits: Mapping[str, Any]) -> list[str]:
    """Return a line per commit: most often package and working folder are of the same one."""
    names: dict[str, list[str]] = {}
    for name, commit in commits.items():
        names.setdefault(_code(commit), []).append(name.replace("_", " "))
    return [f"- commit of the {' and the '.join(of)}: {commit}" for commit, of in names.items()]


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, and an empty one for anything else a damaged file may hold."""
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    """Return a list as it is, and an empty one for anything else."""
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    """Return a number as it is, and 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else 0.0


def _pairs(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in named.items())


def _code(value: Any) -> str:
    text = str(value).replace("`", "'").replace("\n", " ")
    return f"`{text}`"
