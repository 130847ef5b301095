"""In-process engine over transformers models, for CPUs, tests and single machines.

    generate -> PolicyBatch.add -> engine loop: PolicyBatch.step -> Completion

The loop is a task of the caller's event loop and runs while there are requests. Between two steps
it yields once, so that coroutines whose responses have just ended send their next requests into
the next step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rllib_gigpo.engines.adapters import MergedAdapter
from rllib_gigpo.engines.base import Completion, EngineError, Request, Sampling
from rllib_gigpo.engines.batching import Counts, PolicyBatch, Row
from rllib_gigpo.engines.kv_cache import ATTENTION
from rllib_gigpo.engines.packing import Checksums, checksums
from rllib_gigpo.models import load_causal_lm
from rllib_gigpo.vision.sight import Sight, load_sight

_ROPE_BY_BATCH = ("dynamic", "longrope")


class TransformersEngine:
    """Serves policies from models in this process; one event loop owns it.

    Keys and values stay in preallocated slots that grow with the longest running row. Running and
    new requests share each forward pass, equal prompts are computed once, and prompts that start
    alike share their start while requests keep coming.

    The same requests in the same order give the same bits. A request's random draws depend on its
    own seed alone; its log-probabilities depend on the requests beside it through rounding at most
    (on CPUs not even so while rows are short: see `kv_cache.MIN_ROWS`). In bfloat16 rounding may
    change which token a draw meets.

    Args:
        models: From policy id to Hugging Face folder or id, or to a model, which the engine then
            owns: it casts and moves it and sets its attention.
        tokenizers: From policy id to tokenizer, for stop strings with models that are not given by
            folder or id.
        sights: From policy id to image side, for image-text models that are not given so.
        dtype: Type of weights and cache, such as "float32" or "bfloat16".
        device: The CPU or a CUDA device; None for CUDA if there is a GPU, else the CPU.
        max_model_len: Longest prompt plus response; None for what every model allows.
        max_num_seqs: Requests that run at once per policy; further ones wait.
        max_num_batched_tokens: Prompt tokens computed in one step per policy.

    Raises:
        ValueError: A limit below 1, `max_model_len` beyond a model's positions, an unknown dtype,
            no model, or a model whose attention needs more than the slots offer.
    """

    def __init__(
        self,
        models: Mapping[str, str | Path | PreTrainedModel],
        *,
        tokenizers: Mapping[str, PreTrainedTokenizerBase] | None = None,
        sights: Mapping[str, Sight] | None = None,
        dtype: str = "float32",
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
    ):
        for name, limit in (
            ("max_model_len", max_model_len),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} is {limit}: expected at least 1")
        if not models:
            raise ValueError("the engine has no model: pass models={policy_id: folder or model}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        loaded = {
            policy_id: _load(model, _torch_dtype(dtype), self._device)
            for policy_id, model in models.items()
        }
        self._max_model_len = _common_length(loaded, max_model_len)
        self._counts = Counts()
        self._batches: dict[str, PolicyBatch] = {}
        for policy_id, model in loaded.items():
            source = models[policy_id]
            tokenizer = (tokenizers or {}).get(policy_id)
            if tokenizer is None and not isinstance(source, PreTrainedModel):
                tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            sight = (sights or {}).get(policy_id)
            if sight is None and not isinstance(source, PreTrainedModel):
                sight = load_sight(str(source))
            self._batches[policy_id] = PolicyBatch(
                policy_id,
                model,
                tokenizer,
                max_model_len=self._max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                counts=self._counts,
                sight=sight,
            )
        self._adapters = {policy_id: MergedAdapter(model) for policy_id, model in loaded.items()}
        self._loaded: dict[str, tuple[str, ...]] = dict.fromkeys(loaded, ())
        self._running: dict[str, Row] = {}
        self._task: asyncio.Task[None] | None = None
        self._asleep = self._closed = False

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response in tokens."""
        return self._max_model_len

    def stats(self) -> dict[str, int]:
        """Totals since construction.

        Returns:
            `requests`; `prompt_tokens` of their prompts; `prefilled_tokens`, those of them that
            were computed rather than shared; `generated_tokens`.
        """
        return asdict(self._counts)

    async def generate(self, request: Request) -> Completion:
        """Continue one prompt; see `Engine.generate`.

        Raises:
            EngineError: The request is invalid, its id is already running, its stop strings lack
                a tokenizer, the engine sleeps or is closed, or the forward pass failed.
        """
        batch = self._check(request)
        sampling = request.sampling
        try:
            rule = batch.rule(tuple(sampling.stop), tuple(sampling.stop_token_ids))
        except ValueError as error:
            raise EngineError(f"request {request.request_id!r}: {error}") from error
        limit = min(sampling.max_tokens, self._max_model_len - len(request.prompt_ids))
        loop = asyncio.get_running_loop()
        self._start(loop)
        row = Row(request, rule, limit, loop.create_future(), batch.look(request))
        self._running[request.request_id] = row
        batch.add(row)
        try:
            return await row.future
        finally:
            if self._running.pop(request.request_id, None) is not None:  # the caller was cancelled
                batch.remove(row)

    async def abort(self, request_id: str) -> None:
        """End a running request; see `Engine.abort`."""
        row = self._running.pop(request_id, None)
        if row is not None:
            batch = self._batches[row.request.policy_id]
            batch.remove(row)
            row.future.set_result(row.completion("abort", batch.version))

    def load_weights(
        self, policy_id: str, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        """Copy weights into the policy's model and set its version; see `Engine.load_weights`.

        Of tied parameters one name is enough. Values are cast to the engine's dtype.
        """
        batch = self._idle_batch(policy_id)
        parameters = dict(batch.model.named_parameters(remove_duplicate=False))
        _check_names(policy_id, parameters, tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)
        self._adapters[policy_id].forget()
        self._loaded[policy_id] = tuple(tensors)
        batch.forget_weights()
        batch.version = version

    def load_adapter(
        self,
        policy_id: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        version: int,
    ) -> None:
        """Merge a LoRA adapter into the policy's base weights; see `Engine.load_adapter`."""
        batch = self._idle_batch(policy_id)
        self._adapters[policy_id].replace(tensors, config)
        batch.forget_weights()
        batch.version = version

    def checksums(self, policy_id: str = "default_policy") -> Checksums:
        """Checksums of what the policy's model holds; see `Engine.checksums`."""
        model = self._batch(policy_id).model
        if self._adapters[policy_id]:
            return self._adapters[policy_id].checksums()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return checksums({name: parameters[name] for name in self._loaded[policy_id]})

    def _idle_batch(self, policy_id: str) -> PolicyBatch:
        batch = self._batch(policy_id)
        if batch.busy:
            raise EngineError(
                f"weights of policy {policy_id!r} cannot change while its requests run: await or "
                "abort them first"
            )
        return batch

    def version(self, policy_id: str = "default_policy") -> int:
        """Version of the policy's weights."""
        return self._batch(policy_id).version

    def sleep(self) -> None:
        """Free the caches and, on a GPU, move the weights to the CPU.

        Raises:
            EngineError: While requests run.
        """
        if self._running:
            raise EngineError(
                f"the engine cannot sleep while {len(self._running)} requests run: await or abort "
                "them first"
            )
        self._asleep = True
        for batch in self._batches.values():
            batch.clear()
            batch.model.to("cpu")  # pyright: ignore[reportArgumentType]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the weights back; see `Engine.wake`."""
        for batch in self._batches.values():
            batch.model.to(self._device)  # pyright: ignore[reportArgumentType]
        self._asleep = False

    def close(self) -> None:
        """Free everything; requests still running raise EngineError."""
        for batch in self._batches.values():
            self._fail(batch, "the engine was closed")
        self._batches.clear()
        self._closed = True

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make sure that the engine loop runs in the caller's event loop."""
        if self._task is not None and self._task.get_loop() is loop:
            return
        if self._running:
            raise EngineError(
                "requests of another event loop are running: send all requests of an engine from "
                "one loop at a time"
            )
        for batch in self._batches.values():
            batch.forget_prompts()
        self._task = loop.create_task(self._run())

    async def _run(self) -> None:
        """Step every busy policy in turn until no request is left."""
        try:
            while busy := [batch for batch in self._batches.values() if batch.busy]:
                for batch in busy:
                    self._step(batch)
                await asyncio.sleep(0)
        finally:
            self._task = None

    def _step(self, batch: PolicyBatch) -> None:
        try:
            finished = batch.step()
        except Exception as error:  # the callers wait: they get the error, this loop lives on
            self._fail(batch, str(error), error)
            return
        for row, completion in finished:
            del self._running[row.request.request_id]
            if not row.future.done():  # its caller was cancelled a moment ago
                row.future.set_result(completion)

    def _fail(self, batch: PolicyBatch, message: str, cause: Exception | None = None) -> None:
        """Drop all requests of a policy; each of their callers gets an EngineError."""
        for row in batch.clear():
            del self._running[row.request.request_id]
            if not row.future.done():
                error = EngineError(f"request {row.request.request_id!r} failed: {message}")
                error.__cause__ = cause
                row.future.set_exception(error)

    def _batch(self, policy_id: str) -> PolicyBatch:
        if self._closed:
            raise EngineError("the engine is closed: build a new one")
        if policy_id not in self._batches:
            raise EngineError(
                f"unknown policy_id {policy_id!r}: this engine serves {sorted(self._batches)}"
            )
        return self._batches[policy_id]

    def _check(self, request: Request) -> PolicyBatch:
        """Return the request's batch, or say what is wrong with the request."""
        batch = self._batch(request.policy_id)
        if self._asleep:
            raise EngineError("the engine sleeps: call wake() before generate()")
        complaint = _complaint(request, batch.vocab_size, self._max_model_len)
        if request.images and not batch.sees_pictures:
            complaint = f"it shows {len(request.images)} picture(s), and the model reads text alone"
        if any(sum(run) == len(request.prompt_ids) for p in request.images for run in p.runs):
            complaint = "its prompt ends in a picture: end it with the template's generation prompt"
        if request.request_id in self._running:
            complaint = "its request_id is already running: make ids unique"
        if complaint is not None:
            raise EngineError(f"request {request.request_id!r}: {complaint}")
        return batch


def _complaint(request: Request, vocab_size: int, max_model_len: int) -> str | None:
    """What is wrong with a request, and the cure; None if nothing is."""
    prompt = np.asarray(request.prompt_ids)
    if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
        return (
            f"prompt_ids has type {prompt.dtype} and shape {prompt.shape}: expected one row of "
            "integer token ids"
        )
    if len(prompt) == 0:
        return "the prompt is empty: expected at least one token"
    if len(prompt) >= max_model_len:
        return (
            f"the prompt has {len(prompt)} tokens, which with one more exceed max_model_len "
            f"{max_model_len}: shorten the prompt or raise max_model_len"
        )
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= vocab_size:
        return (
            f"token id {lowest if lowest < 0 else highest} is outside the vocabulary of "
            f"{vocab_size}: tokenize with the model's own tokenizer"
        )
    return _sampling_complaint(request.sampling)


def _sampling_complaint(sampling: Sampling) -> str | None:
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}: expected at least 1"
    if not 0 <= sampling.temperature < math.inf:
        return f"temperature is {sampling.temperature}: expected 0 (greedy) or a positive number"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}: expected a number in (0, 1]; 1 keeps every token"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}: expected a positive number, or 0 to keep every token"
    return None


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}: expected a floating type such as 'float32'")
    return dtype


def _load(
    source: str | Path | PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Load or take over a model with the slot attention, ready to serve."""
    if isinstance(source, PreTrainedModel):
        model = source.to(dtype)  # pyright: ignore[reportArgumentType]
    else:
        model = load_causal_lm(str(source), dtype=dtype)
    _check_attention(model)
    model.set_attn_implementation(ATTENTION)
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]


def _check_attention(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not model._supports_attention_backend:
        reason = "does not take its attention from transformers' AttentionInterface"
    elif kinds != {"full_attention"}:
        reason = f"has layers of the types {sorted(kinds)}"
    elif rope.get("rope_type") in _ROPE_BY_BATCH:
        reason = f"has {rope['rope_type']!r} RoPE, which depends on the longest row of a batch"
    else:
        return
    raise ValueError(
        f"{type(model).__name__} {reason}; the transformers engine serves full attention with "
        "fixed positions only: serve this model with vLLM"
    )


def _common_length(models: Mapping[str, PreTrainedModel], wanted: int | None) -> int:
    """Longest row that every model allows, or the wanted length if they all allow it."""
    limits = {
        policy_id: int(model.config.get_text_config().max_position_embeddings)
        for policy_id, model in models.items()
    }
    policy_id = min(limits, key=limits.__getitem__)
    if wanted is not None and wanted > limits[policy_id]:
        raise ValueError(
            f"max_model_len is {wanted}, but the model of policy {policy_id!r} has "
            f"{limits[policy_id]} positions: lower it, or the llm(max_prompt_tokens=..., "
            "max_response_tokens=...) that it is the sum of"
        )
    return wanted or limits[policy_id]


def _check_names(
    policy_id: str,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Raise EngineError unless the tensors are exactly the model's parameters."""
    unknown = sorted(tensors.keys() - parameters.keys())
    given = {id(parameters[name]) for name in tensors.keys() & parameters.keys()}
    missing = sorted(name for name, value in parameters.items() if id(value) not in given)
    if unknown or missing:
        raise EngineError(
            f"weights do not fit policy {policy_id!r}: unknown names {unknown[:3]}, missing names "
            f"{missing[:3]} ({len(unknown)} and {len(missing)} in all); use the names of the "
            "model's own named_parameters()"
        )
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            raise EngineError(
                f"weights do not fit policy {policy_id!r}: {name!r} has shape "
                f"{tuple(tensor.shape)}, the model's has {tuple(parameters[name].shape)}"
            )
