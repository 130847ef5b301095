"""Every engine generates as the contract of `rllib_gigpo/engines/base.py` says.

Once per kind of engine; `test_engine_weights.py` does the same for weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_client import (
    EXACT,
    FRESH,
    MAX_MODEL_LEN,
    MODELS,
    POLICY,
    PROMPT,
    Client,
    weights_of,
)
from tiny_models import EOS_ID, VOCAB_SIZE, WORDS, forward_logps
from transformers import PreTrainedModel

from rllib_gigpo.engines.base import Completion, EngineError


def text_of(token_ids: np.ndarray) -> str:
    return " ".join(WORDS[token] for token in token_ids)


@torch.no_grad()
def next_probabilities(
    model: PreTrainedModel, ids: Sequence[int] | np.ndarray, temperature: float
) -> torch.Tensor:
    logits = model(input_ids=torch.as_tensor(np.asarray(ids))[None].long()).logits[0, -1]
    return (logits / temperature).softmax(dim=-1)


# --- tokens and log-probabilities ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.4, 0.0])
@pytest.mark.parametrize("policy", MODELS)
def test_logps_agree_with_a_plain_forward(
    client: Client, references: dict[str, PreTrainedModel], policy: str, temperature: float
) -> None:
    prompts = [np.arange(10, 10 + length) for length in (1, 5, 31, 32, 70)]
    completions = client.batch(
        [client.request(prompt, policy=policy, temperature=temperature) for prompt in prompts]
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = forward_logps(
            references[policy], prompt, completion.token_ids, temperature or 1.0
        )
        np.testing.assert_allclose(completion.logps, expected, atol=EXACT)
        assert completion.token_ids.dtype == np.int32
        assert completion.logps.dtype == np.float32
        assert completion.token_ids.shape == completion.logps.shape == (12,)
        assert completion.finish_reason == "length"


def test_greedy_takes_the_most_likely_token(
    client: Client, references: dict[str, PreTrainedModel]
) -> None:
    tokens = client.one(temperature=0.0, seed=3).token_ids
    ids = [*PROMPT]
    for token in tokens:
        assert token == int(next_probabilities(references[POLICY], ids, 1.0).argmax())
        ids.append(token)
    np.testing.assert_array_equal(tokens, client.one(temperature=0.0, seed=4).token_ids)


def test_greedy_and_sampled_requests_share_a_batch(
    client: Client, references: dict[str, PreTrainedModel]
) -> None:
    temperatures = [0.0, 0.5, 1.0, 1.5]
    completions = client.batch([client.request(temperature=t) for t in temperatures])
    for temperature, completion in zip(temperatures, completions, strict=True):
        expected = forward_logps(
            references[POLICY], PROMPT, completion.token_ids, temperature or 1.0
        )
        np.testing.assert_allclose(completion.logps, expected, atol=EXACT)


def test_samples_follow_the_tempered_distribution(
    client: Client, references: dict[str, PreTrainedModel]
) -> None:
    draws, temperature, top_k = 600, 0.7, 3
    completions = client.batch(
        [
            client.request(seed=seed, temperature=temperature, top_k=top_k, max_tokens=1)
            for seed in range(draws)
        ]
    )
    probabilities = next_probabilities(references[POLICY], PROMPT, temperature)
    likely = probabilities.topk(top_k)
    expected = likely.values / likely.values.sum()
    counts = Counter(int(completion.token_ids[0]) for completion in completions)
    assert set(counts) <= set(likely.indices.tolist())
    for token, probability in zip(likely.indices.tolist(), expected.tolist(), strict=True):
        deviation = (probability * (1 - probability) / draws) ** 0.5
        assert abs(counts[token] / draws - probability) < 4 * deviation


@pytest.mark.parametrize("restriction", [{"top_k": 5}, {"top_p": 0.4}, {"top_k": 20, "top_p": 0.5}])
def test_top_k_and_top_p_restrict_tokens_but_not_logps(
    client: Client, references: dict[str, PreTrainedModel], restriction: dict[str, Any]
) -> None:
    temperature = 1.3
    completions = client.batch(
        [client.request(seed=seed, temperature=temperature, **restriction) for seed in range(8)]
    )
    for completion in completions:
        expected = forward_logps(references[POLICY], PROMPT, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logps, expected, atol=EXACT)
        ids = [*PROMPT]
        for token in completion.token_ids:
            probabilities = next_probabilities(references[POLICY], ids, temperature)
            kept = allowed_tokens(probabilities, **restriction)
            assert int(token) in kept
            ids.append(token)


def allowed_tokens(probabilities: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> set[int]:
    """Top-k first, then the smallest set of most likely tokens whose share reaches top-p."""
    likely = probabilities.topk(top_k or VOCAB_SIZE)
    share = likely.values / likely.values.sum()
    before = share.cumsum(0) - share
    return set(likely.indices[before < top_p + 1e-6].tolist())


# --- seeds --------------------------------------------------------------------------------------


def test_seed_alone_decides_the_draws(client: Client) -> None:
    lone = [client.one(seed=seed, max_tokens=24) for seed in range(4)]
    rng = np.random.default_rng(0)
    company = [
        client.request(
            rng.integers(3, VOCAB_SIZE, size=length),
            seed=100 + length,
            policy=policy,
            max_tokens=int(rng.integers(1, 30)),
            temperature=0.8,
        )
        for length in (1, 9, 33, 64, 100)
        for policy in (POLICY, FRESH)
    ]
    mixed = client.batch(
        [*company[:5], *(client.request(seed=s, max_tokens=24) for s in range(4)), *company[5:]]
    )[5:9]
    for alone, together in zip(lone, mixed, strict=True):
        np.testing.assert_array_equal(alone.token_ids, together.token_ids)
        np.testing.assert_allclose(alone.logps, together.logps, atol=EXACT)
    assert len({tuple(completion.token_ids) for completion in lone}) == 4


def test_more_requests_than_max_num_seqs_are_all_answered(client: Client) -> None:
    completions = client.batch([client.request(seed=seed, max_tokens=3) for seed in range(40)])
    assert [len(completion.token_ids) for completion in completions] == [3] * 40
    np.testing.assert_array_equal(completions[39].token_ids, client.one(seed=39).token_ids[:3])


def test_a_burst_of_long_prompts_is_answered_like_each_alone(
    client: Client, references: dict[str, PreTrainedModel]
) -> None:
    """40 x 240 prompt tokens: more than an engine computes in one step."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB_SIZE, size=240) for _ in range(40)]
    completions = client.batch(
        [client.request(prompt, seed=seed, max_tokens=3) for seed, prompt in enumerate(prompts)]
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = forward_logps(references[POLICY], prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logps, expected, atol=EXACT)
    for seed in (0, 20, 39):
        alone = client.one(prompts[seed], seed=seed, max_tokens=3)
        np.testing.assert_array_equal(completions[seed].token_ids, alone.token_ids)


# --- ends of a response -------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_max_tokens_limits_the_response(client: Client, max_tokens: int) -> None:
    completion = client.one(max_tokens=max_tokens)
    assert len(completion.token_ids) == max_tokens
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("room", [1, 3])
def test_max_model_len_limits_the_response(client: Client, room: int) -> None:
    prompt = np.arange(MAX_MODEL_LEN - room) % 200 + 3
    completion = client.one(prompt, max_tokens=50)
    assert len(completion.token_ids) == room
    assert completion.finish_reason == "length"


def test_stop_token_id_ends_the_response_and_stays(client: Client) -> None:
    free = client.one(max_tokens=24).token_ids
    stop_id = int(free[7])
    end = free.tolist().index(stop_id) + 1
    completion = client.one(max_tokens=24, stop_token_ids=(EOS_ID + 1, stop_id))
    np.testing.assert_array_equal(completion.token_ids, free[:end])
    assert len(completion.logps) == end
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["one token", "two tokens", "part of a token"])
def test_stop_string_ends_the_response_and_stays(client: Client, kind: str) -> None:
    free = client.one(max_tokens=24, seed=1).token_ids
    words = [WORDS[token] for token in free]
    stop = {
        "one token": words[9],
        "two tokens": f"{words[8]} {words[9]}",
        "part of a token": words[9][1:],
    }[kind]
    end = next(n for n in range(1, 25) if stop in text_of(free[:n]))
    completion = client.one(max_tokens=24, seed=1, stop=("never said", stop))
    np.testing.assert_array_equal(completion.token_ids, free[:end])
    assert len(completion.logps) == end
    assert completion.finish_reason == "stop"


def test_a_stop_string_of_the_prompt_does_not_count(client: Client) -> None:
    completion = client.one(seed=2, max_tokens=8, stop=(f"{text_of(PROMPT[-2:])} ",))
    assert completion.finish_reason == "length"
    np.testing.assert_array_equal(completion.token_ids, client.one(seed=2).token_ids[:8])


def test_the_end_token_counts_only_where_asked_for(
    client: Client, references: dict[str, PreTrainedModel]
) -> None:
    """The tokenizer's end token ends nothing by itself: the request alone says what does."""
    pairs = torch.cartesian_prod(torch.arange(3, VOCAB_SIZE), torch.arange(3, 40))
    with torch.no_grad():
        likely = references[POLICY](input_ids=pairs).logits[:, -1].argmax(dim=-1)
    prompt = pairs[likely == EOS_ID][0].numpy()
    free = client.one(prompt, temperature=0.0, max_tokens=4)
    assert free.token_ids[0] == EOS_ID
    assert (len(free.token_ids), free.finish_reason) == (4, "length")
    for stop in ({"stop_token_ids": (EOS_ID,)}, {"stop": ("<eos>",)}):
        stopped = client.one(prompt, temperature=0.0, max_tokens=4, **stop)
        assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([EOS_ID], "stop")


def test_abort_returns_what_there_is(client: Client) -> None:
    async def scenario() -> list[Completion]:
        lengths = {"max_tokens": 200}
        requests = [client.request(seed=5, **lengths), client.request(seed=6, **lengths)]
        tasks = [asyncio.create_task(client.engine.generate(request)) for request in requests]
        await asyncio.sleep(0.02)
        await client.engine.abort(requests[0].request_id)
        return list(await asyncio.gather(*tasks))

    aborted, other = client.run(scenario())
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.logps) < 200
    whole = client.one(seed=5, max_tokens=200)
    np.testing.assert_array_equal(aborted.token_ids, whole.token_ids[: len(aborted.token_ids)])
    assert (len(other.token_ids), other.finish_reason) == (200, "length")


def test_abort_before_the_first_token(client: Client) -> None:
    async def scenario() -> Completion:
        request = client.request(max_tokens=200)
        task = asyncio.create_task(client.engine.generate(request))
        await asyncio.sleep(0)
        await client.engine.abort(request.request_id)
        return await task

    completion = client.run(scenario())
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.logps) < 200


def test_abort_of_an_unknown_request_is_ignored(client: Client) -> None:
    client.run(client.engine.abort("never sent"))
    assert client.one().finish_reason == "length"


def test_a_cancelled_request_leaves_the_engine(client: Client) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(client.engine.generate(client.request(max_tokens=200)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    weights = weights_of(POLICY)  # before any request runs: an engine may use torch's generator
    client.run(scenario())
    client.engine.load_weights(POLICY, weights, 0)  # refused while a request runs


# --- refusals -----------------------------------------------------------------------------------


def test_bad_requests_are_refused_and_harm_nothing(client: Client) -> None:
    before = client.one(seed=9)
    client.refused([], match="empty")
    client.refused(np.full(MAX_MODEL_LEN, 5), match=f"{MAX_MODEL_LEN}")
    client.refused([5, VOCAB_SIZE], match=f"{VOCAB_SIZE}")
    client.refused([5, -1], match="-1")
    client.refused(max_tokens=0, match="max_tokens")
    client.refused(policy="nobody", match="nobody")
    after = client.one(seed=9)
    np.testing.assert_array_equal(before.token_ids, after.token_ids)


def test_a_bad_request_does_not_harm_its_batch(client: Client) -> None:
    async def scenario() -> list[Any]:
        requests = [client.request(seed=1), client.request([]), client.request(seed=2)]
        return await asyncio.gather(
            *(client.engine.generate(request) for request in requests), return_exceptions=True
        )

    first, refused, last = client.run(scenario())
    assert isinstance(refused, EngineError)
    np.testing.assert_array_equal(first.token_ids, client.one(seed=1).token_ids)
    np.testing.assert_array_equal(last.token_ids, client.one(seed=2).token_ids)


def test_max_model_len_is_told(client: Client) -> None:
    assert client.engine.max_model_len == MAX_MODEL_LEN
    request = client.request(np.full(MAX_MODEL_LEN - 1, 5), max_tokens=1)
    assert len(client.batch([replace(request)])[0].token_ids) == 1
