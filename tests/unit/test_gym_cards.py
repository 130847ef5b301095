"""Gym Cards: rules, rewards of both conventions, experts, deals, and what both views show."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from envs.gym_cards import Blackjack, EZPoints, NumberLine, Points24
from envs.gym_cards.formula import evaluate, shortest_continuation
from envs.gym_cards.game import Card
from tests.shared_data import shared_data

GAMES = (NumberLine, EZPoints, Points24, Blackjack)


def seed_of(cls, task_id, seeds=20_000):
    """The first seed that deals a task."""
    env = cls()
    for seed in range(seeds):
        if env.reset(seed=seed)[1]["task_id"] == task_id:
            return seed
    raise AssertionError(task_id)


def dealt(cls, cards, **kwargs):
    """A game with these ranks, all hearts, as if they had been drawn."""
    env = cls(**kwargs)
    env.reset(seed=0)
    env._cards = [Card(rank, "H") for rank in cards.split()]
    return env


def play(env, actions):
    """Rewards, and the last step."""
    steps = [env.step(action) for action in actions]
    return [reward for _, reward, *_ in steps], steps[-1]


def test_number_line_step_by_step():
    env = NumberLine()
    observation, info = env.reset(seed=seed_of(NumberLine, "1 to 3"))
    assert observation == "Target: 3\nCurrent: 1"
    assert info["admissible_actions"] == ["-", "+"]
    # away: -1; back: closer, 0; closer: 0; there: 1
    rewards, last = play(env, ["-", "+", "+", "+"])
    assert rewards == [-1.0, 0.0, 0.0, 1.0]
    assert last[0] == "Target: 3\nCurrent: 3"
    assert last[2:4] == (True, False)
    assert last[4]["won"] is True


def test_number_line_stops_at_both_ends():
    env = NumberLine()
    env.reset(seed=seed_of(NumberLine, "0 to 5"))
    assert env.step("-")[:2] == ("Target: 5\nCurrent: 0", -1.0)
    env.reset(seed=seed_of(NumberLine, "5 to 2"))
    assert env.step("+")[:2] == ("Target: 2\nCurrent: 5", -1.0)


def test_number_line_is_cut_after_ten_steps():
    env = NumberLine()
    env.reset(seed=seed_of(NumberLine, "0 to 5"))
    rewards, last = play(env, ["-"] * 10)
    assert sum(rewards) == -10
    assert last[2:4] == (False, True)


@pytest.mark.parametrize("largest", [2, 3, 4])
def test_no_number_line_starts_at_its_target(largest):
    env = NumberLine(max_position=largest)
    starts = {env.reset(seed=seed)[1]["task_id"] for seed in range(1000)}
    assert starts == {f"{a} to {b}" for a, b in itertools.permutations(range(largest + 1), 2)}


def test_number_line_never_starts_at_its_target():
    counts = Counter(NumberLine().reset(seed=seed)[1]["task_id"] for seed in range(6000))
    pairs = {f"{a} to {b}" for a, b in itertools.permutations(range(6), 2)}
    assert set(counts) == pairs
    # Each of 36 draws is as likely: 6000 / 36 = 167 a pair. Of the equal ones, (g, g) becomes
    # (g, g + 1) for g below 4, (4, 0), and (5, 1): those six pairs are twice as likely, 333.
    doubled = {"0 to 1", "1 to 2", "2 to 3", "3 to 4", "4 to 0", "5 to 1"}
    assert all(270 < counts[pair] < 400 for pair in doubled)
    assert all(110 < counts[pair] < 230 for pair in pairs - doubled)


def test_ez_points_step_by_step():
    env = dealt(EZPoints, "K 2")
    assert env._text() == "Cards: K 2\nFormula:"
    rewards, last = play(env, ["10", "+", "2"])
    assert rewards == [0.0, 0.0, 0.0]
    assert last[0] == "Cards: K 2\nFormula: 10 + 2"
    assert last[4]["formula"] == "10 + 2"
    *_, last = play(env, ["="])
    assert last[1:4] == (10.0, True, False)
    assert last[4]["won"] is True


@pytest.mark.parametrize(("reward", "loss"), [("paper", 0.0), ("rl4vlm", -1.0)])
@pytest.mark.parametrize(
    ("cls", "cards", "formula"),
    [
        (EZPoints, "K 2", "10 * 2"),  # 20
        (EZPoints, "6 6", "6"),  # one card is left over
        (EZPoints, "K 2", "10 2 +"),  # no formula
        (EZPoints, "K 2", ""),
        (Points24, "4 6 A A", "4 * 6"),  # 24, with two cards left over
        (Points24, "2 4 A A", "2 4 * 1 * 1"),  # 2 and 4 are not 24
        (Points24, "2 2 6 6", "6 / ( 2 - 2 )"),
    ],
)
def test_a_wrong_formula_loses(cls, cards, formula, reward, loss):
    env = dealt(cls, cards, reward=reward)
    rewards, last = play(env, [*formula.split(), "="])
    assert rewards == [*[0.0] * len(formula.split()), loss]
    assert last[2:4] == (True, False)
    assert last[4]["won"] is False


@pytest.mark.parametrize(
    ("reward", "loss", "shown"), [("paper", 0.0, "10"), ("rl4vlm", -1.0, "10  ")]
)
def test_a_number_that_is_on_no_unused_card(reward, loss, shown):
    env = dealt(EZPoints, "K 2", reward=reward)
    rewards, last = play(env, ["10", "10"])
    assert rewards == [0.0, loss]
    # The original writes a blank: "10" + " " + " ".
    assert last[4]["formula"] == shown
    assert last[4]["is_action_valid"] is True
    # The blank does not disturb the formula.
    assert play(env, ["+", "2", "="])[0] == [0.0, 0.0, 10.0]


@pytest.mark.parametrize(
    ("cls", "most", "reward", "loss"),
    [(EZPoints, 5, "rl4vlm", -1.0), (EZPoints, 5, "paper", 0.0), (Points24, 20, "rl4vlm", -1.0)],
)
def test_a_formula_that_is_too_long_is_cut_short(cls, most, reward, loss):
    env = dealt(cls, "6 6" if cls is EZPoints else "6 6 6 6", reward=reward, horizon=50)
    # With `most + 1` entries it is more than `most`, and whatever comes next is the end.
    rewards, last = play(env, [*["+"] * (most + 1), "="])
    assert rewards == [*[0.0] * (most + 1), loss]
    assert last[2:4] == (False, True)


def test_mistakes_end_the_original_episode_and_not_the_papers():
    original = dealt(EZPoints, "6 6", reward="rl4vlm", horizon=50)
    rewards, last = play(original, ["9"] * 7)
    assert rewards == [-1.0] * 7
    assert last[3] is True
    paper = dealt(EZPoints, "6 6", horizon=50)
    assert play(paper, ["9"] * 40)[1][2:4] == (False, False)


def test_ez_points_deals_can_all_be_solved_and_follow_the_rule():
    env = EZPoints()
    counts = Counter()
    for seed in range(4000):
        env.reset(seed=seed)
        first, second = sorted(env.numbers)
        assert first + second == 12 or first * second == 12
        counts[first, second] += 1
    # First card: 2 to 9 with chance 1/12 each, ten 4/12. The pair (2, 6) comes from 2 by product
    # and from 6 by product: 2 * 1/12 * 1/2; (3, 4) alike. (6, 6) from 6 by sum: 1/24. (2, 10) from
    # 2 by sum and from ten: 1/24 + 4/12 = 3/8.
    expected = {(2, 6): 1 / 12, (3, 4): 1 / 12, (6, 6): 1 / 24, (2, 10): 3 / 8}
    for pair, share in expected.items():
        assert counts[pair] / 4000 == pytest.approx(share, abs=0.03)
    assert set(counts) == {(2, 10), (3, 9), (4, 8), (5, 7), (6, 6), (2, 6), (3, 4)}


def test_points24_draws_every_rank_alike():
    env = Points24()
    counts = Counter()
    for seed in range(2000):
        env.reset(seed=seed)
        counts.update(card.rank for card in env._cards)
    # 8000 cards of 13 ranks: 615 each, standard deviation 24.
    assert set(counts) == {"A", *map(str, range(2, 11)), "J", "Q", "K"}
    assert all(500 < count < 730 for count in counts.values())


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("8 / ( 3 - 8 / 3 )", 24),
        ("2 + 3 * 4", 14),
        ("( 2 + 3 ) * 4", 20),
        ("8 / 4 / 2", 1),
        ("7 - 3 - 2", 2),
        ("- 3 + 5", 2),
        ("2 * - 3", -6),
        ("1 / 3", Fraction(1, 3)),
        ("2 * * 3", None),
        ("8 / / 3", None),
        ("1 2", None),
        ("( 2", None),
        ("2 )", None),
        ("( )", None),
        ("2 +", None),
        ("( 2 ) ( 3 )", None),
        ("5 / ( 3 - 3 )", None),
        ("", None),
    ],
)
def test_formulas_are_exact_arithmetic(formula, value):
    assert evaluate(formula.split()) == value


@pytest.mark.parametrize(
    ("numbers", "written", "rest"),
    [
        ((10, 2), "", "10 + 2"),
        ((3, 4), "4", "* 3"),
        ((10, 2), "10 *", ""),
        ((6, 6), "6 + 6", ""),
    ],
)
def test_ez_points_formulas_go_on_from_what_is_written(numbers, written, rest):
    found = shortest_continuation(numbers, EZPoints.actions, 12, tuple(written.split()))
    assert found == tuple(rest.split())


def test_points24_formulas_use_brackets_where_they_must_or_stand():
    def rest(numbers, written=""):
        entries = tuple(written.split())
        return " ".join(shortest_continuation(numbers, Points24.actions, 24, entries))

    assert rest((3, 3, 8, 8)) == "8 / ( 3 - 8 / 3 )"
    assert rest((1, 1, 1, 1)) == ""
    # An optional bracket that is open already is closed where it does no harm.
    assert evaluate(f"( 4 {rest((1, 1, 4, 6), '( 4')}".split()) == 24
    assert rest((1, 1, 4, 6), "4 - - ") == ""


@cache
def can_be_24(numbers: tuple[Fraction, ...]) -> bool:
    """Combine any two numbers until one is left: another way to search than the expert's."""
    if len(numbers) == 1:
        return numbers[0] == 24
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        others = [n for k, n in enumerate(numbers) if k not in (i, j)]
        results = [a + b, a - b, a * b, *([a / b] if b else [])]
        if any(can_be_24(tuple(sorted([*others, result]))) for result in results):
            return True
    return False


def test_the_expert_wins_exactly_the_deals_that_can_be_won():
    env = Points24()
    for seed in range(40):
        env.reset(seed=seed)
        numbers = tuple(sorted(map(Fraction, env.numbers)))
        assert env.is_winnable() == can_be_24(numbers), numbers
        terminated = False
        while not terminated:
            _, _, terminated, truncated, info = env.step(env.expert_action())
            assert not truncated
        assert info["won"] == can_be_24(numbers), numbers


@pytest.mark.parametrize("cls", [NumberLine, EZPoints])
def test_the_solver_wins_always(cls):
    env = cls()
    for seed in range(300):
        env.reset(seed=seed)
        terminated = False
        while not terminated:
            _, _, terminated, truncated, info = env.step(env.expert_action())
            assert not truncated
        assert info["won"]


def test_the_expert_gives_up_where_nothing_can_be_saved():
    env = dealt(EZPoints, "K 2")
    env.step("10")
    env.step("*")
    assert env.expert_action() == "="


@pytest.mark.parametrize("cls", GAMES)
def test_an_unknown_action_changes_nothing_and_costs_a_step(cls):
    env = cls(horizon=2)
    observation, _ = env.reset(seed=3)
    for steps, action in enumerate(("HIT me", "11"), start=1):
        seen, reward, terminated, truncated, info = env.step(action)
        assert seen == observation
        assert (reward, terminated, truncated) == (0.0, False, steps == 2)
        assert info["is_action_valid"] is False
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("hit")
    with pytest.raises(RuntimeError, match="call reset"):
        env.expert_action()


@pytest.mark.parametrize("cls", GAMES)
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"horizon": 0}, "horizon must be at least 1"), ({"view": "ascii"}, "view must be one of")],
)
def test_bad_arguments_are_refused(cls, kwargs, message):
    with pytest.raises(ValueError, match=message):
        cls(**kwargs)


def test_other_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="max_position must be at least 2, got 1"):
        NumberLine(max_position=1)
    with pytest.raises(ValueError, match=r"reward must be one of .*, got 'binary'"):
        EZPoints(reward="binary")


@pytest.mark.parametrize("cls", GAMES)
def test_pictures_show_the_state(cls):
    """As many pictures as texts, apart from the suits, which the text leaves out."""
    text, rgb = cls(), cls(view="rgb")
    pictures: dict[tuple, bytes] = {}
    for seed in range(6):
        words, info = text.reset(seed=seed)
        picture, _ = rgb.reset(seed=seed)
        cards = info["task_id"] if cls is not NumberLine else ""
        for action in (text.actions * 2)[:3]:
            assert picture.shape == (300, 300, 3)
            assert rgb.observation_space.contains(picture)
            key = (words, cards)
            assert pictures.setdefault(key, picture.tobytes()) == picture.tobytes()
            if text._is_over or cls is Blackjack:
                break
            words, picture = text.step(action)[0], rgb.step(action)[0]
    assert len(set(pictures.values())) == len(pictures)


def test_pictures_tell_all_52_cards_apart():
    from envs.gym_cards.draw import draw_cards_and_formula

    ranks = ("A", *map(str, range(2, 11)), "J", "Q", "K")
    seen = {
        draw_cards_and_formula((Card(rank, suit), Card("2", "H")), (("", 258),), [], 20).tobytes()
        for rank, suit in itertools.product(ranks, "HSDC")
    }
    assert len(seen) == 52


def test_cards_lie_where_the_original_has_them():
    env = EZPoints(view="rgb")
    picture, _ = env.reset(seed=0)
    felt = np.array([0x35, 0x65, 0x4D])
    is_felt = (picture == felt).all(axis=2)
    # Two cards of 135 x 189 at x = 5 and 153, from y = (300 - 189) // 2 = 55; corners are round.
    assert not is_felt[55:244, 60].any()
    assert is_felt[:55, 60].all()
    assert not is_felt[150, 5:140].any()
    assert is_felt[150, 140:153].all()
    assert not is_felt[150, 153:288].any()
    assert is_felt[150, 288:].all()


def test_a_returned_picture_can_be_written_to():
    env = NumberLine(view="rgb")
    first, _ = env.reset(seed=0)
    first[:] = 0
    assert env.reset(seed=0)[0].any()


@pytest.mark.parametrize("cls", GAMES)
def test_words_cover_the_text_view(cls):
    words = set(cls.words())
    env = cls()
    for seed in range(40):
        observation, info = env.reset(seed=seed)
        assert set(observation.split()) <= words
        assert set(info["admissible_actions"]) <= words


def test_rules_agree_with_the_recorded_facts():
    import json

    facts = json.loads(shared_data("gym_cards/gym_cards_facts.json").read_text())
    for cls in GAMES:
        assert list(cls.actions) == facts[cls.__name__]["actions"]
    for cls in (EZPoints, Points24):
        assert cls.goal == facts[cls.__name__]["target"]
    steps = facts["common"]["verl_agent_max_steps"]
    assert {cls.__name__: cls().horizon for cls in GAMES if cls is not Points24} == steps
