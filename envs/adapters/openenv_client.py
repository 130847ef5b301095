"""A client of OpenEnv's WebSocket protocol: one session per socket.

The messages are those of OpenEnv 0.10: `{"type": "reset" | "step" | "close", "data": {...}}` to the
server, `{"type": "observation", "data": {"observation", "reward", "done"}}` or `{"type": "error",
"data": {"message", "code"}}` from it. `GET /schema` describes the actions.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import weakref
from collections.abc import Mapping
from typing import Any

from rllib_gigpo_wire import open_url, read_object, read_whole

_MAX_MESSAGE_BYTES = 100 * 2**20
_REFUSED = frozenset({"VALIDATION_ERROR", "EXECUTION_ERROR"})


class OpenEnvError(RuntimeError):
    """The server is absent, silent, full, or cannot make its environment."""


class RefusedError(Exception):
    """The server refuses an action; the episode goes on."""


class OpenEnvClient:
    """One session.

    Args:
        url: The server, as `http(s)://host:port` or `ws(s)://host:port`.
        timeout_s: Seconds that connecting, and every answer, may take.

    Raises:
        ImportError: The `websockets` package is not installed.
        OpenEnvError: No server answers.
    """

    def __init__(self, url: str, timeout_s: float):
        try:
            from websockets.exceptions import WebSocketException
            from websockets.sync.client import connect
        except ImportError as error:
            raise ImportError(
                f"openenv: needs the websockets package ({error}); install it with "
                "`pip install -e '.[openenv]'` in rllib-gigpo's folder"
            ) from error
        self.url = url
        self.timeout_s = timeout_s
        self._faults = (WebSocketException, OSError)
        opened = contextlib.ExitStack()
        try:
            self._socket: Any = opened.enter_context(
                connect(
                    f"{socket_url(url)}/ws",
                    open_timeout=timeout_s,
                    close_timeout=2,
                    max_size=_MAX_MESSAGE_BYTES,
                    # A server that computes a step may answer no ping meanwhile.
                    ping_interval=None,
                )
            )
        except self._faults as error:
            raise OpenEnvError(
                f"no OpenEnv server answers at {url} ({error}): start it, or correct the address"
            ) from error
        # Ends the session of an environment that nobody closed, too; works twice.
        self.close = weakref.finalize(self, _end, self._socket, opened, self._faults)

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Start an episode; return `{"observation", "reward", "done"}`."""
        return self._ask("reset", data)

    def step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Take an action; return `{"observation", "reward", "done"}`.

        Raises:
            RefusedError: The server does not accept the action.
        """
        return self._ask("step", data)

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        try:
            # A server that refuses the session says why and closes: that is still to be read.
            with contextlib.suppress(*self._faults):
                self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer = read_object(self._socket.recv(timeout=self.timeout_s))
        except TimeoutError as error:
            # A late answer would be taken for that of the next question.
            self.close()
            raise OpenEnvError(
                f"the OpenEnv server {self.url} did not answer a {kind} within "
                f"{self.timeout_s:g} s: raise env_config['timeout_s'] if it may take longer"
            ) from error
        except ValueError as error:
            self.close()
            raise OpenEnvError(
                f"{self.url} does not answer a {kind} as an OpenEnv server does ({error})"
            ) from error
        except self._faults as error:
            raise OpenEnvError(
                f"the OpenEnv server {self.url} closed the session: {error}"
            ) from error
        told = answer.get("data") or {}
        if not isinstance(told, dict):
            raise OpenEnvError(f"the OpenEnv server {self.url} answered a {kind} without fields")
        if answer.get("type") != "error":
            return told
        code, message = told.get("code"), told.get("message")
        if kind == "step" and code in _REFUSED:
            raise RefusedError(f"{message} {told['errors']}" if told.get("errors") else message)
        self.close()
        if code == "CAPACITY_REACHED":
            raise OpenEnvError(
                f"the OpenEnv server {self.url} has no session left ({message}): start it with "
                "max_concurrent_envs of at least the number of episodes that run at once"
            )
        raise OpenEnvError(f"the OpenEnv server {self.url} reports {code}: {message}")


def _end(socket: Any, opened: contextlib.ExitStack, faults: tuple[type[Exception], ...]) -> None:
    # The socket may have been closed before, by either side.
    with contextlib.suppress(*faults):
        socket.send(json.dumps({"type": "close"}))
    opened.close()


def socket_url(url: str) -> str:
    """Return a server's address as a WebSocket URL."""
    for scheme, socket_scheme in (("http://", "ws://"), ("https://", "wss://")):
        if url.startswith(scheme):
            return (socket_scheme + url.removeprefix(scheme)).rstrip("/")
    return url.rstrip("/")


def action_schema(url: str, timeout_s: float) -> dict[str, Any]:
    """Return the JSON schema of the server's actions.

    Raises:
        OpenEnvError: The server does not tell.
    """
    address = f"http{socket_url(url).removeprefix('ws')}/schema"
    try:
        with open_url(address, timeout_s) as answer:
            return read_object(read_whole(answer, timeout_s))["action"]
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise OpenEnvError(
            f"no OpenEnv server tells its actions at {address} ({error}): start it, or correct "
            "the address"
        ) from error
