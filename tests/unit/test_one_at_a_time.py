"""A lock keeps a second process out, ends with the first one, and is not asked of disks without."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rllib_gigpo import one_at_a_time
from rllib_gigpo.one_at_a_time import alone
from tests.child import ROOT

# Holds the lock, tells so, and leaves it to the parent when to end. With "fork", a child of its own
# lives on after it.
_HOLDER = """
import os, pathlib, sys, time
from rllib_gigpo.one_at_a_time import alone
with alone(pathlib.Path(sys.argv[1]), "busy"):
    if sys.argv[2] == "fork" and (child := os.fork()) == 0:
        sys.stdin.close()
        time.sleep(60)
    print(child if sys.argv[2] == "fork" else 0, flush=True)
    sys.stdin.read()
"""


def is_free(file: Path) -> bool:
    try:
        with alone(file, "somebody is at work"):
            return True
    except ValueError:
        return False


def test_it_is_held_until_the_end_and_no_longer(tmp_path):
    file = tmp_path / "new" / "lock"

    def work() -> None:
        with alone(file, "busy"):
            with (
                pytest.raises(ValueError, match=r"^somebody is at work$"),
                alone(file, "somebody is at work"),
            ):
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert is_free(file)
    file.write_text("content")
    with alone(file, "busy"):
        assert file.read_text() == "content"


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_it_ends_with_its_process_whatever_that_has_forked(tmp_path, how):
    file = tmp_path / "lock"
    command = [sys.executable, "-c", _HOLDER, str(file), how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            assert not is_free(file)
            holder.kill()
            holder.wait()
            assert is_free(file)
        finally:
            if child:
                os.kill(child, 9)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_disk_without_locks_is_worked_on_with_a_warning(tmp_path, monkeypatch, caplog, code):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(one_at_a_time.fcntl, "flock", refuse)
    assert is_free(tmp_path / "lock")
    (line,) = caplog.messages
    assert line == (
        f"{tmp_path / 'lock'} cannot be locked ({os.strerror(code)}): let nothing else work in "
        f"{tmp_path} at the same time"
    )


def test_a_disk_that_fails_is_no_disk_without_locks(tmp_path, monkeypatch):
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(one_at_a_time.fcntl, "flock", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output error"):
        is_free(tmp_path / "lock")
    assert len(os.listdir("/proc/self/fd")) == before
