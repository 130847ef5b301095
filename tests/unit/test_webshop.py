"""The rules of WebShop, by hand on a small shop: pages, clicks, options, buying."""

import pytest

from tests.unit.webshop_shop import item, options, write_shop

pytest.importorskip("bm25s", reason="WebShop needs the extra [webshop]")

from envs.webshop import WebShop
from envs.webshop.pages import SEPARATOR, item_page
from envs.webshop.product import product_from_raw

BACK = "click[back to search]"
RED_MUG_PAGE = (
    "Back to Search [SEP] < Prev [SEP] color [SEP] red [SEP] sky | blue [SEP] size [SEP] large "
    "[SEP] x-large [SEP] Red Clay Mug [SEP] Price: $9.98 to $16.98 [SEP] Rating: 4.0 [SEP] "
    "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLIB_GIGPO_CACHE", str(folder / "cache"))
        yield str(write_shop(folder))


@pytest.fixture
def make(shop):
    return lambda **arguments: WebShop(products=shop, **arguments)


def task_of(env, words):
    """The id of the only goal whose instruction holds these words."""
    found = []
    for task_id in env.task_ids():
        _, info = env.reset(options={"task_id": task_id})
        if words in info["task"]:
            found.append(task_id)
    (task_id,) = found
    return task_id


def start(env, words="color: red, and size: large"):
    return env.reset(options={"task_id": task_of(env, words)})


def walk(env, *actions):
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
    return observation, reward, terminated, truncated, info


def test_episode_starts_on_the_search_page(make):
    observation, info = start(make())

    assert observation == "Search"
    assert info["task"] == (
        "Find me a hand made mug with color: red, and size: large, "
        f"and price lower than {price_limit(info):.2f} dollars"
    )
    assert info["admissible_actions"] == ["search[<your query>]"]
    assert (info["won"], info["score"]) == (False, 0.0)


def price_limit(info):
    return float(info["task"].split("lower than ")[1].split()[0])


def test_results_come_in_pages_of_ten(make):
    env = make()
    start(env)
    observation, _, _, _, info = env.step("search[a mug]")
    pieces = observation.split(SEPARATOR)

    # "mug" stands in the titles of eleven products; "a" is a stop word.
    assert pieces[:3] == ["Back to Search", "Page 1 (Total results: 11)", "Next >"]
    assert len(pieces) == 3 + 10 * 3
    assert len(info["admissible_actions"]) == 2 + 10
    assert info["admissible_actions"][:2] == [BACK, "click[next >]"]
    # Shorter documents score higher, and equal ones come in the order of the file.
    assert pieces[3:9] == [
        "B0000PLN00",
        "Plain Mug 0",
        "$12.0",
        "B0000PLN01",
        "Plain Mug 1",
        "$12.0",
    ]

    observation, _, _, _, info = env.step("click[next >]")
    assert observation == (
        "Back to Search [SEP] Page 2 (Total results: 11) [SEP] < Prev [SEP] B00000RED1 [SEP] "
        "Red Clay Mug [SEP] $9.98 to $16.98"
    )
    assert info["admissible_actions"] == [BACK, "click[< prev]", "click[b00000red1]"]
    assert env.step("click[< prev]")[0].startswith("Back to Search [SEP] Page 1 ")


def test_exactly_ten_results_are_one_page(make):
    env = make()
    start(env)
    observation, _, _, _, info = env.step("search[plain]")
    assert "Page 1 (Total results: 10)" in observation
    assert "click[next >]" not in info["admissible_actions"]


def test_only_the_start_of_a_very_long_query_is_searched(make):
    env = make()
    start(env)
    assert "B00000TEA1" in env.step(f"search[{'x ' * 490}teapot]")[0]
    assert "B00000TEA1" not in env.step(f"search[{'x ' * 500}teapot]")[0]


def test_values_without_text_or_named_like_buttons_cannot_be_chosen():
    raw = item("A", customization_options=options(Style=["Features", "", "round"], Shape=["round"]))
    product = product_from_raw(raw, None)
    assert product is not None
    page = item_page(product, show_attributes=False)
    assert page.options == {"round": "shape"}  # the later of two options with one value
    assert page.clickables[-2:] == ("buy now", "round")


@pytest.mark.parametrize(
    "way", [[], ["search[red clay]"], ["search[red clay]", "click[b00000red1]", "click[features]"]]
)
def test_buying_is_possible_on_item_pages_only(make, way):
    env = make()
    start(env)
    for action in way:
        env.step(action)
    _, _, terminated, _, info = env.step("click[buy now]")
    assert (terminated, info["is_action_valid"]) == (False, False)


def test_search_without_a_hit(make):
    env = make()
    start(env)
    observation, _, _, _, info = env.step("search[zebra]")

    assert observation == "Back to Search [SEP] Page 1 (Total results: 0)"
    assert info["admissible_actions"] == [BACK]


@pytest.mark.parametrize("query", ["mugs", "MUG", "the mug's", "tea mug"])
def test_search_knows_plurals_case_and_possessives(make, query):
    env = make()
    start(env)
    assert "B0000PLN00" in env.step(f"search[{query}]")[0]


def test_item_page_and_its_details(make):
    env = make()
    start(env)
    observation, _, _, _, info = walk(env, "search[red clay mug]", "click[b00000red1]")

    assert observation == RED_MUG_PAGE
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    values = ["red", "sky | blue", "large", "x-large"]
    assert info["admissible_actions"] == [f"click[{name}]" for name in buttons + values]

    for name, text in [
        ("description", "A mug for tea."),
        ("features", "Dishwasher safe. [SEP] Holds 300 ml"),
        ("reviews", "Nice [SEP] 4 [SEP] Keeps warm."),
    ]:
        observation, _, _, _, info = env.step(f"click[{name}]")
        assert observation == f"Back to Search [SEP] < Prev [SEP] {text}"
        assert info["admissible_actions"] == [BACK, "click[< prev]"]
        assert env.step("click[< prev]")[0] == RED_MUG_PAGE


def test_empty_details_say_so(make):
    env = make(horizon=50)
    start(env)
    walk(env, "search[plain mug]", "click[b0000pln03]")
    for name in ("description", "features", "reviews"):
        assert walk(env, f"click[{name}]")[0].endswith(f"No {name.capitalize()}")
        env.step("click[< prev]")


def test_attributes_page_is_an_option(make):
    env = make(show_attributes=True)
    start(env)
    observation, *_ = walk(env, "search[red clay]", "click[b00000red1]", "click[attributes]")

    assert observation == (
        "Back to Search [SEP] < Prev [SEP] dishwasher safe [SEP] hand made [SEP] garden [SEP] mugs "
        "[SEP] Home & Kitchen › Dining › Mugs"
    )
    assert not walk(make_started(make), "search[red clay]", "click[attributes]")[4][
        "is_action_valid"
    ]


def make_started(make, **arguments):
    env = make(**arguments)
    start(env)
    return env


def test_buying_the_right_thing_gives_ten(make):
    env = make()
    start(env)
    observation, reward, terminated, truncated, info = walk(
        env, "search[red clay]", "click[b00000red1]", "click[red]", "click[large]", "click[buy now]"
    )

    assert (reward, terminated, truncated) == (10.0, True, False)
    assert (info["won"], info["score"], info["admissible_actions"]) == (True, 1.0, [])
    assert observation == (
        "Thank you for shopping with us! [SEP] Your score (min 0.0, max 1.0) [SEP] 1.0"
    )
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(BACK)
    with pytest.raises(RuntimeError, match="call reset"):
        env.expert_action()


@pytest.mark.parametrize(
    ("clicks", "score"),
    [
        # One attribute, two options and the price are asked for: quarters.
        (["red", "large"], 1.0),
        (["sky | blue", "x-large", "large", "red"], 1.0),  # the later value of an option counts
        (["red"], 0.75),
        ([], 0.5),
        (["x-large", "red"], 0.75),
    ],
)
def test_options_are_scored(make, clicks, score):
    env = make(reward="score")
    start(env)
    walk(env, "search[red clay]", "click[b00000red1]", *(f"click[{name}]" for name in clicks))
    _, reward, _, _, info = env.step("click[buy now]")

    assert reward == info["score"] == pytest.approx(score)
    assert info["won"] == (score == 1.0)


def test_going_back_forgets_the_options(make):
    env = make()
    start(env)
    walk(env, "search[red clay]", "click[b00000red1]", "click[red]", "click[large]")
    walk(env, "click[description]", "click[< prev]")  # details keep them
    assert walk(env, "click[buy now]")[4]["score"] == 1.0

    start(env)
    walk(env, "search[red clay]", "click[b00000red1]", "click[red]", "click[large]")
    walk(env, "click[< prev]", "click[b00000red1]")
    assert walk(env, "click[buy now]")[4]["score"] == 0.5


def test_binary_reward_of_an_imperfect_purchase_is_zero(make):
    env = make()
    start(env)
    _, reward, terminated, _, info = walk(
        env, "search[red clay]", "click[b00000red1]", "click[buy now]"
    )
    assert (reward, terminated, info["won"], info["score"]) == (0.0, True, False, 0.5)


def test_search_works_on_any_page_though_only_one_offers_it(make):
    env = make()
    start(env)
    walk(env, "search[red clay]", "click[b00000red1]")
    observation, _, _, _, info = env.step("search[teapot]")
    assert info["is_action_valid"]
    assert "B00000TEA1" in observation


@pytest.mark.parametrize(
    "action",
    [
        "buy now",
        "click[]",
        "click",
        "search[]",
        "search[  ]",
        "click[b00000tea1]",
        "click[search]",
        "click[next >]",
        "think[hm]",
        "[click]",
        "CLICK buy now",
        "search(mug)",
    ],
)
def test_impossible_actions_change_nothing_and_cost_a_step(make, action):
    env = make(horizon=3)
    start(env)
    walk(env, "search[red clay mug dishwasher]", "click[b00000red1]")
    observation, reward, terminated, truncated, info = env.step(action)

    assert observation == RED_MUG_PAGE
    assert (reward, terminated, truncated, info["is_action_valid"]) == (0.0, False, True, False)


@pytest.mark.parametrize("action", [" Click[Back To SEARCH] ", "click[back to search] please"])
def test_letter_case_and_what_follows_do_not_matter(make, action):
    env = make()
    start(env)
    observation, _, _, _, info = walk(env, "search[mug]", action)
    assert (observation, info["is_action_valid"]) == ("Search", True)


def test_episode_is_cut_after_its_horizon(make):
    env = make(horizon=2)
    start(env)
    assert env.step("search[mug]")[3] is False
    assert env.step("click[next >]")[3] is True


def test_official_text_starts_with_the_instruction(make):
    env = make(show_task=True)
    observation, info = start(env)
    assert observation == f"WebShop [SEP] Instruction: [SEP] {info['task']} [SEP] Search"
    observation, *_ = env.step("search[zebra]")
    assert observation == (
        f"Instruction: [SEP] {info['task']} [SEP] Back to Search [SEP] Page 1 (Total results: 0)"
    )


def test_anchor_can_tell_the_options(make):
    env = make(anchor="observation+options")
    start(env)
    infos = [
        env.step(action)[4]
        for action in ("search[red clay]", "click[b00000red1]", "click[large]", "click[red]")
    ]
    assert infos[1]["anchor"] == RED_MUG_PAGE
    assert infos[2]["anchor"] == RED_MUG_PAGE + "\nsize: large"
    assert infos[3]["anchor"] == RED_MUG_PAGE + "\ncolor: red\nsize: large"


def test_human_goal_is_bought_with_its_option(make):
    env = make(goals="human", split="train")
    _, info = env.reset(seed=0)
    assert info["task"].startswith("i want a handmade red mug, and price lower than ")
    info = walk(env, "search[red mug]", "click[b00000red1]", "click[red]", "click[buy now]")[4]
    assert info["score"] == 1.0  # attribute, option and price
