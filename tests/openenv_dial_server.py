"""OpenEnv's wire format, served by websockets: the dial as a simulation and as a tool server.

The messages, fields and error codes are those of OpenEnv 0.10's HTTP server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.dial_worlds import Dial

_META = {"metadata": {"type": "object", "additionalProperties": True, "default": {}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "simulation": {
        "type": "object",
        "title": "DialAction",
        "description": "Turns or tries.",
        "additionalProperties": False,
        "properties": {
            **_META,
            "verb": {"type": "string", "enum": ["left", "right", "unlock"]},
            "clicks": {"type": "integer", "default": 1},
        },
        "required": ["verb"],
    },
    "text": {
        "type": "object",
        "properties": {**_META, "message": {"type": "string"}},
        "required": ["message"],
    },
    "tools": {
        "type": "object",
        "properties": {
            **_META,
            "type": {"const": "call_tool"},
            "tool_name": {"type": "string"},
            "arguments": {"type": "object"},
        },
        "required": ["tool_name"],
    },
}
_TOOL = {
    "name": "turn",
    "description": "Turn the dial.",
    "input_schema": {
        "type": "object",
        "properties": {"direction": {"type": "string", "enum": ["left", "right"]}},
        "required": ["direction"],
    },
}
_LID = {"name": "unlock", "description": "Try the lid.", "input_schema": {"type": "object"}}


class DialServer:
    """What one server plays.

    Attributes:
        kind: "simulation", "text" or "tools".
        max_sessions: Sessions at once, OpenEnv's `max_concurrent_envs`.
        resets: Data of all reset messages.
        open_sessions: Sessions that run.
    """

    def __init__(self, kind: str, max_sessions: int):
        self.kind = kind
        self.max_sessions = max_sessions
        self.resets: list[dict] = []
        self.open_sessions = 0
        self.is_slow = False

    def http(self, connection: Any, request: Any) -> Any:
        """Answer `GET /schema`; leave `/ws` to the WebSocket."""
        if request.path == "/ws":
            return None
        if request.path != "/schema":
            return connection.respond(404, "nothing here")
        body = {"action": SCHEMAS[self.kind], "observation": {}, "state": {}}
        response = connection.respond(200, json.dumps(body))
        return response

    def serve(self, socket: Any) -> None:
        """Play one session."""
        if self.open_sessions >= self.max_sessions:
            _error(socket, "CAPACITY_REACHED", "Server at capacity: 1/1 sessions active")
            return
        self.open_sessions += 1
        try:
            self._session(socket)
        finally:
            self.open_sessions -= 1

    def _session(self, socket: Any) -> None:
        dial, steps = Dial(0), 0
        for raw in socket:
            message = json.loads(raw)
            data = message.get("data", {})
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                self.resets.append(data)
                dial, steps = Dial(data.get("seed", 0)), 0
                _observe(socket, {"text": dial.look(), "step_count": steps, "metadata": {}})
                continue
            if self.is_slow:
                time.sleep(2)
            steps += 1
            try:
                observation, reward = getattr(self, f"_{self.kind}")(dial, data)
            except LookupError as error:
                _error(socket, "VALIDATION_ERROR", "Invalid message", errors=[str(error)])
            except ArithmeticError as error:
                _error(socket, "EXECUTION_ERROR", str(error))
            else:
                told = {**observation, "step_count": steps, "metadata": {}}
                _observe(socket, told, reward, dial.is_open)

    def _simulation(self, dial: Dial, data: dict) -> tuple[dict, float | None]:
        verb, clicks = data["verb"], data.get("clicks", 1)
        if clicks > 9:
            raise OverflowError("the dial has ten numbers")
        if verb == "unlock":
            return {"text": dial.unlock(), "hint": None}, float(dial.is_open)
        return {"text": dial.turn(verb, clicks), "hint": None}, None

    def _text(self, dial: Dial, data: dict) -> tuple[dict, float | None]:
        text = dial.unlock() if data["message"] == "unlock" else f"you said {data['message']}"
        return {"text": text, "shown": dial.shown}, float(dial.is_open)

    def _tools(self, dial: Dial, data: dict) -> tuple[dict, float | None]:
        if data["type"] == "list_tools":
            return {"tools": [_TOOL, _LID]}, None
        assert data["type"] == "call_tool"
        name = data["tool_name"]
        text = dial.unlock() if name == "unlock" else dial.turn(data["arguments"]["direction"], 1)
        result = {"content": [{"type": "text", "text": text}], "data": text, "is_error": False}
        return {"tool_name": name, "result": result, "error": None}, float(dial.is_open)


def _observe(socket: Any, observation: dict, reward: float | None = None, done: bool = False):
    data = {"observation": observation, "reward": reward, "done": done}
    socket.send(json.dumps({"type": "observation", "data": data}))


def _error(socket: Any, code: str, message: str, **more: Any) -> None:
    socket.send(json.dumps({"type": "error", "data": {"message": message, "code": code, **more}}))


@contextmanager
def running(kind: str = "simulation", max_sessions: int = 8) -> Iterator[tuple[str, DialServer]]:
    """Run a server on a free port; yield its address and itself."""
    from websockets.sync.server import serve

    world = DialServer(kind, max_sessions)
    with serve(world.serve, "127.0.0.1", 0, process_request=world.http) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        host, port = server.socket.getsockname()[:2]
        yield f"http://{host}:{port}", world
        server.shutdown()
        thread.join()
