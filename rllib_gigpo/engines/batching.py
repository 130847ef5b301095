"""Continuous batching of one policy's requests over one transformers model.

    waiting requests -> slots -> one forward pass over all rows -> a new token per row -> finished

Requests with equal prompts that are admitted together share the prompt's forward pass, and a
prompt that starts like one still in the cache computes only what differs. Pictures are equal where
every pixel is: in the place of their tokens a prompt holds addresses of their features.

Legend: A running rows, C context tokens, U prompts with context, P prompt length.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rllib_gigpo.engines.base import Completion, EngineError, FinishReason, Request
from rllib_gigpo.engines.flat_tokens import FlatTokens, Prompt
from rllib_gigpo.engines.kv_cache import SlotCache
from rllib_gigpo.engines.stop_strings import StopRule
from rllib_gigpo.engines.token_sampling import SamplingBatch, sample, uniforms
from rllib_gigpo.engines.view import Seen, View
from rllib_gigpo.vision.sight import Sight

# A shorter common start is recomputed: finding and copying it would cost more.
_MIN_SHARED = 16
# Tokens whose computation a prompt saves by waiting one step for another prompt's.
_WORTH_A_STEP = 32
_NO_TOKEN = -1


class Row:
    """One request and its response so far; `position` is where its newest token stands.

    Args:
        request: The request.
        rule: Ends the response.
        limit: Response length limit.
        future: Gets the completion.
        seen: The request's pictures as the engine knows them, where the model sees any.
    """

    def __init__(
        self,
        request: Request,
        rule: StopRule,
        limit: int,
        future: asyncio.Future[Completion],
        seen: Seen | None = None,
    ):
        self.request = request
        self.rule = rule
        self.limit = limit
        self.future = future
        ids = request.prompt_ids if seen is None else seen.addressed
        self.prompt = np.ascontiguousarray(ids, dtype=np.int32)
        self.rotary = None if seen is None else seen.rotary
        self.key = self.prompt.tobytes()
        self.token_ids: list[int] = []
        self.logps: list[float] = []
        self.newest = int(request.prompt_ids[-1])
        self.position = len(self.prompt) - 1

    def rotary_position(self) -> np.ndarray:
        """Rotary position [3] of the newest token; responses count on from the prompt's largest."""
        if self.rotary is None:
            return np.full(3, self.position)
        if not self.token_ids:
            return self.rotary[:, -1]
        return np.full(3, self.rotary.max() + len(self.token_ids))

    def push(self, token: int, logp: float) -> FinishReason | None:
        """Append a token; say why the response is over, or None."""
        self.token_ids.append(token)
        self.logps.append(logp)
        self.newest = token
        self.position += 1
        if self.rule.ends(self.token_ids):
            return "stop"
        return "length" if len(self.token_ids) == self.limit else None

    def completion(self, reason: FinishReason, version: int) -> Completion:
        """The response so far."""
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logps=np.array(self.logps, dtype=np.float32),
            finish_reason=reason,
            weight_version=version,
        )


@dataclass
class Counts:
    """Totals since construction, in tokens and requests."""

    requests: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0


class PolicyBatch:
    """The requests of one policy, running and waiting.

    Args:
        policy_id: Names the policy in errors.
        model: Causal language model with the slot attention, in evaluation mode.
        tokenizer: For stop strings, or None.
        max_model_len: Longest prompt plus response.
        max_num_seqs: Rows that run at once; further requests wait.
        max_num_batched_tokens: Context tokens computed in one pass, padding included; a single
            longer prompt still runs.
        counts: Where totals are kept.
        sight: The model's image side, or None.
    """

    def __init__(
        self,
        policy_id: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        sight: Sight | None = None,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        counts: Counts,
    ):
        self.policy_id = policy_id
        self.model = model
        self.version = 0
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]  # pyright: ignore
        self.rule = lru_cache(maxsize=256)(partial(StopRule, tokenizer))
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._counts = counts
        self._device = model.device
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        self._cache = SlotCache(
            model.config.get_text_config(), model.dtype, model.device, max_num_seqs, max_model_len
        )
        self._waiting: deque[Row] = deque()
        self._rows: list[Row | None] = []
        self._settings: SamplingBatch | None = None
        self._view = None if sight is None else View(sight, model)
        # Prompts whose keys and values a slot holds, also after its row has finished.
        self._cached = np.full((0, 0), _NO_TOKEN, dtype=np.int32)

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self._waiting) or any(row is not None for row in self._rows)

    def look(self, request: Request) -> Seen | None:
        """Take a request's pictures in; None for a model that sees none."""
        return None if self._view is None else self._view.look(request)

    @property
    def sees_pictures(self) -> bool:
        """Whether the model does."""
        return self._view is not None

    def add(self, row: Row) -> None:
        """Queue a request."""
        self._waiting.append(row)

    def remove(self, row: Row) -> None:
        """Drop a request that runs or waits."""
        if row in self._waiting:
            self._waiting.remove(row)
        else:
            self._rows[self._rows.index(row)] = None

    def clear(self) -> list[Row]:
        """Drop all requests and the cache; return the requests."""
        rows = [row for row in (*self._rows, *self._waiting) if row is not None]
        self._rows.clear()
        self._waiting.clear()
        self._cache.clear()
        self._cached = np.full((0, 0), _NO_TOKEN, dtype=np.int32)
        return rows

    def forget_prompts(self) -> None:
        """Share nothing with earlier requests; results then depend on later requests alone."""
        self._cached.fill(_NO_TOKEN)

    def forget_weights(self) -> None:
        """Keep nothing that the weights before have computed."""
        self.forget_prompts()
        if self._view is not None:
            self._view.forget()

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, Completion]]:
        """Admit what fits, compute one token of every row, and return the finished requests.

        Raises:
            EngineError: The model's log-probabilities are not finite.
        """
        new_prompts = self._place(self._admit())
        rows = [row for row in self._rows if row is not None]
        logits = self._forward(rows, new_prompts)
        if self._settings is None:
            settings = [row.request.sampling for row in rows]
            self._settings = SamplingBatch.of(settings, self.vocab_size, self._device)
        draws = uniforms(
            np.array([row.request.seed % 2**64 for row in rows], dtype=np.uint64),
            np.array([len(row.token_ids) for row in rows], dtype=np.uint64),
        )
        draws = torch.from_numpy(draws).to(self._device)
        tokens, logps = sample(logits, self._settings, draws)
        return self._push(rows, tokens.tolist(), logps.tolist())

    def _push(
        self, rows: list[Row], tokens: list[int], logps: list[float]
    ) -> list[tuple[Row, Completion]]:
        if not math.isfinite(sum(logps)):
            raise EngineError(
                f"policy {self.policy_id!r} at weight version {self.version} gives "
                "log-probabilities that are not finite: its weights hold NaN or too large values"
            )
        finished = []
        for slot, (row, token, logp) in enumerate(zip(rows, tokens, logps, strict=True)):
            reason = row.push(token, logp)
            if reason is not None:
                self._rows[slot] = None
                finished.append((row, row.completion(reason, self.version)))
        self._counts.generated_tokens += len(rows)
        return finished

    def _admit(self) -> list[tuple[Prompt, list[Row]]]:
        """Take waiting requests in order, as far as slots and the token budget go.

        A prompt that shares much with another one admitted in this step waits for the next, when
        the common start is in the cache.
        """
        room = self._max_num_seqs - sum(row is not None for row in self._rows)
        admitted: dict[bytes, tuple[Prompt, list[Row]]] = {}
        postponed = []
        longest = 0
        while self._waiting and room > 0:
            row = self._waiting.popleft()
            if row.key not in admitted:
                shared, source = _longest_common_start(row.prompt, self._cached)
                if _starts_like_another(row, shared, admitted):
                    postponed.append(row)
                    continue
                prompt = Prompt(row.prompt, shared, source, rotary=row.rotary)
                width = max(longest, len(prompt.context))
                if admitted and width * (len(admitted) + 1) > self._max_num_batched_tokens:
                    self._waiting.appendleft(row)
                    break
                longest = width
                admitted[row.key] = (prompt, [])
            admitted[row.key][1].append(row)
            room -= 1
        self._waiting.extendleft(reversed(postponed))
        return list(admitted.values())

    def _place(self, admitted: list[tuple[Prompt, list[Row]]]) -> list[Prompt]:
        """Give new rows their slots, close the holes, and bring shared keys and values along."""
        holes = deque(slot for slot, row in enumerate(self._rows) if row is None)
        if holes or admitted:
            self._settings = None
        for prompt, rows in admitted:
            for row in rows:
                if holes:
                    prompt.slots.append(holes.popleft())
                    self._rows[prompt.slots[-1]] = row
                else:
                    prompt.slots.append(len(self._rows))
                    self._rows.append(row)
        copies = self._close(holes)
        prompts = [prompt for prompt, _ in admitted]
        copies += [(p.source, slot, p.shared) for p in prompts if p.shared for slot in p.slots]
        self._reserve(len(self._rows), 1 + max(row.position for row in self._rows if row))
        if copies:
            sources, targets, lengths = zip(*copies, strict=True)
            self._cache.copy(sources, targets, max(lengths))
            self._cached[list(targets)] = self._cached[list(sources)]
        for prompt in prompts:
            self._cached[prompt.slots] = _NO_TOKEN
            self._cached[prompt.slots, : len(prompt.token_ids)] = prompt.token_ids
            self._counts.requests += len(prompt.slots)
            self._counts.prompt_tokens += len(prompt.slots) * len(prompt.token_ids)
            self._counts.prefilled_tokens += len(prompt.context) + len(prompt.slots)
        return prompts

    def _close(self, holes: Iterable[int]) -> list[tuple[int, int, int]]:
        """Move the last rows into the holes; return (from slot, to slot, tokens) of each move."""
        moves = []
        for hole in (*holes, len(self._rows)):
            while self._rows and self._rows[-1] is None:
                self._rows.pop()
            if hole < len(self._rows):
                row = self._rows.pop()
                assert row is not None
                self._rows[hole] = row
                moves.append((len(self._rows), hole, row.position))
        return moves

    def _reserve(self, slots: int, length: int) -> None:
        self._cache.reserve(slots, length)
        shape = (self._cache.slots, self._cache.length)
        if self._cached.shape != shape:
            grown = np.full(shape, _NO_TOKEN, dtype=np.int32)
            grown[: len(self._cached), : self._cached.shape[1]] = self._cached
            self._cached = grown

    def _forward(self, rows: list[Row], prompts: list[Prompt]) -> torch.Tensor:
        """Logits [A, V] of the token after each row's newest one."""
        has_rotary = self._view is not None and self._view.has_rotary
        flat = FlatTokens(
            np.array([row.newest for row in rows]),
            np.array([row.position for row in rows]),
            self._cache,
            np.stack([row.rotary_position() for row in rows], axis=1) if has_rotary else None,
        )
        prompts = [prompt for prompt in prompts if len(prompt.context)]
        if prompts:
            flat.add_context(prompts)
        if self._view is not None:
            return self._view.logits(flat, self._no_mask, [row.request.images for row in rows])[
                : len(rows)
            ]
        output = self.model(
            input_ids=flat.ids(),
            position_ids=flat.positions(),
            # A ready mask, which the slot attention ignores, spares the model from making one.
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=torch.arange(flat.rows, device=self._device) if prompts else 0,
            layout=flat.layout(),
        )
        return output.logits[0, : len(rows)]


def _longest_common_start(prompt: np.ndarray, cached: np.ndarray) -> tuple[int, int]:
    """Longest start of a prompt that a slot holds, at most P - 1 tokens, and the slot.

    Args:
        prompt: int32 [P].
        cached: int32 [S, length], each slot's prompt; `_NO_TOKEN` behind it.

    Returns:
        (tokens, slot); (0, 0) when nothing of at least `_MIN_SHARED` tokens is found.
    """
    width = min(len(prompt) - 1, cached.shape[1])
    if width < _MIN_SHARED:
        return 0, 0
    differs = np.ones((len(cached), width + 1), dtype=bool)
    np.not_equal(cached[:, :width], prompt[:width], out=differs[:, :width])
    shared = differs.argmax(axis=1)
    slot = int(shared.argmax())
    return (int(shared[slot]), slot) if shared[slot] >= _MIN_SHARED else (0, 0)


def _starts_like_another(row: Row, shared: int, admitted: Iterable[bytes]) -> bool:
    """Whether an admitted prompt has `_WORTH_A_STEP` more tokens of the row's than the cache."""
    tokens = shared + _WORTH_A_STEP
    if tokens >= len(row.prompt):
        return False
    start = row.key[: tokens * row.prompt.itemsize]
    return any(key.startswith(start) for key in admitted)
