"""Blackjack: come closer to 21 than the dealer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.gym_cards.game import Card, CardGame, Outcome, Reward, View

_DECK = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "10", "10", "10")
_FACES = ("J", "Q", "K")
_BEST = 21
_DEALER_STANDS = 17


class Blackjack(CardGame):
    """The player draws cards ("hit") until it has enough ("stand"), then the dealer draws to 17.

    A win gives 1, a draw 0, a loss -1, which is 0 by the paper's convention; more than 21 loses at
    once. An ace counts 11 unless that is too much, faces count ten, and every card is drawn from a
    full deck. The cards still to come are fixed by the seed.

    Observations: the dealer's open card and the player's cards, `Dealer: 7 ?` and `Player: K 5`, as
    two lines of text or drawn in a picture.

    Info: `task`, `task_id`, `admissible_actions`, `won`, and after a step `is_action_valid`.

    Args:
        horizon: Step limit, at least 1.
        view: "text", or "rgb": a picture, uint8 [300, 300, 3].
        reward: "paper", or "rl4vlm", the original with its negative rewards.

    Raises:
        ValueError: An argument is out of its range.
    """

    actions = ("stand", "hit")
    task = "Come closer to 21 than the dealer without going over."

    def __init__(self, *, horizon: int = 15, view: View = "text", reward: Reward = "paper"):
        super().__init__(horizon, view, reward)

    @classmethod
    def words(cls) -> list[str]:
        """Return every word of the text view and every action."""
        return ["Dealer:", "Player:", "?", *_DECK[:9], *_FACES, *cls.actions]

    def expert_action(self) -> str:
        """Return what basic strategy says; it loses about as often as it wins."""
        self._require_episode("expert_action")
        total, is_soft = hand_total(self._player)
        return basic_strategy(total, is_soft, hand_total(self._dealer[:1])[0])

    def _deal(self) -> str:
        self._dealer = [self._next_card(), self._next_card()]
        self._player = [self._next_card(), self._next_card()]
        return " ".join(card.rank + card.suit for card in (*self._dealer, *self._player))

    def _play(self, action: str) -> Outcome:
        if action == "hit":
            self._player.append(self._next_card())
            is_over = hand_total(self._player)[0] > _BEST
            return Outcome(-1.0 if is_over else 0.0, is_end=is_over)
        while hand_total(self._dealer)[0] < _DEALER_STANDS:
            self._dealer.append(self._next_card())
        player, dealer = (hand_total(hand)[0] for hand in (self._player, self._dealer))
        if dealer > _BEST:
            dealer = 0
        return Outcome(float((player > dealer) - (player < dealer)), is_end=True)

    def _next_card(self) -> Card:
        rank = _DECK[int(self.np_random.integers(len(_DECK)))]
        return self._draw_card(
            _FACES[int(self.np_random.integers(len(_FACES)))] if rank == "10" else rank
        )

    def _text(self) -> str:
        cards = " ".join(card.rank for card in self._player)
        return f"Dealer: {self._dealer[0].rank} ?\nPlayer: {cards}"

    def _picture(self) -> np.ndarray:
        from envs.gym_cards.draw import draw_table

        return draw_table(self._dealer[0], tuple(self._player))


def hand_total(hand: Sequence[Card]) -> tuple[int, bool]:
    """Return what a hand counts, and whether an ace in it counts 11."""
    total = sum(_count(card.rank) for card in hand)
    is_soft = total <= _BEST - 10 and any(card.rank == "A" for card in hand)
    return (total + 10, True) if is_soft else (total, False)


def basic_strategy(total: int, is_soft: bool, dealer: int) -> str:
    """Return the better action against a dealer who stands on every 17, without other options.

    It is the best policy in expected wins minus losses, for an endless deck.

    Args:
        total: What the player's hand counts.
        is_soft: Whether an ace in it counts 11.
        dealer: What the dealer's open card counts, an ace as 11.
    """
    if is_soft:
        enough = 18 if dealer <= 8 else 19
    elif dealer >= 7:
        enough = 17
    else:
        enough = 12 if 4 <= dealer <= 6 else 13
    return "stand" if total >= enough else "hit"


def _count(rank: str) -> int:
    if rank == "A":
        return 1
    return 10 if rank in _FACES else int(rank)
