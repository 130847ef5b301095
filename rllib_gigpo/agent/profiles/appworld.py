"""AppWorld: the task, how the APIs are used, the last steps, and one piece of code."""

import textwrap
from dataclasses import dataclass

from rllib_gigpo.agent.memory import LastSteps
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import ChatTemplate

_HEAD = """You do everyday tasks for a person by writing Python code that calls the APIs of their \
apps, as apis.<app>.<api>(<name>=<value>). You see only what the code prints; variables stay.
- print(apis.api_docs.show_app_descriptions()) lists the apps.
- print(apis.api_docs.show_api_descriptions(app_name='...')) lists the APIs of an app.
- print(apis.api_docs.show_api_doc(app_name='...', api_name='...')) documents one.
- apis.supervisor.show_account_passwords() gives the person's passwords; most apps need a login, \
which gives an access_token.
- apis.supervisor.complete_task(answer=...) ends the task; leave answer out where none is asked.
Look an API up before you use it, and never invent data.

The task: {task}
"""

_PAST = (
    "Your last {history_length} step(s), with what you saw and the code that you ran then:\n"
    "{history}\n"
)

_ASK = """You see now: {observation}

Think about the next small step first, inside <think> </think>, then write its code inside \
<code> </code>."""


@dataclass(frozen=True)
class CodeParser:
    """Takes the last `<code>` block, its blanks and line breaks kept for Python.

    A Markdown fence around it, and an indentation of all its lines, are taken away.

    A response is valid when it holds a thought and, after it, a code block; without a block the
    last `fallback_chars` characters are sent.

    Attributes:
        fallback_chars: See above.
    """

    fallback_chars: int = 100

    def __call__(self, response: str) -> Action:
        """Parse one response."""
        before, found, _ = response.rpartition("</code>")
        thought, opened, code = before.rpartition("<code>")
        if not (found and opened):
            return Action(response[max(0, len(response) - self.fallback_chars) :], False)
        thinks = "</think>" in thought.partition("<think>")[2]
        return Action(_unfenced(code), thinks and bool(code.strip()))


def _unfenced(code: str) -> str:
    lines = code.strip("\n").split("\n")
    if len(lines) > 2 and lines[0].strip().startswith("```") and lines[-1].strip() == "```":
        lines = lines[1:-1]
    return textwrap.dedent("\n".join(lines)).strip()


def profile() -> AgentProfile:
    """Return the profile of `AppWorld`, with the paper's two last steps."""
    return AgentProfile(
        prompt=ChatTemplate(user=_HEAD + _ASK, user_with_history=_HEAD + _PAST + _ASK),
        memory=LastSteps(2),
        parser=CodeParser(),
        stop=("</code>",),
        respond="<think> I take the next small step. </think> <code> {action} </code>",
    )
