"""What is printed of an iteration."""

from __future__ import annotations

from rllib_gigpo.demo import describe

PHASES = ("rollout", "grouping", "advantages", "old_logp", "ref_logp", "update", "sync")
FOUND = {
    "episode_return_mean": 5.0,
    "episode_len_mean": 3.25,
    "prompt_tokens_mean": 9.0,
    "response_tokens_mean": 2.0,
    "valid_action_rate": 0.75,
    "num_prompt_tokens": 12_345,
    "num_response_tokens": 678,
}
LEARNED = {
    "nonzero_advantage_share": 0.5,
    "nonzero_step_advantage_share": 0.25,
    "gradient_norm": 0.125,
    "kl": 1e-3,
    "ratio_mean": 1.0,
    "entropy": 0.5,
}


def lines(learned=LEARNED, **found):
    result = {
        "env_runners": {**FOUND, **found},
        "timers": dict.fromkeys(PHASES, 1.0),
        "learners": {"__all_modules__": {}, "default_policy": learned},
    }
    return describe(result)


def test_the_numbers_of_the_environment_are_told_without_their_task_types():
    told = lines(success_rate=0.5, score_mean=0.2, tool_calls_mean=1.5, **{"score_mean/heat": 1.0})
    assert told[0] == "success 50.0%, return 5.00, length 3.2, valid actions 75.0%"
    assert told[1] == "tokens: 12,345 prompt, 678 response"
    assert told[2] == "environment: score 0.2, tool calls 1.5"


def test_an_environment_without_numbers_of_its_own_has_no_such_line():
    assert not any(line.startswith("environment") for line in lines())


def test_no_learning_signal_is_told():
    assert not any("no learning signal" in line for line in lines())
    flat = {**LEARNED, "nonzero_advantage_share": 0.0}
    assert any("no learning signal" in line for line in lines(flat))
