"""The action language of `Search`: one tool call per action."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

_TAG = re.compile(r"<(/?)(search|answer)>", re.IGNORECASE)


class ToolCall(NamedTuple):
    """What an action asks for.

    Attributes:
        kind: `"search"` asks the retriever, `"answer"` ends the episode.
        text: The query or the answer, without outer blanks; never empty.
    """

    kind: Literal["search", "answer"]
    text: str


def parse_tool_call(action: str) -> ToolCall | None:
    """Read the single `<search>query</search>` or `<answer>text</answer>` block of an action.

    Tags match in any case; text before and after the block is ignored. Every tag counts, so a
    second block, a block inside a block, an unclosed tag or tags in the wrong order make the
    action invalid: which call was meant would be a guess.

    Args:
        action: The action text.

    Returns:
        The call, or None when the action is not exactly one block with non-blank content.
    """
    tags = list(_TAG.finditer(action))
    if len(tags) != 2:
        return None
    opening, closing = tags
    kind = opening[2].lower()
    if opening[1] or not closing[1] or closing[2].lower() != kind:
        return None
    text = action[opening.end() : closing.start()].strip()
    if not text:
        return None
    return ToolCall("search" if kind == "search" else "answer", text)
