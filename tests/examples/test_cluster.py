"""`ray job submit --working-dir .`, as docs/cluster.md has it, on a cluster of two nodes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
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


def _start(*arguments: str, log: Path) -> subprocess.Popen:
    # The script's own `python` is the one that runs this test.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    environment.pop("RAY_ADDRESS", None)
    with log.open("w") as output:
        return subprocess.Popen(
            [str(_RAY), "start", "--block", "--disable-usage-stats", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    """Address of the dashboard of a head without CPUs and a second node with them."""
    port, web = _free_port(), _free_port()
    agents = [f"--dashboard-agent-listen-port={_free_port()}" for _ in range(2)]
    head = _start(
        "--head", f"--port={port}", "--num-cpus=0", "--node-ip-address=127.0.0.1",
        f"--dashboard-port={web}", f"--ray-client-server-port={_free_port()}", agents[0],
        "--include-dashboard=true", log=tmp_path / "head.log",
    )  # fmt: skip
    nodes = [head]
    url = f"http://127.0.0.1:{web}"
    try:
        _wait_for(lambda: _nodes(url) == 1, tmp_path / "head.log")
        node = _start(
            f"--address=127.0.0.1:{port}", "--num-cpus=4", agents[1], log=tmp_path / "node.log"
        )
        nodes.append(node)
        _wait_for(lambda: _nodes(url) == 2, tmp_path / "node.log")
        yield url
    finally:
        for process in reversed(nodes):
            os.killpg(process.pid, signal.SIGTERM)
        for process in nodes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _nodes(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/nodes?view=summary", timeout=5) as answer:
            found = json.load(answer)["data"]["summary"]
    except OSError:
        return 0
    return sum(node["raylet"].get("state") == "ALIVE" for node in found)


def _wait_for(is_so, log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)


@pytest.mark.examples
@pytest.mark.ray
def test_a_job_runs_as_the_docs_say(dashboard: str, tmp_path: Path):
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
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S * 2,
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
