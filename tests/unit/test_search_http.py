"""The /retrieve protocol over loopback: client against server, and each against broken peers."""

import contextlib
import http.client
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envs.search.client import HttpRetriever
from envs.search.passages import Hit, Passage
from envs.search.retrievers import BM25Retriever, RetrieverError
from envs.search.server import RetrieverServer
from envs.search.sharing import shared_retriever
from envs.search.world import generated_world
from tests.serving import running


class NamesRetriever:
    """Answers each query with passages named after it."""

    def __init__(self):
        self.error = None

    def retrieve(self, queries, topk):
        if self.error is not None:
            raise self.error
        return [
            [Hit(Passage(f"{q}-{k}", f'"{q}"', f"text\nä {k}"), 1.5 - k) for k in range(topk)]
            for q in queries
        ]


@pytest.fixture
def server():
    with running(
        RetrieverServer(NamesRetriever(), port=0, topk=2, max_request_bytes=2000, timeout=1.0)
    ) as server:
        yield server


def post(server, body, path="/retrieve", headers=None):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def down_url():
    return f"http://127.0.0.1:{free_port()}"


# Server: what it accepts.


def test_server_speaks_search_r1s_protocol(server):
    body = json.dumps({"queries": ["x", "y"], "topk": 1, "return_scores": True})
    assert post(server, body) == (
        200,
        {
            "result": [
                [{"document": {"id": "x-0", "contents": '""x""\ntext\nä 0'}, "score": 1.5}],
                [{"document": {"id": "y-0", "contents": '""y""\ntext\nä 0'}, "score": 1.5}],
            ]
        },
    )


def test_server_defaults(server):
    status, answer = post(server, json.dumps({"queries": ["x"], "topk": None}))
    assert status == 200
    assert [document["id"] for document in answer["result"][0]] == ["x-0", "x-1"]
    assert post(server, json.dumps({"queries": []})) == (200, {"result": []})


def test_server_accepts_verl_agents_single_query(server):
    status, answer = post(server, json.dumps({"query": "x", "topk": 1}))
    assert status == 200
    assert [[document["id"] for document in found] for found in answer["result"]] == [["x-0"]]


def test_server_health(server):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    for path, status in (("/health", 200), ("/retrieve", 405), ("/other", 404)):
        connection.request("GET", path)
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == status
        assert answer == {"status": "ok"} if status == 200 else "use POST" in answer["detail"]


# Server: what it refuses.


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"[" * 1500, "must be JSON"),
        (b'{"queries": ["\xff\xfe"]}', "must be UTF-8"),
        ('{"queries": ["x"]}'.encode("utf-16"), "must be UTF-8"),
        (b'["x"]', "must be a JSON object, got list"),
        (b"{}", "'queries' must be a list of strings"),
        (b'{"queries": [1]}', "'queries' must be a list of strings"),
        (b'{"queries": {"x": 1}}', "'queries' must be a list of strings"),
        (b'{"queries": ["x"], "topk": 0}', "'topk' must be an integer from 1 to 100, got 0"),
        (b'{"queries": ["x"], "topk": 101}', "got 101"),
        (b'{"queries": ["x"], "topk": "3"}', "got '3'"),
        (b'{"queries": ["x"], "topk": true}', "got True"),
    ],
)
def test_malformed_requests_get_400_and_a_reason(server, body, detail):
    status, answer = post(server, body)
    assert status == 400
    assert detail in answer["detail"]
    assert post(server, b'{"queries": ["x"], "topk": 1}')[0] == 200, "the server goes on"


def test_huge_requests_get_413(server):
    too_long = json.dumps({"queries": ["x" * 3000]})
    assert post(server, too_long)[0] == 413
    status, answer = post(server, b"x" * 16_000)
    assert status == 413
    assert "16000 bytes, at most 2000" in answer["detail"]


def test_a_declared_length_is_not_believed_into_memory(server):
    with socket.create_connection(server.server_address[:2], timeout=10) as client:
        client.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("length", ["", "x", "-1", "1.5", "²"])
def test_a_body_without_length_gets_411(server, length):
    with socket.create_connection(server.server_address[:2], timeout=10) as client:
        header = f"Content-Length: {length}\r\n" if length else ""
        client.sendall(
            f"POST /retrieve HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode("latin-1", "replace")
        )
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 411 ")


def test_other_paths_get_404(server):
    assert post(server, b'{"queries": []}', path="/search")[0] == 404


def test_a_client_that_stalls_is_dropped(server):
    with socket.create_connection(server.server_address[:2], timeout=10) as client:
        client.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert client.recv(4096) == b"", "closed after the server's timeout of 1 s"


def test_failures_of_the_retriever_are_told_apart(server):
    body = json.dumps({"queries": ["x"]})
    server.retriever.error = RetrieverError("index is loading")
    assert post(server, body) == (503, {"detail": "index is loading"})
    server.retriever.error = ZeroDivisionError("oops")
    assert post(server, body) == (500, {"detail": "the retriever failed: ZeroDivisionError: oops"})
    server.retriever.error = None
    assert post(server, body)[0] == 200


# Client against the server.


def test_client_gets_what_the_retriever_returns(server):
    client = HttpRetriever(server.url, batch_size=2)
    queries = ["x", "wörld", "\ud800 lone surrogate", "", "y"]
    assert client.retrieve(queries, 3) == NamesRetriever().retrieve(queries, 3)
    assert client.retrieve([], 3) == []
    for copy in (client, pickle.loads(pickle.dumps(client))):
        assert copy.retrieve(["x"], 1) == NamesRetriever().retrieve(["x"], 1)


def test_remote_bm25_equals_local_bm25():
    pytest.importorskip("bm25s", reason="needs the extra [search]")
    local = BM25Retriever(generated_world().passages)
    queries = [question.question for question in generated_world().questions[::50]]
    with running(RetrieverServer(local, port=0)) as server:
        assert HttpRetriever(server.url).retrieve(queries, 3) == local.retrieve(queries, 3)
        assert shared_retriever(server.url).retrieve(queries, 3) == local.retrieve(queries, 3)


def test_many_threads_share_one_client(server):
    client = HttpRetriever(server.url)
    answers = {}

    def ask(number):
        answers[number] = [client.retrieve([f"q{number}"], 1)[0][0].passage.id for _ in range(5)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {number: [f"q{number}-0"] * 5 for number in range(16)}


def test_connections_are_reused_and_survive_a_restart():
    port = free_port()
    retriever = NamesRetriever()
    sleeps = []
    client = HttpRetriever(f"http://127.0.0.1:{port}", retries=0, sleep=sleeps.append)
    for _ in range(2):
        with running(RetrieverServer(retriever, port=port, timeout=0.2)):
            # The kept connection belongs to the stopped server, which counts as no failure.
            assert client.retrieve(["x"], 1) == retriever.retrieve(["x"], 1)
            (connection,) = client._endpoints[0]._idle
            assert client.retrieve(["y"], 1) == retriever.retrieve(["y"], 1)
            assert client._endpoints[0]._idle[0] is connection
            time.sleep(0.5)  # longer than the server's patience with an idle connection
            assert client.retrieve(["z"], 1) == retriever.retrieve(["z"], 1)
    assert sleeps == []


# Client against broken servers.

GOOD = json.dumps({"result": [[{"document": {"contents": '"T"\ntext'}, "score": 2}]]}).encode()


class ScriptedServer(ThreadingHTTPServer):
    """Answers the n-th request with the n-th of its answers; the last one repeats.

    An answer is (status, body), or a callable that is given the handler.
    """

    daemon_threads = True

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        super().__init__(("127.0.0.1", 0), _ScriptedHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/retrieve"

    def handle_error(self, request, client_address):
        """Clients hang up on these answers; that is the point."""


class _ScriptedHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.requests.append(json.loads(body))
        answer = server.answers[min(len(server.requests), len(server.answers)) - 1]
        if callable(answer):
            answer(self)
            return
        status, content = answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def hang_up(handler):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def say_half(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(GOOD)
    hang_up(handler)


def stay_silent(handler):
    time.sleep(1.0)
    handler.close_connection = True


def drip(handler):
    """Send a good answer, but over one second."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(20 + len(GOOD)))
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(20):
            handler.wfile.write(b" ")
            time.sleep(0.05)
        handler.wfile.write(GOOD)
    handler.close_connection = True


@pytest.mark.parametrize(
    "fault",
    [(500, b"x"), (503, b"busy"), (429, b""), hang_up, say_half, stay_silent, drip],
    ids=["500", "503", "429", "hang_up", "half", "silent", "drip"],
)
def test_a_fault_of_the_moment_is_tried_again(fault):
    sleeps = []
    with running(ScriptedServer(fault, fault, (200, GOOD))) as server:
        client = HttpRetriever(server.url, timeout=0.3, backoff=2.0, sleep=sleeps.append)
        assert client.retrieve(["x"], 1) == [[Hit(Passage("", "T", "text"), 2.0)]]
        assert server.requests == [{"queries": ["x"], "topk": 1, "return_scores": True}] * 3
    assert sleeps == [2.0, 4.0], "the pauses grow by the back-off"


def test_the_next_url_is_asked_at_once():
    sleeps = []
    with running(ScriptedServer((200, GOOD))) as server:
        client = HttpRetriever([down_url(), server.url], sleep=sleeps.append)
        for _ in range(4):
            assert len(client.retrieve(["x"], 1)[0]) == 1
        assert len(server.requests) == 4
    assert sleeps == []


def test_requests_go_round_robin():
    with running(ScriptedServer((200, GOOD))) as one, running(ScriptedServer((200, GOOD))) as two:
        client = HttpRetriever([one.url, two.url], batch_size=1)
        for query in "abcdef":
            client.retrieve([query], 1)
        assert [r["queries"] for r in one.requests] == [["a"], ["c"], ["e"]]
        assert [r["queries"] for r in two.requests] == [["b"], ["d"], ["f"]]


def test_all_down_is_an_error_that_says_what_was_tried():
    sleeps = []
    urls = [down_url(), down_url()]
    client = HttpRetriever(urls, retries=3, backoff=0.5, sleep=sleeps.append)
    with pytest.raises(RetrieverError, match="no retriever answered in 4 rounds") as caught:
        client.retrieve(["x"], 1)
    assert sleeps == [0.5, 1.0, 1.5]
    for part in (*urls, "ConnectionRefusedError", "python -m envs.search.server"):
        assert part in str(caught.value)


@pytest.mark.parametrize("status", [400, 404, 413, 301])
def test_a_refusal_is_not_repeated(status):
    with running(ScriptedServer((status, b"no such thing"))) as server:
        with pytest.raises(RetrieverError, match=f"refused .* status {status} .*no such thing"):
            HttpRetriever(server.url).retrieve(["x"], 1)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"\xff\xfe{}",
        b"[]",
        b"{}",
        b'{"result": null}',
        b'{"result": []}',
        b'{"result": [[], []]}',
        b'{"result": [[3]]}',
        b'{"result": [[{"document": {"title": "T"}, "score": 1}]]}',
        b'{"result": [[{"document": {"contents": "c"}, "score": "high"}]]}',
        b'{"result": [[{"document": {"contents": "c"}}]]}',
    ],
)
def test_an_answer_outside_the_protocol_is_an_error_at_once(content):
    with running(ScriptedServer((200, content))) as server:
        with pytest.raises(RetrieverError, match="does not speak the /retrieve protocol"):
            HttpRetriever(server.url).retrieve(["x"], 1)
        assert len(server.requests) == 1


def test_an_answer_without_scores_and_too_long_is_read():
    body = json.dumps({"result": [[{"id": i, "contents": f"text {i}"} for i in range(9)]]}).encode()
    with running(ScriptedServer((200, body))) as server:
        (hits,) = HttpRetriever(server.url).retrieve(["x"], 2)
    assert [hit.passage for hit in hits] == [Passage("0", "", "text 0"), Passage("1", "", "text 1")]
    assert all(hit.score != hit.score for hit in hits), "no score is NaN, not a number made up"


def test_a_response_without_end_is_not_read_into_memory():
    with running(ScriptedServer((200, b" " * 100_000))) as server:
        client = HttpRetriever(server.url, max_response_bytes=50_000)
        with pytest.raises(RetrieverError, match="more than 50000 bytes"):
            client.retrieve(["x"], 1)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/retrieve", "http://", "", "/retrieve"])
def test_a_wrong_url_is_refused(url):
    with pytest.raises(ValueError, match="expected a retriever URL such as"):
        HttpRetriever(url)


def test_wrong_numbers_are_refused():
    for wrong in ({"timeout": 0}, {"retries": -1}, {"backoff": -1.0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="expected timeout > 0"):
            HttpRetriever("http://127.0.0.1:1", **wrong)
    with pytest.raises(ValueError, match="at least one retriever URL"):
        HttpRetriever([])


def test_the_server_command_serves_and_stops():
    pytest.importorskip("bm25s", reason="needs the extra [search]")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "envs.search.server", "--port", str(port), "--topk", "1"],
        cwd=Path(__file__).resolve().parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert f"serving bm25 over generated at http://127.0.0.1:{port}/retrieve" in line
        title = generated_world().passages[0].title
        (hits,) = HttpRetriever(f"http://127.0.0.1:{port}").retrieve([title], 2)
        assert hits[0].passage == generated_world().passages[0]
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()
