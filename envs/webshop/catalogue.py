"""The shop's products with their goals and search index, read-only and shared by all episodes.

Generated products are arrays in memory, a few hundred kilobytes. Official files become arrays in
files that all processes of a machine map.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.webshop.files import find_sources
from envs.webshop.generate import generated_products
from envs.webshop.goals import GoalKind
from envs.webshop.index import Index
from envs.webshop.product import Product
from envs.webshop.store import Arrays, cache_folder, in_memory, on_disk

GENERATED = "generated"
NUM_GENERATED = 300
# The official result list is cut here; ten make a page.
MOST_RESULTS = 50
_PRODUCT_CACHE = 4096
_QUERY_CACHE = 16384


class Catalogue:
    """Products by row and id, their goals, and search.

    Args:
        source: The `products` it was opened with.
        num_products: Likewise.
        records: JSON of all products.
        arrays: What `envs.webshop.store.build_arrays` returned.
    """

    def __init__(self, source: str, num_products: int | None, records: Any, arrays: Arrays):
        self.source = source
        self._num_products = num_products
        self._records, self._arrays = records, arrays
        self._index = Index(
            {
                name.removeprefix("index_"): array
                for name, array in arrays.items()
                if name.startswith("index_")
            },
            len(self),
        )
        self.product = lru_cache(_PRODUCT_CACHE)(self._read)
        self.search = lru_cache(_QUERY_CACHE)(self._search)

    def __len__(self) -> int:
        return len(self._arrays["asin_rows"])

    def __reduce__(self) -> tuple:
        # The receiving process opens its own: pickles of episodes stay small.
        return open_catalogue, (self.source, self._num_products)

    def row_of(self, asin: str) -> int | None:
        """Return the row of a product id, None if it is unknown."""
        names = self._arrays["asins"]
        place = int(np.searchsorted(names, asin.encode("utf-8", "surrogatepass")))
        is_found = place < len(names) and names[place] == asin.encode("utf-8", "surrogatepass")
        return int(self._arrays["asin_rows"][place]) if is_found else None

    def goal_records(self, kind: GoalKind) -> np.ndarray:
        """Return all goals (G,) of a kind, sorted by id, as `envs.webshop.goals.GOAL_DTYPE`."""
        return self._arrays[kind]

    def _read(self, row: int) -> Product:
        start, end = self._arrays["offsets"][row : row + 2]
        return Product.from_bytes(bytes(self._records[start:end]))

    def _search(self, query: str) -> tuple[int, ...]:
        return tuple(self._index.search(query, MOST_RESULTS))


@lru_cache(8)
def open_catalogue(products: str = GENERATED, num_products: int | None = None) -> Catalogue:
    """Return the catalogue of this process.

    Args:
        products: "generated", or the path of an official items file or of its folder.
        num_products: Generated: how many, 300 by default. Files: only the first so many.

    Raises:
        FileNotFoundError: No catalogue is at this path.
        ImportError: bm25s is not installed.
        ValueError: `num_products` is not positive or more than there are.
    """
    if num_products is not None and num_products < 1:
        raise ValueError(f"num_products must be at least 1, got {num_products}")
    if products == GENERATED:
        generated = generated_products(num_products or NUM_GENERATED)
        return Catalogue(products, num_products, *in_memory(generated))
    sources = find_sources(Path(products), num_products)
    return Catalogue(products, num_products, *on_disk(sources, num_products, cache_folder()))
