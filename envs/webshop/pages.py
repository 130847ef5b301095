"""The pages of the shop as text, and what can be clicked on them.

The text is the official environment's mode "text": the visible pieces of a page in order, joined by
" [SEP] ". A page is a function of what the shopper sees; it is rendered once and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from envs.webshop.product import Product

SEPARATOR = " [SEP] "
PAGE_SIZE = 10

BACK_TO_SEARCH = "back to search"
NEXT_PAGE = "next >"
PREVIOUS_PAGE = "< prev"
BUY_NOW = "buy now"
SUB_PAGES = ("description", "features", "reviews", "attributes")


class Page(NamedTuple):
    """One page.

    Attributes:
        text: What it says, without the instruction.
        clickables: What can be clicked, in the official order; all lower case.
        options: Which option a clickable value belongs to.
    """

    text: str
    clickables: tuple[str, ...]
    options: dict[str, str]


def search_page() -> Page:
    """Return the page every episode starts on: only a search is possible."""
    return _page(["Search"], [])


def results_page(products: Sequence[Product], number: int, total: int) -> Page:
    """Return one page of search results.

    Args:
        products: The products on it, at most ten.
        number: Its number, from 1.
        total: Products found altogether.
    """
    moves = [PREVIOUS_PAGE] if number > 1 else []
    moves += [NEXT_PAGE] if number * PAGE_SIZE < total else []
    pieces = ["Back to Search", f"Page {number} (Total results: {total})"]
    pieces += [_LABELS[move] for move in moves]
    for product in products:
        pieces += [product.asin, product.title, product.price_tag]
    links = [product.asin.lower() for product in products]
    return _page(pieces, [BACK_TO_SEARCH, *moves, *links])


def item_page(product: Product, show_attributes: bool) -> Page:
    """Return the page of a product, where its options are chosen and it is bought.

    As in the official text mode, the page does not tell which options have been chosen.
    """
    pieces = ["Back to Search", "< Prev"]
    for name, values in product.options.items():
        pieces += [name, *values]
    sub_pages = SUB_PAGES if show_attributes else SUB_PAGES[:-1]
    pieces += [product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}"]
    pieces += [*(name.capitalize() for name in sub_pages), "Buy Now"]
    buttons = [BACK_TO_SEARCH, PREVIOUS_PAGE, *sub_pages, BUY_NOW]
    # A value that two options share belongs to the later one, and a button comes before a value.
    options = {
        value: name
        for name, values in product.options.items()
        for value in values
        if value and value not in buttons
    }
    return _page(pieces, [*buttons, *options], options)


def sub_page(product: Product, name: str) -> Page:
    """Return a page of details: one of `SUB_PAGES`."""
    if name == "description":
        details = [product.description or "No Description"]
    elif name == "features":
        details = product.features or ["No Features"]
    elif name == "reviews":
        details = [piece for review in product.reviews for piece in review] or ["No Reviews"]
    else:
        details = [*product.attributes, product.category, product.query, product.product_category]
    return _page(["Back to Search", "< Prev", *details], [BACK_TO_SEARCH, PREVIOUS_PAGE])


def thanks_page(score: float) -> Page:
    """Return the page after a purchase; nothing can be clicked."""
    thanks = "Thank you for shopping with us!"
    return _page([thanks, "Your score (min 0.0, max 1.0)", str(score)], [])


def header(instruction: str, is_search_page: bool) -> str:
    """Return what the official text mode puts before a page."""
    start = ["WebShop"] if is_search_page else []
    return SEPARATOR.join([*start, "Instruction:", instruction, ""])


_LABELS = {NEXT_PAGE: "Next >", PREVIOUS_PAGE: "< Prev"}


def _page(
    pieces: Sequence[str], clickables: Sequence[str], options: dict[str, str] | None = None
) -> Page:
    text = SEPARATOR.join(piece.strip() for piece in pieces)
    # dict.fromkeys: a product may be named like a button, and an action is listed once.
    return Page(text, tuple(dict.fromkeys(clickables)), options or {})
