"""An MCP server of the dial: `python -m tests.mcp_dial_server [--http PORT] [FAULT]`.

FAULT makes it misbehave: "silent" never answers a call of `turn`, "dies" ends at it, "broken" ends
at once.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.dial_worlds import Dial

_NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
_WAY = {"type": "string", "enum": ["left", "right"]}


def _tool(name: str, text: str, required: tuple[str, ...] = (), **properties: Any) -> dict:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": text, "inputSchema": schema}


PAGES = [
    [
        _tool("start", "Start anew.", seed={"type": "integer"}, start={"type": "integer"}),
        _tool("turn", "Turn the dial.", ("direction",), direction=_WAY, clicks=_NUMBER),
    ],
    [
        _tool("unlock", "Try the lid."),
        _tool("box", "Tell how the box is."),
        _tool("photo", "Show."),
    ],
]


class Session:
    """One client's dial."""

    def __init__(self, fault: str = ""):
        self.fault = fault
        self.dial = Dial(0)
        self.is_ready = False

    def answer(self, message: dict) -> dict | None:
        """Answer a message; None to a notification."""
        method = message["method"]
        if "id" not in message:
            self.is_ready = self.is_ready or method == "notifications/initialized"
            return None
        try:
            result = self.result(method, message.get("params", {}))
        except KeyError as error:
            wrong = {"code": -32602, "message": f"unknown {error}"}
            return {"jsonrpc": "2.0", "id": message["id"], "error": wrong}
        return {"jsonrpc": "2.0", "id": message["id"], "result": result}

    def result(self, method: str, params: dict) -> dict:
        if method == "initialize":
            assert params["clientInfo"]["name"]
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "dial", "version": "1"},
            }
        assert self.is_ready, "the client must say that it is initialized"
        if method == "tools/list":
            page = int(params.get("cursor", 0))
            more = {"nextCursor": str(page + 1)} if page + 1 < len(PAGES) else {}
            if self.fault == "endless":
                more = {"nextCursor": "0"}
            return {"tools": PAGES[page], **more}
        return self.call(params["name"], params["arguments"])

    def call(self, name: str, given: dict) -> dict:
        if name == "turn" and self.fault == "silent":
            time.sleep(60)
        if name == "turn" and self.fault == "dies":
            sys.stderr.write("the dial broke off\n")
            sys.exit(3)
        if name == "photo":
            return {"content": [{"type": "image", "data": "", "mimeType": "image/png"}]}
        if name == "start":
            self.dial = Dial(given["seed"])
            self.dial.shown = given.get("start", self.dial.shown)
            text = self.dial.look()
        elif name == "turn":
            if given.get("clicks") == 0:
                told = [{"type": "text", "text": "0 is no turn"}]
                return {"content": told, "isError": True}
            text = self.dial.turn(given["direction"], given.get("clicks", 1))
        else:
            texts = {"unlock": self.dial.unlock, "box": self._box}
            text = texts[name]()
        return {"content": [{"type": "text", "text": text}], "isError": False}

    def _box(self) -> str:
        return "open" if self.dial.is_open else "shut"


def over_pipes(fault: str) -> None:
    """Serve one client; ask it for a ping and tell it something first, as servers may."""
    session = Session(fault)
    if fault == "broken":
        sys.exit("no dial here")
    for line in sys.stdin:
        message = json.loads(line)
        answer = session.answer(message) if "method" in message else None
        if answer is not None:
            if message["method"] == "tools/list":
                _print({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
                _print({"jsonrpc": "2.0", "id": "p", "method": "ping"})
                _print({"jsonrpc": "2.0", "id": "r", "method": "roots/list"})
            _print(answer)


def _print(message: dict) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    """Streamable HTTP: calls are answered as events, everything else as JSON."""

    sessions: dict[str, Session] = {}  # noqa: RUF012
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        accepted = self.headers["Accept"]
        assert "application/json" in accepted
        assert "text/event-stream" in accepted
        key = self.headers.get("Mcp-Session-Id")
        if message["method"] == "initialize":
            key = f"s{len(self.sessions)}"
            self.sessions[key] = Session()
        if key not in self.sessions:
            self._send(404, b"no such session", "text/plain")
            return
        answer = self.sessions[key].answer(message)
        if answer is None:
            self._send(202, b"", "application/json")
        elif message["method"] == "tools/call":
            told = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
            body = "".join(
                f"event: message\r\ndata: {json.dumps(m)}\r\n\r\n" for m in (told, answer)
            )
            self._send(200, body.encode(), "text/event-stream")
        else:
            self._send(200, json.dumps(answer).encode(), "application/json", key)

    def do_DELETE(self) -> None:
        del self.sessions[str(self.headers["Mcp-Session-Id"])]
        self._send(200, b"", "application/json")

    def _send(self, status: int, body: bytes, kind: str, session: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if session is not None:
            self.send_header("Mcp-Session-Id", session)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


def over_http() -> ThreadingHTTPServer:
    """Return a server on a free port; `serve_forever` runs it."""
    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


if __name__ == "__main__":
    over_pipes(sys.argv[1] if len(sys.argv) > 1 else "")
