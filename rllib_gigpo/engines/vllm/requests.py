"""Requests as vLLM takes them, and its answers on their way back."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import numpy as np

from rllib_gigpo.engines.base import Completion, EngineError, FinishReason, Request

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_MIN_TEMPERATURE = 0.01  # vLLM silently raises smaller ones to this


class Ticket:
    """Carries one response from the engine thread to the coroutine that waits for it."""

    def __init__(self, request: Request):
        self.request = request
        self.internal_id: str | None = None
        self.version = 0
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Completion] = self._loop.create_future()

    def put(self, output: Any) -> None:
        """Take vLLM's final output; vLLM calls this."""
        result = output.outputs[0]
        reason = _FINISH_REASONS.get(result.finish_reason)
        if reason is None:
            self.fail(
                EngineError(
                    f"request {self.request.request_id!r} failed inside vLLM: finish reason "
                    f"{result.finish_reason!r}"
                )
            )
            return
        logps = np.asarray(result.logprobs.logprobs, dtype=np.float32)
        completion = Completion(
            token_ids=np.asarray(result.token_ids, dtype=np.int32),
            logps=logps,
            finish_reason=reason,
            weight_version=self.version,
        )
        self._resolve(partial(self.future.set_result, completion))

    def fail(self, error: Exception) -> None:
        """Raise `error` in the waiting coroutine."""
        self._resolve(partial(self.future.set_exception, error))

    def _resolve(self, deliver: Any) -> None:
        def deliver_if_awaited() -> None:
            if not self.future.done():
                deliver()

        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(deliver_if_awaited)


def check_request(request: Request, *, max_model_len: int, vocab_size: int, sees: bool) -> None:
    """Refuse what vLLM would refuse later or less clearly.

    Args:
        request: The request.
        max_model_len: Longest prompt plus response in tokens.
        vocab_size: Of the policy's model.
        sees: Whether the model reads pictures.

    Raises:
        EngineError: One sentence that names the value and the cure.
    """
    ids, sampling = np.asarray(request.prompt_ids), request.sampling
    if len(ids) == 0:
        raise EngineError("the prompt is empty: send at least one token id")
    if len(ids) >= max_model_len:
        raise EngineError(
            f"the prompt has {len(ids)} tokens and leaves no room for a response within "
            f"max_model_len={max_model_len}: shorten the prompt or raise max_model_len"
        )
    if request.images and not sees:
        raise EngineError(
            f"the prompt shows {len(request.images)} picture(s), and the model reads text alone"
        )
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise EngineError(
            f"token id {int(outside[0])} is outside the vocabulary of {vocab_size} tokens: encode "
            "the prompt with this policy's own tokenizer"
        )
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens is {sampling.max_tokens}: expected at least 1")
    if 0 < sampling.temperature < _MIN_TEMPERATURE:
        raise EngineError(
            f"temperature {sampling.temperature} is too small for vLLM: use 0 (greedy) or at "
            f"least {_MIN_TEMPERATURE}"
        )


def sampling_params(request: Request) -> Any:
    """Return vLLM's own form of a request's sampling."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        seed=request.seed,
        logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
