"""Tools of MCP servers: real processes and HTTP servers that speak the protocol."""

import gc
import json
import sys
import threading
from pathlib import Path

import pytest

from envs.adapters import mcp_client
from envs.adapters.mcp import MCPEnv, MCPEpisode
from envs.adapters.mcp_client import MCPClient, MCPError
from tests import mcp_dial_server
from tests.dial_worlds import ROWS, opened
from tests.missing import skip_or_fail

SERVER = f"{sys.executable} -m tests.mcp_dial_server"
_REAL_SERVER = """
from mcp.server import MCPServer
server = MCPServer("adder")
@server.tool()
def add(first: int, second: int = 1) -> int:
    "Add two numbers."
    return first + second
@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("no")
server.run("stdio")
"""


@pytest.fixture(autouse=True)
def _modules_of_the_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def http():
    server = mcp_dial_server.over_http()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    mcp_dial_server.Handler.sessions.clear()
    yield f"http://127.0.0.1:{server.server_port}/mcp"
    server.shutdown()
    server.server_close()
    thread.join()


def call(name: str, **arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def dial(target: str = SERVER, **more) -> MCPEnv:
    settings = {"rows": ROWS, "reward": opened, "reset_tool": "start", "hide": ("box",), **more}
    return MCPEnv(target=target, **settings)


def process_of(env: MCPEnv) -> int:
    return env._client._transport._process.pid


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_goodbye_that_is_not_answered_in_http_keeps_nobody(http, monkeypatch):
    answered = []

    def garble(self) -> None:
        answered.append("what?")
        self.wfile.write(b"what?\r\n\r\n")
        self.close_connection = True

    monkeypatch.setattr(mcp_dial_server.Handler, "do_DELETE", garble)
    client = MCPClient(http, 10)
    client.close()
    assert answered == ["what?"]


@pytest.mark.parametrize("over", ["pipes", "http"])
def test_all_pages_of_tools_are_listed_and_texts_come_back(over, http):
    client = MCPClient(SERVER if over == "pipes" else http, 10)
    tools = client.tools()
    assert [tool["name"] for tool in tools] == ["start", "turn", "unlock", "box", "photo"]
    assert tools[1]["parameters"]["required"] == ["direction"]
    assert client.call("start", {"seed": 0, "start": 3}) == ("The dial shows 3.", False)
    assert client.call("turn", {"direction": "right", "clicks": 2}) == ("The dial shows 5.", False)
    assert client.call("turn", {"direction": "right", "clicks": 0}) == ("0 is no turn", True)
    assert client.call("photo", {}) == ("[image]", False)
    with pytest.raises(MCPError, match=r"refuses tools/call: unknown 'no_tool' \(code -32602\)"):
        client.call("no_tool", {})
    client.close()
    client.close()
    if over == "http":
        assert mcp_dial_server.Handler.sessions == {}


@pytest.mark.parametrize("over", ["pipes", "http"])
def test_an_episode_with_a_reward_of_ones_own(over, http):
    env = dial(SERVER if over == "pipes" else http, won_reward=1.0)
    start, info = env.reset(seed=3, options={"task_id": 0})
    assert info["task"] == "Open the box."
    assert [tool["name"] for tool in info["tools"]] == ["turn", "unlock", "photo"]
    twin = mcp_dial_server.Dial(env._episode[0])
    assert start == twin.look()
    clicks = (twin.secret - twin.shown) % 10
    observation, reward, *_, info = env.step(call("turn", direction="right", clicks=clicks))
    assert (observation, reward) == (f"The dial shows {twin.secret}.", 0.0)
    assert (info["is_action_valid"], info["won"]) == (True, False)
    assert env.step(call("unlock"))[0] == "The box is open."
    _, reward, terminated, _, info = env.step("<answer>it is open</answer>")
    assert (reward, terminated, info["won"]) == (1.0, True, True)
    env.close()


def test_the_reward_sees_row_calls_and_answer():
    seen: list[MCPEpisode] = []

    def reward(episode: MCPEpisode) -> float:
        seen.append(episode)
        return 0.25

    env = dial(reward=reward, horizon=3)
    env.reset(seed=0, options={"task_id": 1})
    env.step(call("turn", direction="left", clicks=0))
    env.step("nonsense")
    _, reward_given, terminated, truncated, _ = env.step(call("box"))
    assert (reward_given, terminated, truncated) == (0.25, False, True)
    (episode,) = seen
    assert episode.row == ROWS[1]
    assert episode.answer is None
    # The hidden tool and the nonsense were no calls; the refused turn was one.
    assert [(c.name, c.arguments, r.is_error) for c, r in episode.calls] == [
        ("turn", {"direction": "left", "clicks": 0}, True)
    ]
    assert episode.call("box", {}) == "shut"
    env.close()


def test_arguments_that_the_server_refuses_are_told_to_the_policy(http, monkeypatch):
    env = dial(http, horizon=9)
    start, _ = env.reset(seed=0)
    turned, refused = mcp_dial_server.Session.call, []

    def picky(self, name, given):
        if given.get("clicks") == 7:
            refused.append(given)
            raise KeyError("clicks")
        return turned(self, name, given)

    monkeypatch.setattr(mcp_dial_server.Session, "call", picky)
    observation, reward, *ends, info = env.step(call("turn", direction="left", clicks=7))
    assert "refuses tools/call: unknown 'clicks' (code -32602)" in observation
    assert (reward, ends, info["is_action_valid"]) == (0.0, [False, False], False)
    assert refused
    assert env._calls[-1][1].is_error
    # Nothing has changed, and the session goes on.
    assert env.step("<answer>so</answer>")[0] == start
    env.close()


def test_any_other_error_of_the_server_is_no_fault_of_the_policy(http, monkeypatch):
    env = dial(http)
    env.reset(seed=0)
    broken = {"code": -32603, "message": "internal"}
    monkeypatch.setattr(
        mcp_dial_server.Session,
        "answer",
        lambda self, message: {"jsonrpc": "2.0", "id": message["id"], "error": broken},
    )
    with pytest.raises(MCPError, match=r"refuses tools/call: internal \(code -32603\)"):
        env.step(call("turn", direction="left", clicks=1))
    env.close()


def test_numbers_that_json_does_not_know_never_reach_the_server(http):
    env = dial(http)
    env.reset(seed=0)
    for number in ("NaN", "1e999"):
        action = f'{{"name": "turn", "arguments": {{"direction": "left", "clicks": {number}}}}}'
        observation, *_, info = env.step(action)
        assert observation.startswith("That was neither a tool call")
        assert info["is_action_valid"] is False
    assert not env._calls
    env.close()


def test_without_a_reset_tool_every_episode_has_a_server_of_its_own():
    env = dial(reset_tool=None)
    assert env.reset(seed=0)[0] == ""
    first = process_of(env)
    before = env.step(call("turn", direction="right"))[0]
    env.reset(seed=0)
    assert process_of(env) != first
    assert not is_running(first)
    assert env.step(call("turn", direction="right"))[0] == before
    env.close()


def test_a_reset_tool_keeps_the_server_and_gets_the_seed_and_the_rows_fields():
    env = dial(rows=[{"prompt": "Open.", "start": 7, "other": 1}])
    assert env.reset(seed=0)[0] == "The dial shows 7."
    first = process_of(env)
    env.reset(seed=1)
    assert process_of(env) == first
    assert env._ask("turn", {"direction": "left"}) == "The dial shows 6."
    env.close()
    assert not is_running(first)


def test_an_environment_that_nobody_closes_leaves_no_process():
    env = dial()
    env.reset(seed=0)
    pid = process_of(env)
    assert is_running(pid)
    del env
    gc.collect()
    assert not is_running(pid)


def test_servers_that_are_not_there_fall_silent_or_die_are_named():
    with pytest.raises(MCPError, match="'no-such-server --x' cannot be started"):
        dial("no-such-server --x").reset(seed=0)
    with pytest.raises(MCPError, match="ended with exit status 1: no dial here"):
        dial(f"{SERVER} broken").reset(seed=0)
    with pytest.raises(MCPError, match=r"no MCP server answers at http://127\.0\.0\.1:9/mcp"):
        dial("http://127.0.0.1:9/mcp").reset(seed=0)
    silent = dial(f"{SERVER} silent", timeout_s=5)
    silent.reset(seed=0)
    silent._client.timeout_s = 0.2
    with pytest.raises(MCPError, match=r"did not answer within 0.2 s: raise env_config"):
        silent.step(call("turn", direction="left"))
    silent.close()
    dying = dial(f"{SERVER} dies")
    dying.reset(seed=0)
    with pytest.raises(MCPError, match="ended with exit status 3: the dial broke off"):
        dying.step(call("turn", direction="left"))
    dying.close()


def test_an_http_server_that_forgot_the_session_says_so(http):
    env = dial(http)
    env.reset(seed=0)
    mcp_dial_server.Handler.sessions.clear()
    with pytest.raises(MCPError, match="refuses: HTTP Error 404: Not Found no such session"):
        env.step(call("unlock"))
    env.close()


def test_a_list_of_tools_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(mcp_client, "_MAX_PAGES", 4)
    client = MCPClient(f"{SERVER} endless", 10)
    with pytest.raises(MCPError, match="has no end: 4 pages came"):
        client.tools()
    client.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": ""}, "mcp: needs a server"),
        ({"reward": None}, "gives no reward: set env_config"),
        ({"reward": "nothing"}, "reward is 'nothing': expected module:attribute"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        dial(**{"target": SERVER, **arguments})


def test_a_reset_tool_that_is_not_there_is_named():
    env = dial(reset_tool="begin")
    with pytest.raises(ValueError, match=r"no reset_tool='begin': it has \['start', 'turn'"):
        env.reset(seed=0)
    env.close()


def test_a_server_of_the_official_package_works(tmp_path):
    try:
        from mcp.server import MCPServer  # noqa: F401
    except ImportError as error:
        skip_or_fail(f"the mcp package (2.x) is not installed: {error}")
    script = tmp_path / "adder.py"
    script.write_text(_REAL_SERVER)
    env = MCPEnv(
        target=f"{sys.executable} {script}", rows=ROWS, reward="tests.dial_worlds:answered_yes"
    )
    _, info = env.reset(seed=0)
    assert [tool["name"] for tool in info["tools"]] == ["add", "fail"]
    assert env.step(call("add", first=2, second=3))[0] == "5"
    *_, info = env.step(call("fail"))
    assert info["is_action_valid"] is False
    # 1 for "yes", less an eighth for each of the two calls.
    assert env.step("<answer>yes</answer>")[1] == 0.75
    env.close()
