"""The rules of the shop: which page a state shows, and which state an action leads to."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from envs.webshop.catalogue import Catalogue
from envs.webshop.pages import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT_PAGE,
    PAGE_SIZE,
    PREVIOUS_PAGE,
    Page,
    item_page,
    results_page,
    search_page,
    sub_page,
)
from envs.webshop.state import State

_PAGE_CACHE = 4096
# No instruction is half as long; what comes after is not searched for, nor kept.
_LONGEST_QUERY = 1000  # characters
_ACTION = re.compile(r"(search|click)\[(.*)\]", re.DOTALL | re.IGNORECASE)


class Shop:
    """Pages and moves over one catalogue. It holds no visit: one shop serves all episodes.

    Args:
        catalogue: The products.
        show_attributes: Whether item pages link to the page of attributes.
    """

    def __init__(self, catalogue: Catalogue, *, show_attributes: bool = False):
        self.catalogue = catalogue
        self.show_attributes = show_attributes
        self._results = lru_cache(_PAGE_CACHE)(self._render_results)
        self._item = lru_cache(_PAGE_CACHE)(self._render_item)
        self._search = search_page()

    def __reduce__(self) -> tuple:
        return open_shop, (self.catalogue, self.show_attributes)

    def page(self, state: State) -> Page:
        """Return the page that a state shows; "thanks" has none of its own."""
        if state.page == "results":
            return self._results(state.query, state.number)
        if state.page == "item":
            return self._item(state.row)
        if state.page == "details":
            return sub_page(self.catalogue.product(state.row), state.details)
        return self._search

    def move(self, state: State, action: str) -> State | None:
        """Return the state after an action, None if the action is not possible.

        `search[words]` works on every page, as in the official text environment, though only the
        search page offers it. Letter case does not matter. After the last "]" anything may follow.
        """
        match = _ACTION.match(action.strip())
        if match is None:
            return None
        verb, argument = match[1].lower(), match[2].lower()
        if verb == "search":
            query = argument[:_LONGEST_QUERY].strip()
            return State("results", query=query) if query else None
        page = self.page(state)
        return self._click(state, argument, page) if argument in page.clickables else None

    def _click(self, state: State, name: str, page: Page) -> State:
        if name == BACK_TO_SEARCH:
            return State()
        if name == BUY_NOW:
            return replace(state, page="thanks")
        if name == NEXT_PAGE:
            return replace(state, number=state.number + 1)
        if name == PREVIOUS_PAGE:
            return _back(state)
        if state.page == "results":
            return replace(state, page="item", row=self._linked(state, name))
        if name in page.options:
            return replace(state, options={**state.options, page.options[name]: name})
        return replace(state, page="details", details=name)

    def _linked(self, state: State, name: str) -> int:
        rows = self._rows(state.query, state.number)
        return next(row for row in rows if self.catalogue.product(row).asin.lower() == name)

    def _rows(self, query: str, number: int) -> tuple[int, ...]:
        return self.catalogue.search(query)[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]

    def _render_results(self, query: str, number: int) -> Page:
        products = [self.catalogue.product(row) for row in self._rows(query, number)]
        return results_page(products, number, len(self.catalogue.search(query)))

    def _render_item(self, row: int) -> Page:
        return item_page(self.catalogue.product(row), self.show_attributes)


def _back(state: State) -> State:
    if state.page == "details":
        return replace(state, page="item", details="")
    if state.page == "item":
        # The official server forgets the chosen options on the way back to the results.
        return State("results", query=state.query, number=state.number)
    return replace(state, number=state.number - 1)


@lru_cache(16)
def open_shop(catalogue: Catalogue, show_attributes: bool = False) -> Shop:
    """Return the shop of this process over a catalogue."""
    return Shop(catalogue, show_attributes=show_attributes)
