"""One retriever per process, however many environments ask: batching, caching, building by name."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from envs.search.client import HttpRetriever
from envs.search.dense import DenseRetriever, Encoder, sentence_encoder
from envs.search.passages import Hit, JsonlCorpus, Passage
from envs.search.questions import pooled_passages
from envs.search.retrievers import BM25Retriever, Retriever
from envs.search.rows import Question
from envs.search.world import generated_world


class BatchingRetriever:
    """Answers all calls that wait at the same time in one call of the wrapped retriever.

    Whoever finds the retriever free runs it for everyone who waits. A single caller is never
    delayed, and n threads cost about two batches instead of n calls, which is what a sentence
    encoder needs. It also makes a retriever that is not thread-safe safe to share.

    Args:
        retriever: The wrapped retriever.
        max_queries: Queries per batch, if more than one caller waits.
    """

    def __init__(self, retriever: Retriever, *, max_queries: int = 256):
        self.retriever = retriever
        self.max_queries = max_queries
        self._waiting: deque[_Call] = deque()
        self._queue_lock = threading.Lock()
        self._run_lock = threading.Lock()

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """See `envs.search.retrievers.Retriever.retrieve`."""
        call = _Call(list(queries), topk)
        with self._queue_lock:
            self._waiting.append(call)
        with self._run_lock:
            while not call.done:
                self._run_next_batch()
        if call.error is not None:
            raise call.error
        return call.hits

    def _run_next_batch(self) -> None:
        with self._queue_lock:
            batch = [self._waiting.popleft()]
            total = len(batch[0].queries)
            while self._waiting and total + len(self._waiting[0].queries) <= self.max_queries:
                batch.append(self._waiting.popleft())
                total += len(batch[-1].queries)
        try:
            hits = self.retriever.retrieve(
                [query for call in batch for query in call.queries],
                max(call.topk for call in batch),
            )
        except Exception as error:
            # Every caller of the batch gets the error; none may wait for ever.
            for call in batch:
                call.error, call.done = error, True
            return
        start = 0
        for call in batch:
            end = start + len(call.queries)
            call.hits = [found[: call.topk] for found in hits[start:end]]
            call.done = True
            start = end


class _Call:
    def __init__(self, queries: list[str], topk: int):
        self.queries = queries
        self.topk = topk
        self.hits: list[list[Hit]] = []
        self.error: Exception | None = None
        self.done = False


class CachedRetriever:
    """Remembers the latest results: the episodes of a group ask many equal queries.

    Args:
        retriever: The wrapped retriever.
        max_queries: Queries remembered; the least recently used is forgotten first.
    """

    def __init__(self, retriever: Retriever, *, max_queries: int = 4096):
        self.retriever = retriever
        self.max_queries = max_queries
        self._results: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self._lock = threading.Lock()

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """See `envs.search.retrievers.Retriever.retrieve`."""
        found: dict[str, list[Hit]] = {}
        with self._lock:
            for query in queries:
                if (query, topk) in self._results:
                    self._results.move_to_end((query, topk))
                    found[query] = self._results[query, topk]
        missing = [query for query in dict.fromkeys(queries) if query not in found]
        if missing:
            found.update(zip(missing, self.retriever.retrieve(missing, topk), strict=True))
            with self._lock:
                self._results.update(((query, topk), found[query]) for query in missing)
                while len(self._results) > self.max_queries:
                    self._results.popitem(last=False)
        return [list(found[query]) for query in queries]


def load_corpus(corpus: str, questions: Sequence[str | Question] = ()) -> Sequence[Passage]:
    """Open a corpus by name.

    Args:
        corpus: `"generated"`, the passages of the generated world; `"questions"`, those that the
            questions ship; or the path of a JSON lines file.
        questions: The question sources that `"questions"` refers to.
    """
    if corpus == "generated":
        return generated_world().passages
    if corpus == "questions":
        return pooled_passages(questions)
    return JsonlCorpus(corpus)


def shared_retriever(
    kind: str,
    *,
    corpus: str = "generated",
    questions: Sequence[str | Question] = (),
    **settings: Any,
) -> Retriever:
    """Return this process's retriever of the given kind and settings, built on first use.

    Args:
        kind: `"bm25"`, `"dense"`, or one or more retriever URLs separated by commas.
        corpus: See `load_corpus`; not used for URLs.
        questions: See `load_corpus`.
        **settings: For `"bm25"`, `k1` and `b`, or `index`, a folder written by
            `BM25Retriever.save`. For `"dense"`, `encoder` (an `Encoder`, or the name of a
            sentence-transformers model together with the arguments of `sentence_encoder`) and
            `index` of `DenseRetriever`. For URLs, the arguments of `HttpRetriever`.

    Raises:
        ValueError: The kind is unknown.
        ImportError: The kind needs a package that is not installed.
    """
    with _build_lock:
        return _build(kind, corpus, tuple(questions), tuple(sorted(settings.items())))


# Without it, environments that start in several threads would each build the same index.
_build_lock = threading.Lock()


@lru_cache(maxsize=8)
def _build(
    kind: str,
    corpus: str,
    questions: tuple[str | Question, ...],
    settings: tuple[tuple[str, Any], ...],
) -> Retriever:
    options = dict(settings)
    if kind.startswith(("http://", "https://")):
        return CachedRetriever(HttpRetriever(kind.split(","), **options))
    if kind == "bm25":
        passages = load_corpus(corpus, questions)
        index = options.pop("index", None)
        if index is not None:
            return CachedRetriever(BM25Retriever.load(Path(index), passages, **options))
        return CachedRetriever(BM25Retriever(passages, **options))
    if kind == "dense":
        return CachedRetriever(BatchingRetriever(_dense(load_corpus(corpus, questions), options)))
    raise ValueError(f"retriever must be 'bm25', 'dense' or a URL, got {kind!r}")


def _dense(corpus: Sequence[Passage], options: Mapping[str, Any]) -> DenseRetriever:
    settings = dict(options)
    index = settings.pop("index", "faiss")
    encoder = settings.pop("encoder", None)
    if isinstance(encoder, str):
        encoder = sentence_encoder(encoder, **settings)
    elif settings:
        raise ValueError(f"unknown settings of the dense retriever: {sorted(settings)}")
    if not isinstance(encoder, Encoder):
        raise ValueError(
            "the dense retriever needs encoder=<a sentence-transformers id or folder, or an "
            f"Encoder>, got {encoder!r}"
        )
    return DenseRetriever(corpus, encoder, index=index)
