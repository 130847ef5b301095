"""KeyDoor: the observation is the prompt, the response is one short action block."""

from rllib_gigpo.agent.memory import NoMemory
from rllib_gigpo.agent.parsing import TagParser
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate


def profile() -> AgentProfile:
    """Return the profile of `KeyDoor`."""
    return AgentProfile(
        prompt=ChatTemplate(user="{observation}"),
        memory=NoMemory(),
        parser=TagParser(),
        stop=("</action>",),
        respond="<action> {action} </action>",
    )
