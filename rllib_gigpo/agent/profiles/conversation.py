"""Conversation: the whole response is the action, which the environment reads itself."""

from dataclasses import dataclass

from rllib_gigpo.agent.memory import LastSteps
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate


@dataclass(frozen=True)
class WholeResponse:
    """Sends the response as it is; one without any text is invalid."""

    def __call__(self, response: str) -> Action:
        """Parse one response."""
        return Action(response.strip(), bool(response.strip()))


def profile() -> AgentProfile:
    """Return the profile of environments that parse responses themselves, such as skyrl-gym's."""
    return AgentProfile(
        prompt=ChatTemplate(
            user="{task}\n{observation}",
            user_with_history=(
                "{task}\nYour last {history_length} step(s), with what you were told and what you "
                "wrote:\n{history}\nYou are told now: {observation}"
            ),
        ),
        memory=LastSteps(4),
        parser=WholeResponse(),
        stop=(),
        respond="{action}",
    )
