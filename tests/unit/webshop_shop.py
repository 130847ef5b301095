"""A hand-written shop in WebShop's official file format."""

import json
from pathlib import Path
from typing import Any

MUGS = "Home & Kitchen › Dining › Mugs"


def item(asin: str, **changed: Any) -> dict[str, Any]:
    """One entry of an items file."""
    return {
        "asin": asin,
        "name": "Plain Mug",
        "full_description": "",
        "small_description": [],
        "pricing": "$12.00",
        "customization_options": "",
        "query": "Mugs ",
        "category": "garden",
        "product_category": MUGS,
        "images": ["picture.jpg"],
        "average_rating": 4.5,
    } | changed


def options(**values: list[str]) -> dict[str, list[dict[str, Any]]]:
    return {name: [{"value": value, "price": 0} for value in v] for name, v in values.items()}


# Eleven mugs and a teapot: two pages of results for "mug".
ITEMS = [
    item(
        "B00000RED1",
        name="Red Clay Mug",
        full_description="A mug for tea.",
        small_description=["Dishwasher safe. ", "Holds 300 ml"],
        customization_options=options(Color=["Red", "Sky/Blue"], Size=["Large", "X-Large"]),
        pricing="$9.98 - $16.98",
    ),
    item("B00000TEA1", name="Clay Teapot", query="teapots", pricing="$1,050.00"),
    *(item(f"B0000PLN{n:02d}", name=f"Plain Mug {n}") for n in range(10)),
]
ATTRIBUTES = {
    "B00000RED1": {
        "attributes": ["dishwasher safe", "hand made"],
        "instruction": "Find me a hand made mug",
        "instruction_attributes": ["hand made"],
    },
    "B00000TEA1": {
        "attributes": ["hand made", "heat proof"],
        "instruction": "Find me a heat proof teapot",
        "instruction_attributes": ["heat proof"],
    },
    **{f"B0000PLN{n:02d}": {"attributes": ["easy to clean"]} for n in range(10)},
}
HUMAN = {
    "B00000RED1": [
        {
            "asin": "B00000RED1",
            "instruction": "i want a handmade red mug.",
            "instruction_attributes": ["hand made"],
            "instruction_options": ["red"],
        },
        {
            "asin": "B00000RED1",
            "instruction": "anything",
            "instruction_attributes": [],
            "instruction_options": [],
        },
    ]
}
REVIEWS = [
    {
        "asin": "B00000RED1",
        "average_rating": 4.0,
        "reviews": [{"title": "Nice", "stars": 4, "review": "Keeps warm."}],
    }
]


def write_shop(
    folder: Path,
    items: list[dict[str, Any]] = ITEMS,
    attributes: dict[str, Any] = ATTRIBUTES,
    suffix: str = "",
) -> Path:
    """Write the shop as official files and return the items file."""
    path = folder / f"items_shuffle{suffix}.json"
    path.write_text(json.dumps(items), encoding="utf-8")
    (folder / f"items_ins_v2{suffix}.json").write_text(json.dumps(attributes), encoding="utf-8")
    (folder / "items_human_ins.json").write_text(json.dumps(HUMAN), encoding="utf-8")
    (folder / "reviews.json").write_text(json.dumps(REVIEWS), encoding="utf-8")
    return path
