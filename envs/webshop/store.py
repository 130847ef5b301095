"""The arrays of a catalogue, built once per machine and mapped from files by every process."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from envs.webshop.files import Sources, iterate_json
from envs.webshop.goals import GOAL_DTYPE, GoalKind, goal_records, sorted_records
from envs.webshop.index import IndexBuilder, document
from envs.webshop.product import Product, product_from_raw
from envs.webshop.stable import stable_hash

# Raise it whenever the arrays, or what is written in them, change.
_FORMAT = 1
_RECORDS = "records.bin"

Arrays = dict[str, np.ndarray]


def build_arrays(products: Iterable[Product], records: BinaryIO) -> Arrays:
    """Write the products and return everything else a catalogue needs.

    Args:
        products: In the order of the catalogue; of equal ids only the first counts.
        records: Where the products are written, one JSON line after the other.

    Returns:
        `offsets` (P + 1,): where each product begins in `records`; `asins` (P,) sorted and
        `asin_rows` (P,) their rows; `synthetic` and `human` (G,): goals sorted by id; and the
        arrays of the index, their names after `index_`.

    Raises:
        ValueError: There is no product.
    """
    index, offsets, asins = IndexBuilder(), [0], {}
    goals: dict[GoalKind, bytearray] = {"synthetic": bytearray(), "human": bytearray()}
    for product in products:
        if product.asin in asins:
            continue
        row = asins[product.asin] = len(asins)
        offsets.append(offsets[-1] + records.write(product.to_bytes()))
        index.add(document(product))
        for kind, written in goals.items():
            written += goal_records(product, row, kind).tobytes()
    if not asins:
        raise ValueError("the catalogue has no products; expected at least one with a usable id")
    names = np.array([asin.encode() for asin in asins])
    order = np.argsort(names)
    return {
        "offsets": np.array(offsets, dtype=np.int64),
        "asins": names[order],
        "asin_rows": order.astype(np.int32),
        **{kind: sorted_records(np.frombuffer(g, GOAL_DTYPE)) for kind, g in goals.items()},
        **{f"index_{name}": array for name, array in index.build().items()},
    }


def in_memory(products: Iterable[Product]) -> tuple[memoryview, Arrays]:
    """Return the records and arrays of a small catalogue without touching the disk."""
    records = io.BytesIO()
    arrays = build_arrays(products, records)
    return records.getbuffer(), arrays


def on_disk(
    sources: Sources, num_products: int | None, cache_dir: Path
) -> tuple[np.ndarray, Arrays]:
    """Return the records and arrays of official files, mapped from a folder of the cache.

    The first process on a machine builds the folder while others wait for it; its name changes
    with the files, so a changed file is read anew.

    Raises:
        OSError: The cache folder cannot be written.
        ValueError: The items file has fewer than `num_products` entries.
    """
    folder = cache_dir / f"{stable_hash(_fingerprint(sources, num_products)):016x}"
    if not folder.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not folder.exists():
                _build_folder(sources, num_products, folder)
    records = np.memmap(folder / _RECORDS, dtype=np.uint8, mode="r")
    arrays = {file.stem: _mapped(file) for file in sorted(folder.glob("*.npy"))}
    return np.asarray(records), arrays


def _mapped(file: Path) -> np.ndarray:
    # A plain view of the mapping: indexing a np.memmap itself costs microseconds more.
    return np.asarray(np.load(file, mmap_mode="r"))


def cache_folder() -> Path:
    """Return `$RLLIB_GIGPO_CACHE/webshop`, by default below the user's cache folder."""
    root = os.environ.get("RLLIB_GIGPO_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return (Path(root) if root else home / "rllib_gigpo") / "webshop"


def read_products(sources: Sources, num_products: int | None) -> Iterator[Product]:
    """Yield the products of official files in their order.

    Raises:
        ValueError: The items file has fewer than `num_products` entries.
    """
    attributes = _side_table(iterate_json(sources.attributes))
    human = _side_table(iterate_json(sources.human)) if sources.human else {}
    reviews = {}
    if sources.reviews:
        reviews = _side_table((entry["asin"], entry) for entry in iterate_json(sources.reviews))
    read = 0
    for raw in iterate_json(sources.items):
        if read == num_products:
            return
        read += 1
        found = (_pop(table, raw["asin"]) for table in (attributes, human, reviews))
        product = product_from_raw(raw, *found)
        if product is not None:
            yield product
    if num_products is not None and read < num_products:
        raise ValueError(
            f"num_products={num_products}, but {sources.items} holds only {read}; "
            "pass a smaller number or a larger file"
        )


def _side_table(pairs: Iterable[tuple[str, Any]]) -> dict[str, bytes]:
    # As bytes, a million entries take a third of what their parsed form does.
    return {asin: json.dumps(entry).encode() for asin, entry in pairs}


def _pop(table: dict[str, bytes], asin: str) -> Any:
    entry = table.pop(asin, None)
    return None if entry is None else json.loads(entry)


def _build_folder(sources: Sources, num_products: int | None, folder: Path) -> None:
    building = folder.with_suffix(".building")
    if building.exists():
        shutil.rmtree(building)  # of a process that died
    building.mkdir()
    try:
        with open(building / _RECORDS, "wb") as records:
            arrays = build_arrays(read_products(sources, num_products), records)
        for name, array in arrays.items():
            np.save(building / f"{name}.npy", array)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system frees should this process die."""
    # Not everywhere, and generated products need none.
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fingerprint(sources: Sources, num_products: int | None) -> str:
    parts: list[Any] = [_FORMAT, num_products]
    for path in filter(None, sources):
        stat = path.stat()
        parts.append((str(path.resolve()), stat.st_size, stat.st_mtime_ns))
    return repr(parts)
