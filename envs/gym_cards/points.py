"""EZPoints and Points24: build a formula from cards, one entry at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from typing import Any

import numpy as np

from envs.gym_cards.formula import evaluate, shortest_continuation
from envs.gym_cards.game import CardGame, Outcome, Reward, View

_RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
_NUMBERS = tuple(map(str, range(1, 11)))
_BLANK = " "
_SOLVED = 10.0


class Points(CardGame):
    """The rules that both games share.

    Each action is the next entry of the formula. "=" ends the episode and gives 10 if the formula
    is worth the goal and every card is used, else -1. A number that is on no unused card gives
    -1. Ten stands on the faces J, Q and K too, one on the ace. The -1 are 0 by the paper's
    convention.
    """

    goal: int
    most_entries: int

    @classmethod
    def words(cls) -> list[str]:
        """Return every word of the text view and every action."""
        return ["Cards:", "Formula:", *_RANKS, *cls.actions]

    def expert_action(self) -> str:
        """Return the next entry of the shortest formula from here that is worth the goal.

        Where there is none, "=" gives up.
        """
        self._require_episode("expert_action")
        written = tuple(entry for entry in self._formula if entry != _BLANK)
        rest = shortest_continuation(self.numbers, self.actions, self.goal, written)
        return rest[0] if rest else "="

    def is_winnable(self) -> bool:
        """Return whether any formula of the cards is worth the goal."""
        self._require_episode("is_winnable")
        return bool(shortest_continuation(self.numbers, self.actions, self.goal, ()))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the cards, left to right."""
        return tuple(min(_RANKS.index(card.rank) + 1, 10) for card in self._cards)

    @abstractmethod
    def _draw_ranks(self) -> list[int]:
        """Draw the ranks, 1 to 13, left to right."""

    def _deal(self) -> str:
        self._cards = [self._draw_card(_RANKS[rank - 1]) for rank in self._draw_ranks()]
        self._formula: list[str] = []
        return " ".join(card.rank + card.suit for card in self._cards)

    def _play(self, action: str) -> Outcome:
        if len(self._formula) > self.most_entries:
            return Outcome(-1.0, is_cut=True)
        used = Counter(entry for entry in self._formula if entry in _NUMBERS)
        if action == "=":
            is_solved = used.total() == len(self._cards) and evaluate(self._formula) == self.goal
            return Outcome(_SOLVED if is_solved else -1.0, is_end=True)
        if action in _NUMBERS and used[action] >= self.numbers.count(int(action)):
            if self.reward == "rl4vlm":
                # The original lengthens the formula, so that mistakes come to an end.
                self._formula.append(_BLANK)
            return Outcome(-1.0)
        self._formula.append(action)
        return Outcome()

    def _text(self) -> str:
        cards = " ".join(card.rank for card in self._cards)
        return f"Cards: {cards}\nFormula: {' '.join(self._formula)}".rstrip(" ")

    def _info(self) -> dict[str, Any]:
        return {**super()._info(), "formula": " ".join(self._formula)}


class EZPoints(Points):
    """Two cards that make 12 by a sum or a product; the goal can always be reached.

    Observations: `Cards: K 2` and `Formula: 10 +`, as two lines of text or drawn in a picture.

    Info: `task`, `task_id`, `admissible_actions`, `won`, `formula`, and after a step
    `is_action_valid`.

    Args:
        horizon: Step limit, at least 1. An action that finds six entries in the formula is cut
            short too.
        view: "text", or "rgb": a picture, uint8 [300, 300, 3].
        reward: "paper", or "rl4vlm", the original with its negative rewards.

    Raises:
        ValueError: An argument is out of its range.
    """

    actions = (*_NUMBERS, "+", "*", "=")
    task = "Write a formula that equals 12 and uses each card once, then '='."
    goal = 12
    most_entries = 5

    def __init__(self, *, horizon: int = 8, view: View = "text", reward: Reward = "paper"):
        super().__init__(horizon, view, reward)

    def _draw_ranks(self) -> list[int]:
        first = int(self.np_random.integers(2, 14))
        number = min(first, 10)
        by_product = number in (2, 3, 4, 6) and self.np_random.random() < 0.5
        ranks = [first, 12 // number if by_product else 12 - number]
        return ranks[::-1] if self.np_random.random() < 0.5 else ranks

    def _picture(self) -> np.ndarray:
        from envs.gym_cards.draw import draw_cards_and_formula

        return draw_cards_and_formula(tuple(self._cards), (("Formula: ", 258),), self._formula, 20)


class Points24(Points):
    """Four random cards that are to make 24; not every deal can be solved.

    Observations: `Cards: 3 K A 8` and `Formula: ( 3 +`, as two lines of text or drawn in a picture.

    Info: `task`, `task_id`, `admissible_actions`, `won`, `formula`, and after a step
    `is_action_valid`.

    Args:
        horizon: Step limit, at least 1. An action that finds 21 entries in the formula is cut
            short too.
        view: "text", or "rgb": a picture, uint8 [300, 300, 3].
        reward: "paper", or "rl4vlm", the original with its negative rewards.

    Raises:
        ValueError: An argument is out of its range.
    """

    actions = (*_NUMBERS, "+", "-", "*", "/", "(", ")", "=")
    task = "Write a formula that equals 24 and uses each card once, then '='."
    goal = 24
    most_entries = 20

    def __init__(self, *, horizon: int = 22, view: View = "text", reward: Reward = "paper"):
        super().__init__(horizon, view, reward)

    def _draw_ranks(self) -> list[int]:
        return self.np_random.integers(1, 14, size=4).tolist()

    def _picture(self) -> np.ndarray:
        from envs.gym_cards.draw import draw_cards_and_formula

        lines = (("Formula:", 210), ("", 240))
        return draw_cards_and_formula(tuple(self._cards), lines, self._formula, 16)
