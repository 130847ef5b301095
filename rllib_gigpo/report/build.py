"""Puts the page together: HTML, style, scripts and data in one file, without network."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from rllib_gigpo.recording.folder import RunFolder, write_bytes
from rllib_gigpo.report.data import open_run, rollout_data, run_data

_SCRIPTS = ("base.js", "charts.js", "overview.js", "explorer.js", "main.js")
_MB = 2**20
_OWN_SERVER, _NOTHING = "'self'", "'none'"


def write_report(
    path: str | Path, output: str | Path | None = None, *, max_mb: float = 40.0
) -> Path:
    """Write the report of a run.

    Args:
        path: The run folder.
        output: The HTML file; by default `report.html` in the run folder.
        max_mb: Size that the embedded rollouts may have together; where they have more, evenly
            spread iterations are left out.

    Returns:
        The file that was written.

    Raises:
        ValueError: There is no run at the path, or a file of it is damaged.
    """
    folder = open_run(path)
    target = Path(output) if output is not None else folder.path / "report.html"
    write_bytes(target, report_html(folder, max_mb=max_mb).encode())
    return target


def report_html(folder: RunFolder, *, max_mb: float = 40.0) -> str:
    """Return the page with all data in it.

    Args:
        folder: The run folder.
        max_mb: As in `write_report`.
    """
    data = run_data(folder)
    blobs = _rollouts(folder, data["iterations"], max_mb)
    data["recorded"] = data["iterations"]
    data["iterations"] = sorted(blobs)
    return page(data, blobs)


def _rollouts(folder: RunFolder, iterations: list[int], max_mb: float) -> dict[int, str]:
    """Return the JSON of as many iterations as fit, evenly spread, the last one first of all."""
    found: dict[int, str] = {}
    left = max_mb * _MB
    for iteration in spread_order(iterations):
        blob = embedded(rollout_data(folder, iteration))
        if found and len(blob) > left:
            break
        found[iteration] = blob
        left -= len(blob)
    return found


def spread_order(items: list[int]) -> list[int]:
    """Return the items so that every beginning of the list is spread over all of them.

    The last item comes first, then the first one, then always the middle of the widest gap.
    """
    if len(items) < 3:
        return items[::-1]
    order, gaps = [items[-1], items[0]], [(0, len(items) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(items[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def page(data: dict[str, Any], rollouts: dict[int, str], *, live: bool = False) -> str:
    """Return the HTML page.

    Args:
        data: What `run_data` returned.
        rollouts: Embedded JSON per iteration.
        live: Whether the page asks its server for what is new.

    Returns:
        A page whose content policy allows its own script and style and nothing else, so that
        markup in the data could run nothing even if it got out of its place.
    """
    style = _asset("page.css")
    script = "\n".join(map(_asset, _SCRIPTS))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "img-src data:",
            f"connect-src {_OWN_SERVER if live else _NOTHING}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "policy": policy,
        "style": style,
        "data": embedded({**data, "live": live}),
        "rollouts": "\n".join(
            f'<script type="application/json" id="rollouts-{number}">{blob}</script>'
            for number, blob in sorted(rollouts.items())
        ),
        "script": script,
    }
    pieces = _asset("page.html").split("%%")
    # Every second piece is the name of a part; what is put in is not looked at again.
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def embedded(value: Any) -> str:
    """Return JSON that can stand inside a script element: nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _asset(name: str) -> str:
    return resources.files("rllib_gigpo.report").joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
