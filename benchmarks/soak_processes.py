"""What the processes of a run hold: memory, descriptors, threads, shared memory, files. Linux only.

Everything is read from /proc, from outside, so that what is measured does not know of it.

Memory is anonymous memory (`Pss_Anon` and `SwapPss` of `smaps_rollup`): heaps, stacks, tensors. A
leak is in there. What resident size counts besides are pages of files (code, libraries), which come
and go with the page cache, and pages of shared memory, which every process that maps Ray's object
store counts again; shared memory is counted once, for the run as a whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

MIB = 2**20
_PROC = Path("/proc")
_SHM = Path("/dev/shm")
_ANONYMOUS = re.compile(r"^(?:Pss_Anon|SwapPss):\s+(\d+) kB$", re.MULTILINE)
# Files that exist while something is being written, and never after it.
_HALF_WRITTEN = re.compile(
    r"\.tmp|^tmp|\.partial-[0-9a-f]+$|^\..+\.\d+$|^\.[^.]+\.[0-9a-f]{32}$|~$", re.IGNORECASE
)


class Process(NamedTuple):
    """One process at one moment.

    Attributes:
        key: "pid:start"; pids are used again, this is not.
        name: What it is called now: the class of a Ray actor, or the program.
        memory_mib: Anonymous memory.
        fds: Open file descriptors.
        threads: Threads.
    """

    key: str
    name: str
    memory_mib: float
    fds: int
    threads: int


def marked(variable: str, value: str) -> list[int]:
    """Return the processes that were started with an environment variable of this value.

    Children inherit it, those that left their parents too. Processes that have ended and wait for
    their parent to take notice have none.
    """
    wanted = f"{variable}={value}".encode()
    return [pid for pid in _pids() if wanted in _environment(pid)]


def _pids() -> list[int]:
    return sorted(int(path.name) for path in _PROC.iterdir() if path.name.isdigit())


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return []


def look_at(pid: int) -> Process | None:
    """Return what a process holds, or None where it has ended."""
    place = _PROC / str(pid)
    try:
        memory = sum(map(int, _ANONYMOUS.findall((place / "smaps_rollup").read_text())))
        after_name = (place / "stat").read_text().rpartition(")")[2].split()
        command = (place / "cmdline").read_bytes()
        fds = len(os.listdir(place / "fd"))
    except OSError:
        return None
    if not command:  # it has ended since its memory was read
        return None
    # Fields 20 and 22 of proc(5)'s `stat`; what stands behind the name begins with field 3.
    threads, start = int(after_name[17]), after_name[19]
    return Process(f"{pid}:{start}", name_of(command), memory / 1024, fds, threads)


def name_of(command: bytes) -> str:
    """Return what a process is called, from its command line.

    Examples:
        `ray::GiGPO.train` -> "GiGPO"; `ray::IDLE` -> "IDLE"; `.../gcs/gcs_server --log_dir=...` ->
        "gcs_server"; `python -u .../ray/_private/log_monitor.py` -> "log_monitor"; `python -m
        benchmarks.soak` -> "benchmarks.soak".
    """
    words = [word.decode(errors="replace") for word in re.split(rb"[\0 ]+", command) if word]
    if not words:
        return "?"
    if words[0].startswith("ray::"):
        return re.split(r"[.(]", words[0].removeprefix("ray::"))[0] or "?"
    program = Path(words[0]).name
    if program.startswith("python"):
        for before, word in pairwise(words):
            if before == "-m":
                return word
            if word.endswith(".py"):
                return Path(word).stem
    return program


def shared_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of shared memory that processes hold open, every file once.

    Files without a name count too: Ray's object store has none. A file of 10 GB that nobody has
    written into has no bytes.
    """
    device = os.stat(_SHM).st_dev
    sizes = {}
    for pid in pids:
        for status in _open_files(pid):
            if status.st_dev == device:
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _open_files(pid: int) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError):
        for name in os.listdir(_PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):
                yield os.stat(_PROC / str(pid) / "fd" / name)


def shared_names() -> set[str]:
    """Return the names in /dev/shm and the numbers of the System V segments of this machine."""
    names = {f"/dev/shm/{path.name}" for path in _SHM.iterdir()}
    segments = (_PROC / "sysvipc/shm").read_text().splitlines()[1:]
    return names | {f"System V {line.split()[1]}" for line in segments}


def count_files(folder: Path) -> int:
    """Return how many files, links and sockets lie in a folder and below."""
    return sum(len(files) for _, _, files in os.walk(folder))


def half_written(folder: Path) -> list[str]:
    """Return files and folders whose names say that they are not finished."""
    found = []
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if _HALF_WRITTEN.search(name):
                found.append(str(Path(parent, name).relative_to(folder)))
    return sorted(found)


def sample(pids: Iterable[int], folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return what processes and folders hold, as plain JSON.

    Args:
        pids: The processes.
        folders: Whose files are counted, by name.
    """
    pids = list(pids)
    processes = [found for found in map(look_at, pids) if found is not None]
    return {
        "processes": {found.key: list(found[1:]) for found in processes},
        "shm_mib": shared_bytes(pids) / MIB,
        "files": {name: count_files(folder) for name, folder in folders.items()},
    }
