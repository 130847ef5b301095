"""Gym Cards: the rules, what lies on the table, and an answer in JSON.

Keys of the answer and its validity follow the original (arXiv 2405.10292); the wording is our own.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from rllib_gigpo.agent.memory import NoMemory
from rllib_gigpo.agent.parsing import Action, TagParser
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate

_POINT_RULES = (
    "You build a formula out of playing cards, one entry at a time. Every card is to be used "
    "exactly once; A counts 1, and J, Q and K count 10. The entry '=' hands the formula in: "
    "it has to equal {goal} then.\n"
)
_RULES = {
    "number_line": "You walk along a line of numbers. '+' adds 1 to the current number, '-' takes "
    "1 away. The current number is to become the target.\n",
    "ez_points": _POINT_RULES.format(goal=12),
    "points24": _POINT_RULES.format(goal=24),
    "blackjack": "You play Blackjack. Faces count 10, and A counts 11 unless that is too much. "
    "'hit' takes another card, 'stand' ends your turn, and then the dealer draws up to 17. The one "
    "closer to 21 wins, and whoever has more than 21 loses.\n",
}

_ASK = """{observation}
Your possible actions are: {admissible_actions}

Answer with one JSON object and nothing else:
{{
KEYS"thoughts": "think step by step about what to do next",
"action": "one of the possible actions"
}}"""

_NUMBER_KEYS = '"current number": "the current number",\n"target number": "the target number",\n'
_ANSWER = '{{"thoughts": "I take the next useful step.", "action": "{action}"}}'
_ACTION_KEY = re.compile(r'"\s*action\s*"\s*:')
_NUMBERS = tuple(map(str, range(1, 11)))
_EZ_POINTS_ACTIONS = (*_NUMBERS, "+", "*", "=")
_POINTS24_ACTIONS = (*_NUMBERS, "+", "-", "*", "/", "(", ")", "=")
_CARD_KEYS = '"cards": ["the cards that you see"],\n"formula": "the formula so far",\n'
_SEEN = {
    "NumberLine": ("number_line", ("-", "+"), _NUMBER_KEYS),
    "EZPoints": ("ez_points", _EZ_POINTS_ACTIONS, _CARD_KEYS),
    "Points24": ("points24", _POINTS24_ACTIONS, _CARD_KEYS),
    "Blackjack": (
        "blackjack",
        ("stand", "hit"),
        '"dealer": "the dealer\'s open card",\n"player": ["your cards"],\n',
    ),
}


@dataclass(frozen=True)
class JsonActionParser:
    """Reads the action from what follows the key "action", which need not be flawless JSON.

    Exactly one of the actions must occur there, in any case of letters; otherwise the response is
    invalid and no action is sent.

    Attributes:
        actions: The possible actions.
    """

    actions: tuple[str, ...]

    def __call__(self, response: str) -> Action:
        """Parse one response."""
        lowered = response.lower()
        key = _ACTION_KEY.search(lowered)
        if key is None:
            return Action("", False)
        rest, found = lowered[key.end() :], []
        # Longest first, and taken out: the 1 in a 10 is none.
        for action in sorted(self.actions, key=len, reverse=True):
            if action in rest:
                found.append(action)
                rest = rest.replace(action, " ")
        return Action(found[0], True) if len(found) == 1 else Action("", False)


def number_line() -> AgentProfile:
    """Return the profile of `NumberLine`'s text view."""
    return _profile("number_line", ("-", "+"), keys=_NUMBER_KEYS)


def ez_points() -> AgentProfile:
    """Return the profile of `EZPoints`' text view."""
    return _profile("ez_points", _EZ_POINTS_ACTIONS)


def points24() -> AgentProfile:
    """Return the profile of `Points24`'s text view."""
    return _profile("points24", _POINTS24_ACTIONS)


def blackjack() -> AgentProfile:
    """Return the profile of `Blackjack`'s text view."""
    return _profile("blackjack", ("stand", "hit"))


def short_profile() -> AgentProfile:
    """Return a profile for small models, for any of the four: no JSON, a short prompt."""
    return AgentProfile(
        prompt=ChatTemplate(
            user="{task}\n{observation}\nActions: {admissible_actions}\n"
            "Write one of them inside <action> </action>.",
            action_line="{action}",
            action_separator=" ",
        ),
        memory=NoMemory(),
        parser=TagParser(fallback_chars=0),
        respond="<action> {action} </action>",
    )


def picture_profile(game: str) -> AgentProfile:
    """Return the profile of a game's picture view: the answer first says what the picture shows.

    Args:
        game: "NumberLine", "EZPoints", "Points24" or "Blackjack".
    """
    name, actions, keys = _SEEN[game]
    return _profile(name, actions, keys)


PROFILES: dict[str, Callable[[], AgentProfile]] = {
    "NumberLine": number_line,
    "EZPoints": ez_points,
    "Points24": points24,
    "Blackjack": blackjack,
}


def _profile(game: str, actions: tuple[str, ...], keys: str = "") -> AgentProfile:
    return AgentProfile(
        prompt=ChatTemplate(user=_RULES[game] + _ASK.replace("KEYS", keys), action_separator=", "),
        memory=NoMemory(),
        parser=JsonActionParser(actions),
        stop=(),
        respond=_ANSWER,
    )
