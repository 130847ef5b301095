"""vLLM's own OpenAI-compatible server and the engine in this process play the same episodes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rllib_gigpo.evaluate.main import main
from rllib_gigpo.models import materialize
from tests.tiny_runs import tiny_config
from tests.with_vllm import needs_vllm

_PATIENCE_S = 300
pytestmark = [
    pytest.mark.vllm,
    needs_vllm,
]


@pytest.fixture(scope="module")
def model() -> str:
    return materialize(tiny_config().llm(options={}).model_spec)


@pytest.fixture(scope="module")
def url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    settings = ["--max-model-len=256", "--enforce-eager", "--dtype=float32"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}",
                "--served-model-name=tiny", "--host=127.0.0.1", f"--port={port}", *settings,
            ],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _is_healthy(port):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_server_and_engine_play_the_same(model: str, url: str, tmp_path: Path):
    shared = [
        "KeyDoor", "--env-config", json.dumps({"horizon": 6}), "--tasks=5", "--temperature=0",
        "--max-prompt-tokens=128", "--max-response-tokens=12", "--workers=4", "--quiet",
    ]  # fmt: skip
    for name, arguments in (
        ("server", ["--model=tiny", f"--endpoint={url}"]),
        ("engine", [f"--model={model}"]),
    ):
        assert main([*shared, *arguments, f"--output={tmp_path / name}"]) == 0
    server, engine = (
        sorted((tmp_path / name / "episodes.jsonl").read_text().splitlines())
        for name in ("server", "engine")
    )
    assert len(server) == 5
    assert server == engine
