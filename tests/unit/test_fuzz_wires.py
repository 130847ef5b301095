"""Wire protocols against whatever the other side may send: malformed, huge, slow, misencoded."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from envs.adapters import mcp_client
from envs.adapters.mcp_client import MCPClient, MCPError
from envs.adapters.openenv_client import OpenEnvError, action_schema
from envs.appworld.server import AppWorldError, Server
from envs.search.client import HttpRetriever, _read_result
from envs.search.retrievers import RetrieverError
from envs.search.server import BadRequestError, RetrieverServer, read_request
from rllib_gigpo.evaluate.endpoint import Endpoint, EndpointError
from tests.serving import running
from tests.strange_values import DEEP, VALUES

FAST = settings(suppress_health_check=list(HealthCheck), max_examples=30)


@FAST
@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
@example(DEEP)
@example(b'{"queries": ["a"], "topk": ' + b"9" * 10_000 + b"}")
@example(b'{"queries": ["\\ud800"], "topk": 1}')
def test_a_request_for_passages_is_read_or_refused(body):
    with contextlib.suppress(BadRequestError):
        request = read_request(body, 3)
        assert 1 <= request.topk <= 100


@FAST
@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps({"result": value}).encode()))
@example(DEEP)
@example(b'{"result": [[{"document": {"contents": "a"}, "score": 1e999}]]}')
@example(b'{"result": [[{"document": {"contents": "a"}, "score": ' + b"9" * 400 + b"}]]}")
@example(b'{"result": ["abc"]}')
@example(b'{"result": {"0": 1}}')
@example(b'{"result": [[{"document": {"contents": ["a"]}, "score": 1}]]}')
def test_an_answer_of_passages_is_read_or_refused(answer):
    with contextlib.suppress(RetrieverError):
        for hits in _read_result(answer, 1, 3, "http://host"):
            assert len(hits) <= 3


class RawServer:
    """Answers every connection with the same bytes, some of them late, and closes or resets it."""

    def __init__(self, head: bytes, body: bytes, pause_s: float = 0.0, is_reset: bool = False):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.02)  # closing a socket does not wake who waits on it
        self._content = (head, body)
        self._pause_s = pause_s
        self._is_reset = is_reset
        self._over = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                connection.recv(1 << 16)
                head, body = self._content
                connection.sendall(head)
                for start in (
                    range(0, len(body), 1 << 16) if not self._pause_s else range(len(body))
                ):
                    step = 1 if self._pause_s else 1 << 16
                    connection.sendall(body[start : start + step])
                    if self._over.wait(self._pause_s):
                        return
                if self._is_reset:
                    time.sleep(0.05)  # what was sent is read before
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def close(self) -> None:
        self._over.set()
        self._listener.close()
        self._thread.join(timeout=5)


@contextlib.contextmanager
def answering(
    body: bytes, head: bytes | None = None, pause_s: float = 0.0, is_reset: bool = False
) -> Iterator[str]:
    usual = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    server = RawServer(usual % len(body) if head is None else head, body, pause_s, is_reset)
    try:
        yield server.url
    finally:
        server.close()


BAD_BODIES = {
    "nothing": b"",
    "no json": b"<html>busy</html>",
    "other encoding": b"\xff\xfe\x00{",
    "a list": b"[1]",
    "null": b"null",
    "deep": DEEP,
    "long number": b'{"output": ' + b"9" * 10_000 + b"}",
    "empty object": b"{}",
    "wrong types": b'{"choices": [{"message": {"content": [1]}}], "result": 3, "output": 3}',
    "strings": b'{"choices": "x", "result": "x", "output": "x"}',
}
BAD_HEADS = {
    "no http": b"\x16\x03\x01\x02\x00",
    "endless header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    "cut off": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    "bad length": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    "bad chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "closed": b"",
}


def ask_endpoint(url: str, **settings: Any) -> Any:
    chat = Endpoint(f"{url}/v1", "m", timeout_s=2.0, pause_s=0.0, **settings)
    return chat([{"role": "user", "content": "hi"}], {}, 0)


def ask_endpoint_once(url: str, timeout_s: float) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rllib_gigpo.evaluate.endpoint._TRIES", 1)
        return Endpoint(f"{url}/v1", "m", timeout_s=timeout_s)([], {}, 0)


def ask_retriever(url: str) -> Any:
    return HttpRetriever(url, timeout=2.0, retries=0).retrieve(["q"], 1)


def ask_appworld(url: str) -> Any:
    return Server(url, timeout_s=2.0).ask("execute", {"code": "1"})


def ask_mcp(url: str) -> Any:
    return MCPClient(url, 2.0).tools()


def ask_openenv(url: str) -> Any:
    return action_schema(url, 2.0)


CLIENTS = pytest.mark.parametrize(
    ("ask", "error"),
    [
        (ask_endpoint, EndpointError),
        (ask_retriever, RetrieverError),
        (ask_appworld, AppWorldError),
        (ask_mcp, MCPError),
        (ask_openenv, OpenEnvError),
    ],
    ids=["endpoint", "retriever", "appworld", "mcp", "openenv"],
)


def outcome(ask: Any, url: str, error: type[Exception]) -> str:
    """What the client returned, or its own error said; any other error fails the test."""
    try:
        return str(ask(url))
    except error as told:
        return str(told)


@CLIENTS
@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_client_tells_a_bad_answer(ask, error, body):
    with answering(body) as url:
        told = outcome(ask, url, error)
    assert len(told) < 2_000


@CLIENTS
@pytest.mark.parametrize("head", BAD_HEADS.values(), ids=BAD_HEADS)
def test_a_client_tells_a_broken_server(ask, error, head):
    with answering(b"", head) as url, pytest.raises(error) as told:
        ask(url)
    assert len(str(told.value)) < 2_000


def test_a_client_reads_no_endless_answer():
    body = b'{"choices": [{"message": {"content": "' + b"x" * (1 << 20) + b'"}}]}'
    with answering(body) as url, pytest.raises(EndpointError, match="more than 1000 bytes"):
        ask_endpoint(url, max_response_bytes=1000)


def test_a_client_waits_for_no_drops():
    with answering(b"x" * 1000, pause_s=0.2) as url, pytest.raises(EndpointError, match="complete"):
        Endpoint(f"{url}/v1", "m", timeout_s=0.5, pause_s=0.0)([], {}, 0)


DROPS = {
    "status": b"HTTP/1.1 200 OK" + b"k" * 500,
    "header": b"HTTP/1.1 200 OK\r\nServer: " + b"x" * 500,
    "headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 80,
    "refusal": b"HTTP/1.1 503 Busy\r\n" + b"A: b\r\n" * 80,
}


@pytest.mark.parametrize("drops", DROPS.values(), ids=DROPS)
@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda url: HttpRetriever(url, timeout=0.5, retries=0).retrieve(["q"], 1), RetrieverError),
        (lambda url: Server(url, timeout_s=0.5).ask("execute", {}), AppWorldError),
        (lambda url: Server(url, timeout_s=0.5).wait(0.5), AppWorldError),
        (lambda url: MCPClient(url, 0.5), MCPError),
        (lambda url: action_schema(url, 0.5), OpenEnvError),
        (lambda url: ask_endpoint_once(url, 0.5), EndpointError),
    ],
    ids=["retriever", "appworld", "appworld's start", "mcp", "openenv", "endpoint"],
)
def test_a_head_in_drops_ends_in_time(ask, error, drops):
    # A byte each 20 ms: some ten seconds, and no pause reaches the time limit.
    start = time.monotonic()
    with answering(drops, b"", 0.02) as url, pytest.raises(error, match=r"complete after 0\.5 s"):
        ask(url)
    assert time.monotonic() - start < 5


def test_a_session_ends_in_time_though_its_goodbye_is_answered_in_drops():
    with answering(DROPS["header"], b"", 0.02) as url:
        session = mcp_client.HttpTransport(url)
        session._headers = {"Mcp-Session-Id": "s"}
        start = time.monotonic()
        session.close()
        assert 1 < time.monotonic() - start < 6


def test_a_session_whose_name_no_header_can_hold_is_left():
    session = mcp_client.HttpTransport("http://127.0.0.1:9")
    session._headers = {"Mcp-Session-Id": "two\nlines"}
    with pytest.raises(MCPError, match="does not answer as an MCP server does"):
        session.tell({}, 1.0)
    session.close()


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def test_a_stream_of_events_ends_in_time_though_something_comes_all_the_while():
    # 80 comments of 6 bytes, a byte each 20 ms, would take 9.6 s; no pause reaches the time limit.
    body = b": on\n\n" * 80
    late = pytest.raises(MCPError, match="not complete after 1 s")
    with answering(body, EVENTS, pause_s=0.02) as url, late:
        MCPClient(url, 1.0)


@pytest.mark.parametrize("body", [b"data: " + b"x" * 1000, b"data: x\n" * 125])
def test_a_stream_of_events_has_a_size(body, monkeypatch):
    monkeypatch.setattr(mcp_client, "MAX_ANSWER_BYTES", 999)
    with answering(body, EVENTS) as url, pytest.raises(MCPError, match="more than 999 bytes"):
        MCPClient(url, 2.0)


@pytest.mark.parametrize(
    ("head", "pause_s"),
    [
        # 500 letters, one each 20 ms: 10 s.
        (b"HTTP/1.1 503 Busy\r\n\r\n", 0.02),
        (b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n", 0.0),
    ],
    ids=["in drops", "cut off"],
)
@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda url: MCPClient(url, 1.0), MCPError),
        (lambda url: Server(url, timeout_s=1.0).ask("execute", {}), AppWorldError),
        (lambda url: ask_endpoint_once(url, 1.0), EndpointError),
    ],
    ids=["mcp", "appworld", "endpoint"],
)
def test_a_refusal_is_told_though_its_text_has_no_end(ask, error, head, pause_s):
    with answering(b"x" * 500, head, pause_s) as url, pytest.raises(error, match="503: Busy") as e:
        ask(url)
    assert len(str(e.value)) < 400


@pytest.mark.parametrize("head", [b"HTTP/1.1 503 Busy\r\n", b"HTTP/1.1 200 OK\r\n"])
@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_an_answer_that_breaks_off_is_asked_for_again(head, is_reset):
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    with (
        answering(b"fff\r\n{", head, is_reset=is_reset) as url,
        pytest.raises(EndpointError, match="did not answer in 5 tries; the last one: "),
    ):
        ask_endpoint(url)


def test_an_answer_that_stands_still_is_asked_for_again():
    head = b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\n"
    with answering(b"xy", head, 5.0) as url, pytest.raises(EndpointError, match="HTTP 503: Busy x"):
        ask_endpoint_once(url, 0.3)


# Over pipes ---------------------------------------------------------------------------------------

STARTED = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {}}).encode()
LISTED = json.dumps({"jsonrpc": "2.0", "id": 2, "result": {"tools": []}}).encode()


@FAST
@given(
    st.lists(
        st.sampled_from([STARTED, LISTED])
        | st.binary(max_size=40)
        | VALUES.map(lambda value: json.dumps(value).encode())
        | VALUES.map(lambda value: json.dumps({"id": 1, "result": value}).encode())
        | VALUES.map(lambda value: json.dumps({"id": value, "method": value}).encode()),
        max_size=6,
    )
)
@example([DEEP])
@example([b'{"id": 1, "error": [1]}'])
@example([STARTED, b'{"id": "p", "method": "ping"}', LISTED])
@example([STARTED, b'{"id": 2, "result": {"tools": [{"name": [1], "inputSchema": 3}]}}'])
def test_whatever_a_server_writes_is_read_or_refused(tmp_path_factory, lines):
    written = tmp_path_factory.mktemp("server") / "output"
    written.write_bytes(b"\n".join([*lines, b""]))
    with contextlib.suppress(MCPError), contextlib.closing(MCPClient(f"cat {written}", 5.0)) as one:
        one.tools()


def process(script: str) -> str:
    return f"{sys.executable} -c {shlex.quote(script)}"


WRITES = "import os, time\nwhile True:\n    "
FLOODS = {
    "notifications": process(WRITES + 'os.write(1, b\'{"method": "on"}\\n\' * 99)'),
    "answers of others": process(WRITES + 'os.write(1, b\'{"id": 0, "result": {}}\\n\' * 99)'),
    "pings": process(WRITES + 'os.write(1, b\'{"method": "ping", "id": 7}\\n\')'),
    "notifications in drops": process(
        WRITES + 'time.sleep(0.02); os.write(1, b\'{"method": "on"}\\n\')'
    ),
    "a line without end in drops": process(WRITES + "time.sleep(0.02); os.write(1, b'x')"),
}


@pytest.mark.parametrize("command", FLOODS.values(), ids=FLOODS)
def test_a_server_that_never_stops_writing_is_given_up_in_time(command):
    start = time.monotonic()
    with pytest.raises(MCPError, match=r"did not (answer|read a message of \d+ bytes) within 1 s"):
        MCPClient(command, 1.0)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "command", [FLOODS["notifications"], process(WRITES + "os.write(1, b'x' * 999)")]
)
def test_a_server_that_never_stops_writing_has_a_size(command, monkeypatch):
    monkeypatch.setattr(mcp_client, "MAX_ANSWER_BYTES", 9_999)
    with pytest.raises(MCPError, match="wrote more than 9999 bytes where an answer was expected"):
        MCPClient(command, 60.0)


def test_many_lines_and_long_ones_are_read_whole(tmp_path):
    tools = [{"name": f"tool {number}", "description": "x" * 5_000} for number in range(200)]
    listed = json.dumps({"id": 2, "result": {"tools": tools}}).encode()
    assert len(listed) > 10 * (1 << 16)
    written = tmp_path / "output"
    written.write_bytes(b"\n".join([STARTED, *[b'{"method": "on"}'] * 20_000, listed, b""]))
    with contextlib.closing(MCPClient(f"sh -c 'cat {written}; exec sleep 60'", 60.0)) as client:
        assert [tool["name"] for tool in client.tools()] == [tool["name"] for tool in tools]


def test_a_server_that_does_not_read_is_given_up_in_time():
    deaf = process(f"import time\nprint({STARTED.decode()!r}, flush=True)\ntime.sleep(60)")
    client = MCPClient(deaf, 5.0)
    client.timeout_s = 0.5
    # A pipe holds 64 KiB.
    start = time.monotonic()
    with pytest.raises(MCPError, match=r"did not read a message of \d+ bytes within 0\.5 s"):
        client.call("turn", {"text": "x" * 200_000})
    assert time.monotonic() - start < 5
    client.close()


def test_a_message_longer_than_a_pipe_holds_arrives_whole():
    echo = (
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    told = json.loads(line)\n"
        "    size = str(len(line))\n"
        "    text = {'content': [{'type': 'text', 'text': size}]}\n"
        "    print(json.dumps({'id': told.get('id'), 'result': text}), flush=True)"
    )
    with contextlib.closing(MCPClient(process(echo), 20.0)) as client:
        (size, is_error) = client.call("turn", {"text": "x" * 1_000_000})
    assert int(size) > 1_000_000
    assert not is_error


# Servers ------------------------------------------------------------------------------------------


class Nothing:
    """A retriever that finds nothing."""

    def retrieve(self, queries, topk):
        return [[] for _ in queries]


def retriever_server(**settings: Any) -> contextlib.AbstractContextManager[RetrieverServer]:
    return running(RetrieverServer(Nothing(), port=0, **settings))


def sent(server: RetrieverServer, request: bytes) -> bytes:
    """The start of the answer to raw bytes; empty where the server just closed."""
    address = server.server_address[:2]
    with socket.create_connection(address, timeout=5) as connection, contextlib.suppress(OSError):
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1 << 16)
    return b""


REQUESTS = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01",
    b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /retrieve HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /retrieve HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /retrieve HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /retrieve HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    b"POST /retrieve HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
    b"POST /../../etc/passwd HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    b"POST /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    b"GET /health?../../etc/passwd HTTP/1.1\r\n\r\n",
    b"GET //etc/passwd HTTP/1.1\r\n\r\n",
    b"BREW /retrieve HTTP/1.1\r\n\r\n",
    b"POST /retrieve HTTP/9.9\r\nContent-Length: 2\r\n\r\n{}",
]


def test_a_connection_that_is_used_again_has_all_of_its_time_again():
    with retriever_server() as server:
        retriever = HttpRetriever(server.url, timeout=7.0)
        for _ in range(2):
            assert retriever.retrieve(["q"], 1) == [[]]
            (connection,) = retriever._endpoints[0]._idle
            assert connection.sock is not None
            assert connection.sock.gettimeout() == 7.0


def test_the_retriever_server_outlives_every_request():
    with retriever_server(timeout=0.3) as server:
        assert server.server_address[0] == "127.0.0.1"
        for request in REQUESTS:
            answer = sent(server, request)
            assert b"200 OK" not in answer.partition(b"\r\n")[0]
            assert b"root:" not in answer
        assert HttpRetriever(server.url).retrieve(["q"], 1) == [[]]
