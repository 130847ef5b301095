"""Retrieval by the inner product of sentence embeddings.

Legend of the shape suffixes: q queries, p passages, d dimensions, k hits per query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from envs.search.passages import Hit, Passage, to_contents
from envs.search.retrievers import top_indices

_PASSAGES_PER_BLOCK = 65_536


@dataclass(frozen=True)
class Encoder:
    """Turns texts into vectors whose inner product is their relevance.

    Attributes:
        encode: Texts -> array-like of shape (number of texts, d).
        query_prefix: Put before every query, as some models were trained to expect.
        passage_prefix: Put before every passage.
        batch_size: Texts per call of `encode`.
    """

    encode: Callable[[list[str]], Any]
    query_prefix: str = ""
    passage_prefix: str = ""
    batch_size: int = 64

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encode queries: float32, shape (q, d)."""
        return self._vectors([self.query_prefix + text for text in texts])

    def passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Encode passages, each as its quoted title, a newline and its text: float32, (p, d)."""
        return self._vectors([self.passage_prefix + to_contents(p) for p in passages])

    def _vectors(self, texts: list[str]) -> np.ndarray:
        batches = [
            np.asarray(self.encode(texts[start : start + self.batch_size]), dtype=np.float32)
            for start in range(0, len(texts), self.batch_size)
        ]
        vectors = np.concatenate(batches)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ValueError(
                f"the encoder must return finite vectors of shape ({len(texts)}, dimensions) for "
                f"{len(texts)} texts, got shape {vectors.shape}"
            )
        return vectors


def sentence_encoder(
    model: str,
    *,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> Encoder:
    """Load a sentence-transformers model; its embeddings are scaled to length 1.

    Args:
        model: A Hugging Face id or a local folder.
        query_prefix: None: `"query: "` for a model whose name contains `e5`, as those models were
            trained (arXiv 2212.03533), else nothing.
        passage_prefix: None: `"passage: "` for `e5`, else nothing.
        batch_size: Texts per forward pass.
        device: Where the model runs, such as `"cpu"` or `"cuda:0"`; None lets it choose.

    Raises:
        ImportError: sentence-transformers is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            "a sentence encoder by name needs the package sentence-transformers: "
            "pip install -e '.[search-dense]' in rllib-gigpo's folder"
        ) from error
    transformer = SentenceTransformer(model, device=device)
    is_e5 = "e5" in Path(model).name.lower()
    default_query, default_passage = ("query: ", "passage: ") if is_e5 else ("", "")

    def encode(texts: list[str]) -> np.ndarray:
        return transformer.encode(
            texts, batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False
        )

    return Encoder(
        encode,
        query_prefix=default_query if query_prefix is None else query_prefix,
        passage_prefix=default_passage if passage_prefix is None else passage_prefix,
        batch_size=batch_size,
    )


def write_embeddings(path: str | Path, corpus: Sequence[Passage], encoder: Encoder) -> None:
    """Encode a corpus into a `.npy` file, block by block, for `DenseRetriever(index=path)`.

    The file holds float32 of shape (p, d); at no time is more than a block of it in memory.
    """
    path = Path(path)
    if path.suffix != ".npy":
        raise ValueError(f"embeddings are written to a file ending in .npy, got {path}")
    width = encoder.passages(corpus[:1]).shape[1]
    vectors_pd = np.lib.format.open_memmap(
        path, mode="w+", dtype=np.float32, shape=(len(corpus), width)
    )
    block = 64 * encoder.batch_size
    for start in range(0, len(corpus), block):
        vectors_pd[start : start + block] = encoder.passages(corpus[start : start + block])
    vectors_pd.flush()


class DenseRetriever:
    """Exact maximum inner product search over the embeddings of a corpus.

    Two machines may differ in the last bit of a score, so near-ties may come out in another order
    there; on one machine the result is fixed.

    Args:
        corpus: The passages.
        encoder: Encodes the queries, and the passages where `index` does not hold them.
        index: Where the passage embeddings come from and what searches them. `"faiss"`: encoded
            now, searched by faiss-cpu. `"flat"`: encoded now, searched by NumPy, which needs no
            further package. A path ending in `.npy`: written by `write_embeddings`, mapped from
            the file and searched by NumPy. Any other path: a FAISS index file, such as the
            published `e5_Flat.index` of wiki-18.

    Raises:
        ImportError: `index` needs faiss and faiss-cpu is not installed.
        FileNotFoundError: There is no such index file.
        ValueError: The corpus is empty, or the embeddings do not fit it.
    """

    def __init__(self, corpus: Sequence[Passage], encoder: Encoder, *, index: str = "faiss"):
        if len(corpus) == 0:
            raise ValueError("a dense retriever needs at least one passage, got an empty corpus")
        self.corpus = corpus
        self.encoder = encoder
        self._index = _open_index(index, corpus, encoder)
        if self._index.size != len(corpus):
            raise ValueError(
                f"the index {index!r} covers {self._index.size} passages, the corpus has "
                f"{len(corpus)}; use the corpus it was built from"
            )

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """See `envs.search.retrievers.Retriever.retrieve`."""
        if not queries:
            return []
        query_qd = self.encoder.queries(queries)
        if query_qd.shape[1] != self._index.width:
            raise ValueError(
                f"the encoder gives {query_qd.shape[1]} dimensions, the index has "
                f"{self._index.width}; use the encoder that the index was built with"
            )
        scores_qk, numbers_qk = self._index.search(query_qd, min(topk, len(self.corpus)))
        return [
            # A FAISS index that finds fewer fills up with number -1.
            [
                Hit(self.corpus[int(n)], float(s))
                for n, s in zip(numbers, scores, strict=True)
                if n >= 0
            ]
            for numbers, scores in zip(numbers_qk, scores_qk, strict=True)
        ]


class _Index(Protocol):
    """Searches passage embeddings; `size` is p, `width` is d."""

    size: int
    width: int

    def search(self, query_qd: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores (q, k) and passage numbers (q, k), best first; `topk` <= p."""
        ...


class _FlatIndex:
    def __init__(self, vectors_pd: np.ndarray):
        if vectors_pd.ndim != 2:
            raise ValueError(f"embeddings must have shape (p, d), got {vectors_pd.shape}")
        self._vectors_pd = vectors_pd
        self.size, self.width = vectors_pd.shape

    def search(self, query_qd: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        scores_qk = np.empty((len(query_qd), 0), np.float32)
        numbers_qk = np.empty((len(query_qd), 0), np.int64)
        for start in range(0, self.size, _PASSAGES_PER_BLOCK):
            block = self._vectors_pd[start : start + _PASSAGES_PER_BLOCK]
            scores = np.hstack([scores_qk, query_qd @ block.T])
            numbers = np.broadcast_to(
                np.arange(start, start + len(block)), (len(query_qd), len(block))
            )
            numbers = np.hstack([numbers_qk, numbers])
            kept = np.stack([top_indices(row, topk) for row in scores])
            scores_qk = np.take_along_axis(scores, kept, axis=1)
            numbers_qk = np.take_along_axis(numbers, kept, axis=1)
        return scores_qk, numbers_qk


class _FaissIndex:
    def __init__(self, index: Any):
        self._index = index
        self.size, self.width = index.ntotal, index.d

    def search(self, query_qd: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        return self._index.search(query_qd, topk)


def _open_index(index: str, corpus: Sequence[Passage], encoder: Encoder) -> _Index:
    if index == "flat":
        return _FlatIndex(encoder.passages(corpus))
    if index == "faiss":
        faiss = _faiss()
        vectors_pd = encoder.passages(corpus)
        flat = faiss.IndexFlatIP(vectors_pd.shape[1])
        flat.add(vectors_pd)
        return _FaissIndex(flat)
    if not Path(index).is_file():
        raise FileNotFoundError(f"no index file at {index!r}; use 'faiss', 'flat' or a file's path")
    if index.endswith(".npy"):
        return _FlatIndex(np.load(index, mmap_mode="r"))
    return _FaissIndex(_faiss().read_index(index))


def _faiss():
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "a FAISS index needs the package faiss-cpu: pip install -e '.[search-dense]' in "
            "rllib-gigpo's folder; or choose index='flat', the same exact search in NumPy"
        ) from error
    return faiss
