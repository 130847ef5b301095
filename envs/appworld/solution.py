"""How the tasks of the shipped world are solved, in two lines of code.

One line each: word-level tokenizers, such as the tiny model's, put a blank before every line but
the first, which Python takes for an indentation.
"""

from __future__ import annotations

import re

_TITLE = re.compile(r"my note about the (.+)\?")
_NUMBER = re.compile(r"The number is (\d+)\.")


def next_code(task: str, email: str, seen: str) -> str:
    """Return the code that comes next.

    Args:
        task: The question.
        email: The person's address, by which they log in.
        seen: The last observation; what the note says ends the task.
    """
    found = _NUMBER.search(seen)
    if found:
        return f"apis.supervisor.complete_task(answer='{found[1]}')"
    title = _TITLE.search(task)
    assert title is not None, "the shipped world asks about notes only"
    password = "apis.supervisor.show_account_passwords()[0]['password']"
    login = f"apis.notes.login(username='{email}', password={password})"
    return (
        f"print(apis.notes.show_note(access_token={login}['access_token'], title='{title[1]}')"
        "['content'])"
    )
