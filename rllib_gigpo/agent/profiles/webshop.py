"""WebShop: the instruction, the last two pages, the current page, and what can be clicked."""

from rllib_gigpo.agent.memory import LastSteps
from rllib_gigpo.agent.parsing import TagParser
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate

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
