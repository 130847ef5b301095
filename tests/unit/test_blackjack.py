"""Blackjack: rules, both rewards, and an expert that plays the best policy there is."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest

from envs.gym_cards import Blackjack
from envs.gym_cards.blackjack import basic_strategy, hand_total
from envs.gym_cards.game import Card


def test_a_hand_counts_an_ace_as_eleven_unless_that_is_too_much():
    def total(ranks):
        return hand_total([Card(rank, "S") for rank in ranks.split()])

    assert total("A K") == (21, True)
    assert total("A A") == (12, True)
    assert total("A 9 5") == (15, False)
    assert total("Q 5 6") == (21, False)
    assert total("J 2") == (12, False)


def test_blackjack_step_by_step():
    env = Blackjack()
    seed = next(
        seed
        for seed in range(10_000)
        if (lambda _: env._text())(env.reset(seed=seed)) == "Dealer: 7 ?\nPlayer: 5 6"
    )
    observation, info = env.reset(seed=seed)
    assert info["admissible_actions"] == ["stand", "hit"]
    seen, reward, terminated, truncated, info = env.step("hit")
    # 11 and any card are at most 21
    assert (reward, terminated, truncated, info["won"]) == (0.0, False, False, False)
    assert seen.startswith(observation + " ")
    # The same seed deals the same cards again.
    env.reset(seed=seed)
    assert env.step("hit")[0] == seen


@pytest.mark.parametrize(
    ("player", "dealer", "outcome"),
    [
        ("K Q", "10 9", 1),  # 20 against 19
        ("K 9", "10 9", 0),
        ("K 8", "10 9", -1),
        ("K 2", "A 6", -1),  # the dealer stands on a soft 17
        ("A K", "Q J", 1),
    ],
)
@pytest.mark.parametrize("reward", ["paper", "rl4vlm"])
def test_standing_compares_the_hands(player, dealer, outcome, reward):
    env = Blackjack(reward=reward)
    env.reset(seed=0)
    env._player = [Card(rank, "S") for rank in player.split()]
    env._dealer = [Card(rank, "H") for rank in dealer.split()]
    _, earned, terminated, _, info = env.step("stand")
    assert terminated
    assert earned == (outcome if reward == "rl4vlm" else max(0, outcome))
    assert info["won"] == (outcome > 0)


@pytest.mark.parametrize(("reward", "loss"), [("paper", 0.0), ("rl4vlm", -1.0)])
def test_more_than_21_loses_at_once(reward, loss):
    env = Blackjack(reward=reward)
    env.reset(seed=0)
    env._player = [Card("K", "S"), Card("Q", "S"), Card("A", "S")]
    # 21 and any card are more
    assert env.step("hit")[1:4] == (loss, True, False)


def test_a_dealer_with_more_than_21_loses():
    env = Blackjack(reward="rl4vlm")
    for seed in range(200):
        env.reset(seed=seed)
        env._player = [Card("2", "S"), Card("3", "S")]
        _, reward, *_ = env.step("stand")
        dealer, _ = hand_total(env._dealer)
        assert dealer >= 17
        # 5 is never more than what the dealer stands on.
        assert reward == (1.0 if dealer > 21 else -1.0)


def test_ten_is_four_times_as_likely_and_shows_a_face():
    env = Blackjack()
    counts = Counter()
    for seed in range(2000):
        env.reset(seed=seed)
        counts.update(card.rank for card in (*env._dealer, *env._player))
    faces = sum(counts[face] for face in "JQK")
    assert "10" not in counts
    # 8000 cards: 4/13 are ten (2462, standard deviation 41), a third of them of each face.
    assert 2300 < faces < 2620
    assert all(700 < counts[face] < 950 for face in "JQK")
    assert all(500 < counts[rank] < 730 for rank in ("A", *map(str, range(2, 10))))


_DECK = [*range(2, 10), *[10] * 4, 11]


def _add(total: int, is_soft: bool, card: int) -> tuple[int, bool]:
    """Draw to a hand; aces come as 11."""
    total, soft_aces = total + card, is_soft + (card == 11)
    while total > 21 and soft_aces:
        total, soft_aces = total - 10, soft_aces - 1
    return total, soft_aces > 0


@cache
def dealer_ends(total: int, is_soft: bool) -> dict[int, float]:
    """Chances of what the dealer ends with, 0 for more than 21."""
    if total > 21:
        return {0: 1.0}
    if total >= 17:
        return {total: 1.0}
    chances: dict[int, float] = Counter()
    for card in _DECK:
        for end, chance in dealer_ends(*_add(total, is_soft, card)).items():
            chances[end] += chance / 13
    return dict(chances)


@cache
def values(total: int, is_soft: bool, dealer: int) -> tuple[float, float]:
    """Expected wins minus losses of standing and of hitting, playing on at best."""
    ends = dealer_ends(dealer, dealer == 11)
    stand = sum(chance * ((total > end) - (total < end)) for end, chance in ends.items())
    hit = 0.0
    for card in _DECK:
        after, soft = _add(total, is_soft, card)
        hit += (-1.0 if after > 21 else max(values(after, soft, dealer))) / 13
    return stand, hit


def test_basic_strategy_is_the_best_policy_by_dynamic_programming():
    for dealer in range(2, 12):
        hands = [(t, False) for t in range(4, 22)] + [(t, True) for t in range(12, 22)]
        for total, is_soft in hands:
            stand, hit = values(total, is_soft, dealer)
            better = "stand" if stand > hit else "hit"
            assert basic_strategy(total, is_soft, dealer) == better, (total, is_soft, dealer)


def test_the_expert_wins_what_the_best_policy_can():
    # First cards are drawn from the deck: the mean over the deals of the value above.
    expected = 0.0
    for dealer, first, second in itertools.product(_DECK, repeat=3):
        hand = _add(*_add(0, False, first), second)
        expected += max(values(*hand, dealer)) / 13**3
    env = Blackjack(reward="rl4vlm")
    total = 0.0
    for seed in range(4000):
        env.reset(seed=seed)
        terminated = False
        while not terminated:
            _, reward, terminated, *_ = env.step(env.expert_action())
        total += reward
    # The standard error is at most 1 / sqrt(4000) = 0.016.
    assert expected == pytest.approx(-0.047, abs=0.005)
    assert total / 4000 == pytest.approx(expected, abs=0.05)
