"""A real Chromium without a window, driven over its debugging pipe with the standard library."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_LIMIT_S = 60.0
# The browser reads from file 3 and writes to file 4.
_START = """
import fcntl, os, sys
reading, writing = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str:
    """Path of the browser; without one the calling test is skipped.

    `.ci/run` may set RLLIB_GIGPO_REQUIRE_BROWSER=1: there a skip would hide a broken installation.
    """
    named = os.environ.get("RLLIB_GIGPO_BROWSER")
    found = named or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        reason = "there is no Chromium: apt-get install chromium, or set RLLIB_GIGPO_BROWSER"
        if os.environ.get("RLLIB_GIGPO_REQUIRE_BROWSER") == "1":
            pytest.fail(f"RLLIB_GIGPO_REQUIRE_BROWSER=1, but {reason}")
        pytest.skip(reason)
    return found


class Browser:
    """One page of a browser.

    Attributes:
        logs: What the page has logged, and its uncaught errors.
        requests: Addresses that the page has asked for.
    """

    def __init__(self, process: subprocess.Popen, reading: int, writing: int):
        self._process = process
        self._read = os.fdopen(reading, "rb", buffering=0)
        self._write = os.fdopen(writing, "wb", buffering=0)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.logs: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = self._read.read(65536)
            if not part:
                raise RuntimeError("the browser has gone")
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.logs.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") in ("Runtime.consoleAPICalled", "Log.entryAdded"):
            self.logs.append(json.dumps(params))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Open a report page and wait until it is drawn."""
        self._call("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def js(self, expression: str) -> Any:
        """Evaluate in the page; promises are awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + _LIMIT_S
        while not self.js(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}; {self.logs[:3]}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", **facts, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def use_scheme(self, scheme: str) -> None:
        """Prefer "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        """Save what the page looks like."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser for one test or module."""
    path = find_browser()
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={profile}",
            "--window-size=1300,1000",
        ]
        if os.geteuid() == 0:
            options.append("--no-sandbox")
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_browser), str(from_browser), path, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(process, reading, writing)
        finally:
            process.terminate()
            process.wait(timeout=_LIMIT_S)
