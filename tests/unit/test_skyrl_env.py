"""Environments with skyrl-gym's methods, of the package itself and of one's own."""

import re

import pytest

from envs.adapters.skyrl import SkyRLEnv
from rllib_gigpo.agent import Action, PromptContext
from rllib_gigpo.agent.profiles.conversation import profile
from tests.dial_worlds import Dial
from tests.missing import skip_or_fail

DIAL = "skyrl:tests.dial_worlds:DialText"
ROWS = [{"prompt": [{"role": "user", "content": "Open."}], "dial": 4, "level": 1}]
# SkyRL's own rule of gsm8k: "#### 72" is the answer 72.
MATHS = [
    {
        "prompt": [
            {"role": "system", "content": "Do maths."},
            {"role": "user", "content": "48+24?"},
        ],
        "reward_spec": {"ground_truth": "72"},
        "extra_info": {"max_turns": 3},
    }
]


def dial(**more) -> SkyRLEnv:
    return SkyRLEnv(target="tests.dial_worlds:DialText", rows=ROWS, **more)


def maths(**more) -> SkyRLEnv:
    try:
        return SkyRLEnv(target="gsm8k_multi_turn", rows=MATHS, **more)
    except ImportError as error:
        skip_or_fail(str(error))
        raise


def test_the_prompt_is_the_task_and_what_is_added_is_seen():
    env = dial(won_reward=1.0)
    observation, info = env.reset(seed=0)
    twin = Dial(4)
    assert observation == twin.look()
    assert info == {"task": "Open.", "task_id": "0", "won": False}
    assert env._world.extras == {"dial": 4, "level": 1}
    observation, reward, terminated, _, info = env.step("turn right")
    assert (observation, reward, terminated) == (twin.turn("right", 1), 0.0, False)
    # Numbers of the metadata are told; texts and flags are not.
    assert info == {"task": "Open.", "task_id": "0", "won": False, "tries": 0.0}


def test_the_end_is_the_environments_with_its_metrics():
    env = dial(won_reward=1.0)
    env.reset(seed=0)
    twin = Dial(4)
    for _ in range((twin.secret - twin.shown) % 10):
        env.step("turn right")
    observation, reward, terminated, truncated, info = env.step("unlock")
    assert (observation, reward, terminated, truncated) == ("The box is open.", 1.0, True, False)
    assert (info["won"], info["tries"], info["shown_at_end"]) == (True, 1.0, float(twin.secret))


def test_the_horizon_cuts_and_a_new_episode_closes_the_old_world():
    env = dial(horizon=2, won_reward=1.0)
    env.reset(seed=0)
    world = env._world
    env.step("unlock")
    *_, terminated, truncated, info = env.step("unlock")
    assert (terminated, truncated, info["won"]) == (False, True, False)
    assert info["tries"] == 2.0
    assert "shown_at_end" in info
    env.reset(seed=0)
    assert world.is_closed
    assert ROWS[0]["dial"] == 4


def test_an_environment_of_the_package_by_its_id():
    env = maths(won_reward=1.0)
    observation, info = env.reset(seed=0)
    assert (observation, info["task"]) == ("", "Do maths.\n48+24?")
    observation, reward, terminated, *_ = env.step("It is 72, I think.")
    assert "#### ANSWER" in observation
    assert (reward, terminated) == (0.0, False)
    # Well formed but wrong: 0.2 / 3 turns.
    _, reward, terminated, *_ = env.step("#### 71")
    assert reward == pytest.approx(0.2 / 3)
    assert not terminated
    _, reward, terminated, _, info = env.step("48 + 24 = 72\n#### 72")
    assert (reward, terminated, info["won"], info["steps"]) == (1.0, True, True, 3.0)


def test_an_id_that_the_package_lacks_is_named():
    maths()
    with pytest.raises(ValueError, match=r"skyrl-gym has no 'chess': it has \['aime', 'gsm8k'"):
        SkyRLEnv(target="chess")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "skyrl: needs a name"),
        ("tests.dial_worlds:Nothing", "module 'tests.dial_worlds' has no 'Nothing'"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(target, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SkyRLEnv(target=target)


def test_the_profile_sends_the_whole_response():
    agent = profile()
    assert agent.read(" <search>x</search>\n so ") == Action("<search>x</search>\n so", True)
    assert agent.read(" \n") == Action("", False)
    (first,) = agent.prompt(PromptContext("Open.", "The dial shows 1."))
    assert first["content"] == "Open.\nThe dial shows 1."
