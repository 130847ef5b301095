"""A client of Search-R1's retriever protocol: `POST /retrieve`, JSON in and out."""

from __future__ import annotations

import http.client
import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from envs.search.passages import Hit, passage_from_document
from envs.search.retrievers import RetrieverError
from rllib_gigpo_wire import HTTPConnection, HTTPSConnection, read_object, read_whole

_EXCERPT_CHARS = 300
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


class HttpRetriever:
    """Asks one or several retriever servers; any server that speaks Search-R1's protocol will do.

    A request is `{"queries": [...], "topk": k, "return_scores": true}`. Each request starts at the
    next URL (round robin). A refused or broken connection, a time-out, and the statuses 429 and
    5xx are faults of the moment: the request goes to the next URL at once and, when all have
    failed, again to all of them after a pause that grows by `backoff` each round. Any other
    status, or an answer outside the protocol, is a fault of the set-up and raises at once.

    Args:
        urls: One URL or several, such as `"http://127.0.0.1:8000"`; a URL without a path means
            `/retrieve`.
        timeout: Seconds that connecting, sending and the whole answer may take, each.
        retries: Further rounds over all URLs after the first.
        backoff: Seconds of the first pause; the n-th is n times as long.
        batch_size: Queries per request; more are sent in turn.
        max_response_bytes: Largest response that is read.
        sleep: How to pause.

    Raises:
        ValueError: A URL or a number is out of range.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        timeout: float = 60.0,
        retries: int = 10,
        backoff: float = 1.0,
        batch_size: int = 256,
        max_response_bytes: int = 64 << 20,
        sleep: Callable[[float], None] = time.sleep,
    ):
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise ValueError("give at least one retriever URL, such as 'http://127.0.0.1:8000'")
        if timeout <= 0 or retries < 0 or backoff < 0 or batch_size < 1:
            raise ValueError(
                "expected timeout > 0, retries >= 0, backoff >= 0 and batch_size >= 1, got "
                f"{timeout}, {retries}, {backoff} and {batch_size}"
            )
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.batch_size = batch_size
        self._endpoints = [_Endpoint(url, timeout, max_response_bytes) for url in urls]
        self._sleep = sleep
        self._turn = 0

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """See `envs.search.retrievers.Retriever.retrieve`.

        Raises:
            RetrieverError: Every URL failed in every round, or one broke the protocol.
        """
        hits: list[list[Hit]] = []
        for start in range(0, len(queries), self.batch_size):
            batch = list(queries[start : start + self.batch_size])
            hits.extend(self._request(batch, topk))
        return hits

    def _request(self, queries: list[str], topk: int) -> list[list[Hit]]:
        body = json.dumps({"queries": queries, "topk": topk, "return_scores": True}).encode("ascii")
        # Concurrent calls may read the same turn; that costs balance for one request, not safety.
        first = self._turn % len(self._endpoints)
        self._turn += 1
        endpoints = self._endpoints[first:] + self._endpoints[:first]
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                self._sleep(self.backoff * attempt)
            for endpoint in endpoints:
                try:
                    answer = endpoint.post(body)
                except (OSError, http.client.HTTPException, _BusyError) as error:
                    failure = f"{endpoint.url}: {type(error).__name__}: {error}"
                else:
                    return _read_result(answer, len(queries), topk, endpoint.url)
        raise RetrieverError(
            f"no retriever answered in {self.retries + 1} rounds over "
            f"{[endpoint.url for endpoint in endpoints]}; the last failure was {failure}. Start "
            "one with `python -m envs.search.server`, or check the URLs"
        )


class _BusyError(Exception):
    """The server answered with a status that a later attempt may not meet."""


class _Endpoint:
    """One URL, with its idle connections kept open for the next request of any thread."""

    def __init__(self, url: str, timeout: float, max_response_bytes: int):
        parts = urlsplit(url)
        if parts.username is not None:
            raise ValueError(
                "a retriever's URL holds a user name: it is not sent, and is written down"
            )
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(
                f"expected a retriever URL such as 'http://127.0.0.1:8000/retrieve', got {url!r}"
            )
        self.url = url
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        path = parts.path if parts.path not in {"", "/"} else "/retrieve"
        self._target = f"{path}?{parts.query}" if parts.query else path
        self._timeout = timeout
        self._max_response_bytes = max_response_bytes
        self._idle: deque[http.client.HTTPConnection] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": deque()}

    def post(self, body: bytes) -> bytes:
        try:
            connection = self._idle.pop()
        except IndexError:
            return self._exchange(self._connect(), body)
        try:
            return self._exchange(connection, body)
        except ConnectionError:
            # The server may have closed the connection while it was idle, which is no failure.
            return self._exchange(self._connect(), body)

    def _connect(self) -> http.client.HTTPConnection:
        kind = HTTPSConnection if self._secure else HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout)

    def _exchange(self, connection: http.client.HTTPConnection, body: bytes) -> bytes:
        try:
            connection.request("POST", self._target, body, _HEADERS)
            response = connection.getresponse()
            answer = self._read(response)
            response.close()  # or the connection would refuse the next request
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        if response.status == 200:
            return answer
        excerpt = answer[:_EXCERPT_CHARS].decode("utf-8", "replace")
        message = f"status {response.status} {response.reason}: {excerpt}"
        if response.status == 429 or response.status >= 500:
            raise _BusyError(message)
        raise RetrieverError(f"{self.url} refused the request with {message}")

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return read_whole(response, self._timeout, self._max_response_bytes)
        except ValueError as error:
            raise RetrieverError(
                f"{self.url} sent more than {self._max_response_bytes} bytes; lower topk or "
                "batch_size, or raise max_response_bytes"
            ) from error


def _read_result(answer: bytes, num_queries: int, topk: int, url: str) -> list[list[Hit]]:
    """Read `{"result": [[document or {"document", "score"}, ...], ...]}`, one list per query."""
    try:
        result = read_object(answer)["result"]
        if not isinstance(result, list) or not all(isinstance(hits, list) for hits in result):
            raise ValueError("'result' is no list of lists")
        if len(result) != num_queries:
            raise ValueError(f"{len(result)} result lists for {num_queries} queries")
        return [[_read_hit(entry) for entry in hits[:topk]] for hits in result]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        excerpt = answer[:_EXCERPT_CHARS].decode("utf-8", "replace")
        raise RetrieverError(
            f"{url} does not speak the /retrieve protocol ({type(error).__name__}: {error}); it "
            f"answered {excerpt!r}"
        ) from error


def _read_hit(entry: Any) -> Hit:
    if isinstance(entry, dict) and "document" in entry:
        return Hit(passage_from_document(entry["document"]), float(entry["score"]))
    return Hit(passage_from_document(entry), math.nan)
