"""A shop of made-up products in the official raw schema, so that no download is needed.

Product `i` is the same whatever the size of the catalogue, on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from envs.webshop.product import Product, product_from_raw
from envs.webshop.stable import stable_choice, stable_hash, stable_sample, stable_unit

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MOST_PRODUCTS = len(_DIGITS) ** 5


class RawProduct(NamedTuple):
    """One product as the official files tell it: an entry of each of three files."""

    item: dict[str, Any]
    attributes: dict[str, Any]
    reviews: dict[str, Any]


def generated_products(count: int) -> Iterator[Product]:
    """Yield the first `count` made-up products.

    Raises:
        ValueError: More products than ids.
    """
    if count > _MOST_PRODUCTS:
        raise ValueError(f"at most {_MOST_PRODUCTS:,} products can be generated, got {count:,}")
    for number in range(count):
        raw = raw_product(number)
        product = product_from_raw(raw.item, raw.attributes, reviews=raw.reviews)
        assert product is not None
        yield product


def write_official_files(folder: Path, count: int) -> None:
    """Write the first `count` made-up products as official files, to be loaded by path."""
    raw = [raw_product(number) for number in range(count)]
    contents = {
        "items_shuffle.json": [product.item for product in raw],
        "items_ins_v2.json": {product.item["asin"]: product.attributes for product in raw},
        "reviews.json": [product.reviews for product in raw],
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def raw_product(number: int) -> RawProduct:
    """Return one made-up product.

    It has four of the six attributes of its type: the first stands in its title, the second in its
    description, all in its features. Two of three products are goals; the instruction asks for two
    attributes.
    """
    words = _words()
    kind = words["types"][number % len(words["types"])]
    key = f"generated/{number}"
    attributes = stable_sample(kind["attributes"], 4, f"{key}/attributes")
    asin = _asin(number)
    title = f"{_name(number)} {attributes[0].title()} {kind['query'].title()}"
    item = {
        "asin": asin,
        "name": title,
        "full_description": f"A {kind['query']} by {title.split()[0]}: {attributes[1]}.",
        "small_description": [f"{attribute.capitalize()}." for attribute in attributes],
        "pricing": _pricing(kind["price"], key),
        "customization_options": {
            name.title(): [{"value": value} for value in values]
            for name, values in kind["options"].items()
        },
        "query": kind["query"],
        "category": kind["category"],
        "product_category": kind["path"],
        "images": [],
        "average_rating": "",
    }
    instructions = {}
    if number % 3:
        wanted = stable_sample(attributes, 2, f"{key}/wanted")
        opening = stable_choice(words["openings"], f"{key}/opening")
        instructions = {
            "instruction": f"{opening} {kind['query']} that is {wanted[0]} and {wanted[1]}",
            "instruction_attributes": wanted,
        }
    return RawProduct(item, {"attributes": attributes, **instructions}, _reviews(asin, key))


def _name(number: int) -> str:
    """A brand and a series, with a model number once all pairs are used up."""
    words = _words()
    brands, series = words["brands"], words["series"]
    place = number // len(words["types"])
    model, pair = divmod(place, len(brands) * len(series))
    # Neighbours differ in both words.
    brand, line = pair % len(brands), (pair // len(brands) + pair) % len(series)
    return f"{brands[brand]} {series[line]}" + (f" {model + 1}" if model else "")


def _asin(number: int) -> str:
    """Ten characters: a letter, four drawn ones, and the number in base 36."""
    drawn = stable_hash(f"asin/{number}")
    digits = [_DIGITS[drawn // 36**place % 36] for place in range(4)]
    digits += [_DIGITS[number // 36**place % 36] for place in reversed(range(5))]
    return "G" + "".join(digits)


def _pricing(ends: tuple[int, int], key: str) -> str:
    low, high = ends
    price = low + int((high - low) * stable_unit(f"{key}/price")) + 0.99
    if stable_hash(f"{key}/range") % 5:
        return f"${price:.2f}"
    return f"${price:.2f} - ${price + low // 2:.2f}"


def _reviews(asin: str, key: str) -> dict[str, Any]:
    written = stable_sample(_words()["reviews"], stable_hash(f"{key}/reviews") % 3, key)
    stars = [score for _, score, _ in written]
    return {
        "asin": asin,
        "average_rating": round(sum(stars) / len(stars), 1) if stars else "N.A.",
        "reviews": [{"title": t, "score": s, "review": text} for t, s, text in written],
    }


@lru_cache(1)
def _words() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
