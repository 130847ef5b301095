"""AppWorld behind its server: the shipped world, servers that run already, and what goes wrong."""

import gc
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from envs.appworld import AppWorld
from envs.appworld.interpreter import Shell
from envs.appworld.server import AppWorldError
from rllib_gigpo.agent import Action
from rllib_gigpo.agent.profiles.appworld import profile

TASK = {"task_id": "shipped_3"}


def shipped(**more) -> AppWorld:
    return AppWorld(world="shipped", **more)


@pytest.fixture(scope="module")
def env():
    env = shipped(horizon=6)
    yield env
    env.close()


# Episodes ----------------------------------------------------------------------------------------


def test_a_task_is_solved_by_code(env):
    start, info = env.reset(seed=0, options=TASK)
    assert start.startswith("You act for ")
    assert info["task_id"] == "shipped_3"
    observation, reward, *_ = env.step(env.expert_action())
    assert observation.startswith("The number is ")
    assert reward == 0.0
    observation, reward, terminated, truncated, info = env.step(env.expert_action())
    assert observation == "Execution successful."
    assert (reward, terminated, truncated) == (10.0, True, False)
    assert (info["won"], info["score"], info["is_action_valid"]) == (True, 1.0, True)


def test_the_expert_solves_every_shipped_task_and_no_other(env):
    for task_id in env.task_ids():
        env.reset(options={"task_id": task_id})
        env.step(env.expert_action())
        assert env.step(env.expert_action())[1] == 10.0
    with pytest.raises(RuntimeError, match=r"call reset\(\) before expert_action"):
        env.expert_action()
    with pytest.raises(ValueError, match="world='appworld' has no expert"):
        AppWorld(server="http://127.0.0.1:9", tasks=["t_1"]).expert_action()


def test_a_wrong_answer_ends_it_with_half_of_the_tests(env):
    env.reset(seed=0, options=TASK)
    _, reward, terminated, _, info = env.step("apis.supervisor.complete_task(answer='?')")
    # Of two tests, one asks that the task is complete and one for the answer.
    assert (reward, terminated, info["won"], info["score"]) == (0.0, True, False, 0.5)


def test_the_horizon_ends_it_without_a_reward(env):
    env.reset(seed=0, options=TASK)
    for _ in range(5):
        *ends, info = env.step("print(1)")[2:]
        assert ends == [False, False]
        assert "score" not in info
    _, reward, terminated, truncated, info = env.step("print(1)")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["won"], info["score"]) == (False, 0.0)


@pytest.mark.parametrize(
    ("code", "output", "is_valid"),
    [
        ("x = 'a'\nprint(x, len([1]) if 0 else 2)", "has no IfExp", True),
        ("print(unknown)", "NameError: name 'unknown' is not defined", True),
        ("print(apis.notes.show_note(access_token='x', title='y'))", "401", True),
        ("print(apis.notes.fly())", "No API named 'fly' found in the notes app.", True),
        ("print(apis.notes.login(user='x'))", "Wrong arguments for notes.login: ['user']", True),
        ("import os", "has no Import", True),
        ("open('/etc/passwd')", "'open' is not a function of the shipped world", True),
        ("().__class__", "has no Attribute", True),
        (" print(1)\n", "1", True),
        ("go north", "Syntax error", False),
        ("", "No code available to execute.", False),
        ("# nothing", "No code available to execute.", False),
    ],
)
def test_errors_are_seen_and_only_what_is_no_python_is_flagged(env, code, output, is_valid):
    env.reset(seed=0, options=TASK)
    observation, reward, terminated, _, info = env.step(code)
    assert output in observation
    assert (reward, terminated, info["is_action_valid"]) == (0.0, False, is_valid)


def test_a_lone_surrogate_that_code_prints_is_replaced(env):
    env.reset(options=TASK)
    assert env.step(r'print("so \ud83d")')[0] == "so \ufffd"


def test_names_stay_within_an_episode_and_no_longer(env):
    env.reset(seed=0, options=TASK)
    env.step("x = 'kept'")
    assert env.step("print(x)")[0] == "kept"
    env.reset(seed=0, options=TASK)
    assert "NameError" in env.step("print(x)")[0]


def test_tasks_are_listed_and_differ(env):
    assert len(env.task_ids()) == 16
    tasks = {tuple(env.reset(options={"task_id": name})[1].items()) for name in env.task_ids()}
    assert len(tasks) == 16
    with pytest.raises(ValueError, match="task_id 'x' is not one of the 16 tasks"):
        env.reset(options={"task_id": "x"})


def test_the_shell_runs_nothing_but_its_few_words():
    called: list = []

    def call(*asked: Any) -> list[str]:
        called.append(asked)
        return ["a", "b"]

    shell = Shell(call)
    assert shell.run("y = apis.app.api(k='v')\nprint(y[1], len(y), str(3))") == "b 2 3"
    assert called == [("app", "api", {"k": "v"})]
    for code in ("while True: pass", "print.__self__", "apis.a.b('positional')", "x[0]"):
        assert shell.run(code).startswith("Execution failed. Traceback:\n")
    assert len(called) == 1


# Servers -----------------------------------------------------------------------------------------


def test_close_and_being_gone_end_the_server():
    env = shipped()
    env.reset(seed=0)
    process = env._running._process
    env.close()
    env.close()
    assert process.poll() is not None
    env.reset(seed=0)
    process = env._running._process
    assert process.poll() is None
    del env
    gc.collect()
    assert process.poll() is not None


def test_servers_that_run_already_are_lent_to_one_environment_each():
    owner = shipped()
    owner.reset(seed=0)
    url = owner._running.url
    settings = {"server": url, "tasks": ["shipped_1"]}
    first, second = AppWorld(**settings), AppWorld(**settings)
    assert first.reset(seed=0)[1]["task_id"] == "shipped_1"
    with pytest.raises(RuntimeError, match=r"all 1 AppWorld server\(s\) .* are in use"):
        second.reset(seed=0)
    first.close()
    assert second.reset(seed=0)[1]["task_id"] == "shipped_1"
    second.close()
    # What it did not start it does not end.
    assert owner._running._process.poll() is None
    owner.close()


class Recorder(BaseHTTPRequestHandler):
    """Answers as AppWorld 0.1.3 does, and keeps what it was asked."""

    asked: list[tuple[str, dict]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self._send({"message": "Welcome"})

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        what = self.path.strip("/")
        self.asked.append((what, given))
        person = {"first_name": "A", "last_name": "B", "email": "a@b", "phone_number": "1"}
        outputs = {
            "initialize": {
                "task_id": given["task_id"],
                "instruction": "Do it.",
                "supervisor": person,
                "datetime": "2023-05-18T12:00:00",
            },
            "execute": "out\n",
            "task_completed": given["task_id"] == "t_2",
            "evaluate": {"success": True, "num_tests": 4, "passes": [{}] * 4, "failures": []},
            "close": None,
        }
        self._send({"output": outputs[what]})

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def _send(self, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def recorder():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    Recorder.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_requests_are_those_of_appworlds_server(recorder):
    env = AppWorld(server=[recorder], tasks=["t_1", "t_2"], timeout_s=65, horizon=9)
    start, _ = env.reset(options={"task_id": "t_1"})
    assert start == "You act for A B (email a@b, phone 1). It is 2023-05-18T12:00:00."
    assert env.step("print('out')")[:2] == ("out", 0.0)
    env.reset(options={"task_id": "t_2"})
    _, reward, terminated, _, info = env.step("x")
    # Success counts only where the task was completed, as it is for t_2.
    assert (reward, terminated, info["score"]) == (10.0, True, 1.0)
    env.close()
    (_, begun), *later = Recorder.asked
    name = begun["experiment_name"]
    assert name.startswith("rllib_gigpo_")
    expected = {"max_interactions": 10, "timeout_seconds": 60, "random_seed": 100}
    assert begun == {"task_id": "t_1", "experiment_name": name, **expected}
    assert later == [
        ("execute", {"task_id": "t_1", "code": "print('out')"}),
        ("task_completed", {"task_id": "t_1"}),
        ("close", {"task_id": "t_1"}),
        ("initialize", {**begun, "task_id": "t_2"}),
        ("execute", {"task_id": "t_2", "code": "x"}),
        ("task_completed", {"task_id": "t_2"}),
        ("evaluate", {"task_id": "t_2", "suppress_errors": True, "report": False}),
        ("close", {"task_id": "t_2"}),
    ]


def test_two_environments_write_under_two_names(recorder, tmp_path):
    first = AppWorld(server=recorder, tasks=["t_1"], root=str(tmp_path))
    first.reset(seed=0)
    first.close()
    second = AppWorld(server=recorder, tasks=["t_1"], root=str(tmp_path))
    second.reset(seed=0)
    names = {given["experiment_name"] for what, given in Recorder.asked if what == "initialize"}
    assert len(names) == 2
    outputs = tmp_path / "experiments" / "outputs"
    for name in (*names, "someone_elses"):
        (outputs / name).mkdir(parents=True)
    second.close()
    # Only what the second has written is deleted.
    kept = {path.name for path in outputs.iterdir()}
    assert kept == {first._experiment, "someone_elses"}


def test_an_interpreter_without_appworld_says_what_is_missing(tmp_path):
    env = AppWorld(python_executable=sys.executable, root=str(tmp_path), tasks=["t_1"])
    with pytest.raises(AppWorldError, match=r"ended with exit status 1: .*No module named"):
        env.reset(seed=0)
    env = AppWorld(python_executable="/no/python", root=str(tmp_path), tasks=["t_1"])
    with pytest.raises(AppWorldError, match=r"cannot be started by '/no/python'"):
        env.reset(seed=0)


def test_a_server_that_is_not_there_is_named():
    env = AppWorld(server="http://127.0.0.1:9", tasks=["t_1"], start_timeout_s=0.1)
    with pytest.raises(AppWorldError, match=r"no AppWorld server answers at http://127.0.0.1:9"):
        env.reset(seed=0)
    env.close()


def test_a_server_that_dies_is_told():
    env = shipped()
    env.reset(seed=0)
    env._running._process.kill()
    env._running._process.wait()
    with pytest.raises(AppWorldError, match=r"ended with exit status -9"):
        env.step("print(1)")
    env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "AppWorld needs an interpreter of its own: install appworld"),
        ({"python_executable": "p", "server": "http://h"}, r"one of the two"),
        ({"world": "moon"}, "world must be one of appworld, shipped; got 'moon'"),
        ({"world": "shipped", "horizon": 0}, "horizon must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AppWorld(**arguments)


def test_the_tasks_of_a_split_are_read_from_the_root(tmp_path):
    folder = tmp_path / "data" / "datasets"
    folder.mkdir(parents=True)
    (folder / "dev.txt").write_text("a_1\nb_2:tag\n\n")
    env = AppWorld(python_executable="python", root=str(tmp_path), split="dev")
    assert env.task_ids() == ["a_1", "b_2"]
    with pytest.raises(
        FileNotFoundError, match=r"split 'train' is not at .*appworld download data"
    ):
        AppWorld(python_executable="python", root=str(tmp_path))


def test_the_real_appworld_plays_an_episode():
    python, root = os.environ.get("APPWORLD_PYTHON"), os.environ.get("APPWORLD_ROOT")
    if not (python and root and Path(root, "data").is_dir()):
        pytest.skip(
            "AppWorld's data cannot be had from a package index: set APPWORLD_PYTHON to an "
            "interpreter with appworld and APPWORLD_ROOT to a folder with its data"
        )
    env = AppWorld(python_executable=python, root=root, horizon=3)
    start, _ = env.reset(seed=0)
    assert env.reset(seed=0)[0] == start
    assert "supervisor" in env.step("print(apis.api_docs.show_app_descriptions())")[0]
    _, _, terminated, _, info = env.step("apis.supervisor.complete_task()")
    assert terminated
    assert 0.0 <= info["score"] <= 1.0
    env.close()


# Profile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "action"),
    [
        (
            "<think>t</think>\n<code>\nif x:\n    print(1)\n</code>",
            Action("if x:\n    print(1)", True),
        ),
        ("<think>t</think><code>```python\nprint(1)\n```</code>", Action("print(1)", True)),
        ("<think>t</think><code> a = 1\nb </code>", Action("a = 1\nb", True)),
        ("<think>t</think><code>\n  if x:\n    y\n  z\n</code>", Action("if x:\n  y\nz", True)),
        ("<think>t</think><code>a</code><code>b</code>", Action("b", True)),
        ("<code>a</code>", Action("a", False)),
        ("<think>t</think><code> </code>", Action("", False)),
        ("x" * 150, Action("x" * 100, False)),
        ("", Action("", False)),
    ],
)
def test_code_keeps_its_blanks_and_lines(response, action):
    assert profile().read(response) == action


def test_the_profile_reads_what_it_writes():
    assert profile().read(profile().respond.format(action="a = {}\nb")) == Action("a = {}\nb", True)
