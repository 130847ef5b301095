"""`ray job submit --working-dir .`, as docs/cluster.md has it, on a cluster of two nodes."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

_ROOT = Path(__file__).parents[2]
_RAY = Path(sys.executable).with_name("ray")
_PATIENCE_S = 240
# Of what is uploaded; the code itself is a few megabytes.
_MOST_BYTES = 10 * 2**20


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(folder: Path) -> dict[str, str]:
    """The script's `python` is this one; no other Ray of this machine meets this cluster."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": folder.name.ljust(32, "x"),
    }
    environment.pop("RAY_ADDRESS", None)
    return environment


def _start(*arguments: str, folder: Path, log: Path) -> subprocess.Popen:
    """Start a node in processes that end with it."""
    with log.open("w") as output:
        node = subprocess.Popen(
            [str(_RAY), "start", "--block", "--disable-usage-stats", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(folder),
            start_new_session=True,
        )
    deadline = time.monotonic() + _PATIENCE_S
    while "Ray runtime started" not in log.read_text():
        assert node.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)
    return node


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Dashboard of a head without CPUs and a second node with them, and their folder."""
    port, web = _free_port(), _free_port()
    # Paths of sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    nodes = []
    try:
        nodes.append(
            _start(
                "--head",
                "--num-cpus=0",
                f"--temp-dir={folder / 'a'}",
                f"--port={port}",
                f"--dashboard-port={web}",
                f"--ray-client-server-port={_free_port()}",
                f"--dashboard-agent-listen-port={_free_port()}",
                folder=folder,
                log=tmp_path / "head.log",
            )
        )
        address = re.search(r"ray start --address='([^']+)'", (tmp_path / "head.log").read_text())
        assert address is not None
        nodes.append(
            _start(
                f"--address={address[1]}",
                # As on another machine: nodes that share it unpack the code over each other.
                f"--temp-dir={folder / 'b'}",
                "--num-cpus=4",
                f"--dashboard-agent-listen-port={_free_port()}",
                folder=folder,
                log=tmp_path / "node.log",
            )
        )
        yield f"http://127.0.0.1:{web}", folder
    finally:
        for node in reversed(nodes):
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.examples
@pytest.mark.ray
def test_a_job_runs_as_the_docs_say(cluster: tuple[str, Path], tmp_path: Path):
    dashboard, folder = cluster
    page = (_ROOT / "docs" / "cluster.md").read_text()
    shape = "--working-dir . --runtime-env cluster/runtime_env.yaml"
    assert page.count(shape) == 2
    assert "-- python tuned_examples/sweep_gigpo.py --results" in page
    done = subprocess.run(
        [
            str(_RAY), "job", "submit", "--address", dashboard, *shape.split(), "--", "python",
            "tuned_examples/sweep_gigpo.py", "--results", str(tmp_path / "sweep"), "--smoke",
            "--seeds=1",
        ],
        cwd=_ROOT,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    assert "succeeded" in printed
    # The head has no CPUs: what trained was on the second node.
    assert len(list((tmp_path / "sweep" / "trials").glob("GiGPO_*/result.json"))) == 2
    assert (tmp_path / "sweep" / "heat_map.png").exists()


def test_nothing_large_is_uploaded():
    excluded = yaml.safe_load((_ROOT / "cluster" / "runtime_env.yaml").read_text())["excludes"]
    assert "/.git/" in excluded
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    folders = tuple(name.strip("/") + "/" for name in excluded if name.endswith("/"))
    kept = [_ROOT / name for name in listed if not name.startswith(folders)]
    assert sum(path.stat().st_size for path in kept if path.is_file()) < _MOST_BYTES


def test_the_templates_name_scripts_and_flags_that_there_are():
    texts = [(_ROOT / "cluster" / name).read_text() for name in ("rayjob.yaml", "slurm.sh")]
    job = yaml.safe_load(texts[0])
    assert job["kind"] == "RayJob"
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    import ray

    assert ray.__version__.split(".")[:2] == version.split(".")[:2]
    choices = (_ROOT / "tuned_examples" / "_choices.py").read_text()
    for text in texts:
        for script in re.findall(r"tuned_examples/\w+\.py", text):
            assert (_ROOT / script).exists()
        for flag in re.findall(r"--(engine|num-engines)=", text):
            assert f'"--{flag}"' in choices
    checked = subprocess.run(
        ["bash", "-n", str(_ROOT / "cluster" / "slurm.sh")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
