"""Python in a process of its own: a cluster of its own, a fresh hash seed, a peak of memory."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# The answer has a file of its own: anything may be printed, also at the very end.
_CALL = """
import importlib, json, pathlib, sys
answer, module, name, *arguments = sys.argv[1:]
found = getattr(importlib.import_module(module), name)(*arguments)
pathlib.Path(answer).write_text(json.dumps(found))
"""


def run_python(
    *arguments: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, which has to be a good one.

    Args:
        *arguments: As on the command line: "-c" and code, "-m" and a module, or a script.
        cwd: Where; by default the repository's root.
        env: Variables besides those of this process.
        timeout: Seconds that it may take.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


def call(function: Callable[..., Any], *arguments: str | Path, **how: Any) -> Any:
    """Call a function of a file of the tests in a process of its own.

    Args:
        function: Takes strings, and returns what can be written as JSON.
        *arguments: Its arguments.
        **how: As of `run_python`.
    """
    file = Path(inspect.getfile(function)).relative_to(ROOT)
    module = ".".join(file.with_suffix("").parts)
    with TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        run_python("-c", _CALL, answer, module, function.__name__, *arguments, **how)
        return json.loads(answer.read_text())
