"""Every engine keeps the contract of `rllib_gigpo/engines/base.py`.

The reference is a plain Hugging Face forward pass in fp32. One engine of each kind serves six tiny
random models; the file runs once per kind.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tiny_models import (
    EOS_ID,
    VOCAB_SIZE,
    WORDS,
    Family,
    build_tiny_folder,
    forward_logps,
    tiny_adapter,
    tiny_model,
)
from transformers import PreTrainedModel

from rllib_gigpo.engines.base import (
    Completion,
    Engine,
    EngineError,
    Request,
    Sampling,
    generate_batch,
)
from rllib_gigpo.engines.packing import checksums

Result = TypeVar("Result")

MAX_MODEL_LEN = 256
MODELS: dict[str, tuple[Family, bool]] = {
    f"{family}-{'tied' if tied else 'untied'}": (family, tied)
    for family in ("qwen2", "qwen3", "llama")
    for tied in (True, False)
}
POLICY = "llama-tied"
FRESH = "llama-untied"
PROMPT = np.arange(40, 60, dtype=np.int32)
EXACT = 1e-4


def model_of(policy: str, seed: int = 0) -> PreTrainedModel:
    family, tied = MODELS[policy]
    return tiny_model(family, tied=tied, seed=seed)


def weights_of(policy: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(model_of(policy, seed).named_parameters())


def _vllm_missing() -> bool:
    return (
        importlib.util.find_spec("vllm") is None
        and os.environ.get("RLLIB_GIGPO_REQUIRE_VLLM") != "1"
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: build_tiny_folder(root / name, family, tied=tied)
        for name, (family, tied) in MODELS.items()
    }


@pytest.fixture(scope="module")
def references() -> dict[str, PreTrainedModel]:
    return {policy: model_of(policy) for policy in MODELS}


@pytest.fixture(
    scope="module",
    params=[
        "transformers",
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.vllm,
                pytest.mark.skipif(_vllm_missing(), reason="vLLM is not installed"),
            ],
        ),
    ],
)
def engine(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Engine]:
    if request.param == "vllm":
        from rllib_gigpo.engines.vllm.engine import VLLMEngine
        from rllib_gigpo.engines.vllm.settings import VLLMSettings

        built: Engine = VLLMEngine(
            folders,
            VLLMSettings(
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=16,
                kv_cache_memory_bytes=16 << 20,
                enable_lora=True,
                max_lora_rank=8,
            ),
        )
    else:
        from rllib_gigpo.engines.transformers_engine import TransformersEngine

        built = TransformersEngine(
            folders, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=16
        )
    yield built
    built.close()
    built.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop owns an engine."""
    with asyncio.Runner() as runner:
        yield runner.get_loop()


class Client:
    """Sends requests with fresh ids and waits for them."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop):
        self.engine = engine
        self._loop = loop
        self._count = 0

    def request(
        self,
        prompt: Sequence[int] | np.ndarray = PROMPT,
        *,
        seed: int = 0,
        policy: str = POLICY,
        **sampling: Any,
    ) -> Request:
        self._count += 1
        return Request(
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            sampling=Sampling(**{"max_tokens": 12, **sampling}),
            seed=seed,
            request_id=f"request-{self._count}",
            policy_id=policy,
        )

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(coroutine)

    def batch(self, requests: Sequence[Request]) -> list[Completion]:
        return self.run(generate_batch(self.engine, requests))

    def one(self, *args: Any, **kwargs: Any) -> Completion:
        return self.batch([self.request(*args, **kwargs)])[0]

    def refused(self, *args: Any, match: str, **kwargs: Any) -> None:
        with pytest.raises(EngineError, match=match):
            self.one(*args, **kwargs)


@pytest.fixture
def client(engine: Engine, loop: asyncio.AbstractEventLoop) -> Client:
    return Client(engine, loop)


def text_of(token_ids: np.ndarray) -> str:
    return " ".join(WORDS[token] for token in token_ids)


@torch.no_grad()
def next_probabilities(
    model: PreTrainedModel, ids: Sequence[int] | np.ndarray, temperature: float
) -> torch.Tensor:
    logits = model(input_ids=torch.as_tensor(np.asarray(ids))[None].long()).logits[0, -1]
    return (logits / temperature).softmax(dim=-1)


# --- tokens and log-probabilities ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
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


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", MODELS)
@pytest.mark.parametrize("sent", ["parameters", "state"])
def test_new_weights_serve_at_once(
    client: Client, references: dict[str, PreTrainedModel], policy: str, sent: str
) -> None:
    """Equal prompts are asked for again, so that a stale prefix cache would show."""
    prompt = np.arange(3, 103)
    old = client.one(prompt, policy=policy)
    new_model = model_of(policy, seed=11)
    tensors = new_model.named_parameters() if sent == "parameters" else new_model.state_dict()
    try:
        client.engine.load_weights(policy, dict(tensors), 7)
        new = client.one(prompt, policy=policy)
        assert client.engine.version(policy) == new.weight_version == 7
        expected = forward_logps(new_model, prompt, new.token_ids)
        np.testing.assert_allclose(new.logps, expected, atol=EXACT)
        stale = forward_logps(references[policy], prompt, new.token_ids)
        assert np.abs(new.logps - stale).mean() > 0.1
    finally:
        client.engine.load_weights(policy, weights_of(policy), 0)
    again = client.one(prompt, policy=policy)
    np.testing.assert_array_equal(old.token_ids, again.token_ids)
    np.testing.assert_allclose(old.logps, again.logps, atol=EXACT)


def test_a_small_change_of_one_layer_shows(
    client: Client, references: dict[str, PreTrainedModel]
) -> None:
    """Each parameter reaches the engine, not only the large ones."""
    policy = "qwen3-untied"
    model = model_of(policy)
    for name, parameter in model.named_parameters():
        original = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.05 * torch.randn_like(parameter)
        client.engine.load_weights(policy, dict(model.named_parameters()), 1)
        completion = client.one(policy=policy)
        expected = forward_logps(model, PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.logps, expected, atol=EXACT, err_msg=name)
        stale = forward_logps(references[policy], PROMPT, completion.token_ids)
        assert np.abs(completion.logps - stale).max() > 10 * EXACT, name
        with torch.no_grad():
            parameter.copy_(original)
    client.engine.load_weights(policy, weights_of(policy), 0)


def test_loading_one_policy_leaves_the_others(client: Client) -> None:
    before = client.one(policy=FRESH)
    client.engine.load_weights(POLICY, weights_of(POLICY, seed=5), 3)
    after = client.one(policy=FRESH)
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    np.testing.assert_allclose(before.logps, after.logps, atol=1e-6)
    assert client.engine.version(FRESH) == after.weight_version == 0
    client.engine.load_weights(POLICY, weights_of(POLICY), 0)


def test_loading_while_requests_run_is_refused(client: Client) -> None:
    async def scenario() -> Completion:
        request = client.request(max_tokens=200)
        task = asyncio.create_task(client.engine.generate(request))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"run"):
            client.engine.load_weights(POLICY, weights, 5)
        await client.engine.abort(request.request_id)
        return await task

    weights = weights_of(POLICY)
    version = client.engine.version(POLICY)
    assert client.run(scenario()).weight_version == version
    assert client.engine.version(POLICY) == version


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused(
    client: Client, references: dict[str, PreTrainedModel], fault: str
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = weights_of(POLICY, seed=4)
    parameter = tensors.pop(name)
    if fault == "unknown":
        tensors |= {name: parameter, "model.layers.7.mlp.up_proj.weight": parameter}
    if fault == "shape":
        tensors[name] = torch.nn.Parameter(parameter[:-1].clone())
    with pytest.raises(EngineError, match=r"up_proj"):
        client.engine.load_weights(POLICY, tensors, 5)
    completion = client.one()
    expected = forward_logps(references[POLICY], PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.logps, expected, atol=EXACT)


def test_unknown_policies_have_no_weights(client: Client) -> None:
    with pytest.raises(EngineError, match="nobody"):
        client.engine.load_weights("nobody", {}, 1)
    with pytest.raises(EngineError, match="nobody"):
        client.engine.version("nobody")


# --- adapters -----------------------------------------------------------------------------------


def assert_served_by(model: Any, completion: Completion) -> None:
    expected = forward_logps(model, PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.logps, expected, atol=EXACT)


@pytest.mark.parametrize("policy", MODELS)
def test_each_adapter_version_serves_like_its_merged_model(
    client: Client, references: dict[str, PreTrainedModel], policy: str
) -> None:
    family, tied = MODELS[policy]
    base = references[policy]
    for version in (1, 2, 3):
        adapter = tiny_adapter(family, tied=tied, seed=version)
        client.engine.load_adapter(policy, adapter.tensors, adapter.config, version)
        completion = client.one(policy=policy)
        assert completion.weight_version == client.engine.version(policy) == version
        assert_served_by(adapter.merged, completion)
        difference = completion.logps - forward_logps(base, PROMPT, completion.token_ids)
        assert np.abs(difference).mean() > 0.1
    new_base = model_of(policy, seed=5)
    client.engine.load_weights(policy, dict(new_base.named_parameters()), 4)
    assert_served_by(new_base, client.one(policy=policy))
    client.engine.load_weights(policy, weights_of(policy), 0)
    assert_served_by(base, client.one(policy=policy))


def test_an_adapter_of_fewer_layers_leaves_the_others_as_they_were(client: Client) -> None:
    """The second adapter's matrices only: nothing of the first one stays."""
    first = tiny_adapter("llama", tied=True, seed=1)
    second = tiny_adapter("llama", tied=True, seed=2)
    part = {name: value for name, value in second.tensors.items() if "down_proj" in name}
    config = {**second.config, "target_modules": ["down_proj"]}
    merged = model_of(POLICY)
    for name, module in merged.named_modules():
        if name.endswith("down_proj"):
            a, b = (part[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
            module.weight.data += 2.0 * b @ a
    client.engine.load_adapter(POLICY, first.tensors, first.config, 1)
    client.engine.load_adapter(POLICY, part, config, 2)
    assert_served_by(merged, client.one())
    client.engine.load_weights(POLICY, weights_of(POLICY), 0)


def test_an_adapter_that_does_not_fit_leaves_the_old_one(client: Client) -> None:
    old = tiny_adapter("llama", tied=True, seed=1)
    client.engine.load_adapter(POLICY, old.tensors, old.config, 1)
    new = tiny_adapter("llama", tied=True, seed=2)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    faults = [
        {**new.tensors, name.replace("q_proj", "x_proj"): new.tensors[name]},
        {**new.tensors, name: new.tensors[name][:, :-1]},
        {key: value for key, value in new.tensors.items() if key != name},
        {},
    ]
    for tensors in faults:
        with pytest.raises(EngineError, match="adapter"):
            client.engine.load_adapter(POLICY, tensors, new.config, 2)
    for config in ({"r": 4}, {**new.config, "use_rslora": True}):
        with pytest.raises(EngineError, match="configuration"):
            client.engine.load_adapter(POLICY, new.tensors, config, 2)
    completion = client.one()
    assert completion.weight_version == 1
    assert_served_by(old.merged, completion)
    with pytest.raises(EngineError, match="nobody"):
        client.engine.load_adapter("nobody", new.tensors, new.config, 2)
    client.engine.load_weights(POLICY, weights_of(POLICY), 0)


def test_an_adapter_while_requests_run_is_refused(client: Client) -> None:
    adapter = tiny_adapter("llama", tied=True)

    async def scenario() -> None:
        request = client.request(max_tokens=200)
        task = asyncio.create_task(client.engine.generate(request))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"run"):
            client.engine.load_adapter(POLICY, adapter.tensors, adapter.config, 5)
        await client.engine.abort(request.request_id)
        await task

    client.run(scenario())


# --- checksums ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", MODELS)
def test_checksums_are_those_of_what_was_loaded_last(client: Client, policy: str) -> None:
    family, tied = MODELS[policy]
    weights = weights_of(policy, seed=3)
    adapter = tiny_adapter(family, tied=tied, seed=1)
    try:
        client.engine.load_weights(policy, weights, 1)
        assert client.engine.checksums(policy) == checksums(weights)
        client.engine.load_adapter(policy, adapter.tensors, adapter.config, 2)
        assert client.engine.checksums(policy) == checksums(adapter.tensors)
        other = tiny_adapter(family, tied=tied, seed=2)
        client.engine.load_adapter(policy, other.tensors, other.config, 3)
        assert client.engine.checksums(policy) == checksums(other.tensors)
    finally:
        client.engine.load_weights(policy, weights_of(policy), 0)
    assert client.engine.checksums(policy) == checksums(weights_of(policy))
    with pytest.raises(EngineError, match="nobody"):
        client.engine.checksums("nobody")


# --- sleep and limits ---------------------------------------------------------------------------


def test_sleep_and_wake_keep_the_weights(client: Client) -> None:
    model = model_of(POLICY, seed=8)
    before = client.one(seed=4)
    client.engine.sleep()
    client.engine.wake()
    np.testing.assert_array_equal(before.token_ids, client.one(seed=4).token_ids)
    client.engine.sleep()
    client.engine.load_weights(POLICY, dict(model.named_parameters()), 2)
    client.engine.wake()
    after = client.one(seed=4)
    np.testing.assert_allclose(
        after.logps, forward_logps(model, PROMPT, after.token_ids), atol=EXACT
    )
    client.engine.load_weights(POLICY, weights_of(POLICY), 0)


def test_max_model_len_is_told(client: Client) -> None:
    assert client.engine.max_model_len == MAX_MODEL_LEN
    request = client.request(np.full(MAX_MODEL_LEN - 1, 5), max_tokens=1)
    assert len(client.batch([replace(request)])[0].token_ids) == 1
