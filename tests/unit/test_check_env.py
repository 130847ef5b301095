"""The environment checker's command line: its tables and its exit status."""

from __future__ import annotations

import re

import pytest

from rllib_gigpo.check_env import main


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_a_good_environment_with_an_expert(capsys):
    assert main(["KeyDoor", "--episodes", "32", "--env-config", '{"size": 3}']) == 0
    told = capsys.readouterr().out
    assert "BROKEN" not in told
    assert len(re.findall(r" ok$", told, re.MULTILINE)) == 10
    assert "4 groups of 8 episodes" in told
    assert line_of(told, "expert ").split()[1] == "100.0%"
    assert "(anchor: exact)" in told
    # The observation is 11 to 13 words, and two role tokens stand around it.
    assert "tokenizer of tiny" in told
    assert "GiGPO will help here" in told.splitlines()[-1]
    assert told.splitlines()[-1].endswith("(policy: half expert)")


def test_similarity_and_no_expert(capsys):
    arguments = ["--episodes", "8", "--group-size", "4", "--anchor", "similarity"]
    assert main(["tests.broken_envs:Silent", *arguments]) == 0
    told = capsys.readouterr().out
    assert "2 groups of 4 episodes" in told
    assert "(anchor: similarity of 0.9 by rapidfuzz)" in told
    assert line_of(told, "random ").split()[1:3] == ["not", "told"]
    assert "\nexpert" not in told
    assert told.splitlines()[-1].endswith("(policy: random)")


@pytest.mark.parametrize("flag", ["--similarity-threshold=0.8", "--similarity-measure=rapidfuzz"])
def test_a_flag_of_similarity_without_it_is_refused(capsys, flag):
    with pytest.raises(SystemExit):
        main(["KeyDoor", flag])
    told = capsys.readouterr().err
    assert f"{flag.split('=')[0]} is of --anchor similarity: add that, or leave it out" in told


def test_an_expert_that_gives_up_is_told(capsys):
    assert main(["tests.broken_envs:GivesUp", "--episodes", "8"]) == 0
    told = capsys.readouterr().out
    assert "not played by expert: no expert for this task" in told
    assert told.splitlines()[-1].endswith("(policy: random)")


def test_one_task_alone_is_a_note(capsys):
    assert main(["tests.broken_envs:OneTask", "--episodes", "8"]) == 0
    told = capsys.readouterr().out
    assert "note: 20 seeds all give the same task: fine for an environment that has one" in told
    assert len(re.findall(r" ok *$", told, re.MULTILINE)) == 9
    assert "BROKEN" not in told


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("StepCounter", "BROKEN: ContractError: after an invalid action"),
        ("RaisesOnNonsense", "BROKEN: ValueError: frobnicate the grue"),
    ],
)
def test_a_broken_contract_is_exit_status_1(capsys, name, message):
    assert main([f"tests.broken_envs:{name}"]) == 1
    told = capsys.readouterr().out
    assert message in told
    assert "The contract is broken" in told
    assert "groups of" not in told, "nothing is played"
