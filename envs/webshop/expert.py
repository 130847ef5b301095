"""A shopper that knows the product behind the goal and reaches it by the actions of the shop."""

from __future__ import annotations

from functools import lru_cache

from envs.webshop.catalogue import Catalogue
from envs.webshop.goals import Goal
from envs.webshop.pages import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT_PAGE,
    PAGE_SIZE,
    PREVIOUS_PAGE,
    item_page,
)
from envs.webshop.product import Product
from envs.webshop.reward import option_matches
from envs.webshop.state import State


def expert_action(catalogue: Catalogue, goal: Goal, state: State) -> str:
    """Return the next action towards buying the goal's product with its options.

    It searches with words of the instruction where they find the product, turns pages, chooses the
    options and buys. From any state, so after a wrong turn as well.
    """
    row = catalogue.row_of(goal.asin)
    assert row is not None, "goals are made from products of the catalogue"
    if state.page == "search":
        return f"search[{_query(catalogue, goal, row)}]"
    if state.page == "details":
        return f"click[{PREVIOUS_PAGE}]"
    results = catalogue.search(state.query)
    if state.page == "results":
        return f"click[{_from_results(results, row, state.number, goal.asin)}]"
    if state.row != row:
        return f"click[{PREVIOUS_PAGE if row in results else BACK_TO_SEARCH}]"
    return f"click[{_missing_option(catalogue.product(row), goal, state) or BUY_NOW}]"


@lru_cache(4096)
def _query(catalogue: Catalogue, goal: Goal, row: int) -> str:
    """The first of three queries that finds the product: wanted words, instruction, title."""
    wanted = " ".join([*goal.attributes, goal.query])
    instruction = goal.instruction.split(", and price lower than")[0]
    queries = [wanted, instruction.lower(), goal.title.lower()]
    return next((query for query in queries if row in catalogue.search(query)), queries[-1])


def _from_results(results: tuple[int, ...], row: int, number: int, asin: str) -> str:
    if row not in results:
        return BACK_TO_SEARCH
    wanted = results.index(row) // PAGE_SIZE + 1
    if wanted == number:
        return asin.lower()
    return NEXT_PAGE if wanted > number else PREVIOUS_PAGE


def _missing_option(product: Product, goal: Goal, state: State) -> str | None:
    """A value still to be chosen, None once all wanted ones are."""
    owner = item_page(product, show_attributes=False).options
    chosen: dict[str, str] = {}
    for name, wanted in goal.options:
        free = [value for value in owner if owner[value] not in chosen]
        fitting = [value for value in free if option_matches(value, name, wanted)]
        # The wanted value itself comes first: for a few the official reward counts none at all.
        best = wanted if wanted in free else next(iter(fitting), None)
        if best is not None:
            chosen[owner[best]] = best
    missing = (value for name, value in chosen.items() if state.options.get(name) != value)
    return next(missing, None)
