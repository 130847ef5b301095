"""A small faithful OpenAI-compatible server, and an environment that it can play."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import gymnasium as gym

from envs.spaces import TextSpace
from rllib_gigpo import AgentProfile, ChatTemplate, LastSteps, TagParser, register_llm_env


class Echo(gym.Env):
    """Say the number that is shown, twice in a row; a wrong one ends the episode."""

    observation_space, action_space = TextSpace(), TextSpace()

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(10, 100))
        self._said = 0
        return f"say {self._number}", self._info(False)

    def step(self, action: str):
        right = action == str(self._number)
        self._said += right
        won = self._said == 2
        self._number += 1
        return f"say {self._number}", 5.0 * right, won or not right, False, self._info(won)

    def _info(self, won: bool) -> dict[str, Any]:
        parity = "even" if self._number % 2 == 0 else "odd"
        return {"task": "Repeat.", "task_type": parity, "won": won, "score": self._said / 2}


def echo_profile() -> AgentProfile:
    return AgentProfile(
        prompt=ChatTemplate(
            user="{task}\n{observation}", user_with_history="{task}\n{history}\n{observation}"
        ),
        memory=LastSteps(2),
        parser=TagParser(),
    )


register_llm_env("Echo", Echo, echo_profile)


class ChatServer:
    """What the server was asked, and how it is to behave.

    The model "good" repeats the last number that it is asked to say, and goes on talking. "bad"
    says another. "learner" is bad until it reads its own reflection.

    Attributes:
        requests: The bodies of all requests.
        failures: So many of the next requests fail with `status`.
        status: HTTP status of a failure.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.failures = 0
        self.status = 503
        self.url = ""
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            if self.failures > 0:
                self.failures -= 1
                return self.status, {"error": {"message": "not now"}}
        text = "\n".join(str(message["content"]) for message in body["messages"])
        if "did not complete it" in text:
            content = "Repeat exactly what is asked."
        else:
            number = int(re.findall(r"say (\d+)", text)[-1])
            knows = body["model"] == "good" or "Repeat exactly" in text
            content = f"<action> {number if knows else 0} </action> and so on"
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"object": "chat.completion", "model": body["model"], "choices": [choice]}


@contextmanager
def serving() -> Iterator[ChatServer]:
    """Serve on a free port of this machine."""
    state = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions":
                code, answer = 404, {"error": {"message": f"no {self.path}"}}
            else:
                code, answer = state.answer(body, dict(self.headers))
            sent = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
