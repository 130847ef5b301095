"""`rllib-gigpo view`: the report of a run, served while it goes on."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rllib_gigpo.recording.folder import RunFolder
from rllib_gigpo.report.build import page
from rllib_gigpo.report.data import open_run, rollout_data, run_data, state

_ROLLOUTS = re.compile(r"/rollouts/([0-9]{1,9})")
_NUMBER = re.compile(r"[0-9]{1,9}")
_LOCAL = ("127.0.0.1", "localhost", "::1")


class RunServer(ThreadingHTTPServer):
    """Serves one run folder.

    No part of an address ever becomes a path: there are four pages, and one of them takes a number.
    Answers go to requests for the host that the server listens on alone, so that a web page cannot
    read them by pointing a name of its own at this machine.

    Args:
        path: The run folder.
        host: Where to listen; the default is this machine alone.
        port: 0 takes a free one.

    Attributes:
        url: Where the page is.

    Raises:
        ValueError: There is no run at the path.
    """

    daemon_threads = True

    def __init__(self, path: str | Path, *, host: str = "127.0.0.1", port: int = 0):
        self.folder: RunFolder = open_run(path)
        self.host = host
        super().__init__((host, port), _Handler)
        shown = host if host not in ("0.0.0.0", "::") else "localhost"
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.server_port}/"

    def is_for_us(self, host_header: str | None) -> bool:
        """Whether a request's Host header names this server."""
        name = urlsplit(f"//{host_header or ''}").hostname
        if self.host in _LOCAL:
            return name in _LOCAL
        return self.host in ("0.0.0.0", "::", name)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests."""

    server_version = "rllib-gigpo"
    sys_version = ""
    server: RunServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Answer one request."""
        if not self.server.is_for_us(self.headers.get("Host")):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this server answers for its own host")
            return
        address = urlsplit(self.path)
        try:
            answer = self._answer(address.path, parse_qs(address.query))
        except FileNotFoundError:
            answer = None
        except (ValueError, OSError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error).encode())
            return
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page")
        elif isinstance(answer, str):
            self._send(HTTPStatus.OK, "text/html", answer.encode())
        else:
            content = json.dumps(answer, allow_nan=False).encode()
            self._send(HTTPStatus.OK, "application/json", content)

    def _answer(self, path: str, query: dict[str, list[str]]) -> Any:
        folder = self.server.folder
        if path == "/":
            return page(run_data(folder), {}, live=True)
        if path == "/state":
            return state(folder)
        if path == "/run":
            after = query.get("after", ["0"])[0]
            return run_data(folder, after=int(after) if _NUMBER.fullmatch(after) else 0)
        found = _ROLLOUTS.fullmatch(path)
        return rollout_data(folder, int(found.group(1))) if found else None

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page that asks every few seconds would fill the terminal."""
