"""One product, read from the official raw schema by the rules of the official loader."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from envs.webshop.stable import stable_unit

NO_PRICE = 100.0
NO_ATTRIBUTES = ["DUMMY_ATTR"]
_LONGEST_ASIN = 10


class Product(NamedTuple):
    """A product. Read-only: the catalogue hands the same object to every episode.

    Attributes:
        asin: Its id, at most 10 characters.
        title: Its name.
        description: Free text, may be empty.
        features: Bullet points.
        price_tag: What the pages show, "$9.98 to $16.98" for a range.
        price: What it costs in dollars: inside the range, drawn by the asin.
        rating: What the item page shows, "N.A." without reviews.
        reviews: (title, stars, text) each.
        query: The search words it was found with, lower case; the reward calls it the type.
        category: One of five departments.
        product_category: Path of categories, separated by "›".
        options: Values to choose from, by name of the option; lower case.
        attributes: Attributes that the reward matches.
        instruction: Synthetic instruction, None for products that are no goal.
        instruction_attributes: The attributes that this instruction asks for.
        human: Human instructions: (text, attributes, options) each.
    """

    asin: str
    title: str
    description: str
    features: list[str]
    price_tag: str
    price: float
    rating: str
    reviews: list[Sequence[str]]
    query: str
    category: str
    product_category: str
    options: dict[str, list[str]]
    attributes: list[str]
    instruction: str | None
    instruction_attributes: list[str]
    human: list[Sequence[Any]]

    def to_bytes(self) -> bytes:
        """Return the product as one line of JSON."""
        return json.dumps(self, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Product:
        """Read what `to_bytes` wrote."""
        return cls(*json.loads(data))


def product_from_raw(
    raw: Mapping[str, Any],
    attributes: Mapping[str, Any] | None,
    human: list[Mapping[str, Any]] | None = None,
    reviews: Mapping[str, Any] | None = None,
) -> Product | None:
    """Read one entry of the official items file.

    Args:
        raw: The entry.
        attributes: The product's entry in `items_ins_v2*.json`.
        human: Its entries in `items_human_ins.json`.
        reviews: Its entry in `reviews.json`.

    Returns:
        The product, or None for the entries that the official loader leaves out (no usable id).

    Raises:
        ValueError: The price cannot be read.
    """
    asin = raw["asin"]
    if asin == "nan" or len(asin) > _LONGEST_ASIN:
        return None
    attributes = attributes or {}
    features = raw["small_description"]
    prices = _prices(raw.get("pricing"), asin)
    low, high = prices[0], prices[-1]
    return Product(
        asin=asin,
        title=raw["name"],
        description=raw["full_description"] or "",
        features=features if isinstance(features, list) else [features],
        price_tag=" to ".join(f"${price}" for price in prices),
        price=low + (high - low) * stable_unit(f"price/{asin}"),
        rating=str(reviews["average_rating"]) if reviews else "N.A.",
        reviews=[_review(review) for review in reviews["reviews"]] if reviews else [],
        query=raw["query"].lower().strip(),
        category=raw["category"],
        product_category=raw["product_category"],
        options=_options(raw.get("customization_options")),
        attributes=attributes.get("attributes", NO_ATTRIBUTES),
        instruction=attributes.get("instruction"),
        instruction_attributes=attributes.get("instruction_attributes") or [],
        human=[
            (entry["instruction"], entry["instruction_attributes"], entry["instruction_options"])
            for entry in human or ()
        ],
    )


def _prices(pricing: str | None, asin: str) -> list[float]:
    """One price, or the two ends of a range, in dollars."""
    parts = (pricing or "").split("$")[1:3]
    try:
        return [float(Decimal(re.sub(r"[^\d.]", "", part))) for part in parts] or [NO_PRICE]
    except InvalidOperation:
        raise ValueError(
            f"product {asin} has the price {pricing!r}, expected '$9.99' or '$9.99 - $19.99'"
        ) from None


def _options(raw: Mapping[str, Any] | str | None) -> dict[str, list[str]]:
    if not raw or isinstance(raw, str):
        return {}
    return {
        name.lower(): [value["value"].strip().replace("/", " | ").lower() for value in values]
        for name, values in raw.items()
        if values is not None
    }


def _review(raw: Mapping[str, Any]) -> tuple[str, str, str]:
    stars = raw["score"] if "score" in raw else raw.get("stars", "")
    return str(raw.get("title", "")), str(stars), str(raw.get("review", ""))
