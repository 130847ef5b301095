"""Classes as TRL's environment_factory takes them, played without TRL."""

import asyncio
import json

import pytest

from envs.adapters.trl import TRLEnv
from rllib_gigpo.agent.profiles.tools import JsonCallParser
from rllib_gigpo.games import Game
from rllib_gigpo.registry import get_env_spec
from tests.dial_worlds import ROWS, Dial, DialEnv, dial_state

DIAL = "tests.dial_worlds:DialEnv"


def call(name: str, **arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def dial(**more) -> TRLEnv:
    return TRLEnv(target=DIAL, rows=ROWS, **more)


def test_tools_are_the_public_methods_with_their_types():
    _, info = dial().reset(seed=0)
    assert [tool["name"] for tool in info["tools"]] == ["turn", "unlock"]
    assert info["tools"][0]["parameters"] == {
        "type": "object",
        "properties": {
            "direction": {"enum": ["left", "right"], "description": "Which way."},
            "clicks": {"type": "integer", "description": "How far, 0 to 9."},
        },
        "required": ["direction"],
    }


def test_an_episode_by_calls_is_rewarded_at_its_end():
    env = dial(won_reward=1.0)
    start, info = env.reset(seed=5)
    shown, secret = env._world.dial.shown, env._world._secret()
    assert start == f"The dial shows {shown}."
    assert info["task"] in ("Open the box.", "Open it.")
    clicks = (secret - shown) % 10
    observation, reward, *ends, info = env.step(call("turn", direction="right", clicks=clicks))
    assert (observation, reward, ends) == (f"The dial shows {secret}.", 0.0, [False, False])
    assert (info["is_action_valid"], info["won"]) == (True, False)
    observation, reward, *_ = env.step(call("unlock"))  # async
    assert (observation, reward) == ("The box is open.", 0.0)
    observation, reward, terminated, truncated, info = env.step("<answer>done</answer>")
    assert (reward, terminated, truncated, info["won"]) == (1.0, True, False, True)
    assert observation == "The box is open."


def test_the_horizon_ends_an_episode_with_its_reward():
    env = dial(horizon=2)
    env.reset(seed=0)
    env._world.dial.shown = env._world._secret()
    env.step(call("unlock"))
    _, reward, terminated, truncated, info = env.step("no call")
    assert (reward, terminated, truncated) == (1.0, False, True)
    assert "won" not in info


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("turn left", "That was neither a tool call"),
        (call("reset", seed=1), "There is no tool 'reset'"),
        (call("get_reward"), "There is no tool 'get_reward'"),
        (call("_secret"), "There is no tool '_secret'"),
        (call("turn", direction="up"), "does not fit"),
        (call("turn", direction="left", clicks=99), "ValueError: the dial has ten numbers"),
    ],
)
def test_what_does_not_work_is_told_flagged_and_changes_nothing(action, told):
    env = dial()
    start, _ = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(action)
    assert told in observation
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["is_action_valid"] is False
    assert env._world.dial.look() == start


def _unescaped(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("unicode_escape")


class Parrot:
    """Gives back what it is told, and by `\\u` escapes what has no UTF-8 form."""

    said = "nothing \udc80"

    def reset(self) -> str:
        return self.said

    def say(self, text: str) -> str:
        """Say.

        Args:
            text: What, with escapes.
        """
        self.said = _unescaped(text)
        return self.said

    def fail(self, text: str) -> str:
        """Fail.

        Args:
            text: With what, with escapes.
        """
        raise ValueError(_unescaped(text) + "\ud800")

    def get_reward(self) -> float:
        return 0.0


def test_lone_surrogates_are_replaced_wherever_they_are_shown():
    env = TRLEnv(target="tests.unit.test_trl_env:Parrot", anchor=lambda world: world.said)
    game = Game(env, "trl:Parrot")  # which refuses texts without a UTF-8 form
    observations, infos = game.reset(0)
    assert observations["agent"] == infos["agent"]["anchor"] == "nothing \ufffd"
    for action in (
        call("say", text="\\ud83d"),
        '{"name": "say", "arguments": {"text": "\\ud83d"}}',
    ):
        outcome = game.step({"agent": action})
        assert outcome.observations["agent"] == outcome.infos["agent"]["anchor"] == "\ufffd"
    assert "\ufffd" in game.step({"agent": call("fail", text="x")}).observations["agent"]
    told = game.step({"agent": '{"name": "\\ud800", "arguments": {}}'}).observations["agent"]
    assert told.startswith("There is no tool '\ufffd'")


def test_a_seed_chooses_the_row_and_goes_to_reset():
    env = dial()
    starts = {seed: env.reset(seed=seed) for seed in range(8)}
    assert {info["task_id"] for _, info in starts.values()} == {"0", "1"}
    for seed, start in starts.items():
        assert env.reset(seed=seed) == start
    assert env.task_ids() == ["0", "1"]
    assert env.reset(options={"task_id": "1"})[1]["task"] == "Open it."
    with pytest.raises(ValueError, match="task_id '2' is not one of the rows' numbers 0 to 1"):
        env.reset(options={"task_id": "2"})


def test_rows_come_from_a_file_and_choose_among_factories(tmp_path):
    rows = [
        {"environment": "silent", "prompt": "Say yes.", "wanted": "yes"},
        {"environment": "dial", "prompt": "Open."},
        {"environment": "gone", "prompt": ""},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    env = TRLEnv(
        target="tests.dial_worlds:FACTORIES",
        rows=str(file),
        reward="tests.dial_worlds:silent_reward",
    )
    observation, info = env.reset(options={"task_id": 0})
    # reset returns nothing: the task is what there is to see. The row went to reset.
    assert observation == info["task"] == "Say yes."
    assert env._world.row == rows[0]
    assert env.step(call("say", text="no"))[0] == "no"
    assert env.step("<answer>yes</answer>")[1] == 1.0
    assert env.reset(options={"task_id": 1})[0].startswith("The dial shows")
    with pytest.raises(ValueError, match=r"environment='gone': .* holds \['dial', 'silent'\]"):
        env.reset(options={"task_id": 2})


def test_a_state_of_ones_own_is_the_anchor():
    env = dial(anchor=dial_state)
    _, info = env.reset(seed=0)
    assert info["anchor"] == f"dial {env._world.dial.shown}"
    *_, info = env.step("nonsense")
    assert info["anchor"] == f"dial {env._world.dial.shown}"


def test_async_tools_run_where_a_loop_runs_already():
    env = dial()
    env.reset(seed=0)

    async def step():
        return env.step(call("unlock"))[0]

    assert asyncio.run(step()) in ("Too low.", "Too high.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": ""}, "trl: is '': expected module:attribute"),
        ({"target": "tests.nowhere:X"}, "there is no module 'tests.nowhere'"),
        ({"target": DIAL, "rows": []}, r"rows=\[\] holds no task"),
        ({"target": DIAL, "horizon": 0}, "horizon must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TRLEnv(**arguments)


def test_a_world_without_a_reward_is_refused_with_the_cure():
    with pytest.raises(ValueError, match=r"has no get_reward\(\): give env_config"):
        TRLEnv(target="tests.dial_worlds:Silent").reset(seed=0)


@pytest.mark.parametrize("line", ["no json", "[1]"])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*rows.jsonl is no JSON"):
        TRLEnv(target=DIAL, rows=str(file))


def test_the_string_brings_the_profile_of_tool_calls():
    spec = get_env_spec(f"trl:{DIAL}")
    assert isinstance(spec.profile().parser, JsonCallParser)
    env = spec.make({"rows": ROWS, "horizon": 4})
    assert env.horizon == 4
    env.reset(seed=1)
    assert isinstance(env._world, DialEnv)
    assert isinstance(env._world.dial, Dial)
