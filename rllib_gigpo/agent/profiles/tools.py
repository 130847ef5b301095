"""Tool calls: task, tools as JSON, what the last calls brought, and one call or the answer.

The form of tools and calls is the one that the chat templates of Hermes and Qwen models write:
one JSON object per line inside <tools>, the call inside <tool_call>.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllib_gigpo.agent.memory import LastSteps
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import Message, PromptContext

_ASK = """You see now: {observation}

You may call one of these tools:
<tools>
{tools}
</tools>
Think first, inside <think> </think>. Then either call one tool by writing its name and arguments \
as JSON inside <tool_call> </tool_call>, such as
<tool_call>
{{"name": "the tool's name", "arguments": {{}}}}
</tool_call>
or, once you are done, end with <answer>your answer</answer>."""

_PAST = "Your last {history_length} step(s), with what you saw and what you did:\n{history}\n"


@dataclass(frozen=True)
class ToolPrompt:
    """One user message with the tools of `info["tools"]`."""

    def __call__(self, context: PromptContext) -> list[Message]:
        """Build the message of one step."""
        parts = [context.task] if context.task else []
        if context.history_length:
            parts.append(
                _PAST.format(history_length=context.history_length, history=context.history)
            )
        tools = "\n".join(map(_line, context.info.get("tools", ())))
        parts.append(_ASK.format(observation=context.observation, tools=tools))
        return [{"role": "user", "content": "\n".join(parts)}]


def _line(tool: Mapping[str, Any]) -> str:
    return json.dumps({"type": "function", "function": tool}, ensure_ascii=False)


@dataclass(frozen=True)
class JsonCallParser:
    """Takes what stands inside the last `<tool_call>` block, else the last `<answer>` block.

    A response is valid when it holds such a block whose call is a JSON object with a name; whether
    there is such a tool is the environment's word. Without a block, what follows the thought is
    sent.
    """

    def __call__(self, response: str) -> Action:
        """Parse one response."""
        after = response.rpartition("</think>")[2].strip()
        call = _block(after, "tool_call")
        if call is not None:
            return Action(call, _is_call(call))
        answer = _block(after, "answer")
        if answer is not None:
            return Action(f"<answer>{answer}</answer>", True)
        return Action(after, False)


def _block(text: str, tag: str) -> str | None:
    before, found, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if found and opened else None


def _is_call(text: str) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def profile() -> AgentProfile:
    """Return the profile of the environments whose actions are tool calls."""
    return AgentProfile(
        prompt=ToolPrompt(),
        memory=LastSteps(4),
        parser=JsonCallParser(),
        stop=("</tool_call>", "</answer>"),
        respond="<think> I take the next useful step. </think> <tool_call>{action}</tool_call>",
    )
