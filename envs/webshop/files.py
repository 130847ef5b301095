"""Finding and reading WebShop's official files, of any size, one element at a time."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

_CHUNK = 1 << 22  # characters
_LONGEST = 1 << 26  # characters of one element
_OPENERS = {".json": open, ".gz": gzip.open, ".xz": lzma.open}
_ITEMS = re.compile(r"items_shuffle(_\d+)?\.json(\.gz|\.xz)?")
_BETWEEN = re.compile(r"[\s,:]*")


class Sources(NamedTuple):
    """The files of one catalogue.

    Attributes:
        items: Products: a list of objects (`items_shuffle*.json`).
        attributes: Attributes and synthetic instructions by product (`items_ins_v2*.json`).
        human: Human instructions by product (`items_human_ins*.json`), or None.
        reviews: Reviews: a list of objects (`reviews.json`), or None.
    """

    items: Path
    attributes: Path
    human: Path | None
    reviews: Path | None


def find_sources(path: str | Path, num_products: int | None) -> Sources:
    """Find the files that belong together.

    Args:
        path: An items file, or the folder that holds one. Files may be compressed (.gz, .xz).
        num_products: In a folder with several items files, chooses `items_shuffle_<num>.json`,
            or else the full `items_shuffle.json`.

    Raises:
        FileNotFoundError: The items or attributes file is missing.
        ValueError: The folder holds several items files and neither of these two.
    """
    path = Path(path)
    items = path if path.is_file() else _items_in(path, num_products)
    match = _ITEMS.fullmatch(items.name)
    suffix = (match.group(1) or "") if match else ""
    attributes = _beside(items, f"items_ins_v2{suffix}") or _beside(items, "items_ins_v2")
    if attributes is None:
        raise FileNotFoundError(
            f"WebShop needs the attributes file items_ins_v2{suffix}.json beside {items}; "
            "the official data set has one for each items file"
        )
    return Sources(items, attributes, _beside(items, "items_human_ins*"), _beside(items, "reviews"))


def _items_in(folder: Path, num_products: int | None) -> Path:
    found = {}
    if folder.is_dir():
        for file in sorted(folder.iterdir()):
            if match := _ITEMS.fullmatch(file.name):
                found[match.group(1)] = file
    if not found:
        raise FileNotFoundError(
            f"no items_shuffle*.json in {folder}; pass WebShop(products=...) the official items "
            "file, its folder, or 'generated'"
        )
    if len(found) == 1:
        return next(iter(found.values()))
    named = found.get(f"_{num_products}", found.get(None))
    if named is None:
        names = ", ".join(file.name for file in found.values())
        raise ValueError(
            f"{folder} holds several items files ({names}) and num_products={num_products} names "
            "none; pass the path of one of them"
        )
    return named


def _beside(items: Path, stem: str) -> Path | None:
    """The only file of this stem in the folder of `items`, None without one."""
    for suffix in (".json", ".json.gz", ".json.xz"):
        if found := sorted(items.parent.glob(stem + suffix)):
            return found[0]
    return None


def iterate_json(path: Path) -> Iterator[Any]:
    """Yield the elements of a JSON list, or the (key, value) pairs of a JSON object.

    The official file of 1.18 million products has 5 GB: at most one chunk of it is in memory, and
    of a damaged file 2^27 characters.

    Raises:
        ValueError: The file is not a JSON list or object, is damaged, ends too early, or has an
            element that does not end within 2^27 characters.
    """
    with _OPENERS[path.suffix](path, "rt", encoding="utf-8") as stream:
        reader = _Reader(stream, path)
        opening = reader.symbol()
        if opening not in ("[", "{"):
            raise ValueError(f"{path} must hold a JSON list or object, it starts with {opening!r}")
        closing = "]" if opening == "[" else "}"
        reader.skip()
        while reader.symbol() != closing:
            value = reader.value()
            yield value if opening == "[" else (value, reader.value())


class _Reader:
    """Decodes one JSON value after the other from a text stream."""

    def __init__(self, stream: IO[str], path: Path):
        self._stream, self._path = stream, path
        self._buffer, self._at = "", 0
        self._decode = json.JSONDecoder().raw_decode

    def symbol(self) -> str:
        """The next character that is neither blank nor a separator."""
        while True:
            self._at = _BETWEEN.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            self._read()

    def skip(self) -> None:
        self._at += 1

    def value(self) -> Any:
        self.symbol()
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
            except json.JSONDecodeError:
                self._read()
                continue
            except (ValueError, RecursionError) as error:  # too many digits, too deep
                raise self._damaged(str(error)) from error
            self._at = end
            return value

    def _read(self) -> None:
        # Twice what is left over, so that one element larger than a chunk costs linear time.
        rest = self._buffer[self._at :]
        if len(rest) > _LONGEST:  # one bad character, and all that follows belongs to its element
            raise self._damaged()
        try:
            more = self._stream.read(max(_CHUNK, len(rest)))
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
            raise self._damaged(str(error)) from error
        if not more:
            raise self._damaged()
        self._buffer, self._at = rest + more, 0

    def _damaged(self, why: str = "") -> ValueError:
        near = self._buffer[self._at : self._at + 60]
        told = f" ({why})" if why else ""
        return ValueError(
            f"{self._path} is cut off or is no valid JSON near {near!r}{told}; fetch it again"
        )
