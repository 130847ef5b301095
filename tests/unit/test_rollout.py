"""Rollouts: who is asked what, what is recorded, and how an episode ends.

The engine is scripted and counts its requests; words are tokens. `Countdown` from s says "left s"
and ends at "left 0"; "down" takes one step, "jump" two.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import gymnasium
import numpy as np
import pytest

from rllib_gigpo.agent import AgentProfile, ChatTemplate, LastSteps
from rllib_gigpo.encoding import PromptTooLongError
from rllib_gigpo.engines.base import Request
from rllib_gigpo.games import SOLO_AGENT
from rllib_gigpo.rollout_types import GroupTask
from rllib_gigpo.rows import step_is_valid
from rllib_gigpo.seeding import derive_seed
from rllib_gigpo.stepping import EnvFailure
from tests.fakes import Countdown
from tests.stage import DOWN, PROFILE, Stage, task, words

# Who is asked ------------------------------------------------------------------------------------


def test_an_episode_asks_once_per_step_and_then_never_again():
    stage = Stage()
    episodes = stage.play(task(0, start=1), task(1, start=3), task(2, start=5))
    assert [len(episode) for episode in episodes] == [1, 3, 5]
    # One request per step that was played, 1 + 3 + 5; a batch that goes on asking for finished
    # episodes until the last one ends would send 3 x 5.
    assert len(stage.engine.requests) == 9
    live = Counter(request.group_id for request in stage.engine.requests)
    assert live == {0: 1, 1: 3, 2: 5}


def test_finished_episodes_leave_the_loop_round_by_round():
    stage = Stage()
    stage.play(task(0, start=1), task(1, start=3), task(2, start=5))
    # All advance together: rounds of 3, 2, 2, 1, 1 requests.
    assert [request.group_id for request in stage.engine.requests] == [0, 1, 2, 1, 2, 1, 2, 2, 2]
    assert stage.engine.most_running == 3


def test_no_episode_waits_for_a_slow_one():
    stage = Stage(turns=lambda request: 50 if request.group_id == 0 else 1)
    stage.play(task(0, start=2), task(1, start=4))
    # The second group plays all of its four steps while the first waits for its first answer.
    assert [request.group_id for request in stage.engine.requests] == [0, 1, 1, 1, 1, 0]


def test_the_last_observation_asks_for_nothing():
    stage = Stage()
    stage.play(task(start=2))
    assert stage.prompts() == ["<user> left 2 <assistant>", "<user> left 1 <assistant>"]


# Groups ------------------------------------------------------------------------------------------


def test_members_share_the_groups_reset_seed_and_options():
    stage = Stage()
    stage.play(task(0, size=3, env_seed=44), task(1, size=2, env_seed=90))
    assert [game.env.seeds for game in stage.lent] == [[44], [44], [44], [90], [90]]


def test_episodes_come_in_the_order_of_group_and_member():
    stage = Stage(turns=lambda request: 1 + request.seed % 7)
    episodes = stage.play(task(3, size=2, start=4), task(1, size=2, start=2))
    places = [(e.custom_data["group"], e.custom_data["member"]) for e in episodes]
    assert places == [(3, 0), (3, 1), (1, 0), (1, 1)]
    assert [len(episode) for episode in episodes] == [4, 4, 2, 2]


class Unseeded(Countdown):
    """A reset that depends on more than its seed."""

    count = 0

    def reset(self, **kwargs):
        Unseeded.count += 1
        return super().reset(seed=kwargs["seed"], options={"start": Unseeded.count})


class HiddenDifference(Countdown):
    """Starts that look alike but are different tasks."""

    count = 0

    def reset(self, **kwargs):
        HiddenDifference.count += 1
        observation, info = super().reset(**kwargs)
        return observation, {**info, "task_id": f"task {HiddenDifference.count}"}


@pytest.mark.parametrize("make", [Unseeded, HiddenDifference])
def test_members_that_start_differently_are_refused(make):
    stage = Stage(make=make)
    message = r"members of group 5 start from different states although reset\(seed=15\)"
    with pytest.raises(ValueError, match=message) as error:
        stage.play(task(5, size=2, start=3))
    assert "depends on its seed alone" in str(error.value)
    assert set(map(id, stage.returned)) == set(map(id, stage.lent))


def test_groups_may_start_differently_from_each_other():
    episodes = Stage().play(task(0, start=2), task(1, start=3))
    assert [e.infos[0]["observation"] for e in episodes] == ["left 2", "left 3"]


# Seeds and requests ------------------------------------------------------------------------------


def test_a_requests_seed_is_a_function_of_its_place():
    stage = Stage(seed=5)
    stage.play(task(2, size=2, start=2, iteration=9))
    seeds = {request.request_id: request.seed for request in stage.engine.requests}
    # stream, iteration, group, member, seat, step
    assert seeds == {
        f"response:9:2:{member}:0:{step}": derive_seed(5, "response", 9, 2, member, 0, step)
        for member in (0, 1)
        for step in (0, 1)
    }
    assert len(set(seeds.values())) == 4


def test_seeds_do_not_depend_on_what_plays_beside_or_how_fast():
    def seeds(*tasks: GroupTask, slow: int) -> dict[str, int]:
        stage = Stage(turns=lambda request: 1 + request.seed % slow)
        stage.play(*tasks)
        return {request.request_id: request.seed for request in stage.engine.requests}

    tasks = (task(0, size=2, start=3), task(1, size=2, start=2))
    together = seeds(*tasks, slow=7)
    alone = seeds(tasks[1], slow=2) | seeds(tasks[0], slow=3)
    assert together == alone
    assert len(set(together.values())) == len(together) == 10


def test_evaluation_draws_from_its_own_stream():
    stage = Stage()
    stage.play(task(start=1), task(start=1, stream="evaluation"))
    first, second = stage.engine.requests
    assert first.request_id == "response:0:0:0:0:0"
    assert second.request_id == "evaluation:0:0:0:0:0"
    assert first.seed != second.seed


def test_a_request_carries_sampling_policy_and_group():
    stage = Stage(policy_of=lambda agent: f"policy of {agent}")
    stage.play(task(4, start=1))
    (request,) = stage.engine.requests
    assert request.sampling is stage.settings.sampling
    assert request.policy_id == f"policy of {SOLO_AGENT}"
    assert request.group_id == 4


# What is recorded --------------------------------------------------------------------------------

REPLIES = [
    "<action> down </action>",
    "nonsense",
    "<action> wait </action>",
    "<action> jump </action>",
]


def by_step(request: Request) -> str:
    return REPLIES[int(request.request_id.rpartition(":")[2])]


def test_an_episode_step_by_step():
    stage = Stage(by_step)
    (episode,) = stage.play(task(6, start=3, iteration=2, env_seed=8))
    assert [words(ids) for ids in episode.observations] == [
        "<user> left 3 <assistant>",
        "<user> left 2 <assistant>",
        "<user> left 2 <assistant>",
        "<user> left 2 <assistant>",
        "",
    ]
    assert [words(ids) for ids in episode.actions] == REPLIES
    assert {ids.dtype for ids in (*episode.observations, *episode.actions)} == {np.dtype(np.int32)}
    assert list(episode.rewards) == [0.0, 0.0, 0.0, 1.0]
    assert (episode.is_terminated, episode.is_truncated) == (True, False)
    extras = {name: list(column) for name, column in episode.extra_model_outputs.items()}
    assert extras["action_text"] == ["down", "nonsense", "wait", "jump"]
    assert extras["format_is_valid"] == [True, False, True, True]
    assert extras["weight_version"] == [7] * 4
    assert extras["finish_reason"] == ["stop"] * 4
    # The log-probabilities of the fake engine count down from the request's own first one.
    for step, request in enumerate(stage.engine.requests):
        first = -(request.seed % 1000 + 1) * 1e-3
        expected = first - np.arange(len(episode.actions[step]))
        np.testing.assert_allclose(extras["action_logp"][step], expected, rtol=1e-6)
    assert [info["anchor"] for info in episode.infos] == [
        "left 3",
        "left 2",
        "left 2",
        "left 2",
        "left 0",
    ]
    assert episode.custom_data == {
        "group": 6,
        "member": 0,
        "iteration": 2,
        "env_seed": 8,
        "task": "count to 0",
        "task_id": "from 0",
        "won": True,
        "numbers": {},
    }


def test_a_step_is_valid_when_parser_and_environment_say_so():
    (episode,) = Stage(by_step).play(task(start=3))
    # "nonsense" breaks the format; "wait" is well written but no move of the environment.
    assert [step_is_valid(episode, step) for step in range(4)] == [True, False, False, True]


def test_the_environments_verdict_is_left_out_where_the_profile_says_so():
    stage = Stage(by_step, profile=replace(PROFILE, validity="parser"))
    (episode,) = stage.play(task(start=3))
    assert [step_is_valid(episode, step) for step in range(4)] == [True, False, True, True]


def test_a_response_at_the_token_limit_is_recorded_as_cut():
    stage = Stage("<action> down </action> down down", max_tokens=3, max_episode_steps=1)
    (episode,) = stage.play(task(start=2))
    assert episode.extra_model_outputs["finish_reason"][0] == "length"
    assert words(episode.actions[0]) == "<action> down </action>"


def test_anchors_are_the_environments_or_the_profiles():
    class Marked(Countdown):
        def _info(self):
            return {**super()._info(), "anchor": f"mark {self.left % 2}"}

    (episode,) = Stage(make=Marked).play(task(start=2))
    assert [info["anchor"] for info in episode.infos] == ["mark 0", "mark 1", "mark 0"]
    own = replace(PROFILE, anchor=lambda observation, info: observation[-1])
    (episode,) = Stage(make=Marked, profile=own).play(task(start=2))
    assert [info["anchor"] for info in episode.infos] == ["2", "1", "0"]


def test_prompts_show_task_history_and_actions_of_their_own_episode():
    profile = AgentProfile(
        ChatTemplate(
            user="{task} ; {observation} ; {admissible_actions} ; {step}",
            user_with_history="{history} ; {observation} ; {step}",
        ),
        memory=LastSteps(1),
    )
    stage = Stage(lambda r: DOWN if r.group_id == 0 else "<action> jump </action>", profile=profile)
    stage.play(task(0, start=3), task(1, start=5))
    assert stage.prompts()[0] == (
        "<user> count to 0 ; left 3 ; ' down ' \n ' jump ' ; 1 <assistant>"
    )
    assert stage.prompts()[2] == (
        "<user> [ Observation 1 : ' left 3 ' , Action 1 : ' down ' ] ; left 2 ; 2 <assistant>"
    )
    assert stage.prompts()[5] == (
        "<user> [ Observation 2 : ' left 3 ' , Action 2 : ' jump ' ] ; left 1 ; 3 <assistant>"
    )
    assert profile.memory.render() == ("", 0)  # episodes work on copies


def test_a_task_told_only_at_reset_stays():
    class ToldOnce(Countdown):
        def step(self, action):
            *rest, info = super().step(action)
            del info["task"]
            return *rest, info

    stage = Stage(make=ToldOnce, profile=replace(PROFILE, prompt=ChatTemplate("{task}")))
    (episode,) = stage.play(task(start=2))
    assert stage.prompts() == ["<user> count to 0 <assistant>"] * 2
    assert episode.custom_data["task"] == "count to 0"


# How it ends -------------------------------------------------------------------------------------


def test_max_episode_steps_truncates():
    stage = Stage("<action> wait </action>", max_episode_steps=3)
    (episode,) = stage.play(task(start=2))
    assert len(episode) == len(stage.engine.requests) == 3
    assert (episode.is_terminated, episode.is_truncated) == (False, True)
    assert episode.custom_data["won"] is False
    assert words(episode.observations[3]) == ""


def test_success_in_the_last_step_is_no_truncation():
    (episode,) = Stage(max_episode_steps=2).play(task(start=2))
    assert (episode.is_terminated, episode.is_truncated) == (True, False)


def test_the_environments_own_limit_counts():
    class Short(Countdown):
        def step(self, action):
            *rest, _, info = super().step(action)
            return *rest, self.left == 3, info

    (episode,) = Stage(make=Short).play(task(start=5))
    assert len(episode) == 2
    assert (episode.is_terminated, episode.is_truncated) == (False, True)


class Growing(Countdown):
    """An observation that grows by one word per step."""

    def _seen(self):
        return " ".join(["left"] * (6 - self.left))


def test_a_prompt_over_the_limit_ends_the_episode_where_wanted():
    # Prompts have 1, 2, 3, ... words and two tokens around them: the fourth has 6.
    stage = Stage(make=Growing, max_prompt_tokens=5, on_long_prompt="end_episode")
    (episode,) = stage.play(task(start=5))
    assert [len(ids) for ids in episode.observations] == [3, 4, 5, 0]
    assert len(stage.engine.requests) == 3
    assert (episode.is_terminated, episode.is_truncated) == (False, True)
    assert episode.infos[3]["observation"] == "left left left left"


def test_a_first_prompt_over_the_limit_gives_a_truncated_episode_of_no_steps():
    stage = Stage(make=Growing, max_prompt_tokens=2, on_long_prompt="end_episode")
    episodes = stage.play(task(size=2, start=5))
    assert stage.engine.requests == []
    assert [len(episode) for episode in episodes] == [0, 0]
    assert [(e.is_terminated, e.is_truncated) for e in episodes] == [(False, True)] * 2
    assert episodes[1].custom_data["member"] == 1


def test_a_prompt_over_the_limit_is_an_error_by_default():
    stage = Stage(make=Growing, max_prompt_tokens=5)
    with pytest.raises(PromptTooLongError, match=r"has 6 tokens"):
        stage.play(task(start=5))
    assert stage.returned == stage.lent


# What goes wrong ---------------------------------------------------------------------------------


class Painter(Countdown):
    """Shows a picture of the last two steps."""

    def _seen(self):
        return np.zeros(3) if self.left <= 2 else super()._seen()


@pytest.mark.parametrize("start", [2, 3], ids=["at reset", "at a step"])
def test_an_observation_that_is_no_string_is_refused(start):
    with pytest.raises(EnvFailure, match="'Test' observed a ndarray for 'agent'") as error:
        Stage(make=Painter).play(task(start=start))
    assert "expected a string" in str(error.value)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward):
    class Divided(Countdown):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, reward, *rest

    with pytest.raises(EnvFailure, match=f"'Test' gave reward {reward} to 'agent'"):
        Stage(make=Divided).play(task(start=3))


def test_what_is_no_environment_is_refused():
    with pytest.raises(EnvFailure, match=r"'Test' is a list: expected a gymnasium.Env or an"):
        Stage(make=list).play(task())


class CrashError(Exception):
    """The environment broke."""


def test_an_error_in_one_episode_stops_the_others_and_frees_all_games():
    class Crashing(Countdown):
        def step(self, action):
            if self.seeds == [10]:
                raise CrashError("the simulator died")
            return super().step(action)

    stage = Stage(make=Crashing)

    async def scenario() -> None:
        with pytest.raises(EnvFailure, match="'Test' raised CrashError: the simulator died"):
            await stage.start(task(0, start=30), task(1, start=30))
        sent = len(stage.engine.requests)
        # The other one of 30 steps may have sent a few more requests by then.
        assert sent < 8
        for _ in range(20):
            await asyncio.sleep(0)
        # Nothing goes on playing behind the error, on games that others may be lent by now.
        assert len(stage.engine.requests) == sent
        assert stage.engine.running == set()

    asyncio.run(scenario())
    # The game that broke does not come back.
    assert stage.returned == stage.lent[1:]
    assert len(stage.lent) == 2


def test_a_game_can_be_played_again():
    env = Countdown()
    stage = Stage(make=lambda: env)
    assert [len(e) for e in stage.play(task(start=3))] == [3]
    assert [len(e) for e in stage.play(task(start=2))] == [2]


def test_spaces_are_not_needed_to_play():
    class Bare(gymnasium.Env):
        def reset(self, *, seed=None, options=None):
            return "left 1", {}

        def step(self, action):
            return "left 0", 1, True, False, {}

    (episode,) = Stage(make=Bare).play(task())
    assert list(episode.rewards) == [1.0]
    assert episode.custom_data["task"] == ""
    assert "won" not in episode.custom_data
