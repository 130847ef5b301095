"""A retriever server that speaks Search-R1's protocol, on the standard library alone.

One server per machine (or one for a cluster) holds the corpus and its index once, however many
processes play episodes:

    python -m envs.search.server --corpus wiki-18.jsonl --retriever bm25 --port 8000

`POST /retrieve` takes `{"queries": [str, ...], "topk": int, "return_scores": bool}`; verl-agent's
form, `"query"` with a single string, works too. The answer is `{"result": [...]}` with one list per
query of documents `{"id", "contents"}`, or of `{"document", "score"}` when scores are asked for.
`GET /health` answers `{"status": "ok"}`. Errors are JSON, `{"detail": sentence}`: 400 for a body
that is no such request, 404, 405, 411 without a length, 413 above the size limit, 500 and 503 when
the retriever fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from envs.search.passages import Hit, to_contents
from envs.search.retrievers import Retriever, RetrieverError
from envs.search.sharing import shared_retriever

_LOG = logging.getLogger("envs.search.server")
_MAX_TOPK = 100
_CHUNK_BYTES = 1 << 16


class RetrieveRequest(NamedTuple):
    """A checked request."""

    queries: list[str]
    topk: int
    return_scores: bool


class BadRequestError(Exception):
    """The body is not a request of the protocol; the message says what is wrong."""


def read_request(body: bytes, default_topk: int) -> RetrieveRequest:
    """Check and read the body of a `/retrieve` request.

    Raises:
        BadRequestError: It is not UTF-8, not JSON, or a field has the wrong type or range.
    """
    try:
        fields = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the body must be UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body must be JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequestError(f"the body must be a JSON object, got {type(fields).__name__}")
    queries = fields.get("queries", fields.get("query"))
    queries = [queries] if isinstance(queries, str) else queries
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequestError("'queries' must be a list of strings")
    topk = fields.get("topk")
    topk = default_topk if topk is None else topk
    if type(topk) is not int or not 1 <= topk <= _MAX_TOPK:
        raise BadRequestError(f"'topk' must be an integer from 1 to {_MAX_TOPK}, got {topk!r}")
    return RetrieveRequest(queries, topk, bool(fields.get("return_scores", False)))


class RetrieverServer(ThreadingHTTPServer):
    """Serves one retriever; `serve_forever()` runs it, `shutdown()` from another thread ends it.

    Args:
        retriever: What answers; called from several threads.
        host: Address to bind; the default is reachable from this machine only. The server has no
            authentication: bind another address inside a trusted network only.
        port: Port to bind; 0 takes a free one, see `url`.
        topk: Hits per query where a request names no number.
        max_request_bytes: Largest body that is read.
        timeout: Seconds to wait for the next bytes of a client.
    """

    daemon_threads = True
    # The default of 5 refuses connections when a few hundred episodes start at once.
    request_queue_size = 1024

    def __init__(
        self,
        retriever: Retriever,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        topk: int = 3,
        max_request_bytes: int = 8 << 20,
        timeout: float = 60.0,
    ):
        self.retriever = retriever
        self.topk = topk
        self.max_request_bytes = max_request_bytes
        super().__init__((host, port), type("Handler", (_Handler,), {"timeout": timeout}))

    @property
    def url(self) -> str:
        """The URL that clients are given."""
        host, port = self.server_address[:2]
        return f"http://{host}:{port}/retrieve"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection instead of printing its traceback."""
        _LOG.warning("connection of %s broke: %r", client_address, sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    server: RetrieverServer  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"
    # Head and body leave in one packet; two would wait for the client's delayed acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self._read_body()
        if body is None:
            return
        if self.path.partition("?")[0] != "/retrieve":
            self._fail(404, f"no such path {self.path!r}; use POST /retrieve")
            return
        try:
            request = read_request(body, self.server.topk)
            hits = self.server.retriever.retrieve(request.queries, request.topk)
        except BadRequestError as error:
            self._fail(400, str(error))
        except RetrieverError as error:
            self._fail(503, str(error))
        except Exception as error:
            # One request must not take the server down; the client is told and may try again.
            _LOG.exception("the retriever failed")
            self._fail(500, f"the retriever failed: {type(error).__name__}: {error}")
        else:
            self._send(200, {"result": [_to_json(found, request.return_scores) for found in hits]})

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok"})
        elif self.path == "/retrieve":
            self._fail(405, "use POST /retrieve")
        else:
            self._fail(404, f"no such path {self.path!r}; use POST /retrieve or GET /health")

    def _read_body(self) -> bytes | None:
        """Return the body, or None after answering that it cannot be read."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            self._fail(411, "send the body with a Content-Length")
            return None
        size, limit = int(length), self.server.max_request_bytes
        if size > limit:
            # A client that is still sending would see a reset instead of the answer, so a body
            # that is only somewhat too long is read and dropped.
            remaining = min(size, 8 * limit)
            while remaining and (chunk := self.rfile.read(min(remaining, _CHUNK_BYTES))):
                remaining -= len(chunk)
            self.close_connection = True
            self._fail(413, f"the body has {size} bytes, at most {limit} are read; send less")
            return None
        return self.rfile.read(size)

    def _fail(self, status: int, detail: str) -> None:
        self._send(status, {"detail": detail})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode("ascii")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.debug(format, *args)


def _to_json(hits: Sequence[Hit], return_scores: bool) -> list[dict[str, Any]]:
    documents = [{"id": hit.passage.id, "contents": to_contents(hit.passage)} for hit in hits]
    if not return_scores:
        return documents
    return [
        {"document": document, "score": hit.score}
        for document, hit in zip(documents, hits, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a server until it is interrupted or terminated."""
    parser = argparse.ArgumentParser(prog="python -m envs.search.server", description=__doc__)
    parser.add_argument("--retriever", choices=("bm25", "dense"), default="bm25")
    parser.add_argument(
        "--corpus",
        default="generated",
        help="JSON lines of passages, or 'generated' for the built-in world",
    )
    parser.add_argument(
        "--index", help="bm25: folder of BM25Retriever.save; dense: faiss, flat or a file"
    )
    parser.add_argument("--encoder", help="dense: sentence-transformers id or folder")
    parser.add_argument("--device", help="dense: where the encoder runs")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--topk", type=int, default=3, help="hits where a request names no number")
    parser.add_argument("--max-request-mb", type=float, default=8.0)
    options = parser.parse_args(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    chosen = {name: getattr(options, name) for name in ("index", "encoder", "device")}
    settings = {name: value for name, value in chosen.items() if value is not None}
    retriever = shared_retriever(options.retriever, corpus=options.corpus, **settings)
    server = RetrieverServer(
        retriever,
        host=options.host,
        port=options.port,
        topk=options.topk,
        max_request_bytes=int(options.max_request_mb * (1 << 20)),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _LOG.info("serving %s over %s at %s", options.retriever, options.corpus, server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        _LOG.info("stopped")
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
