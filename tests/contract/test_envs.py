"""Every bundled environment keeps the contract, and the contract notices broken ones."""

from __future__ import annotations

import functools

import pytest

from envs.catalog import ENVIRONMENTS, make
from rllib_gigpo.env_checks import CHECKS, ContractError, check_contract
from rllib_gigpo.scripted import random_legal
from tests import broken_envs
from tests.missing import skip_or_fail

_WITH_PICTURES = ("Sokoban", "NumberLine", "EZPoints", "Points24", "Blackjack")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment_keeps_the_contract(name, check):
    entry = ENVIRONMENTS[name]
    make_env = functools.partial(make, name, **entry.contract_kwargs)
    if entry.extra is not None:
        try:
            make_env().close()
        except ImportError as error:
            skip_or_fail(str(error))
    check(make_env, random_legal)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", _WITH_PICTURES)
def test_picture_views_keep_the_contract(name, check):
    check(functools.partial(make, name, view="rgb"), random_legal)


def test_unknown_environment_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'KeyDor'; use one of.*'KeyDoor'"):
        make("KeyDor")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (broken_envs.PositionalArguments, "not keyword-only"),
        (broken_envs.NoHorizon, "the step limit must be env.horizon, an int"),
        (broken_envs.PlainSpaces, "does not contain"),
        (broken_envs.HashOrder, "another process"),
        (broken_envs.Leftovers, "left a trace"),
        (broken_envs.ForgetfulPickle, "a copy made after"),
        (broken_envs.StepCounter, "after an invalid action"),
        (broken_envs.CountDown, "counts the steps"),
        (broken_envs.IntegerReward, "not a float"),
        (broken_envs.SharedList, "changed afterwards"),
        (broken_envs.AcceptsNonsense, "counts as valid"),
        (broken_envs.NothingAdmissible, "no admissible action"),
        (broken_envs.BadAdmissible, "'go up' is not accepted"),
        (broken_envs.NoEnd, "no end"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_contract_notices(broken, message):
    with pytest.raises(ContractError, match=message):
        check_contract(broken, broken_envs.only_moves)


def test_one_task_alone_is_noted():
    with pytest.warns(UserWarning, match="20 seeds all give the same task"):
        check_contract(broken_envs.OneTask, broken_envs.only_moves)


def test_contract_notices_an_error_on_nonsense():
    with pytest.raises(ValueError, match="frobnicate"):
        check_contract(broken_envs.RaisesOnNonsense, broken_envs.only_moves)
