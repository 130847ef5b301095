"""Passages: how they are stored, read from a corpus of any size, and shown to the agent."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from rllib_gigpo_wire import read_json

NO_PASSAGES = "No passage matches this query."
_SCAN_BYTES = 1 << 24


class Passage(NamedTuple):
    """A titled piece of text, about 100 words in the Wikipedia corpora."""

    id: str
    title: str
    text: str


class Hit(NamedTuple):
    """A retrieved passage and its relevance; higher is better, the scale is the retriever's."""

    passage: Passage
    score: float


def format_hits(hits: Sequence[Hit]) -> str:
    """Number the passages as the agent sees them, one a line: `Doc 1 (Title: "T") text`."""
    if not hits:
        return NO_PASSAGES
    return "\n".join(
        f'Doc {rank} (Title: "{hit.passage.title}") {" ".join(hit.passage.text.split())}'
        for rank, hit in enumerate(hits, start=1)
    )


def to_contents(passage: Passage) -> str:
    """Join title and text as the Search-R1 corpora store them: the quoted title, then the text."""
    return f'"{passage.title}"\n{passage.text}'


def passage_from_document(document: Any, fallback_id: str = "") -> Passage:
    """Read one document of a corpus file or of a retriever's response.

    Args:
        document: A mapping with `contents` (first line the title, in double quotes; the rest the
            text) or with `text` and optionally `title`; `id` is optional.
        fallback_id: The id of a document that has none.

    Raises:
        ValueError: The document has another layout.
    """
    if isinstance(document, dict):
        number = str(document.get("id", fallback_id))
        contents, text = document.get("contents"), document.get("text")
        if isinstance(contents, str):
            title, newline, rest = contents.partition("\n")
            if not newline:
                return Passage(number, "", contents)
            if len(title) >= 2 and title[0] == title[-1] == '"':
                title = title[1:-1]
            return Passage(number, title, rest)
        if isinstance(text, str):
            return Passage(number, str(document.get("title", "")), text)
    raise ValueError(
        f"expected a document with the string 'contents' or 'text', got {str(document)[:200]!r}"
    )


class JsonlCorpus(Sequence[Passage]):
    """A read-only view of a corpus file, `{"id", "contents"}` a line, that keeps no text in memory.

    The file is mapped and each passage is decoded when asked for, so a corpus of 21 million
    passages (wiki-18, 14 GB) costs eight bytes a passage; the file's pages are shared by every
    process of the machine. Reads from several threads are safe. Pickling stores the path.

    Args:
        path: A `.jsonl` file; blank lines are ignored.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is compressed, empty, or its first line is no document.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"no corpus file at {self.path}; expected JSON lines with 'id' and 'contents'"
            )
        if self.path.suffix in {".gz", ".xz", ".zst", ".bz2", ".zip"}:
            raise ValueError(f"{self.path} is compressed; unpack it first, it is read in place")
        if self.path.stat().st_size == 0:
            raise ValueError(f"{self.path} is empty; expected JSON lines with 'id' and 'contents'")
        with self.path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts, self._ends = _line_bounds(self._bytes)
        if len(self) == 0:
            raise ValueError(f"{self.path} has blank lines only; expected JSON documents")
        self[0]

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        line = self._bytes[self._starts[index] : self._ends[index]]
        try:
            return passage_from_document(read_json(line), fallback_id=str(index))
        except ValueError as error:
            raise ValueError(f"document {index} of {self.path}: {error}") from error

    def __iter__(self) -> Iterator[Passage]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[type[JsonlCorpus], tuple[Path]]:
        return JsonlCorpus, (self.path,)


def _line_bounds(data: mmap.mmap) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end offsets of the lines that are not blank, int64 each."""
    breaks = [
        np.flatnonzero(np.frombuffer(data[start : start + _SCAN_BYTES], np.uint8) == ord("\n"))
        + start
        for start in range(0, len(data), _SCAN_BYTES)
    ]
    ends = np.append(np.concatenate(breaks), len(data)).astype(np.int64)
    starts = np.append(0, ends[:-1] + 1)
    # A line of at most two bytes ("\r", blanks) is no JSON document; longer blank lines are rare
    # enough to be reported when they are read.
    keep = ends - starts > 2
    return starts[keep], ends[keep]
