"""Search: the question, all earlier calls with what they found, and two kinds of tool call."""

from dataclasses import dataclass, replace

from rllib_gigpo.agent.memory import LastSteps
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate

_HEAD = "Answer this question: {task}\n"

_PAST = (
    "Your {history_length} earlier step(s), with what you saw and what you did:\n"
    "{history}\nNow you see: {observation}\n"
)

_ASK = """Think first, inside <think> </think>. If you lack knowledge, ask a search engine with \
<search>query</search>. If you know the answer, give it, without explanation, as \
<answer>text</answer>. Write exactly one of the two."""


_TEAM_ASK = """You are one of two: a searcher, who asks a search engine, and an answerer, who \
reads what it found. Think first, inside <think> </think>. The searcher writes \
<search>query</search>. The answerer writes the answer, without explanation, as \
<answer>text</answer>, or tells the searcher what is missing with <search>text</search>. Write \
exactly one of the two."""

# The answerer's first sight of the game is what was found.
_FIRST = "You see: {observation}\n" + _TEAM_ASK


@dataclass(frozen=True)
class ToolCallParser:
    """Passes the response from its last opening tag on to the environment, which reads the call.

    The environment decides whether the call is valid; here a response is valid when it holds one
    of the tags at all.
    """

    def __call__(self, response: str) -> Action:
        """Cut the thought away."""
        after = response.rpartition("</think>")[2]
        lowered = after.lower()
        return Action(after.strip(), "<search>" in lowered or "<answer>" in lowered)


def profile() -> AgentProfile:
    """Return the profile of `Search` as the paper plays it."""
    return AgentProfile(
        prompt=ChatTemplate(user=_HEAD + _ASK, user_with_history=_HEAD + _PAST + _ASK),
        memory=LastSteps(4),
        parser=ToolCallParser(),
        stop=("</search>", "</answer>"),
        respond="<think> I decide what to do next. </think> {action}",
    )


def team() -> AgentProfile:
    """Return the profile of both agents of `SearchTeam`."""
    return replace(
        profile(),
        prompt=ChatTemplate(user=_HEAD + _FIRST, user_with_history=_HEAD + _PAST + _TEAM_ASK),
    )
