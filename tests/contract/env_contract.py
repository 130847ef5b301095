"""The contract that every text environment keeps, as checks that raise AssertionError.

`check_contract(make, legal_action=...)` runs all of `CHECKS`; the parametrised test runs them one
by one. Single-agent environments and RLlib `MultiAgentEnv`s go through the same checks: a `Player`
turns both into `Turn`s, dictionaries by agent id.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from gymnasium.utils.env_checker import check_env

from envs.spaces import TextSpace

Make = Callable[[], Any]
LegalAction = Callable[[str, dict[str, Any], np.random.Generator], str]
Actions = dict[str, str]

SEEDS = (0, 1, 2)
INFO_TYPES = {
    "task": str,
    "task_id": str,
    "anchor": str,
    "admissible_actions": list,
    "is_action_valid": bool,
    "won": bool,
    "score": float,
}
NONSENSE = ("", " \t\n", "frobnicate the grue", "🦄 \x00 </action>", "<action>" * 1000)


class Turn(NamedTuple):
    """What one reset or step returned, by agent id."""

    observations: dict[str, str]
    rewards: dict[str, float]
    is_terminated: bool
    is_truncated: bool
    infos: dict[str, dict[str, Any]]

    @property
    def is_last(self) -> bool:
        return self.is_terminated or self.is_truncated


class Player:
    """Plays single- and multi-agent environments alike."""

    def __init__(self, env: Any):
        self.env = env
        self.is_multi_agent = hasattr(env, "possible_agents")
        self.agents = list(env.possible_agents) if self.is_multi_agent else ["agent"]

    def reset(self, seed: int | None = None) -> Turn:
        observation, info = self.env.reset(seed=seed)
        if self.is_multi_agent:
            return Turn(observation, {}, False, False, info)
        return Turn({"agent": observation}, {}, False, False, {"agent": info})

    def step(self, actions: Actions) -> Turn:
        if self.is_multi_agent:
            observations, rewards, terminateds, truncateds, infos = self.env.step(actions)
            return Turn(observations, rewards, terminateds["__all__"], truncateds["__all__"], infos)
        observation, reward, terminated, truncated, info = self.env.step(actions["agent"])
        return Turn(
            {"agent": observation}, {"agent": reward}, terminated, truncated, {"agent": info}
        )

    def play(self, first: Turn, choose: Callable[[Turn], Actions], max_steps: int) -> list[Turn]:
        """Step until the episode ends or `max_steps` are done; return all turns."""
        turns = [first]
        while not turns[-1].is_last and len(turns) <= max_steps:
            turns.append(self.step(choose(turns[-1])))
        return turns


def any_admissible(observation: str, info: dict[str, Any], rng: np.random.Generator) -> str:
    """Draw one of the admissible actions."""
    return str(rng.choice(info["admissible_actions"]))


def check_contract(make: Make, *, legal_action: LegalAction = any_admissible) -> None:
    """Check the whole contract.

    Args:
        make: Builds a new environment each time; picklable by cloudpickle.
        legal_action: Draws a legal action from (observation, info, random generator).

    Raises:
        AssertionError: The environment breaks the contract; the message says where.
    """
    for check in CHECKS:
        check(make, legal_action)


def check_constructor(make: Make, legal_action: LegalAction) -> None:
    """Constructor arguments are keyword-only and have defaults; `env.horizon` is the step limit."""
    env = make()
    assert isinstance(getattr(env, "horizon", None), int), "the step limit must be env.horizon"
    for parameter in inspect.signature(type(env.unwrapped)).parameters.values():
        assert parameter.kind is parameter.KEYWORD_ONLY, f"{parameter} is not keyword-only"
        assert parameter.default is not parameter.empty, f"{parameter} has no default"


def check_gymnasium(make: Make, legal_action: LegalAction) -> None:
    """Spaces are `TextSpace`; gymnasium's own checker passes without a warning."""
    env = make()
    player = Player(env)
    if player.is_multi_agent:
        spaces = [env.get_observation_space(agent) for agent in player.agents]
        spaces += [env.get_action_space(agent) for agent in player.agents]
    else:
        spaces = [env.observation_space, env.action_space]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env, skip_render_check=True)
    assert all(isinstance(space, TextSpace) for space in spaces), spaces
    env.close()


def check_same_seed_same_episode(make: Make, legal_action: LegalAction) -> None:
    """A seed gives the same episodes in a used environment, a new one, and another process."""
    used = Player(make())
    random_episode(used, 99, legal_action, max_steps=3)
    here = fingerprint(used, legal_action)
    assert here == fingerprint(Player(make()), legal_action), "an earlier episode left a trace"
    assert here == _fingerprint_in_another_process(make, legal_action), (
        "another process plays other episodes for the same seeds"
    )


def check_seeds_give_different_tasks(make: Make, legal_action: LegalAction) -> None:
    """20 seeds give at least two tasks."""
    player = Player(make())
    first = _dump([player.reset(0)])
    assert any(_dump([player.reset(seed)]) != first for seed in range(1, 20)), (
        "20 seeds all give the same task"
    )


def check_pickle(make: Make, legal_action: LegalAction) -> None:
    """A pickled copy goes on exactly as the original: before, just after, and past a reset."""
    original = make()
    fresh = pickle.loads(pickle.dumps(original))
    assert fingerprint(Player(original), legal_action) == fingerprint(Player(fresh), legal_action)
    for steps in (0, 2):
        player = Player(make())
        turns = random_episode(player, SEEDS[0], legal_action, max_steps=steps)
        if turns[-1].is_last:
            continue
        copied = Player(pickle.loads(pickle.dumps(player.env)))
        rests = [
            p.play(turns[-1], _chooser(legal_action, seed=7), max_steps=5) for p in (player, copied)
        ]
        assert _dump(rests[0]) == _dump(rests[1]), f"a copy made after {steps} steps differs"


def check_no_step_counter(make: Make, legal_action: LegalAction) -> None:
    """Neither observations nor anchors count steps.

    Two ways to see one: actions that change nothing (one per agent, which keeps whose turn it is)
    must leave all later observations as they were, and no number in the observations may go up or
    down by one at every step of every episode.
    """
    for seed in SEEDS:
        player = Player(make())
        turns = [player.reset(seed)]
        choose = _chooser(legal_action, seed)
        taken: list[str] = []
        while not turns[-1].is_last and len(taken) < 6:
            (action,) = choose(turns[-1]).values()
            taken.append(action)
            turns.append(player.step(_same_for_all(turns[-1], action)))
        delayed = player.reset(seed)
        for _ in player.agents:
            delayed = player.step(_same_for_all(delayed, NONSENSE[2]))
        for action, expected in zip(taken, turns[1:], strict=True):
            if delayed.is_last:
                break
            delayed = player.step(_same_for_all(delayed, action))
            if not delayed.is_last and not expected.is_last:
                assert _anchors(delayed) == _anchors(expected), (
                    f"after an invalid action, {action!r} is answered by {_anchors(delayed)} "
                    f"in place of {_anchors(expected)}"
                )

    episodes = [random_episode(Player(make()), seed, legal_action) for seed in SEEDS]
    for sign in (1, -1):
        starts = [
            {number - sign * t for number in _numbers(turn)}
            for turns in episodes
            for t, turn in enumerate(turns)
        ]
        assert not set.intersection(*starts), "a number in the observation counts the steps"


def check_types(make: Make, legal_action: LegalAction) -> None:
    """Observations, rewards, flags and infos have the promised types and never change later."""
    for seed in SEEDS:
        player = Player(make())
        turns = [player.reset(seed)]
        kept = [copy.deepcopy(turns[0])]
        choose = _chooser(legal_action, seed)
        while not turns[-1].is_last:
            turns.append(player.step(choose(turns[-1])))
            kept.append(copy.deepcopy(turns[-1]))
        assert turns == kept, "an info that was handed out changed afterwards"
        for turn in turns:
            _check_turn_types(turn)
        assert set(turns[-1].observations) == set(turns[-1].rewards) == set(player.agents), (
            "the last step must give every agent an observation and a reward"
        )


def check_invalid_actions(make: Make, legal_action: LegalAction) -> None:
    """Nonsense never raises, never wins, is flagged where actions are, and play goes on."""
    player = Player(make())
    for nonsense in NONSENSE:
        answers = [player.reset(SEEDS[0])]
        for _ in range(len(player.agents) + 1):
            if answers[-1].is_last:
                break
            answers.append(player.step(_same_for_all(answers[-1], nonsense)))
        for answer in answers[1:]:
            _check_turn_types(answer)
            for info in answer.infos.values():
                assert not info.get("won"), f"{nonsense!r} wins"
                assert info.get("is_action_valid") is not True, f"{nonsense!r} counts as valid"
        if not answers[-1].is_last:
            player.step(_chooser(legal_action, seed=0)(answers[-1]))


def check_admissible_actions(make: Make, legal_action: LegalAction) -> None:
    """Where admissible actions are listed, there are some until the end and each is valid."""
    player = Player(make())
    for seed in SEEDS:
        turns = random_episode(player, seed, legal_action)
        for turn in turns[:-1]:
            for info in turn.infos.values():
                assert info.get("admissible_actions") != [], "no admissible action, yet no end"
        for turn in turns[1:]:
            for info in turn.infos.values():
                assert info.get("is_action_valid") is not False, "a legal action counts as invalid"
    first = player.reset(SEEDS[0])
    (agent,) = first.observations
    for action in first.infos[agent].get("admissible_actions", [])[:12]:
        player.reset(SEEDS[0])
        answers = [player.step({agent: action})]
        if player.is_multi_agent:
            answers = player.play(answers[0], _chooser(legal_action, seed=0), max_steps=1)
        for answer in answers:
            for info in answer.infos.values():
                assert info.get("is_action_valid") is not False, f"{action!r} is not accepted"


def check_episode_ends(make: Make, legal_action: LegalAction) -> None:
    """Episodes end within `env.horizon` steps for any policy; reset and close work afterwards."""
    env = make()
    player = Player(env)
    policies = [_chooser(legal_action, seed=0), lambda turn: _same_for_all(turn, NONSENSE[2])]
    for choose in policies:
        turns = player.play(player.reset(SEEDS[0]), choose, max_steps=env.horizon)
        assert turns[-1].is_last, f"no end after horizon = {env.horizon} steps"
        assert not player.reset().is_last
    env.close()
    env.close()


CHECKS: list[Callable[[Make, LegalAction], None]] = [
    check_constructor,
    check_gymnasium,
    check_same_seed_same_episode,
    check_seeds_give_different_tasks,
    check_pickle,
    check_no_step_counter,
    check_types,
    check_invalid_actions,
    check_admissible_actions,
    check_episode_ends,
]


def random_episode(
    player: Player, seed: int, legal_action: LegalAction, max_steps: int = 15
) -> list[Turn]:
    """Play random legal actions, a function of the seed alone."""
    return player.play(player.reset(seed), _chooser(legal_action, seed), max_steps)


def fingerprint(player: Player, legal_action: LegalAction) -> str:
    """Hash everything that random legal episodes of all `SEEDS` return."""
    dumps = [_dump(random_episode(player, seed, legal_action)) for seed in SEEDS]
    return hashlib.sha256("\n".join(dumps).encode()).hexdigest()


def _fingerprint_in_another_process(make: Make, legal_action: LegalAction) -> str:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, cloudpickle; make, legal_action, Player, fingerprint = "
            "cloudpickle.load(sys.stdin.buffer); print(fingerprint(Player(make()), legal_action))",
        ],
        input=cloudpickle.dumps((make, legal_action, Player, fingerprint)),
        capture_output=True,
        # Another hash seed than this process has: order of sets must not matter.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1234"},
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode().split()[-1]


def _chooser(legal_action: LegalAction, seed: int) -> Callable[[Turn], Actions]:
    rng = np.random.default_rng(seed)
    return lambda turn: {
        agent: legal_action(observation, turn.infos[agent], rng)
        for agent, observation in turn.observations.items()
    }


def _same_for_all(turn: Turn, action: str) -> Actions:
    return dict.fromkeys(turn.observations, action)


def _anchors(turn: Turn) -> list[str]:
    return [
        turn.infos[agent].get("anchor", observation)
        for agent, observation in turn.observations.items()
    ]


def _numbers(turn: Turn) -> Iterable[int]:
    return (int(digits) for text in _anchors(turn) for digits in re.findall(r"[0-9]+", text))


def _dump(turns: list[Turn]) -> str:
    known = [
        turn._replace(
            infos={
                agent: {key: value for key, value in info.items() if key in INFO_TYPES}
                for agent, info in turn.infos.items()
            }
        )
        for turn in turns
    ]
    return json.dumps(known, sort_keys=True)


def _check_turn_types(turn: Turn) -> None:
    for observation in turn.observations.values():
        assert isinstance(observation, str), f"observation {observation!r} is not a str"
    for reward in turn.rewards.values():
        assert type(reward) is float, f"reward {reward!r} is not a float"
        assert math.isfinite(reward), f"reward {reward!r} is not finite"
    assert type(turn.is_terminated) is bool, f"terminated is {turn.is_terminated!r}"
    assert type(turn.is_truncated) is bool, f"truncated is {turn.is_truncated!r}"
    assert set(turn.infos) <= set(turn.observations), "an info without an observation"
    for info in turn.infos.values():
        for key in info.keys() & INFO_TYPES.keys():
            assert type(info[key]) is INFO_TYPES[key], f"info[{key!r}] is {info[key]!r}"
        for action in info.get("admissible_actions", []):
            assert isinstance(action, str), f"admissible action {action!r} is not a str"
        assert math.isfinite(info.get("score", 0.0)), f"score {info['score']!r} is not finite"
