"""A small pretence of AppWorld: `python -m envs.appworld.shipped --port 8000`.

It answers the requests of AppWorld's environment server (paths, fields and texts of 0.1.3) with a
small world: notes of a few people behind a login, and the apps `supervisor` and `api_docs`. Code is
not run as Python but read by `envs.appworld.interpreter`, which knows calls, names and `print`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from envs.appworld.interpreter import Shell

_FIRST = ("Ada", "Ben", "Cleo", "Dan")
_LAST = ("Moss", "Hale", "Stone", "Reed")
_TITLES = ("locker", "bike lock", "garage", "suitcase", "safe", "router")
_DOCS: dict[str, dict[str, str]] = {
    "api_docs": {
        "show_app_descriptions": "show_app_descriptions(): the apps",
        "show_api_descriptions": "show_api_descriptions(app_name): the APIs of an app",
    },
    "supervisor": {
        "show_account_passwords": "show_account_passwords(): the user's passwords, by app",
        "complete_task": "complete_task(answer=None): say that the task is done",
    },
    "notes": {
        "login": "login(username, password): log in with the user's email; gives an access_token",
        "search_notes": "search_notes(access_token, query): titles that contain the query",
        "show_note": "show_note(access_token, title): the note of a title",
    },
}
_APPS = {
    "api_docs": "search for APIs",
    "supervisor": "what the user gives you",
    "notes": "the user's notes",
}


class ApiError(Exception):
    """What an app answers to a call that it refuses."""


class World:
    """One task: a person with notes, and a question about one of them."""

    def __init__(self, task_id: str):
        rng = random.Random(task_id)
        first, last = rng.choice(_FIRST), rng.choice(_LAST)
        self.task_id = task_id
        self.email = f"{first}.{last}@example.com".lower()
        self.person = {
            "first_name": first,
            "last_name": last,
            "email": self.email,
            "phone_number": f"555{rng.randrange(10**7):07d}",
        }
        self.password = f"pw{rng.randrange(10**4):04d}"
        self.token = f"token{rng.randrange(10**6):06d}"
        self.notes = {title: f"{rng.randrange(10**4):04d}" for title in rng.sample(_TITLES, 4)}
        self.asked = rng.choice(sorted(self.notes))
        self.answer: Any = None
        self.is_completed = False
        self.shell = Shell(self.call)

    @property
    def instruction(self) -> str:
        """The task."""
        return f"What is the number in my note about the {self.asked}?"

    def call(self, app: str, api: str, given: dict[str, Any]) -> Any:
        """Call an API."""
        if api not in _DOCS.get(app, {}):
            raise ApiError(f"No API named '{api}' found in the {app} app.")
        function: Callable[..., Any] = getattr(self, f"_{app}_{api}")
        try:
            return function(**given)
        except TypeError as error:
            raise ApiError(f"Wrong arguments for {app}.{api}: {sorted(given)}") from error

    def tests(self) -> dict[str, Any]:
        """Evaluate as AppWorld does, by tests that pass or fail."""
        results = {
            "the task is marked complete": self.is_completed,
            "the answer is the note's number": str(self.answer) == self.notes[self.asked],
        }
        listed = {
            passed: [
                {"requirement": name, "label": None} for name, ok in results.items() if ok is passed
            ]
            for passed in (True, False)
        }
        return {
            "success": not listed[False],
            "difficulty": 1,
            "num_tests": len(results),
            "passes": listed[True],
            "failures": listed[False],
        }

    def _api_docs_show_app_descriptions(self) -> list[dict[str, str]]:
        return [{"name": name, "description": text} for name, text in _APPS.items()]

    def _api_docs_show_api_descriptions(self, app_name: str) -> list[str]:
        if app_name not in _DOCS:
            raise ApiError(f"No app named '{app_name}' found.")
        return list(_DOCS[app_name].values())

    def _supervisor_show_account_passwords(self) -> list[dict[str, str]]:
        return [{"account_name": "notes", "password": self.password}]

    def _supervisor_complete_task(self, answer: Any = None) -> dict[str, str]:
        self.answer, self.is_completed = answer, True
        return {"message": "Marked the active task complete."}

    def _notes_login(self, username: str, password: str) -> dict[str, str]:
        if (username, password) != (self.email, self.password):
            raise ApiError("Response status code is 401: Invalid credentials")
        return {"access_token": self.token, "token_type": "Bearer"}

    def _notes_search_notes(self, access_token: str, query: str = "") -> list[str]:
        self._check(access_token)
        return [title for title in sorted(self.notes) if str(query) in title]

    def _notes_show_note(self, access_token: str, title: str) -> dict[str, str]:
        self._check(access_token)
        if title not in self.notes:
            raise ApiError("Response status code is 409: The note does not exist")
        return {"title": title, "content": f"The number is {self.notes[title]}."}

    def _check(self, access_token: str) -> None:
        if access_token != self.token:
            raise ApiError("Response status code is 401: You are not authorized")


class Handler(BaseHTTPRequestHandler):
    """The requests of AppWorld's environment server; it plays one world at a time."""

    world: World | None = None

    def do_GET(self) -> None:
        """Answer that the server is there."""
        self._send(200, {"message": "Welcome to AppWorld Server!"})

    def do_POST(self) -> None:
        """Answer one request."""
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        what = self.path.strip("/")
        if what == "initialize":
            world = type(self).world = World(given["task_id"])
            told = {"task_id": world.task_id, "instruction": world.instruction}
            day = "2023-05-18T12:00:00"
            self._send(200, {"output": {**told, "supervisor": world.person, "datetime": day}})
            return
        world = type(self).world
        if world is None or world.task_id != given.get("task_id"):
            self._send(500, {"detail": "This is not the task that was initialized."})
            return
        answers: dict[str, Callable[[], Any]] = {
            "execute": lambda: world.shell.run(given["code"]),
            "task_completed": lambda: world.is_completed,
            "evaluate": world.tests,
            "close": lambda: None,
        }
        if what in answers:
            self._send(200, {"output": answers[what]()})
        else:
            self._send(404, {"detail": "Not Found"})

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def _send(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    HTTPServer(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()


if __name__ == "__main__":
    main()
