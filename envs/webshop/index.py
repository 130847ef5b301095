"""BM25 search over the catalogue, scored by bm25s.

The vocabulary is a sorted array of 64-bit hashes instead of a dictionary of words: it is mapped
from a file and shared by all processes, as the postings are.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from envs.webshop.product import Product
from envs.webshop.stable import stable_hash

# Lucene's defaults in the toolkit that the official index was built with.
_K1, _B = 0.9, 0.4
_WORD = re.compile(r"\d+(?:[.,]\d+)+|\w+(?:['’]\w+)*")
# The stop words of Lucene's English analyzer.
_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)


@lru_cache(maxsize=1 << 16)
def _term(word: str) -> int | None:
    """The hash of a word's stem, None for stop words.

    Possessives lose their 's, plurals their ending by the three rules of Harman (1991), "How
    effective is suffixing?".
    """
    if word in _STOP_WORDS.split():
        return None
    word = re.sub(r"['’]s?$", "", word)
    if word.endswith("ies") and not word.endswith(("eies", "aies")):
        word = word[:-3] + "y"
    elif word.endswith("s") and not word.endswith(("aes", "ees", "oes", "us", "ss")):
        word = word[:-1]
    return stable_hash(word)


def terms(text: str) -> list[int]:
    """Return the hashes of the words of a text, in order, without stop words."""
    found = (_term(word) for word in _WORD.findall(text.lower()))
    return [term for term in found if term is not None]


def document(product: Product) -> str:
    """Return the text that a product is found by: what the official index holds."""
    options = ", and ".join(f"{name}: {', '.join(v)}" for name, v in product.options.items())
    first_feature = product.features[0] if product.features else ""
    return f"{product.title} {product.description} {first_feature} {options}"


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(
            "WebShop searches with bm25s, which is not installed: pip install -e '.[webshop]' in "
            "rllib-gigpo's folder"
        ) from error
    return bm25s.BM25(k1=_K1, b=_B, method="lucene")


class IndexBuilder:
    """Collects the documents of a catalogue, four bytes a word, and indexes them."""

    def __init__(self):
        self._bm25 = _bm25s()
        self._column: dict[int, int] = {}
        self._documents: list[array[int]] = []

    def add(self, text: str) -> None:
        """Append the next document."""
        column = self._column
        self._documents.append(array("i", [column.setdefault(t, len(column)) for t in terms(text)]))

    def build(self) -> dict[str, np.ndarray]:
        """Return the arrays of an `Index`.

        Returns:
            `terms` (V,) hashes in ascending order, `columns` (V,) their columns, and the scores
            by column in compressed form: `starts` (V + 1,), `rows` and `scores` (postings,).
        """
        scores = self._bm25.build_index_from_ids(
            unique_token_ids=list(range(len(self._column))),
            corpus_token_ids=self._documents,
            show_progress=False,
        )
        hashes = np.fromiter(self._column, dtype=np.uint64, count=len(self._column))
        columns = np.argsort(hashes)
        return {
            "terms": hashes[columns],
            "columns": columns.astype(np.int32),
            "starts": scores["indptr"],
            "rows": scores["indices"],
            "scores": scores["data"],
        }


class Index:
    """Ranks the rows of a catalogue for a query.

    Args:
        arrays: What `IndexBuilder.build` returned; memory-mapped arrays stay on disk.
        num_rows: Products in the catalogue.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], num_rows: int):
        self._terms, self._columns = arrays["terms"], arrays["columns"]
        self._bm25 = _bm25s()
        self._bm25.nonoccurrence_array = None
        self._bm25.scores = {
            "data": arrays["scores"],
            "indices": arrays["rows"],
            "indptr": arrays["starts"],
            "num_docs": num_rows,
        }

    def search(self, query: str, count: int) -> list[int]:
        """Return the rows that share a word with the query, best first, at most `count`.

        Equal scores come in the order of the catalogue, so the answer is the same everywhere.
        """
        columns = self._columns_of(terms(query))
        if not len(columns):
            return []
        scores = self._bm25.get_scores_from_ids(columns)
        rows = np.flatnonzero(scores > 0)
        if len(rows) > count:
            # The count-th best score does not depend on how NumPy breaks ties, as the positions
            # that a partial sort returns do.
            least = np.partition(scores[rows], -count)[-count]
            rows = rows[scores[rows] >= least]
        return rows[np.argsort(-scores[rows], kind="stable")[:count]].tolist()

    def _columns_of(self, hashes: Iterable[int]) -> np.ndarray:
        """The columns of the known terms."""
        wanted = np.array(list(hashes), dtype=np.uint64)
        places = np.searchsorted(self._terms, wanted).clip(max=len(self._terms) - 1)
        return self._columns[places[self._terms[places] == wanted]]
