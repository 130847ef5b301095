"""Requests that the transformers engine refuses or fails, event loops, sleep and close."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from transformers_requests import (
    POLICY,
    assert_exact,
    build,
    request,
    run,
)

from rllib_gigpo.engines.base import Completion, EngineError, Request, Sampling, generate_batch

# --- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_impossible_sampling_is_refused(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        run(build(), [request([5, 6], **sampling)])


@pytest.mark.parametrize("prompt", [np.array([[5, 6]]), np.array([5.0, 6.0])])
def test_prompts_are_rows_of_integers(prompt: np.ndarray) -> None:
    with pytest.raises(EngineError, match="integer token ids"):
        run(build(), [Request(prompt, Sampling(), seed=0, request_id="bad")])


def test_running_ids_are_unique() -> None:
    with pytest.raises(EngineError, match="request_id"):
        run(build(), [request([5, 6], "twin"), request([7, 8], "twin")])


def test_a_waiting_request_can_be_aborted() -> None:
    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(sent)) for sent in requests]
        await asyncio.sleep(0)
        await engine.abort("waits-1")
        return await asyncio.gather(*tasks)

    engine = build(max_num_seqs=1)
    requests = [request([5, 6, 7 + i], f"waits-{i}") for i in range(3)]
    completions = asyncio.run(scenario())
    assert [c.finish_reason for c in completions] == ["length", "abort", "length"]
    assert [len(c.token_ids) for c in completions] == [8, 0, 8]
    assert_exact(requests, completions)


def test_non_finite_weights_fail_the_requests_and_good_ones_cure_it() -> None:
    engine = build()
    weights = dict(tiny_model("llama", tied=True).named_parameters())
    broken = {name: torch.full_like(value, torch.nan) for name, value in weights.items()}
    engine.load_weights(POLICY, broken, 4)
    requests = [request(range(5, 40), "one"), request(range(6, 40), "two")]

    async def gather() -> list[Any]:
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    errors = asyncio.run(gather())
    assert [type(error) for error in errors] == [EngineError, EngineError]
    assert "weight version 4" in str(errors[1])
    engine.load_weights(POLICY, weights, 5)
    shorter = [request(range(5, 9), "leaves old values behind its end")]
    assert_exact(shorter, run(engine, shorter))


# --- event loops, sleep, close ------------------------------------------------------------------


def test_event_loops_may_follow_each_other() -> None:
    engine = build()
    sent = [request(range(5, 9), "a")]
    with asyncio.Runner() as stays_open:
        stays_open.run(generate_batch(engine, sent))
        assert_exact(sent, run(engine, sent))
        assert_exact(sent, stays_open.run(generate_batch(engine, sent)))


def test_two_event_loops_at_once_are_refused() -> None:
    engine = build()
    with asyncio.Runner() as other:
        loop = other.get_loop()
        task = loop.create_task(engine.generate(request(range(5, 9), "a")))
        loop.run_until_complete(asyncio.sleep(0))
        with pytest.raises(EngineError, match="another event loop"):
            run(engine, [request(range(5, 9), "b")])
        assert len(loop.run_until_complete(task).token_ids) == 8


def test_sleep_waits_for_no_request_and_stops_new_ones() -> None:
    async def scenario() -> None:
        task = asyncio.create_task(engine.generate(request(range(5, 9), "runs")))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests run"):
            engine.sleep()
        await task
        engine.sleep()
        with pytest.raises(EngineError, match=r"wake\(\)"):
            await engine.generate(request(range(5, 9), "asleep"))
        engine.wake()
        await engine.generate(request(range(5, 9), "awake"))

    engine = build()
    asyncio.run(scenario())


def test_close_fails_what_runs_and_what_comes() -> None:
    async def scenario() -> None:
        task = asyncio.create_task(engine.generate(request(range(5, 9), "runs")))
        await asyncio.sleep(0)
        engine.close()
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request(range(5, 9), "late"))

    engine = build()
    asyncio.run(scenario())
