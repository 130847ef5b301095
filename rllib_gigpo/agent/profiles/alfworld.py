"""ALFWorld: task, the last two steps, the current observation, and what can be done now.

What the prompt shows, its order and the validity rules follow the paper's framework (a response
is valid with a thought and an action block and without CJK ideographs); the wording is our own.
"""

from rllib_gigpo.agent.memory import LastSteps, NoMemory
from rllib_gigpo.agent.parsing import TagParser
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate

_ASK = """{observation}
These actions are possible right now:
{admissible_actions}

Choose the next one. Think about the situation first, inside <think> </think>, then write exactly \
one of the possible actions inside <action> </action>."""

_START = (
    "You are an expert at household work in the text game ALFRED.\n"
    "Your task: {task}\nYou see: " + _ASK
)

_LATER = (
    "You are an expert at household work in the text game ALFRED.\n"
    "Your task: {task}\n"
    "Your last {history_length} step(s), with what you saw and what you did:\n"
    "{history}\nThis is step {step}. You see now: " + _ASK
)


def profile() -> AgentProfile:
    """Return the profile of `ALFWorld` as the paper plays it."""
    return AgentProfile(
        prompt=ChatTemplate(user=_START, user_with_history=_LATER, hide_actions=("help",)),
        memory=LastSteps(2),
        parser=TagParser(require_think=True, reject_cjk=True),
        respond="<think> I take the next useful step. </think> <action> {action} </action>",
    )


def short_profile() -> AgentProfile:
    """Return a profile for small models: no thought, no memory, a short prompt."""
    return AgentProfile(
        prompt=ChatTemplate(
            user="Task: {task}\nYou see: {observation}\nPossible actions:\n{admissible_actions}\n"
            "Write one of them inside <action> </action>.",
            hide_actions=("help",),
            action_line="{action}",
        ),
        memory=NoMemory(),
        parser=TagParser(),
        respond="<action> {action} </action>",
    )
