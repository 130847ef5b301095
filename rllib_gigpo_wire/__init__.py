"""Answers of servers: read within a time and a size, and as JSON that is not nested without end.

A socket's time limit is one for each piece that comes. `open_url` and the connections here have one
for the whole answer, from its first header to its last byte.

A package of its own beside `rllib_gigpo` and `envs`, which do not import each other and both ask
servers. It imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import time
import urllib.request
from collections.abc import Iterator
from functools import cache
from typing import Any

MAX_ANSWER_BYTES = 64 << 20

_CHUNK_BYTES = 1 << 16
_MAX_REFUSAL_BYTES = 1 << 20


class TooLargeError(ValueError):
    """An answer has more bytes than are read."""


class _Incoming(io.RawIOBase):
    """What a socket receives until a time limit is over, in however small drops it comes."""

    def __init__(self, sock: Any, received: io.RawIOBase):
        self._sock = sock
        self._received = received
        self._timeout_s: float = sock.gettimeout()
        self._deadline = time.monotonic() + self._timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left > 0:
            self._sock.settimeout(left)
            with contextlib.suppress(TimeoutError):
                return self._received.readinto(buffer)
        raise TimeoutError(f"the answer was not complete after {self._timeout_s:g} s")

    def close(self) -> None:
        if not self.closed:
            # The connection may serve another request, which has all of its time.
            with contextlib.suppress(OSError):
                self._sock.settimeout(self._timeout_s)
            self._received.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that is whole within its connection's time limit."""

    def __init__(self, sock: Any, *args: Any, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        self.fp: Any = io.BufferedReader(_Incoming(sock, self.fp.detach()))


class HTTPConnection(http.client.HTTPConnection):
    """A connection whose time limit holds for a whole answer; it needs one."""

    response_class = _Response


class HTTPSConnection(http.client.HTTPSConnection):
    """The same over TLS."""

    response_class = _Response


class _HTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(HTTPConnection, req)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(HTTPSConnection, req)


def build_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Return what opens URLs by connections whose time limit holds for a whole answer."""
    return urllib.request.build_opener(_HTTPHandler, _HTTPSHandler, *handlers)


def open_url(url: str | urllib.request.Request, timeout_s: float) -> Any:
    """Ask a server; as `urllib.request.urlopen`, but for the time limit.

    Args:
        url: An address, or a request.
        timeout_s: Seconds that connecting, sending and the answer may take, each.

    Raises:
        OSError: The server does not answer in time, or refuses (`urllib.error.HTTPError`).
        http.client.HTTPException: It breaks HTTP's rules.
    """
    return _opener().open(url, timeout=timeout_s)


@cache
def _opener() -> urllib.request.OpenerDirector:
    return build_opener()


def read_whole(response: Any, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Return the body of an HTTP response.

    Args:
        response: What `http.client` or `urllib` gave.
        timeout_s: Seconds that all of it may take, in however small drops it comes.
        max_bytes: Largest body that is read.

    Raises:
        TimeoutError: It did not end in time.
        TooLargeError: It is too large.
        http.client.HTTPException: It is shorter than announced.
    """
    data = b"".join(_chunks(response, timeout_s, max_bytes))
    if response.length:
        raise http.client.IncompleteRead(data, response.length)
    return data


def read_lines(
    response: Any, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES
) -> Iterator[bytes]:
    """Yield the lines of an HTTP response as they come, without their ends.

    A last line that has no end is left out: the server broke off within it.

    Args:
        response: What `http.client` or `urllib` gave.
        timeout_s: Seconds that all lines may take, what the caller does between them included.
        max_bytes: Most bytes that are read in all.

    Raises:
        TimeoutError: It did not end in time.
        TooLargeError: It is too large.
        http.client.HTTPException: It breaks HTTP's rules.
    """
    rest = bytearray()
    for chunk in _chunks(response, timeout_s, max_bytes):
        rest += chunk
        if b"\n" in chunk:  # what came before was searched already
            *lines, rest = rest.split(b"\n")
            yield from (bytes(line).removesuffix(b"\r") for line in lines)


def read_refusal(response: Any, timeout_s: float, max_chars: int) -> str:
    """Return the beginning of what a server says to an error status, as far as it comes.

    Args:
        response: What `urllib` raised.
        timeout_s: Seconds that it may take.
        max_chars: Longest text that is returned.
    """
    data = b""
    # The refusal itself is the error to be told, whatever becomes of its text.
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        for chunk in _chunks(response, timeout_s, _MAX_REFUSAL_BYTES):
            data += chunk
    return data.decode(errors="replace")[:max_chars]


def _chunks(response: Any, timeout_s: float, max_bytes: int) -> Iterator[bytes]:
    """Yield a body piece by piece, within a time and a size."""
    deadline = time.monotonic() + timeout_s
    size = 0
    while chunk := response.read1(_CHUNK_BYTES):
        size += len(chunk)
        if size > max_bytes:
            raise TooLargeError(f"the answer has more than {max_bytes} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer was not complete after {timeout_s:g} s")
        yield chunk


def read_json(content: bytes | str) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: It is no JSON, not in UTF-8, or nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_object(content: bytes | str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: It is none.
    """
    found = read_json(content)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {str(found)[:100]!r}")
    return found
