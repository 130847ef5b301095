"""Sokoban: the rules, the last two grids, the current grid, and four directions."""

from dataclasses import dataclass

from rllib_gigpo.agent.memory import LastSteps, NoMemory
from rllib_gigpo.agent.parsing import Action, TagParser
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate

_DIRECTIONS = ("up", "down", "left", "right")

_GOAL = "You play Sokoban. Every box has to stand on a target in the end.\n"
_SYMBOLS = """`#` is a wall, `_` free floor, `O` a target, `X` a box, `√` a box on a target, \
`P` you, and `S` you on a target.
"""
_COLOURS = """You see the room from above: brick walls, dark free floor, red diamonds as targets, \
yellow boxes, green boxes where they stand on a target, and yourself in blue.
"""
_RULES = """You push a box by walking into it, if the cell behind it is free. You never pull \
one, so a box in a corner that is no target is lost. You cannot enter walls.
"""

_HEAD = _GOAL + _SYMBOLS + _RULES

_PAST = (
    "Your last {history_length} step(s), with what you saw and what you did:\n"
    "{history}\nThis is step {step}. "
)

_ASK = """The room looks like this:
{observation}
Your possible moves are 'up', 'down', 'left' and 'right'.

Think first, inside <think> </think>: where are you, the boxes and the targets, and from which \
side does a box have to be pushed? Then write exactly one move inside <action> </action>."""


@dataclass(frozen=True)
class DirectionParser:
    """Takes the first of up, down, left, right that occurs in the action block.

    A response without such a block or direction is invalid, and nothing is moved. One without a
    thought is invalid as well where the tag parser wants one, yet its move is made.

    Attributes:
        parser: Finds the block; it is to send nothing where there is none.
    """

    parser: TagParser

    def __call__(self, response: str) -> Action:
        """Parse one response."""
        action = self.parser(response)
        for direction in _DIRECTIONS:
            if direction in action.text:
                return action._replace(text=direction)
        return action._replace(is_valid=False)


def profile() -> AgentProfile:
    """Return the profile of `Sokoban`'s text view as the paper's framework plays it."""
    return AgentProfile(
        prompt=ChatTemplate(user=_HEAD + _ASK, user_with_history=_HEAD + _PAST + _ASK),
        memory=LastSteps(2),
        parser=DirectionParser(TagParser(require_think=True, fallback_chars=0)),
        respond="<think> I take the next useful step. </think> <action> {action} </action>",
    )


def picture_profile() -> AgentProfile:
    """Return the profile of `Sokoban`'s picture view, as the paper plays it: no memory."""
    return AgentProfile(
        prompt=ChatTemplate(user=_GOAL + _COLOURS + _RULES + _ASK),
        memory=NoMemory(),
        parser=DirectionParser(TagParser(require_think=True, fallback_chars=0)),
        respond="<think> I take the next useful step. </think> <action> {action} </action>",
    )


def short_profile() -> AgentProfile:
    """Return a profile for small models: no thought, no memory, a short prompt."""
    return AgentProfile(
        prompt=ChatTemplate(
            user="{task}\n{observation}\nWrite up, down, left or right inside <action> </action>."
        ),
        memory=NoMemory(),
        parser=DirectionParser(TagParser(fallback_chars=0)),
        respond="<action> {action} </action>",
    )
