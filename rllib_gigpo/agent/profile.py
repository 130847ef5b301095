"""One agent: prompt, memory, parser and stop strings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rllib_gigpo.agent.memory import LastSteps, Memory
from rllib_gigpo.agent.parsing import Action, ActionParser, TagParser
from rllib_gigpo.agent.prompt import ChatTemplate, PromptTemplate, check_fields
from rllib_gigpo.grouping import AnchorKey
from rllib_gigpo.observations import state_key

# As far as the tiny model knows the numbers of steps.
_COUNTED_STEPS = 100


@dataclass(frozen=True)
class AgentProfile:
    """How an agent sees an environment and how its responses are read.

    Attributes:
        prompt: Builds the chat messages of a step.
        memory: Prototype of the memory; each episode works on its own deep copy.
        parser: Reads the action out of a response.
        stop: Strings that end a response; empty lets the model end it with its end-of-turn token.
        validity: Who decides whether a step was valid: "parser", or "parser_and_environment"
            (the environment's `info["is_action_valid"]` counts too, where it gives one).
        anchor: None groups steps by the environment's anchor (`info["anchor"]`, else the
            observation, a picture by its bytes); a callable (observation, info) -> key replaces it,
            for instance the room that a text speaks of. The key is a str, bytes, int or tuple of
            them.
        vocabulary: Sample texts whose words the tiny from-scratch model must know.
        respond: Writes a response in this profile's format for a given action text; used for
            warm starts.
    """

    prompt: PromptTemplate
    memory: Memory = field(default_factory=lambda: LastSteps(2))
    parser: ActionParser = field(default_factory=TagParser)
    stop: tuple[str, ...] = ("</action>",)
    validity: str = "parser_and_environment"
    anchor: Callable[[str, Mapping[str, Any]], AnchorKey] | None = None
    vocabulary: tuple[str, ...] = ()
    respond: str = "<action> {action} </action>"

    def __post_init__(self):
        """Check what a user may have got wrong."""
        if self.validity not in ("parser", "parser_and_environment"):
            raise ValueError(
                f"AgentProfile(validity={self.validity!r}): expected 'parser' or "
                "'parser_and_environment'"
            )
        check_fields(f"AgentProfile(respond={self.respond!r})", self.respond, {"action"})
        if "{action}" not in self.respond:
            raise ValueError(f"AgentProfile(respond={self.respond!r}): it must hold '{{action}}'")

    def read(self, response: str) -> Action:
        """Parse one response."""
        return self.parser(response)

    def anchor_of(self, observation: str, info: Mapping[str, Any]) -> AnchorKey:
        """Return the anchor state of a step (Eq. 6 groups steps of one task by it)."""
        if self.anchor is not None:
            return self.anchor(observation, info)
        return state_key(info.get("anchor", observation))


def default_profile() -> AgentProfile:
    """Return the profile of environments that bring none: task, history, observation, actions."""
    ask = (
        "{task}\n{past}Your current observation is: {{observation}}\n"
        "Your admissible actions are:\n{{admissible_actions}}\n\n"
        "First reason step by step inside <think> </think> tags. "
        "Then write one action inside <action> </action> tags."
    )
    past = (
        "You have taken {history_length} recent step(s), oldest first:\n{history}\n"
        "You are now at step {step}.\n"
    )
    return AgentProfile(
        prompt=ChatTemplate(
            user=ask.format(task="{task}", past=""),
            user_with_history=ask.format(task="{task}", past=past),
        ),
        memory=LastSteps(2),
        # How an action is spelled is the environment's business.
        parser=TagParser(require_think=True, lowercase=False),
        vocabulary=tuple(map(str, range(_COUNTED_STEPS))),
        respond="<think> </think><action>{action}</action>",
    )
