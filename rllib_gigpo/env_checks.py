"""The contract that every environment keeps, as checks that raise `ContractError`.

`check_contract(make)` runs all of `CHECKS`. Single-agent environments and RLlib `MultiAgentEnv`s go
through the same ones. `python -m rllib_gigpo.check_env NAME` prints them as a table.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NoReturn

from gymnasium.spaces import Box, Dict, Text
from gymnasium.utils.env_checker import check_env

from rllib_gigpo.env_player import (
    INFO_TYPES,
    SEEDS,
    Actions,
    Make,
    Player,
    Turn,
    dump,
    fingerprint,
    fingerprint_elsewhere,
)
from rllib_gigpo.observations import EXPECTED, is_observation, is_picture, is_text_and_picture
from rllib_gigpo.scripted import Policy, random_legal

NONSENSE = ("", " \t\n", "frobnicate the grue", "🦄 \x00 </action>", "<action>" * 1000)


class ContractError(AssertionError):
    """An environment breaks the contract; the message says where."""


class ContractNote(ContractError):  # noqa: N818 - not an error
    """An environment keeps the contract, and yet one should know what the message says."""


def check_contract(make: Make, policy: Policy = random_legal) -> None:
    """Check the whole contract.

    Args:
        make: Builds a new environment each time; picklable by cloudpickle.
        policy: Draws legal actions.

    Raises:
        ContractError: The environment breaks the contract. What is only to be noted is a warning.
    """
    for check in CHECKS:
        try:
            check(make, policy)
        except ContractNote as note:
            warnings.warn(str(note), stacklevel=2)


def horizon_of(env: Any) -> int | None:
    """Return the step limit: `env.horizon`, or that of gymnasium's registration, or None."""
    own = getattr(env.unwrapped, "horizon", None)
    return own if own is not None else getattr(env.spec, "max_episode_steps", None)


def check_constructor(make: Make, policy: Policy) -> None:
    """Constructor arguments are keywords with defaults; the step limit is env.horizon."""
    env = make()
    if not isinstance(horizon_of(env), int):
        _fail("the step limit must be env.horizon, an int")
    for parameter in inspect.signature(type(env.unwrapped)).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            _fail(f"the constructor argument {parameter} is not keyword-only")
        if parameter.default is parameter.empty:
            _fail(f"the constructor argument {parameter} has no default")
    env.close()


def check_gymnasium(make: Make, policy: Policy) -> None:
    """Spaces contain every text or picture; gymnasium's own checker passes without a warning."""
    env = make()
    player = Player(env)
    if player.is_multi_agent:
        spaces = [env.get_observation_space(agent) for agent in player.agents]
        spaces += [env.get_action_space(agent) for agent in player.agents]
    else:
        spaces = [env.observation_space, env.action_space]
    if not player.is_multi_agent and isinstance(spaces[0], Box | Dict):
        drawn = spaces[0].sample()
        if not is_picture(drawn) and not is_text_and_picture(drawn):
            _fail(f"{spaces[0]} holds no pictures: use envs.spaces.image_space")
        spaces = spaces[1:]
    for space in spaces:
        if not isinstance(space, Text):
            _fail(f"{space} is not a gymnasium Text space")
        refused = [text for text in (*NONSENSE, "Go left.") if not space.contains(text)]
        if refused:
            _fail(f"{space} does not contain {refused[0]!r}: use envs.spaces.TextSpace")
    if not player.is_multi_agent:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env.unwrapped, skip_render_check=True)
    env.close()


def check_same_seed_same_episode(make: Make, policy: Policy) -> None:
    """A seed gives the same episodes in a used environment, a new one, and another process."""
    used = Player(make())
    used.episode(99, policy, max_steps=3)
    here = fingerprint(used, policy)
    if here != fingerprint(Player(make()), policy):
        _fail("an earlier episode left a trace")
    if here != fingerprint_elsewhere(make, policy):
        _fail("another process plays other episodes for the same seeds")


def check_seeds_give_different_tasks(make: Make, policy: Policy) -> None:
    """20 seeds give at least two tasks.

    A task may hide at first, so starts of episodes are compared, played with the same draws.
    """
    player = Player(make())
    starts = (
        dump(player.play(player.reset(seed), player.chooser(policy, seed=0), max_steps=6))
        for seed in range(20)
    )
    first = next(starts)
    if all(start == first for start in starts):
        raise ContractNote(
            "20 seeds all give the same task: fine for an environment that has one alone, whose "
            "evaluation then tells nothing of other tasks; else draw it from self.np_random"
        )


def check_pickle(make: Make, policy: Policy) -> None:
    """A pickled copy goes on exactly as the original: before, just after, and past a reset."""
    original = make()
    fresh = pickle.loads(pickle.dumps(original))
    if fingerprint(Player(original), policy) != fingerprint(Player(fresh), policy):
        _fail("a copy made before the first reset plays other episodes")
    for steps in (0, 2):
        player = Player(make())
        turns = player.episode(SEEDS[0], policy, max_steps=steps)
        if turns[-1].is_last:
            continue
        copied = Player(pickle.loads(pickle.dumps(player.env)))
        rests = [
            p.play(turns[-1], p.chooser(policy, seed=7), max_steps=5) for p in (player, copied)
        ]
        if dump(rests[0]) != dump(rests[1]):
            _fail(f"a copy made after {steps} steps differs")


def check_no_step_counter(make: Make, policy: Policy) -> None:
    """Neither observations nor anchors count steps.

    Two ways to see one: actions that change nothing (one per agent, which keeps whose turn it is)
    must leave all later observations as they were, and no number in the observations may go up or
    down by one at every step of every episode.
    """
    for seed in SEEDS:
        _check_delay(Player(make()), policy, seed)
    episodes = [Player(make()).episode(seed, policy) for seed in SEEDS]
    for sign in (1, -1):
        starts = [
            {number - sign * t for number in _numbers(turn)}
            for turns in episodes
            for t, turn in enumerate(turns)
        ]
        if set.intersection(*starts):
            _fail("a number in the observation counts the steps")


def _check_delay(player: Player, policy: Policy, seed: int) -> None:
    turns = [player.reset(seed)]
    choose = player.chooser(policy, seed)
    taken: list[str] = []
    while not turns[-1].is_last and len(taken) < 6:
        (action,) = choose(turns[-1]).values()
        taken.append(action)
        turns.append(player.step(_same_for_all(turns[-1], action)))
    delayed = player.reset(seed)
    for _ in player.agents:
        if delayed.is_last:
            return
        delayed = player.step(_same_for_all(delayed, NONSENSE[2]))
    for action, expected in zip(taken, turns[1:], strict=True):
        if delayed.is_last:
            return
        delayed = player.step(_same_for_all(delayed, action))
        if delayed.is_last or expected.is_last:
            return
        if _anchors(delayed) != _anchors(expected):
            _fail(
                f"after an invalid action, {action!r} is answered by {_anchors(delayed)} "
                f"in place of {_anchors(expected)}"
            )


def check_types(make: Make, policy: Policy) -> None:
    """Observations, rewards, flags and infos have the promised types and never change later."""
    for seed in SEEDS:
        player = Player(make())
        turns = [player.reset(seed)]
        kept = [copy.deepcopy(turns[0])]
        choose = player.chooser(policy, seed)
        while not turns[-1].is_last:
            turns.append(player.step(choose(turns[-1])))
            kept.append(copy.deepcopy(turns[-1]))
        if [t.comparable() for t in turns] != [t.comparable() for t in kept]:
            _fail("an info that was handed out changed afterwards")
        for turn in turns:
            _check_turn_types(turn)
        for before, after in pairwise(turns):
            if not set(before.acting) <= set(after.rewards):
                _fail("an agent that acted got no reward, not even 0.0")
        last = turns[-1]
        if not set(last.observations) == set(last.rewards) == set(player.agents):
            _fail("the last step must give every agent an observation and a reward")


def check_invalid_actions(make: Make, policy: Policy) -> None:
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
                if info.get("won"):
                    _fail(f"{nonsense!r} wins")
                if info.get("is_action_valid") is True:
                    _fail(f"{nonsense!r} counts as valid")
        if not answers[-1].is_last:
            player.step(player.chooser(policy, seed=0)(answers[-1]))


def check_admissible_actions(make: Make, policy: Policy) -> None:
    """Where admissible actions are listed, there are some until the end and each is valid."""
    player = Player(make())
    for seed in SEEDS:
        turns = player.episode(seed, policy)
        for turn in turns[:-1]:
            if any(info.get("admissible_actions") == [] for info in turn.infos.values()):
                _fail("no admissible action, yet no end")
        for turn in turns[1:]:
            if any(info.get("is_action_valid") is False for info in turn.infos.values()):
                _fail("a legal action counts as invalid")
    first = player.reset(SEEDS[0])
    (agent,) = first.observations
    for action in first.infos[agent].get("admissible_actions", [])[:12]:
        player.reset(SEEDS[0])
        answers = [player.step({agent: action})]
        if player.is_multi_agent:
            answers = player.play(answers[0], player.chooser(policy, seed=0), max_steps=1)
        for answer in answers:
            if any(info.get("is_action_valid") is False for info in answer.infos.values()):
                _fail(f"{action!r} is not accepted")


def check_episode_ends(make: Make, policy: Policy) -> None:
    """Episodes end within env.horizon steps for any policy; reset and close work afterwards."""
    env = make()
    player = Player(env)
    horizon = horizon_of(env)
    assert horizon is not None, "check_constructor comes first"
    for choose in (
        player.chooser(policy, seed=0),
        lambda turn: _same_for_all(turn, NONSENSE[2]),
    ):
        turns = player.play(player.reset(SEEDS[0]), choose, max_steps=horizon)
        if not turns[-1].is_last:
            _fail(f"no end after horizon = {horizon} steps")
        if player.reset().is_last:
            _fail("a reset without a seed gives an episode that is over")
    env.close()
    env.close()


CHECKS: list[Callable[[Make, Policy], None]] = [
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


def _fail(message: str) -> NoReturn:
    raise ContractError(message)


def _same_for_all(turn: Turn, action: str) -> Actions:
    return dict.fromkeys(turn.acting, action)


def _anchors(turn: Turn) -> list[str | bytes]:
    return [
        turn.infos.get(agent, {}).get("anchor", observation)
        for agent, observation in turn.comparable().observations.items()
    ]


def _numbers(turn: Turn) -> Iterable[int]:
    texts = [anchor for anchor in _anchors(turn) if isinstance(anchor, str)]
    return (int(digits) for text in texts for digits in re.findall(r"[0-9]+", text))


def _check_turn_types(turn: Turn) -> None:
    for observation in turn.observations.values():
        if not is_observation(observation):
            _fail(f"observation {observation!r} is not what is expected: {EXPECTED}")
    for reward in turn.rewards.values():
        if type(reward) is not float:
            _fail(f"reward {reward!r} is not a float")
        if not math.isfinite(reward):
            _fail(f"reward {reward!r} is not finite")
    for name, flag in (("terminated", turn.is_terminated), ("truncated", turn.is_truncated)):
        if type(flag) is not bool:
            _fail(f"{name} is {flag!r}, not a bool")
    if not set(turn.infos) <= set(turn.observations):
        _fail("an info without an observation")
    for info in turn.infos.values():
        for key in info.keys() & INFO_TYPES.keys():
            if type(info[key]) not in INFO_TYPES[key]:
                kinds = " or ".join(kind.__name__ for kind in INFO_TYPES[key])
                _fail(f"info[{key!r}] is {info[key]!r}, not a {kinds}")
        for action in info.get("admissible_actions", []):
            if not isinstance(action, str):
                _fail(f"admissible action {action!r} is not a str")
        if not math.isfinite(info.get("score", 0.0)):
            _fail(f"score {info['score']!r} is not finite")
