"""AppWorld: tasks of everyday life, solved by code that calls the APIs of apps."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from envs.adapters.base import AdapterEnv, Turn
from envs.appworld.leases import lease
from envs.appworld.server import AppWorldError, Server
from envs.appworld.solution import next_code

SUCCESS_REWARD = 10.0
SHIPPED_TASKS = tuple(f"shipped_{number}" for number in range(16))
_WORLDS = ("appworld", "shipped")
_EXAMPLES = (
    "print(apis.api_docs.show_app_descriptions())",
    "print(apis.api_docs.show_api_descriptions(app_name='supervisor'))",
    "print(apis.supervisor.show_account_passwords())",
    "apis.supervisor.complete_task()",
)


class AppWorld(AdapterEnv):
    """AppWorld (Trivedi et al. 2024, arXiv 2407.18901) behind its environment server.

    An action is Python code; it runs in AppWorld's shell, where `apis.<app>.<api>(...)` calls the
    apps, and what it prints is the next observation. `apis.supervisor.complete_task(...)` ends the
    episode. The reward is 10 where AppWorld's unit tests of the task all pass then, otherwise 0.
    Code that is no Python is flagged; code that raises is not: errors are how APIs are learnt.

    The first observation names the person whose tasks are done, with date and time. `info` holds
    `task`, `task_id`, `won`, `is_action_valid` (after a step), and at the end `score`, the share of
    the unit tests that pass.

    A server plays one episode at a time. Each environment starts one of its own at the first reset,
    ends it in `close`, and writes under an experiment name of its own, which `close` deletes; or it
    takes a server out of `server` that no other environment of this machine uses.

    Isolation: the policy's code runs in AppWorld's server process, with the rights of whoever
    started it and with its environment variables; AppWorld's shell restrains it, and no sandbox of
    this package does. Where the policy is not trusted, run the server in a container without
    network and name it in `server`. The shipped world runs no code: an interpreter of a few
    statements reads it.

    Args:
        world: "appworld", or "shipped": a small pretence of it that comes with this package (notes
            of a few people, one kind of question), to try things out without AppWorld.
        python_executable: The interpreter in which `appworld` is installed.
        root: AppWorld's root folder, which holds `data`; None: the environment variable
            APPWORLD_ROOT, else the current folder.
        server: Addresses of servers that run already, in place of `python_executable`.
        split: Whose tasks are played: train, dev, test_normal or test_challenge.
        tasks: Ids of the tasks, in place of `split`; needed where `root` is on another machine.
        horizon: Most actions of an episode.
        timeout_s: Seconds that an action may take.
        start_timeout_s: Seconds that the server may take to start.

    Raises:
        ValueError: An argument is none of its values, or no way to a server is named.
        FileNotFoundError: The root has no such split.
    """

    def __init__(
        self,
        *,
        world: str = "appworld",
        python_executable: str | None = None,
        root: str | None = None,
        server: str | Sequence[str] = (),
        split: str = "train",
        tasks: Sequence[str] | None = None,
        horizon: int = 50,
        timeout_s: float = 120.0,
        start_timeout_s: float = 180.0,
    ):
        super().__init__(horizon=horizon, examples=_EXAMPLES)
        self.world = world
        self.python_executable = python_executable
        self.root = root
        self.server = server
        self.split = split
        self.tasks = tasks
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._urls = (server,) if isinstance(server, str) else tuple(server)
        self._check_ways()
        self._listed = self._list_tasks()
        self._experiment = f"rllib_gigpo_{uuid.uuid4().hex}"
        self._running: Server | None = None
        self._lock: IO[str] | None = None
        self._open_task: str | None = None

    def task_ids(self) -> list[str]:
        """Return the ids of all tasks; any goes to `reset` as the option `task_id`."""
        return list(self._listed)

    def expert_action(self) -> str:
        """Return the next code of a solution, in the shipped world.

        Raises:
            ValueError: AppWorld itself ships no solutions that could be played.
            RuntimeError: No episode is running.
        """
        if self.world != "shipped":
            raise ValueError("world='appworld' has no expert; world='shipped' has one")
        if self._is_over:
            raise RuntimeError("no episode is running; call reset() before expert_action()")
        return next_code(self._facts["task"], self._email, self._seen)

    def _start(self, seed: int, options: Mapping[str, Any]) -> Turn:
        task_id = options.get("task_id", self._listed[seed % len(self._listed)])
        if task_id not in self._listed:
            raise ValueError(
                f"task_id {task_id!r} is not one of the {len(self._listed)} tasks that task_ids() "
                "lists"
            )
        server = self._server()
        self._end_task()
        told = server.ask(
            "initialize",
            {
                "task_id": task_id,
                "experiment_name": self._experiment,
                "max_interactions": self.horizon + 1,
                "timeout_seconds": max(1, int(self.timeout_s) - 5),
                "random_seed": 100,
            },
        )
        self._open_task = task_id
        person = told["supervisor"]
        self._email = person["email"]
        self._facts = {"task": told["instruction"], "task_id": task_id, "won": False}
        self._seen = (
            f"You act for {person['first_name']} {person['last_name']} (email "
            f"{person['email']}, phone {person['phone_number']}). It is {told['datetime']}."
        )
        return Turn(self._seen, info=dict(self._facts))

    def _act(self, action: str) -> Turn:
        server = self._server()
        about = {"task_id": self._open_task}
        self._seen = str(server.ask("execute", {**about, "code": action})).strip()
        info = {**self._facts, "is_action_valid": _is_code(action)}
        done = bool(server.ask("task_completed", about))
        if done or self.is_last_step:
            verdict = server.ask("evaluate", {**about, "suppress_errors": True, "report": False})
            info["won"] = done and bool(verdict["success"])
            info["score"] = len(verdict["passes"]) / max(1, int(verdict["num_tests"]))
        return Turn(self._seen, SUCCESS_REWARD * info["won"], done, info=info)

    def _release(self) -> None:
        if self._running is None:
            return
        if self._lock is not None:
            # A server that is gone by now has nothing left to end.
            with contextlib.suppress(AppWorldError):
                self._end_task()
            self._lock.close()
            self._lock = None
        self._running.close()
        self._running = self._open_task = None
        if self.world == "appworld":
            outputs = self._root() / "experiments" / "outputs" / self._experiment
            shutil.rmtree(outputs, ignore_errors=True)

    def _server(self) -> Server:
        if self._running is None:
            if self._urls:
                url, self._lock = lease(self._urls)
                self._running = Server(url, self.timeout_s)
                self._running.wait(self.start_timeout_s)
            else:
                self._running = Server.start(
                    self._command(), self._variables(), self.timeout_s, self.start_timeout_s
                )
        return self._running

    def _end_task(self) -> None:
        if self._open_task is not None and self._running is not None:
            task_id, self._open_task = self._open_task, None
            self._running.ask("close", {"task_id": task_id})

    def _command(self) -> list[str]:
        if self.world == "shipped":
            return [sys.executable, "-m", "envs.appworld.shipped", "--port", "{port}"]
        words = [str(self.python_executable), "-m", "appworld.cli", "serve", "environment"]
        return [*words, "--port", "{port}", "--no-show-usage", "--root", str(self._root())]

    def _variables(self) -> dict[str, str]:
        # What this process finds its modules by must not lead AppWorld's interpreter to them.
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        if self.world == "shipped":
            variables["PYTHONPATH"] = str(Path(__file__).parents[2])
        return variables

    def _root(self) -> Path:
        return Path(self.root or os.environ.get("APPWORLD_ROOT") or ".").resolve()

    def _check_ways(self) -> None:
        if self.world not in _WORLDS:
            raise ValueError(f"world must be one of {', '.join(_WORLDS)}; got {self.world!r}")
        if self.world == "appworld" and bool(self.python_executable) == bool(self._urls):
            raise ValueError(
                "AppWorld needs an interpreter of its own: install appworld into a separate "
                "virtual environment and set env_config={'python_executable': "
                "'/path/to/it/bin/python', 'root': '/path/to/root'}, or name running servers as "
                "'server' (one of the two), or set 'world': 'shipped' to try the shipped pretence"
            )

    def _list_tasks(self) -> tuple[str, ...]:
        if self.tasks is not None:
            return tuple(self.tasks)
        if self.world == "shipped":
            return SHIPPED_TASKS
        file = self._root() / "data" / "datasets" / f"{self.split}.txt"
        if not file.exists():
            raise FileNotFoundError(
                f"AppWorld's split {self.split!r} is not at {file}: set 'root' to the folder in "
                "which `appworld download data` ran, or give the ids as 'tasks'"
            )
        # A line may carry a tag after a colon.
        lines = file.read_text(encoding="utf-8").split()
        return tuple(line.partition(":")[0] for line in lines)


def _is_code(action: str) -> bool:
    try:
        return bool(ast.parse(action.strip()).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
