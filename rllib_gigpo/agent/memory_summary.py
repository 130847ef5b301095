"""A running summary that the policy writes itself, in the same response as the action.

No further engine request is needed: the response carries `<summary>...</summary>` before the
action, its tokens are trained with the step's advantage like all others, and the next prompt shows
it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllib_gigpo.agent.parsing import Action, ActionParser, TagParser

_HEAD = "Your summary so far: "


@dataclass(frozen=True)
class SummaryParser:
    """Takes the last `<summary>` block out of a response as the action's note.

    Attributes:
        parser: Reads the action out of the rest.
        is_required: Whether a response without a summary is invalid; its action is still sent.
    """

    parser: ActionParser = field(default_factory=TagParser)
    is_required: bool = False

    def __call__(self, response: str) -> Action:
        """Parse one response."""
        blocks = _BLOCK.findall(response)
        note = " ".join(blocks[-1].split()) if blocks else ""
        action = self.parser(_BLOCK.sub("", response))
        is_valid = action.is_valid and bool(note or not self.is_required)
        return action._replace(is_valid=is_valid, note=note)


_BLOCK = re.compile(r"<summary>((?:(?!<summary>).)*?)</summary>", re.DOTALL)


class RunningSummary:
    """Shows the latest summary that the policy wrote; an older one stays until a new one comes.

    Args:
        max_chars: Longer summaries are cut.

    Raises:
        ValueError: `max_chars` is below 1.
    """

    def __init__(self, max_chars: int = 1000):
        if max_chars < 1:
            raise ValueError(f"RunningSummary(max_chars={max_chars}): expected at least 1")
        self.max_chars = max_chars
        self._summary = ""

    def add(self, observation: str, action: str, info: Mapping[str, Any]) -> None:
        """Take the step's note as the new summary."""
        self._summary = info.get("note", self._summary)[: self.max_chars]

    def render(self, drop: int = 0) -> tuple[str, int]:
        """Return the summary, one entry."""
        if not self._summary or drop:
            return "", 0
        return _HEAD + self._summary, 1
