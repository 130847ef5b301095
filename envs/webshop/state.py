"""Where a shopper is in the shop, and where a click leads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PageName = Literal["search", "results", "item", "details", "thanks"]


@dataclass(frozen=True)
class State:
    """The state of a visit.

    Attributes:
        page: Kind of the current page.
        query: Last search.
        number: Number of the page of results, from 1.
        row: Row of the current product in the catalogue.
        details: Name of the page of details.
        options: Chosen value by name of the option.
    """

    page: PageName = "search"
    query: str = ""
    number: int = 1
    row: int = -1
    details: str = ""
    options: dict[str, str] = field(default_factory=dict)
