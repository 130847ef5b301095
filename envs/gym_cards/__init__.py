"""Gym Cards (arXiv 2405.10292): NumberLine, EZPoints, Points24 and Blackjack."""

from envs.gym_cards.blackjack import Blackjack
from envs.gym_cards.number_line import NumberLine
from envs.gym_cards.points import EZPoints, Points24

__all__ = ["Blackjack", "EZPoints", "NumberLine", "Points24"]
