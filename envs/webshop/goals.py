"""What to buy: goals numbered by their content, and the split into train and test."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from envs.webshop.product import Product
from envs.webshop.stable import stable_hash, stable_sample

if TYPE_CHECKING:
    from envs.webshop.catalogue import Catalogue

GoalKind = Literal["synthetic", "human"]
Split = Literal["train", "test"]

# The official test set; smaller catalogues give a fifth of their goals.
_MOST_TEST_GOALS = 500
_TEST_SHARE = 5
_PRICE_STEPS = [10.0 * step for step in range(1, 100)]
_ANY_PRICE = 1_000_000.0
_GOAL_CACHE = 4096

GOAL_DTYPE = np.dtype([("id", np.uint64), ("row", np.int32), ("choice", np.int32)])


class Goal(NamedTuple):
    """What the shopper asks for.

    Attributes:
        task_id: 16 hexadecimal digits, a hash of everything below that the reward looks at.
        asin: The product that the goal was made from; others may serve as well.
        instruction: What the agent reads.
        attributes: Wanted attributes, at least one.
        options: (name, value) of the wanted options; human goals leave the name empty.
        price_upper: Most dollars to spend.
        title: Title of that product.
        query: Its type.
        product_category: Its path of categories.
    """

    task_id: str
    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    price_upper: float
    title: str
    query: str
    product_category: str


@lru_cache(16)
def open_goals(catalogue: Catalogue, kind: GoalKind, split: Split) -> GoalSet:
    """Return the goals of a split, one set per process; arguments as in `GoalSet`."""
    return GoalSet(catalogue, kind, split)


def goal_records(product: Product, row: int, kind: GoalKind) -> np.ndarray:
    """Return the goals (G,) that a product gives, as `GOAL_DTYPE`.

    The rules are the official loader's. Synthetic: one goal for every combination of the product's
    options. Human: one for every instruction that asks for an attribute. The price limit is the
    higher of two of the next four multiples of 10 dollars above the price; the official code draws
    these two anew in every process, here the product's id decides.
    """
    if kind == "synthetic":
        choices = range(_num_synthetic(product))
    else:
        choices = [i for i, (_, attributes, _) in enumerate(product.human) if attributes]
    records = [(int(_goal(product, kind, i).task_id, 16), row, i) for i in choices]
    return np.array(records, dtype=GOAL_DTYPE)


class GoalSet:
    """The goals of one split, in an order that content alone decides.

    All goals are sorted by their id. The first fifth, at most 500, are the test goals and all
    others the train goals (the official order is a shuffle, its first 500 are the test goals).

    Args:
        catalogue: Where the products are.
        kind: "synthetic" or "human".
        split: "train" or "test".

    Raises:
        ValueError: The catalogue has no such goal.
    """

    def __init__(self, catalogue: Catalogue, kind: GoalKind, split: Split):
        records = catalogue.goal_records(kind)
        num_test = min(_MOST_TEST_GOALS, len(records) // _TEST_SHARE)
        self._records = records[:num_test] if split == "test" else records[num_test:]
        if not len(self._records):
            raise ValueError(
                f"the catalogue {catalogue.source} has {len(records)} {kind} goals, which leaves "
                f"none for split={split!r}; use goals='{_other(kind)}' or more products"
            )
        self._catalogue = catalogue
        self._kind: GoalKind = kind
        self._split: Split = split
        self._cached = lru_cache(_GOAL_CACHE)(self._make)

    def __reduce__(self) -> tuple:
        return open_goals, (self._catalogue, self._kind, self._split)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> Goal:
        return self._cached(number)

    def ids(self) -> list[str]:
        """Return the task ids of the split in order."""
        return [_task_id(int(number)) for number in self._records["id"]]

    def find(self, task_id: str) -> int | None:
        """Return the number of a goal in this split, None if it is not in it."""
        try:
            wanted = int(task_id, 16)
        except ValueError:
            return None
        if not 0 <= wanted < 1 << 64:
            return None
        place = int(np.searchsorted(self._records["id"], np.uint64(wanted)))
        found = place < len(self) and int(self._records["id"][place]) == wanted
        return place if found else None

    def _make(self, number: int) -> Goal:
        record = self._records[number]
        product = self._catalogue.product(int(record["row"]))
        return _goal(product, self._kind, int(record["choice"]))


def sorted_records(records: np.ndarray) -> np.ndarray:
    """Return goal records (G,) sorted by id, each id once: goals of equal content are one goal."""
    _, first = np.unique(records["id"], return_index=True)
    return records[first]


def _num_synthetic(product: Product) -> int:
    if product.instruction is None or not product.instruction_attributes:
        return 0
    return prod(len(values) for values in product.options.values())


def _goal(product: Product, kind: GoalKind, choice: int) -> Goal:
    return _synthetic(product, choice) if kind == "synthetic" else _human(product, choice)


def _synthetic(product: Product, choice: int) -> Goal:
    names = sorted(product.options)
    values = []
    for name in reversed(names):
        choice, place = divmod(choice, len(product.options[name]))
        values.append(product.options[name][place])
    wanted = list(zip(names, reversed(values), strict=True))
    limit, price_text = _price_limit(product.price, f"limit/{product.asin}/synthetic")
    listed = ", and ".join(f"{name}: {value}" for name, value in wanted)
    text = f"{product.instruction}{' with ' + listed if listed else ''}{price_text}"
    return _finish(product, text, product.instruction_attributes, wanted, limit)


def _human(product: Product, choice: int) -> Goal:
    text, attributes, values = product.human[choice]
    wanted = [("", value) for value in values]
    limit, price_text = _price_limit(product.price, f"limit/{product.asin}/human/{choice}")
    return _finish(product, text.strip(".") + price_text, attributes, wanted, limit)


@lru_cache(1024)
def _price_limit(price: float, key: str) -> tuple[float, str]:
    above = [step for step in _PRICE_STEPS if step > price][:4]
    if len(above) < 2:
        return _ANY_PRICE, ""
    limit = max(stable_sample(above, 2, key))
    return limit, f", and price lower than {limit:.2f} dollars"


def _finish(
    product: Product,
    text: str,
    attributes: list[str],
    options: list[tuple[str, str]],
    limit: float,
) -> Goal:
    pieces = [product.asin, text, str(limit), *attributes, *map("=".join, options)]
    return Goal(
        task_id=_task_id(stable_hash("\n".join(pieces))),
        asin=product.asin,
        instruction=text,
        attributes=tuple(attributes),
        options=tuple(options),
        price_upper=limit,
        title=product.title,
        query=product.query,
        product_category=product.product_category,
    )


def _task_id(number: int) -> str:
    return f"{number:016x}"


def _other(kind: GoalKind) -> GoalKind:
    return "human" if kind == "synthetic" else "synthetic"
