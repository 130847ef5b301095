"""From a run folder to what the page shows, as plain JSON."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rllib_gigpo.recording.folder import RunFolder, read_json, read_lines
from rllib_gigpo.recording.receipt import PHASES, Costs, receipt_of
from rllib_gigpo.recording.rollout_rows import FIELDS, read_rows

PICTURE_NAME = re.compile(r"[0-9a-f]{32}")

_LARGEST_PICTURE = 4 * 2**20


def open_run(path: str | Path) -> RunFolder:
    """Return a run folder, or say what is wrong with the path.

    Args:
        path: The folder of a run, or one with a single run in it, such as the results of a tuned
            example.

    Raises:
        ValueError: No run is there, or several are below it; they are listed.
    """
    folder = RunFolder(path)
    if folder.run.is_file():
        return folder
    if not folder.path.is_dir():
        raise ValueError(f"{folder.path} is no folder: expected a run folder, which holds run.json")
    below = sorted(found.parent for found in folder.path.glob("*/run.json"))
    below += sorted(found.parent for found in folder.path.glob("*/*/run.json"))
    if len(below) == 1:
        return RunFolder(below[0])
    if below:
        names = "".join(f"\n  {found}" for found in below[:20])
        raise ValueError(f"{folder.path} holds {len(below)} runs, choose one:{names}")
    raise ValueError(
        f"{folder.path} holds no run.json: expected the folder of a run, see recording(folder=...)"
    )


def run_data(folder: RunFolder, *, after: int = 0) -> dict[str, Any]:
    """Return everything but the rollouts.

    Args:
        folder: The run folder.
        after: Leave out the lines of iterations up to this one.
    """
    run = read_json(folder.inside(folder.run))
    if not isinstance(run, dict):
        raise ValueError(f"{folder.run}: expected a JSON object")
    metrics = _lines(folder, folder.metrics)
    return {
        "run": run,
        "metrics": [line for line in metrics if _number(line) > after],
        "evaluations": _lines(folder, folder.evaluations),
        "events": _lines(folder, folder.events),
        "receipt": receipt_of(run, Costs.of(metrics)),
        "iterations": folder.recorded_iterations(),
        "phases": [*PHASES, "other"],
    }


def state(folder: RunFolder) -> dict[str, Any]:
    """Return what changes when a run goes on: the iterations that are there."""
    lines = _lines(folder, folder.metrics)
    return {
        "last": _number(lines[-1]) if lines else 0,
        "evaluations": len(_lines(folder, folder.evaluations)),
        "events": len(_lines(folder, folder.events)),
        "iterations": folder.recorded_iterations(),
    }


def rollout_data(folder: RunFolder, iteration: int) -> dict[str, Any]:
    """Return the rows of an iteration, each text once.

    Returns:
        `fields`; `rows`, lists in the order of `fields`, with a text replaced by its number in
        `texts`; `pictures`, PNG files in base64 by digest.

    Raises:
        FileNotFoundError: There is no such iteration.
    """
    rows = _rows(folder, iteration)
    texts: dict[str, int] = {}
    table = [[_cell(row.get(name), texts) for name in FIELDS] for row in rows]
    return {
        "iteration": iteration,
        "fields": list(FIELDS),
        "text_fields": [name for name, kind in FIELDS.items() if kind == "string"],
        "rows": table,
        "texts": list(texts),
        "pictures": _pictures(folder, rows),
    }


def _rows(folder: RunFolder, iteration: int) -> list[dict[str, Any]]:
    lines = folder.inside(folder.rollout_file(iteration))
    if lines.exists():
        return read_lines(lines)
    return read_rows(folder.inside(folder.rollout_file(iteration, "parquet")))


def _cell(value: Any, texts: dict[str, int]) -> Any:
    if isinstance(value, str):
        return texts.setdefault(value, len(texts))
    return value if value is None or isinstance(value, bool | int | float) else None


def _pictures(folder: RunFolder, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    named = {
        name
        for row in rows
        for field in ("picture", "prompt_pictures", "last_picture")
        for name in str(row.get(field) or "").split()
    }
    found = {}
    for name in sorted(named):
        path = folder.pictures / f"{name}.png"
        if not PICTURE_NAME.fullmatch(name) or not path.is_file():
            continue
        if folder.inside(path).stat().st_size <= _LARGEST_PICTURE:
            found[name] = base64.b64encode(path.read_bytes()).decode()
    return found


def _lines(folder: RunFolder, path: Path) -> list[dict[str, Any]]:
    return read_lines(folder.inside(path)) if path.exists() else []


def _number(line: Mapping[str, Any]) -> int:
    number = line.get("iteration")
    return number if isinstance(number, int) else 0
