"""A client of the Model Context Protocol: tools of a server over its pipes or over HTTP.

JSON-RPC 2.0 after https://modelcontextprotocol.io/specification/2025-06-18: `initialize`, then
`tools/list` and `tools/call`. Over stdio a message is one line; over HTTP it is a POST whose answer
is JSON or a stream of server-sent events.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shlex
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from rllib_gigpo_wire import (
    MAX_ANSWER_BYTES,
    open_url,
    read_lines,
    read_object,
    read_refusal,
    read_whole,
)

PROTOCOL_VERSION = "2025-06-18"
_CHUNK_BYTES = 1 << 16
_TAIL_CHARS = 500
INVALID_PARAMS = -32602
_METHOD_NOT_FOUND = -32601
_MAX_PAGES = 1000


class MCPError(RuntimeError):
    """The server is absent, silent, gone, or refuses a request."""


class MCPRefusedError(MCPError):
    """The server answers a request with an error of JSON-RPC.

    Args:
        message: What happened.
        code: The error's code, as the server gives it.
    """

    def __init__(self, message: str, code: Any):
        super().__init__(message)
        self.code = code


class Transport(Protocol):
    """Carries messages to a server and back."""

    def tell(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Send a message that has no answer."""
        ...

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
        """Send a message and yield what the server says afterwards."""
        ...

    def close(self) -> None:
        """Free the process or the session; works twice."""
        ...


class StdioTransport:
    """A server process of one's own, spoken to over its standard input and output.

    Args:
        command: Its command line.

    Raises:
        MCPError: The command cannot be started.
    """

    def __init__(self, command: str):
        self.command = command
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the finalizer
        try:
            self._process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
            )
        except OSError as error:
            self._errors.close()
            raise MCPError(f"the MCP server {command!r} cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        # Not select(): it knows no file numbers above 1,023, which hundreds of episodes reach.
        self._questions, self._answers = select.poll(), select.poll()
        self._questions.register(self._process.stdin, select.POLLOUT)
        self._answers.register(self._process.stdout, select.POLLIN)
        self._lines: deque[bytes] = deque()
        self._rest = bytearray()
        self.close = weakref.finalize(self, _stop, self._process, self._errors)

    def tell(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + timeout_s
        rest = json.dumps(message).encode() + b"\n"
        while rest:
            left = deadline - time.monotonic()
            if left <= 0 or not self._questions.poll(left * 1000):
                raise MCPError(
                    f"the MCP server {self.command!r} did not read a message of {len(rest)} bytes "
                    f"within {timeout_s:g} s: raise env_config['timeout_s'] if it may take longer"
                )
            try:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise MCPError(self._ended()) from error

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
        """Write a line, then yield the lines that come until the time is over."""
        deadline = time.monotonic() + timeout_s
        self.tell(message, timeout_s)
        size = 0
        while True:
            line = self._line(deadline, timeout_s)
            size += len(line)
            self._check_size(size)
            try:
                yield read_object(line)
            except ValueError as error:
                raise MCPError(
                    f"the MCP server {self.command!r} wrote a line that is no message ({error})"
                ) from error

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        while True:
            left = deadline - time.monotonic()
            # What has come already is late too: a server may go on writing for ever.
            if left <= 0 or (not self._lines and not self._answers.poll(left * 1000)):
                raise MCPError(
                    f"the MCP server {self.command!r} did not answer within {timeout_s:g} s: raise "
                    "env_config['timeout_s'] if its tools take longer"
                )
            if self._lines:
                return self._lines.popleft()
            chunk = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
            if not chunk:
                raise MCPError(self._ended())
            self._rest += chunk
            if b"\n" in chunk:  # what came before was searched already
                *lines, self._rest = self._rest.split(b"\n")
                self._lines.extend(map(bytes, lines))
            self._check_size(len(self._rest))

    def _check_size(self, size: int) -> None:
        if size > MAX_ANSWER_BYTES:
            raise MCPError(
                f"the MCP server {self.command!r} wrote more than {MAX_ANSWER_BYTES} bytes where "
                "an answer was expected"
            )

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self._errors.seek(0)
        told = self._errors.read().decode(errors="replace").strip()[-_TAIL_CHARS:]
        return (
            f"the MCP server {self.command!r} ended with exit status {self._process.returncode}"
            f": {told or 'it said nothing'}"
        )


def _stop(process: subprocess.Popen, errors: Any) -> None:
    """End a server as the protocol asks: close its input, then stop it if it stays."""
    for pipe in (process.stdin, process.stdout):
        # What was not yet written has no reader any more.
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    errors.close()


class HttpTransport:
    """A server that others run, spoken to over streamable HTTP.

    Args:
        url: Its endpoint, such as `http://127.0.0.1:8000/mcp`.
    """

    def __init__(self, url: str):
        if urlsplit(url).username is not None:
            raise MCPError("the MCP server's URL holds a user name: it is not sent; leave it out")
        self.url = url
        self._headers: dict[str, str] = {}

    def tell(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Post a message."""
        for _ in self.ask(message, timeout_s):
            pass

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
        """Post a message and yield those of the answer."""
        request = urllib.request.Request(
            self.url,
            data=json.dumps(message).encode(),
            headers={
                "Content-Type": "application/json",
                "Accept": "application/json, text/event-stream",
                **self._headers,
            },
        )
        try:
            with open_url(request, timeout_s) as answer:
                session = answer.headers.get("Mcp-Session-Id")
                if session is not None:
                    self._headers = {
                        "Mcp-Session-Id": session,
                        "MCP-Protocol-Version": PROTOCOL_VERSION,
                    }
                if answer.headers.get_content_type() == "text/event-stream":
                    yield from _events(read_lines(answer, timeout_s, MAX_ANSWER_BYTES))
                else:
                    body = read_whole(answer, timeout_s)
                    if body:
                        yield read_object(body)
        except urllib.error.HTTPError as error:
            told = read_refusal(error, timeout_s, _TAIL_CHARS)
            raise MCPError(f"the MCP server {self.url} refuses: {error} {told}") from error
        except ValueError as error:
            raise MCPError(
                f"{self.url} does not answer as an MCP server does ({str(error)[:_TAIL_CHARS]})"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise MCPError(
                f"no MCP server answers at {self.url} within {timeout_s:g} s ({error}): start it, "
                "or correct the address"
            ) from error

    def close(self) -> None:
        """End the session."""
        if not self._headers:
            return
        request = urllib.request.Request(self.url, headers=self._headers, method="DELETE")
        self._headers = {}
        # A server may refuse to end sessions, be gone already, answer with what is not HTTP, or
        # have named its session by what no header can hold.
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            open_url(request, 2.0).close()


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a stream of server-sent events."""
    data: list[str] = []
    for raw in lines:
        line = raw.decode()
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield read_object("\n".join(data))
            data = []


class MCPClient:
    """One session with a server.

    Args:
        target: A command line, or the URL of a server's endpoint.
        timeout_s: Seconds that the answer to a request may take.

    Raises:
        MCPError: No server answers.
    """

    def __init__(self, target: str, timeout_s: float):
        self.timeout_s = timeout_s
        is_url = target.startswith(("http://", "https://"))
        self._transport: Transport = HttpTransport(target) if is_url else StdioTransport(target)
        self._count = 0
        try:
            self._request(
                "initialize",
                {
                    "protocolVersion": PROTOCOL_VERSION,
                    "capabilities": {},
                    "clientInfo": {"name": "rllib_gigpo", "version": "1"},
                },
            )
            self._transport.tell(
                {"jsonrpc": "2.0", "method": "notifications/initialized"}, timeout_s
            )
        except BaseException:
            self.close()
            raise

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools as `{"name", "description", "parameters"}`.

        Raises:
            MCPError: The server refuses, or its list has no end.
        """
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = self._request("tools/list", {"cursor": cursor} if cursor else {})
            found += self._read(lambda page=page: [_tool(tool) for tool in page["tools"]])
            cursor = page.get("nextCursor")
            if not cursor:
                return found
        raise MCPError(
            f"the MCP server's list of tools has no end: {_MAX_PAGES} pages came, and the last one "
            "names another"
        )

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool; return its text, and whether it reports an error.

        Raises:
            MCPRefusedError: The server refuses the call, as it does (code `INVALID_PARAMS`) where
                it finds fault with the arguments.
        """
        result = self._request("tools/call", {"name": name, "arguments": dict(arguments)})
        parts = self._read(lambda: [_text(part) for part in result.get("content", ())])
        return "\n".join(parts), bool(result.get("isError", False))

    def _read(self, read: Callable[[], list[Any]]) -> list[Any]:
        """Read fields of an answer, or say that it has others."""
        try:
            return read()
        except (KeyError, TypeError, AttributeError) as error:
            raise MCPError(
                f"the MCP server's answer has not the fields of the protocol "
                f"({type(error).__name__}: {error})"
            ) from error

    def close(self) -> None:
        """End the session, and the process where it is one's own; works twice."""
        self._transport.close()

    def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)}
        for answer in self._transport.ask(message, self.timeout_s):
            if "method" in answer:
                self._serve(answer)
            elif answer.get("id") == number:
                if "error" in answer:
                    told = answer["error"]
                    error = told if isinstance(told, dict) else {"message": told}
                    code = error.get("code")
                    raise MCPRefusedError(
                        f"the MCP server refuses {method}: {error.get('message')} (code {code})",
                        code,
                    )
                if not isinstance(answer.get("result"), dict):
                    raise MCPError(f"the MCP server answered {method} without a result")
                return answer["result"]
        raise MCPError(f"the MCP server closed its answer to {method} without a result")

    def _serve(self, message: Mapping[str, Any]) -> None:
        """Answer what a server asks of its client; what it only tells needs no answer."""
        if "id" not in message:
            return
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "ping":
            answer["result"] = {}
        else:
            answer["error"] = {"code": _METHOD_NOT_FOUND, "message": "this client has no such part"}
        self._transport.tell(answer, self.timeout_s)


def _tool(tool: Any) -> dict[str, Any]:
    return {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("inputSchema") or {"type": "object", "properties": {}},
    }


def _text(part: Any) -> str:
    return str(part["text"]) if part.get("type") == "text" else f"[{part.get('type')}]"
