"""From a response to an action: which text goes to the environment, and whether it was valid."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

_CJK = re.compile("[\u4e00-\u9fff]")


class Action(NamedTuple):
    """What the agent does.

    Attributes:
        text: Sent to the environment.
        is_valid: False when the response broke the format; such a step pays the invalid-action
            penalty.
        note: What the policy wrote to itself; memories find it as `info["note"]`.
    """

    text: str
    is_valid: bool
    note: str = ""

    def noted(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the environment's info as memories take it in: with the note, if there is one."""
        return {**info, "note": self.note} if self.note else info


class ActionParser(Protocol):
    """The parser contract: any callable from response text to `Action`."""

    def __call__(self, response: str) -> Action:
        """Parse one response; must not raise, whatever the model wrote."""
        ...


@dataclass(frozen=True)
class TagParser:
    """Takes the text between `<action>` and `</action>`.

    Attributes:
        tag: Name of the tag that holds the action.
        require_think: A response without a `<think>...</think>` block before the action is
            invalid; its action is still sent.
        reject_cjk: A response with a CJK ideograph (U+4E00-U+9FFF) is invalid; its action is
            still sent.
        lowercase: Lower-case the action.
        fallback_chars: Without an action block, this many last characters of the response are
            sent (the environment answers them like any unknown command).
    """

    tag: str = "action"
    require_think: bool = False
    reject_cjk: bool = False
    lowercase: bool = True
    fallback_chars: int = 30

    def __call__(self, response: str) -> Action:
        """Parse one response; of several action blocks the last counts."""
        opening, closing = f"<{self.tag}>", f"</{self.tag}>"
        end = response.rfind(closing)
        start = response.rfind(opening, 0, end) if end >= 0 else -1
        found = start >= 0
        tail = response[max(0, len(response) - self.fallback_chars) :]
        text = response[start + len(opening) : end] if found else tail
        text = " ".join(text.split())
        valid = (
            found
            and bool(text)
            and not (self.require_think and not _has_thought(response[:start]))
            and not (self.reject_cjk and _CJK.search(response))
        )
        return Action(text.lower() if self.lowercase else text, bool(valid))


def _has_thought(text: str) -> bool:
    opening = text.find("<think>")
    return opening >= 0 and text.find("</think>", opening) >= 0
