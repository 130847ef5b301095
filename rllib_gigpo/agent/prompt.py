"""From task, memory and observation to chat messages. The prompt is rebuilt at every step."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Protocol

from rllib_gigpo.vision.pictures import Picture

Message = dict[str, str]

_FIELDS = frozenset(
    {"task", "observation", "history", "history_length", "step", "admissible_actions"}
)


@dataclass(frozen=True)
class PromptContext:
    """What a prompt may show.

    Attributes:
        task: The environment's task text (empty when it has none).
        observation: The current observation; a mark stands where it shows a picture.
        history: The memory's text (empty at the first step).
        history_length: Number of steps that the history shows.
        step: Number of steps already taken, 0 at the start.
        admissible_actions: What the environment offers; empty when it offers nothing.
        info: The environment's whole info dict.
        pictures: The pictures of all marks that a text may hold, by name.
    """

    task: str
    observation: str
    history: str = ""
    history_length: int = 0
    step: int = 0
    admissible_actions: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, Picture] = field(default_factory=dict)


def check_fields(what: str, text: str, allowed: Set[str]) -> None:
    """Make sure that `str.format` can fill a text.

    Args:
        what: What the text is, for the error.
        text: The text.
        allowed: Names of the fields it may use.

    Raises:
        ValueError: Another field, or an unbalanced brace.
    """
    try:
        used = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"{what} is no format text ({error}): write {{{{ or }}}} for a literal brace"
        ) from error
    for name in used:
        if name not in allowed:
            raise ValueError(
                f"{what} uses unknown field {name!r}: expected one of {sorted(allowed)} "
                "(write {{ or }} for a literal brace)"
            )


class PromptTemplate(Protocol):
    """The prompt contract: any callable from context to chat messages."""

    def __call__(self, context: PromptContext) -> list[Message]:
        """Build the messages of one step."""
        ...


@dataclass(frozen=True)
class ChatTemplate:
    """One user message (and an optional system message) filled by `str.format`.

    Fields: {task}, {observation}, {history}, {history_length}, {step} (counted from 1),
    {admissible_actions}.

    Attributes:
        user: Text of every step that has no history.
        user_with_history: Text of the steps that have; None means `user`.
        system: Text of the system message, or None.
        hide_actions: Admissible actions that are not listed (such as "help").
        action_line: How one admissible action is written.
        action_separator: What stands between two of them.

    Raises:
        ValueError: A field that is not one of the six, or an unbalanced brace.
    """

    user: str
    user_with_history: str | None = None
    system: str | None = None
    hide_actions: tuple[str, ...] = ()
    action_line: str = "'{action}'"
    action_separator: str = "\n"

    def __post_init__(self):
        """Check the fields now rather than in the middle of a rollout."""
        for text in (self.user, self.user_with_history or "", self.system or ""):
            check_fields("prompt template", text, _FIELDS)
        check_fields(f"action_line={self.action_line!r}", self.action_line, {"action"})

    def __call__(self, context: PromptContext) -> list[Message]:
        """Build the messages of one step.

        Raises:
            TypeError: The observation is no text.
        """
        if not isinstance(context.observation, str):
            raise TypeError(
                f"the observation is a {type(context.observation).__name__}, expected text: "
                "Gallery().show(observation) writes pictures as marks in a text"
            )
        actions = self.action_separator.join(
            self.action_line.format(action=action)
            for action in context.admissible_actions
            if action not in self.hide_actions
        )
        values = {
            "task": context.task,
            "observation": context.observation,
            "history": context.history,
            "history_length": context.history_length,
            "step": context.step + 1,
            "admissible_actions": actions,
        }
        text = self.user
        if context.history_length and self.user_with_history is not None:
            text = self.user_with_history
        messages = [{"role": "user", "content": text.format(**values)}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system.format(**values)})
        return messages
