"""What every retriever does, and retrieval by BM25 in this process.

The other retrievers are `envs.search.dense.DenseRetriever` and `envs.search.client.HttpRetriever`;
`envs.search.sharing` builds any of them by name, once per process.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from envs.search.passages import Hit, Passage

_WORD = re.compile(r"\w+")
# Words that stand in most questions and tell no passage from another; scoring them costs a pass
# over most of the corpus each.
_STOP_WORDS = frozenset(
    _WORD.findall(
        """
        a an and are as at be been but by did do does for from had has have he her his how i if in
        into is it its me my no not of on or our she so such than that the their them then there
        these they this to was we were what when where which while who whom whose why will with
        would you your
        """
    )
)


class RetrieverError(RuntimeError):
    """A retriever could not answer: an outage, not the agent's fault and never a reward of 0."""


class Retriever(Protocol):
    """Finds the passages most relevant to a query; safe to call from several threads."""

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most `topk` hits for each query, best first.

        Args:
            queries: Any number of queries, answered as one batch.
            topk: Largest number of hits per query, at least 1.

        Raises:
            RetrieverError: The retriever cannot answer at present.
        """
        ...


def tokenize(text: str) -> list[str]:
    """Split into lower-case words without diacritics and without the most common English words."""
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in decomposed if not unicodedata.combining(char))
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]


def top_indices(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` largest scores, best first, ties by the lower index.

    Args:
        scores: Shape (n,).
        count: At least 1; all n indices are returned when it is n or more.
    """
    if count < len(scores):
        # Values are partitioned, not indices: which of several equal scores argpartition keeps
        # depends on the processor.
        threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
        kept = np.flatnonzero(scores >= threshold)
    else:
        kept = np.arange(len(scores))
    # flatnonzero is ascending and the sort is stable: ties stay in the order of the index.
    return kept[np.argsort(-scores[kept], kind="stable")][:count]


class BM25Retriever:
    """Okapi BM25 in Lucene's form over an eager sparse index (bm25s, arXiv 2407.03618).

    Title and text are indexed together. Passages that share no word with the query are never
    returned, so a hopeless query yields fewer than `topk` hits, possibly none. Equal scores keep
    the order of the corpus.

    Args:
        corpus: The passages; held by reference and read again only for hits.
        k1: Saturation of the term frequency.
        b: Strength of the length normalisation.

    Raises:
        ImportError: bm25s is not installed.
        ValueError: The corpus is empty.
    """

    def __init__(self, corpus: Sequence[Passage], *, k1: float = 1.5, b: float = 0.75):
        if len(corpus) == 0:
            raise ValueError("BM25 needs at least one passage, got an empty corpus")
        self.corpus = corpus
        self._index = _bm25s().BM25(k1=k1, b=b, method="lucene")
        vocabulary: dict[str, int] = {}
        ids = [
            [
                vocabulary.setdefault(word, len(vocabulary))
                for word in tokenize(f"{passage.title} {passage.text}")
            ]
            for passage in corpus
        ]
        if not vocabulary:
            raise ValueError(f"none of the {len(corpus)} passages holds a word to index")
        self._index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
        self._vocabulary = vocabulary

    @classmethod
    def load(
        cls, folder: str | Path, corpus: Sequence[Passage], *, in_memory: bool = False
    ) -> BM25Retriever:
        """Open an index written by `save` instead of building it.

        Args:
            folder: Where `save` wrote it.
            corpus: The same passages in the same order.
            in_memory: Read the arrays now; by default they are mapped from the file, so the
                processes of one machine share them.

        Raises:
            ImportError: bm25s is not installed.
            FileNotFoundError: The folder holds no index.
            ValueError: The index was built over another number of passages.
        """
        bm25s = _bm25s()
        if not (Path(folder) / "params.index.json").is_file():
            raise FileNotFoundError(
                f"{folder} holds no BM25 index; write one with BM25Retriever.save"
            )
        retriever = cls.__new__(cls)
        retriever.corpus = corpus
        retriever._index = bm25s.BM25.load(str(folder), mmap=not in_memory, show_progress=False)
        retriever._vocabulary = retriever._index.vocab_dict
        indexed = retriever._index.scores["num_docs"]
        if indexed != len(corpus):
            raise ValueError(
                f"the index in {folder} covers {indexed} passages, the corpus has {len(corpus)}; "
                "use the corpus it was built from"
            )
        return retriever

    def save(self, folder: str | Path) -> None:
        """Write the index, without the passages, for `load`."""
        self._index.save(str(folder), show_progress=False)

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """See `Retriever.retrieve`."""
        return [self._retrieve_one(query, topk) for query in queries]

    def _retrieve_one(self, query: str, topk: int) -> list[Hit]:
        # A word repeated in the query counts once: an agent that stutters is not asking harder.
        words = dict.fromkeys(tokenize(query))
        ids = [self._vocabulary[word] for word in words if word in self._vocabulary]
        if not ids:
            return []
        scores = self._index.get_scores_from_ids(ids)
        matching = np.flatnonzero(scores)
        best = matching[top_indices(scores[matching], topk)]
        return [Hit(self.corpus[int(i)], float(scores[i])) for i in best]


def _bm25s():
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(
            "the BM25 retriever needs the package bm25s: pip install -e '.[search]' in "
            "rllib-gigpo's folder"
        ) from error
    return bm25s
