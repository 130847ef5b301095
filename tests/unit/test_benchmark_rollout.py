"""The rollout benchmark's parts, on a tiny model and few turns."""

from __future__ import annotations

import json

import pytest

from benchmarks import rollout as benchmark


def test_lengths_are_spread_evenly_and_shuffled():
    turns = benchmark.spread(32)
    assert (min(turns), max(turns)) == (5, 50)
    # 32 numbers in even steps from 5 to 50 have the mean 27.5.
    assert sum(turns) == pytest.approx(27.5 * 32, abs=16)
    assert turns != sorted(turns)
    assert benchmark.spread(3, longest=9) in ([5, 7, 9], [7, 9, 5], [9, 7, 5], [5, 9, 7], [9, 5, 7])


def test_one_step_in_twenty_is_slow_and_always_the_same():
    steps = [benchmark.slow_step(seed, step) for seed in range(100) for step in range(100)]
    slow = steps.count(0.5)
    assert steps.count(0.0) + slow == 10_000
    # 500 expected, standard deviation 22.
    assert abs(slow - 500) < 90
    assert steps[:100] == [benchmark.slow_step(0, step) for step in range(100)]


def test_an_episode_ends_after_its_turns():
    env = benchmark.House()
    seen = {env.reset(seed=4, options={"turns": 3})[0]}
    ends = []
    for _ in range(3):
        observation, _, terminated, _, _ = env.step("whatever")
        seen.add(observation)
        ends.append(terminated)
    assert ends == [False, False, True]
    assert len(seen) == 4


def test_all_ratios_of_a_small_run(capsys):
    command = "--model tiny --dtype float32 --episodes 3 --longest 6 --requests 4"
    benchmark.main([*command.split(), "--engine", "transformers"])
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    turns = benchmark.spread(3, longest=6)
    # Every turn has 16 tokens; in lockstep all three episodes take six turns.
    assert figures["tokens_vs_lockstep"] == round(sum(turns) / (3 * 6), 3)
    for name in (
        "wall_vs_lockstep",
        "wall_over_no_env",
        "wall_over_engine",
        "cpu_over_engine",
        "lockstep_over_async",
    ):
        assert figures[name] > 0
    assert figures["transformers_tokens_per_cpu_s_shared"] > 0
    assert "vllm_tokens_per_cpu_s" not in figures


def test_requests_of_a_rollout_can_be_sent_again():
    bench = benchmark.build("transformers", "tiny", concurrency=2, dtype="float32")
    *_, tokens = bench.play([1, 2])
    assert tokens == 3 * 16
    assert len(bench.requests) == 3
    wall, cpu, again = bench.send_at_once(bench.requests)
    assert wall > 0
    assert cpu > 0
    assert again == tokens
    bench.engine.close()
