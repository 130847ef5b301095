"""WebShop: the instruction, the last two pages, the current page, and what can be clicked."""

import re
from dataclasses import dataclass, field

from rllib_gigpo.agent.memory import LastSteps, NoMemory
from rllib_gigpo.agent.parsing import Action, TagParser
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate

_SPACED = re.compile(r"^(search|click) ?\[ ?(.*?) ?\]$")

_HEAD = "You shop online for a customer. The customer says: {task}\n"

_ASK = """The page shows: {observation}
These actions are possible right now:
{admissible_actions}

Choose the next one (in a search, write your own words between the brackets). Think about the \
situation first, inside <think> </think>, then write one action inside <action> </action>."""

_PAST = (
    "Your last {history_length} step(s), with what you saw and what you did:\n"
    "{history}\nThis is step {step}. "
)


def profile() -> AgentProfile:
    """Return the profile of `WebShop` as the paper plays it."""
    return AgentProfile(
        prompt=ChatTemplate(user=_HEAD + _ASK, user_with_history=_HEAD + _PAST + _ASK),
        memory=LastSteps(2),
        parser=TagParser(require_think=True, reject_cjk=True, fallback_chars=20),
        respond="<think> I take the next useful step. </think> <action> {action} </action>",
    )


@dataclass(frozen=True)
class BracketParser:
    """Takes the blanks away that stand around brackets: "search [ red mug ]" is "search[red mug]".

    Word-level tokenizers, such as the tiny model's, can write the action in no other way.

    Attributes:
        parser: Reads the action.
    """

    parser: TagParser = field(default_factory=TagParser)

    def __call__(self, response: str) -> Action:
        """Parse one response."""
        action = self.parser(response)
        return action._replace(text=_SPACED.sub(r"\1[\2]", action.text))


def short_profile() -> AgentProfile:
    """Return a profile for small models: no thought, no memory, a short prompt."""
    return AgentProfile(
        prompt=ChatTemplate(
            user="Task: {task}\nPage: {observation}\nPossible actions:\n{admissible_actions}\n"
            "Write one of them inside <action> </action>.",
            action_line="{action}",
        ),
        memory=NoMemory(),
        parser=BracketParser(),
        respond="<action> {action} </action>",
    )
