"""What the transformers engine does beyond the contract that all engines keep.

Shared prompts, slots, arrivals in the middle of a response, models given as objects. The reference
is a plain Hugging Face forward pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, build_tiny_folder, forward_logps, tiny_config, tiny_model
from transformers import AutoModelForCausalLM
from transformers_requests import (
    EXACT,
    POLICY,
    assert_exact,
    build,
    difference,
    random_prompt,
    request,
    run,
)

from rllib_gigpo.engines.base import Completion, EngineError, Request, Sampling
from rllib_gigpo.engines.transformers_engine import TransformersEngine

# --- shared prompts -----------------------------------------------------------------------------


def test_equal_prompts_are_computed_once() -> None:
    requests = [request(range(10, 30), f"equal-{i}", max_tokens=3) for i in range(5)]
    requests += [request(range(50, 57), f"other-{i}", max_tokens=3) for i in range(2)]
    # Each distinct prompt of P tokens costs P - 1, and each request its last prompt token:
    # 19 + 5 + 6 + 2 = 32 of 5 * 20 + 2 * 7 = 114.
    assert difference(build(), requests) == {
        "requests": 7,
        "prompt_tokens": 114,
        "prefilled_tokens": 32,
        "generated_tokens": 21,
    }


def test_a_common_start_is_computed_once() -> None:
    start = [*range(10, 70)]
    requests = [request([*start, *random_prompt(i, 5 + i)], f"start-{i}") for i in range(4)]
    # The first prompt in full (65); the others wait one step and compute only what follows the
    # 60 common tokens (6 + 7 + 8).
    assert difference(build(), requests)["prefilled_tokens"] == 65 + 6 + 7 + 8


def test_a_late_request_continues_a_running_prompt() -> None:
    async def scenario() -> list[Completion]:
        first = asyncio.create_task(engine.generate(requests[0]))
        while engine.stats()["generated_tokens"] < 3:
            await asyncio.sleep(0)
        return [await engine.generate(requests[1]), await first]

    engine = build()
    long = request(range(10, 50), "long", max_tokens=40)
    requests = [long, request([*range(10, 45), 7, 8], "late", max_tokens=4)]
    late, first = asyncio.run(scenario())
    assert_exact(requests, [first, late])
    # 35 of the late prompt's 37 tokens are in the first one's slot.
    assert engine.stats()["prefilled_tokens"] == 40 + 2


def test_short_common_starts_are_not_worth_sharing() -> None:
    requests = [request([*range(10, 20), 100 + i], f"short-{i}") for i in range(3)]
    assert difference(build(), requests)["prefilled_tokens"] == 33


def test_nothing_is_shared_with_requests_before_an_idle_moment() -> None:
    async def scenario() -> list[Completion]:
        first = await engine.generate(request(prompt, "a"))
        for _ in range(3):
            await asyncio.sleep(0)
        return [first, await engine.generate(request(prompt, "a"))]

    engine, prompt = build(), range(10, 60)
    first, second = asyncio.run(scenario())
    assert engine.stats()["prefilled_tokens"] == 2 * 50
    np.testing.assert_array_equal(first.logps, second.logps)


def test_nothing_is_shared_across_sleep() -> None:
    async def scenario() -> list[Completion]:
        first = await engine.generate(sent[0])
        engine.sleep()
        engine.wake()
        return [first, await engine.generate(sent[1])]

    engine = build()
    sent = [request(range(10, 60), "before"), request(range(10, 60), "after")]
    assert_exact(sent, asyncio.run(scenario()))


def test_nothing_is_shared_across_weights() -> None:
    async def scenario() -> Completion:
        await engine.generate(request(prompt, "old"))
        engine.load_weights(POLICY, dict(other.named_parameters()), 3)
        return await engine.generate(request(prompt, "new"))

    engine, prompt, other = build(), range(10, 60), tiny_model("llama", tied=True, seed=5)
    completion = asyncio.run(scenario())
    expected = forward_logps(other, prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logps, expected, atol=EXACT)


# --- slots and arrivals -------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_batched_tokens", [1, 64, 8192])
def test_rows_of_very_different_lengths_share_few_slots(max_num_batched_tokens: int) -> None:
    """Finished rows leave holes in every pattern; rows move, slots and lengths grow."""
    rng = np.random.default_rng(0)
    requests = [
        request(
            random_prompt(i, int(rng.choice([1, 2, 15, 16, 17, 90]))),
            f"row-{i}",
            max_tokens=int(rng.choice([1, 2, 7, 40])),
            temperature=float(rng.choice([0.0, 0.5, 1.0, 2.0])),
        )
        for i in range(40)
    ]
    engine = build(max_num_seqs=7, max_num_batched_tokens=max_num_batched_tokens)
    completions = run(engine, requests)
    assert_exact(requests, completions)
    lengths = [len(completion.token_ids) for completion in completions]
    assert lengths == [sent.sampling.max_tokens for sent in requests]


def test_shared_starts_survive_moves_and_reuse_of_slots() -> None:
    """Turns of several episodes: every prompt repeats the one before and adds to it."""

    async def episode(number: int) -> list[tuple[Request, Completion]]:
        rng = np.random.default_rng(number)
        prompt = [*range(20, 60), *rng.integers(3, VOCAB_SIZE, 4 * (number % 3))]
        turns = []
        for turn in range(5):
            sent = request(prompt, f"{number}-{turn}", max_tokens=int(rng.integers(1, 9)))
            turns.append((sent, await engine.generate(sent)))
            prompt = [*prompt, *turns[-1][1].token_ids, *rng.integers(3, VOCAB_SIZE, 3)]
        return turns

    async def scenario() -> list[list[tuple[Request, Completion]]]:
        return await asyncio.gather(*(episode(number) for number in range(9)))

    engine = build(max_num_seqs=5)
    turns = [turn for played in asyncio.run(scenario()) for turn in played]
    assert_exact(*zip(*turns, strict=True))
    assert engine.stats()["prefilled_tokens"] < engine.stats()["prompt_tokens"] / 2


def test_the_slot_of_a_moved_row_is_known_by_its_new_row() -> None:
    async def scenario() -> list[Completion]:
        gone, moved = (asyncio.create_task(engine.generate(each)) for each in sent[:2])
        await gone
        generated = engine.stats()["generated_tokens"]
        while engine.stats()["generated_tokens"] < generated + 2:  # the second row moves to slot 0
            await asyncio.sleep(0)
        last = await engine.generate(sent[2])
        return [await gone, await moved, last]

    engine, first = build(), random_prompt(1, 40)
    sent = [
        request(first, "gone", max_tokens=2),
        request(random_prompt(3, 5), "moved", max_tokens=60),
        request([*first[:30], 5, 6], "like the first"),
    ]
    assert_exact(sent, asyncio.run(scenario()))


def test_a_slot_forgets_the_longer_prompt_it_held_before() -> None:
    async def scenario() -> list[Completion]:
        running = asyncio.create_task(engine.generate(sent[0]))
        return [*[await engine.generate(each) for each in sent[1:]], await running]

    engine, longer, shorter = build(), random_prompt(1, 40), random_prompt(2, 20)
    sent = [
        request(random_prompt(3, 5), "keeps the engine busy", max_tokens=60),
        request(longer, "longer", max_tokens=2),
        request(shorter, "shorter", max_tokens=2),
        request([*shorter, *longer[20:]], "starts like one, ends like the other"),
    ]
    *others, busy = asyncio.run(scenario())
    assert_exact(sent, [busy, *others])


def test_a_request_joins_while_another_runs() -> None:
    async def scenario() -> list[str]:
        order = []

        async def send(sent: Request) -> None:
            completion = await engine.generate(sent)
            assert_exact([sent], [completion])
            order.append(sent.request_id)

        first = asyncio.create_task(send(request(range(5, 20), "first", max_tokens=60)))
        while engine.stats()["generated_tokens"] < 10:
            await asyncio.sleep(0)
        late = asyncio.create_task(send(request(range(30, 90), "late", max_tokens=5)))
        await asyncio.gather(first, late)
        return order

    engine = build()
    assert asyncio.run(scenario()) == ["late", "first"]


def test_the_same_requests_give_the_same_bits() -> None:
    requests = [request(random_prompt(i % 5, 30), f"bits-{i}", max_tokens=9) for i in range(12)]
    engine = build()
    runs = [run(engine, requests), run(engine, requests), run(build(), requests)]
    for again in runs[1:]:
        for one, other in zip(runs[0], again, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logps, other.logps)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _products_ignore_company(dtype: torch.dtype) -> bool:
    """Whether a row's product with each of the model's matrices is the same among 1 to 25 rows."""
    for module in tiny_model("llama", tied=True).to(dtype).modules():
        if isinstance(module, torch.nn.Linear):
            rows = torch.randn(25, module.in_features, dtype=dtype)
            together = module(rows)
            if not all(torch.equal(module(rows[:n]), together[:n]) for n in range(1, 25)):
                return False
    return True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_changes_no_bit(dtype: str, one_thread: None) -> None:
    if not _products_ignore_company(getattr(torch, dtype)):
        pytest.skip("this processor's matrix products depend on the number of rows")
    rng = np.random.default_rng(0)
    requests = [
        request(random_prompt(i, int(rng.integers(1, 80))), f"bit-{i}", max_tokens=10)
        for i in range(30)
    ]
    engine = build(dtype=dtype, max_num_seqs=25)
    for sent, together in zip(requests, run(engine, requests), strict=True):
        alone = run(engine, [sent])[0]
        np.testing.assert_array_equal(alone.token_ids, together.token_ids)
        np.testing.assert_array_equal(alone.logps, together.logps)


def test_samples_follow_the_model() -> None:
    draws = 4000
    prompt = random_prompt(1, 12)
    completions = run(build(), [request(prompt, f"d{i}", max_tokens=1) for i in range(draws)])
    counts = np.bincount([int(c.token_ids[0]) for c in completions], minlength=VOCAB_SIZE)
    ids = torch.from_numpy(prompt)[None].long()
    with torch.no_grad():
        logits = tiny_model("llama", tied=True)(input_ids=ids).logits[0, -1]
    expected = draws * logits.softmax(dim=-1).numpy()
    # Pearson's statistic over the tokens expected at least five times, the rest as one cell: its
    # mean is the number of cells less one, its variance about twice that; allow five deviations.
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    freedom = len(wanted) - 1
    assert freedom > 20
    assert ((observed - wanted) ** 2 / wanted).sum() < freedom + 5 * (2 * freedom) ** 0.5


# --- models -------------------------------------------------------------------------------------


def test_bfloat16_agrees_within_its_precision() -> None:
    requests = [request(random_prompt(i, 20), f"bf16-{i}", max_tokens=16) for i in range(6)]
    completions = run(build(dtype="bfloat16"), requests)
    model = tiny_model("llama", tied=True)
    for sent, completion in zip(requests, completions, strict=True):
        expected = forward_logps(model, sent.prompt_ids, completion.token_ids)
        assert 0 < np.abs(completion.logps - expected).mean() < 0.1


def test_several_policies_keep_their_own_models() -> None:
    models = {"one": tiny_model("qwen2", tied=True), "two": tiny_model("qwen3", tied=False)}
    references = {"one": tiny_model("qwen2", tied=True), "two": tiny_model("qwen3", tied=False)}
    engine = TransformersEngine(models)
    requests = [
        Request(random_prompt(i, 9), Sampling(max_tokens=6), i, f"p{i}", policy_id=policy)
        for i, policy in enumerate(["one", "two", "one", "two", "two"])
    ]
    for sent, completion in zip(requests, run(engine, requests), strict=True):
        reference = references[sent.policy_id]
        expected = forward_logps(reference, sent.prompt_ids, completion.token_ids)
        np.testing.assert_allclose(completion.logps, expected, atol=EXACT)


def test_a_served_model_still_answers_plain_calls() -> None:
    model, untouched = tiny_model("llama", tied=True), tiny_model("llama", tied=True)
    TransformersEngine({POLICY: model})
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    with torch.no_grad():
        ours = model(input_ids=ids, attention_mask=mask).logits
        plain = untouched(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(ours[0, :3], plain[0, :3])
    torch.testing.assert_close(ours[1], plain[1])


def test_stop_strings_need_a_tokenizer(tmp_path: Any) -> None:
    sent = request(range(5, 9), "stop", stop=("w7",), temperature=0.0)
    with pytest.raises(EngineError, match="tokenizer"):
        run(build(), [sent])
    folder = build_tiny_folder(tmp_path / "model", "llama", tied=True)
    run(TransformersEngine({POLICY: folder}), [sent])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "sliding"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "RoPE"),
    ],
)
def test_models_that_slots_cannot_serve_are_refused(change: dict[str, Any], message: str) -> None:
    config = tiny_config("qwen3", tied=True)
    for name, value in change.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message):
        TransformersEngine({POLICY: model})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, "512 positions"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "half precision"}, "half precision"),
    ],
)
def test_impossible_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**settings)


def test_an_engine_needs_a_model() -> None:
    with pytest.raises(ValueError, match="no model"):
        TransformersEngine({})
