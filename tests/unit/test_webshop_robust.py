"""WebShop survives whatever a model or a user throws at it: actions, pickles, arguments."""

import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.webshop_shop import write_shop

pytest.importorskip("bm25s", reason="WebShop needs the extra [webshop]")

from envs.webshop import WebShop

TEXT = st.text(st.characters(), max_size=300)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXT | TEXT.map("search[{}]".format) | TEXT.map("click[{}]".format), max_size=4))
def test_no_action_raises(actions):
    env = WebShop()
    env.reset(seed=0)
    for action in actions:
        if env.step(action)[2]:
            break


@pytest.mark.parametrize(
    "action",
    [
        "search[" + "lamp " * 10**6 + "]",
        "click[" * 10**5,
        "search[\ud800\udfff]",
        "search[" + "[" * 10**6,
        "search[ﷺ ①②③ ｌａｍｐ]",
        "click[\x00]",
        "search[%s%n{0}]",
    ],
    ids=["huge", "nested", "surrogates", "unclosed", "wide", "null", "format"],
)
def test_hostile_actions_do_not_raise(action):
    env = WebShop()
    env.reset(seed=0)
    observation, *_ = env.step(action)
    assert len(observation) < 2000


def test_random_walk_meets_every_kind_of_page():
    env = WebShop(horizon=60)
    rng = random.Random(0)
    seen = set()
    for seed in range(30):
        _, info = env.reset(seed=seed)
        done = False
        while not done:
            _, _, terminated, truncated, info = env.step(env.random_action(rng))
            assert info["is_action_valid"]
            seen.add(env._state.page)
            done = terminated or truncated
    assert seen == {"search", "results", "item", "details", "thanks"}


def test_pickle_shares_the_catalogue_and_goes_on():
    env = WebShop()
    env.reset(seed=3)
    for _ in range(3):
        env.step(env.expert_action())
    data = pickle.dumps(env)
    copied = pickle.loads(data)

    assert len(data) < 20_000
    assert copied.catalogue is env.catalogue
    while True:
        action = env.expert_action()
        answer = env.step(action)
        assert copied.step(action) == answer
        if answer[2]:
            break
    assert answer[4]["won"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"goals": "all"}, "goals must be one of"),
        ({"split": "dev"}, "split must be one of"),
        ({"reward": "dense"}, "reward must be one of"),
        ({"anchor": "page"}, "anchor must be one of"),
        ({"horizon": 0}, "horizon must be at least 1, got 0"),
        ({"num_products": 0}, "num_products must be at least 1, got 0"),
        ({"goals": "human"}, "catalogue generated has 0 human goals"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        WebShop(**arguments)


def test_more_products_than_the_file_has(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLIB_GIGPO_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"num_products=13, but .* holds only 12"):
        WebShop(products=write_shop(tmp_path), num_products=13)


def test_unknown_task_is_named():
    with pytest.raises(ValueError, match="'nope' is not one of this split's"):
        WebShop().reset(options={"task_id": "nope"})
