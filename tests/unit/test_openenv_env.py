"""OpenEnv's messages over a WebSocket: both kinds of servers, refusals, full and silent ones."""

import gc
import json
import time

import pytest

from envs.adapters.openenv import OpenEnv, observation_text
from envs.adapters.openenv_client import OpenEnvClient, OpenEnvError, socket_url
from tests.dial_worlds import ROWS, Dial
from tests.missing import skip_or_fail

try:
    import websockets  # noqa: F401
except ImportError as error:
    skip_or_fail(f"websockets is not installed: {error}")

from tests.openenv_dial_server import running


def twin_of(env: OpenEnv) -> Dial:
    """The dial that the server plays for this episode."""
    return Dial(env._episode[0])


def call(name: str, **arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_a_simulation_is_played_by_the_fields_of_its_actions():
    with running("simulation") as (url, server):
        env = OpenEnv(target=url, rows=[{"prompt": "Open.", "level": 2}], won_reward=1.0)
        observation, info = env.reset(seed=1)
        dial = twin_of(env)
        assert observation == dial.look()  # without step_count and metadata
        assert server.resets == [{"level": 2, "seed": env._episode[0]}]
        assert (info["task"], info["won"]) == ("Open.", False)
        (tool,) = info["tools"]
        assert tool["name"] == "step"
        assert tool["description"] == "Turns or tries."
        assert set(tool["parameters"]["properties"]) == {"verb", "clicks"}

        assert env.step(call("step", verb="right", clicks=1))[0] == dial.turn("right", 1)
        assert env.step('{"verb": "left"}')[0] == dial.turn("left", 1)
        fenced = env.step('```json\n{"verb": "right", "clicks": 2}\n```')
        assert fenced[0] == dial.turn("right", 2)
        assert fenced[4]["is_action_valid"] is True
        clicks = (dial.secret - dial.shown) % 10
        env.step(call("step", verb="right", clicks=clicks))
        observation, reward, terminated, truncated, info = env.step('{"verb": "unlock"}')
        assert (observation, reward) == ("The box is open.", 1.0)
        assert (terminated, truncated, info["won"]) == (True, False, True)
        env.close()


def test_what_json_does_not_know_never_reaches_the_server():
    with running("simulation") as (url, _):
        env = OpenEnv(target=url)
        env.reset(seed=1)
        for action in ('{"verb": "left", "clicks": NaN}', '{"verb": "left", "clicks": 1e999}'):
            assert env.step(action)[4]["is_action_valid"] is False
        env.close()


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("turn left", "'verb' of 'step' does not fit"),
        ("", "no JSON object that fits"),
        ('{"verb": "jump"}', "'verb' of 'step' does not fit"),
        ('{"clicks": 1}', "lacks the argument(s) ['verb']"),
        ('{"verb": "left", "force": 1}', "has no argument 'force'"),
        # The server itself refuses this one.
        ('{"verb": "left", "clicks": 10}', "the dial has ten numbers"),
    ],
)
def test_what_is_refused_is_told_flagged_and_changes_nothing(action, told):
    with running("simulation") as (url, _):
        env = OpenEnv(target=url)
        env.reset(seed=0)
        observation, reward, terminated, truncated, info = env.step(action)
        assert told in observation
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert info["is_action_valid"] is False
        assert env.step('{"verb": "left"}')[0] == twin_of(env).turn("left", 1)
        env.close()


def test_a_text_is_sent_as_it_is_where_the_one_field_is_a_text():
    with running("text") as (url, _):
        env = OpenEnv(target=url, won_reward=1.0)
        env.reset(seed=0)
        shown = twin_of(env).shown
        observation, *_, info = env.step("hello there")
        assert observation == f"text: you said hello there\nshown: {shown}"
        # Nobody can say whether it is an action; an empty one is none.
        assert "is_action_valid" not in info
        assert env.step(" ")[4]["is_action_valid"] is False
        assert env.step(call("step", message="hi"))[4]["is_action_valid"] is True
        env.close()


def test_a_tool_server_lists_its_tools_and_is_played_by_calls():
    with running("tools") as (url, _):
        env = OpenEnv(target=url)
        _, info = env.reset(seed=0)
        assert [tool["name"] for tool in info["tools"]] == ["turn", "unlock"]
        assert info["tools"][0]["parameters"]["required"] == ["direction"]
        dial = twin_of(env)
        assert env.step(call("turn", direction="left"))[0] == dial.turn("left", 1)
        assert env.step(call("unlock"))[0] == dial.unlock()
        assert "There is no tool 'step'" in env.step(call("step"))[0]
        assert "neither a tool call" in env.step("turn left")[0]
        env.close()


def test_an_answer_ends_the_episode():
    with running("tools") as (url, _):
        env = OpenEnv(target=url, won_reward=1.0)
        start, _ = env.reset(seed=0)
        observation, reward, terminated, _, info = env.step("<answer>done</answer>")
        assert (observation, reward, terminated, info["won"]) == (start, 0.0, True, False)
        env.close()


def won(env: OpenEnv) -> tuple:
    """Open the box of the episode that has begun."""
    dial = twin_of(env)
    env.step(call("step", verb="right", clicks=(dial.secret - dial.shown) % 10))
    return env.step('{"verb": "unlock"}')


def rewarding(server, reward) -> None:
    """Let a simulation give this reward at every step."""
    play = server._simulation
    server._simulation = lambda dial, data: (play(dial, data)[0], reward)


def test_a_reward_may_be_absent_on_the_way_and_not_at_the_end():
    with running("simulation") as (url, server):
        rewarding(server, None)
        env = OpenEnv(target=url)
        env.reset(seed=0)
        assert env.step(call("step", verb="left", clicks=0))[1:3] == (0.0, False)
        with pytest.raises(OpenEnvError, match=rf"{url} ended an episode without a reward: set"):
            won(env)
        env = OpenEnv(target=url, final_reward=0.25, won_reward=0.25)
        env.reset(seed=0)
        assert env.step(call("step", verb="left", clicks=0))[1] == 0.0
        _, reward, terminated, _, info = won(env)
        assert (reward, terminated, info["won"]) == (0.25, True, True)
        env.close()


@pytest.mark.parametrize("reward", [0, 0.0, False, True, 1])
def test_a_number_is_a_reward_at_the_end(reward):
    with running("simulation") as (url, server):
        rewarding(server, reward)
        env = OpenEnv(target=url, final_reward=7.0)
        env.reset(seed=0)
        assert won(env)[1:3] == (float(reward), True)
        env.close()


@pytest.mark.parametrize("reward", ["1.0", "", [], [1.0], {}, {"value": 1.0}])
def test_what_is_no_number_is_no_reward(reward):
    with running("simulation") as (url, server):
        rewarding(server, reward)
        env = OpenEnv(target=url, final_reward=0.0)
        env.reset(seed=0)
        with pytest.raises(OpenEnvError, match=rf"{url} gave reward .*: expected a number"):
            env.step('{"verb": "left"}')
        env.close()


def test_a_full_server_says_so_and_close_makes_room():
    with running("simulation", max_sessions=1) as (url, server):
        first, second = OpenEnv(target=url), OpenEnv(target=url)
        first.reset(seed=0)
        with pytest.raises(OpenEnvError, match=r"no session left .*max_concurrent_envs"):
            second.reset(seed=0)
        first.close()
        wait_for(lambda: server.open_sessions == 0)
        second.reset(seed=0)
        del second
        gc.collect()
        wait_for(lambda: server.open_sessions == 0)


def test_the_reason_of_a_server_that_has_closed_already_is_read():
    with running("simulation", max_sessions=0) as (url, _):
        client = OpenEnvClient(url, 5.0)
        wait_for(lambda: client._socket.state.name == "CLOSED")
        with pytest.raises(OpenEnvError, match=r"no session left .*max_concurrent_envs"):
            client.reset({"seed": 0})


def test_after_a_time_out_the_session_is_given_up_and_a_reset_starts_anew():
    with running("simulation") as (url, server):
        env = OpenEnv(target=url, timeout_s=5)
        env.reset(seed=0)
        env._client.timeout_s = 0.2
        server.is_slow = True
        with pytest.raises(OpenEnvError, match=r"did not answer a step within 0.2 s: raise env_"):
            env.step('{"verb": "left"}')
        server.is_slow = False
        assert env.reset(seed=0)[0] == twin_of(env).look()
        env.close()


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(OpenEnvError, match=r"no OpenEnv server .* http://127.0.0.1:9/schema"):
        OpenEnv(target="http://127.0.0.1:9").reset(seed=0)
    with pytest.raises(ValueError, match="openenv: needs a server"):
        OpenEnv()


@pytest.mark.parametrize(
    ("url", "socket"),
    [
        ("http://h:1/", "ws://h:1"),
        ("https://h/env", "wss://h/env"),
        ("ws://h:1", "ws://h:1"),
        ("wss://h/", "wss://h"),
    ],
)
def test_addresses_become_socket_addresses(url, socket):
    assert socket_url(url) == socket


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "a", "metadata": {"x": 1}, "hint": None}, "a"),
        ({"board": [1, 2], "turn": "me"}, "board: [1, 2]\nturn: me"),
        ({"tool_name": "f", "result": {"content": [{"type": "text", "text": "4"}]}}, "4"),
        ({"tool_name": "f", "result": {"data": 4}}, '{"data": 4}'),
        ({"tool_name": "f", "error": {"error_type": "timeout", "message": "slow"}}, "slow"),
        ({}, ""),
    ],
)
def test_observations_as_text(observation, text):
    assert observation_text(observation, ("metadata",)) == text


def test_rows_are_chosen_by_the_seed():
    with running("simulation") as (url, _):
        env = OpenEnv(target=url, rows=ROWS)
        tasks = {env.reset(seed=seed)[1]["task"] for seed in range(8)}
        assert tasks == {"Open the box.", "Open it."}
        env.close()


def wait_for(condition) -> None:
    """The server learns of a closed socket in a thread of its own."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the session stayed open"
        time.sleep(0.01)
