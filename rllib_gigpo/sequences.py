"""Log-probabilities of responses under a causal LM, without logits where nothing was said.

Rows are packed into micro-batches by a token budget, equal (prompt, response) pairs share one
forward pass, and the output layer runs at response positions only.

Shapes: n rows of a micro-batch, U distinct sequences, L longest sequence, T longest response,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rllib_gigpo.chunked import token_logps
from rllib_gigpo.vision.pictures import PlacedPicture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rllib_gigpo.vision.sight import Sight


_LARGE = 1000.0


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    Attributes:
        rows: Positions of the rows in the list that was packed, int64 [n].
        index: Sequence of each row, int64 [n], values below U.
        input_ids: Prompt and response, right-padded, int64 [U, L].
        lengths: Sequence lengths, int64 [U].
        positions: Where the logits of the response tokens are, int64 [U, T] (padding repeats 0).
        targets: Response tokens, int64 [U, T].
        mask: True at response tokens, bool [U, T].
        images: Pictures of each sequence, length U.
    """

    rows: torch.Tensor
    index: torch.Tensor
    input_ids: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    images: tuple[tuple[PlacedPicture, ...], ...]


class ResponseLogps(NamedTuple):
    """What a forward pass says about the responses of a micro-batch's rows.

    Attributes:
        logps: Log-probability of each response token, float32 [n, T], 0 at padding.
        entropy: Entropy of each token's distribution, float32 [n, T], 0 at padding.
        mask: True at response tokens, bool [n, T].
        values: A critic's value of what is known before each token, float32 [n, T], 0 at padding;
            the first one is that of the prompt. None where nobody asked.
    """

    logps: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    values: torch.Tensor | None = None


class Sequence(NamedTuple):
    """A prompt, its response, and the prompt's pictures."""

    prompt: np.ndarray
    response: np.ndarray
    images: tuple[PlacedPicture, ...]


def pack(
    prompts: Iterable[np.ndarray],
    responses: Iterable[np.ndarray],
    token_budget: int,
    images: Iterable[tuple[PlacedPicture, ...]] | None = None,
) -> list[MicroBatch]:
    """Pack rows into micro-batches of at most `token_budget` padded tokens.

    Distinct sequences are sorted by length, so padding is small; a sequence longer than the budget
    gets a micro-batch of its own.

    Args:
        prompts: int32 [P] each, P >= 1.
        responses: int32 [T] each, T >= 1.
        token_budget: Limit of U * L.
        images: Pictures of each prompt; None where no prompt shows any.

    Returns:
        Micro-batches that cover every row once.

    Raises:
        ValueError: An empty prompt or response.
    """
    numbers: dict[tuple[bytes, ...], int] = {}
    index: list[int] = []
    distinct: list[Sequence] = []
    pairs = list(zip(prompts, responses, strict=True))
    shown = repeat((), len(pairs)) if images is None else images
    for row, ((prompt, response), seen) in enumerate(zip(pairs, shown, strict=True)):
        if len(prompt) == 0 or len(response) == 0:
            raise ValueError(
                f"row {row} has {len(prompt)} prompt and {len(response)} response tokens: both "
                "must be at least 1"
            )
        key = (prompt.tobytes(), response.tobytes(), *(placed.picture.key for placed in seen))
        number = numbers.setdefault(key, len(distinct))
        if number == len(distinct):
            distinct.append(Sequence(prompt, response, seen))
        index.append(number)
    lengths = np.array([len(s.prompt) + len(s.response) for s in distinct], np.int64)
    order = np.argsort(lengths, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and (end + 1 - start) * lengths[order[end]] <= token_budget:
            end += 1
        batches.append(_micro_batch(order[start:end], np.array(index), distinct))
        start = end
    return batches


def _micro_batch(members: np.ndarray, index: np.ndarray, distinct: list[Sequence]) -> MicroBatch:
    sequences = [distinct[member] for member in members]
    lengths = np.array([len(s.prompt) + len(s.response) for s in sequences])
    longest_response = max(len(s.response) for s in sequences)
    input_ids = np.zeros((len(sequences), lengths.max()), dtype=np.int64)
    positions = np.zeros((len(sequences), longest_response), dtype=np.int64)
    targets = np.zeros_like(positions)
    mask = np.zeros(positions.shape, dtype=bool)
    for u, (prompt, response, _) in enumerate(sequences):
        input_ids[u, : len(prompt)] = prompt
        input_ids[u, len(prompt) : lengths[u]] = response
        positions[u, : len(response)] = np.arange(len(prompt) - 1, lengths[u] - 1)
        targets[u, : len(response)] = response
        mask[u, : len(response)] = True
    local = np.full(len(distinct), -1, dtype=np.int64)
    local[members] = np.arange(len(members))
    rows = np.flatnonzero(local[index] >= 0)
    arrays = (rows, local[index[rows]], input_ids, lengths, positions, targets, mask)
    tensors = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
    return MicroBatch(*tensors, images=tuple(s.images for s in sequences))


def empty_batch() -> MicroBatch:
    """Return a micro-batch without rows: a pass of the model that nobody asks for anything."""
    token = np.zeros(1, dtype=np.int32)
    return _micro_batch(np.zeros(1, int), np.zeros(0, int), [Sequence(token, token, ())])


def nothing_of(out: ResponseLogps) -> torch.Tensor:
    """Return 0, the loss of no rows, whose gradient is 0 for every parameter."""
    parts = [part for part in (out.logps, out.entropy, out.values) if part is not None]
    return torch.stack([part.sum() for part in parts]).sum()


def response_logps(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    value_head: torch.nn.Module | None = None,
    sight: Sight | None = None,
) -> ResponseLogps:
    """Run the model on a micro-batch.

    Args:
        model: A causal LM whose logits are `lm_head(hidden)` (checked by `check_output_layer`).
        batch: The rows.
        temperature: Divides the logits, as the engine does when it samples; 0 counts as 1.
        entropy_grad: Whether the entropy carries a gradient.
        value_head: From hidden states [..., D] to values [...], where values are asked for.
        sight: The model's image side, where prompts may show pictures.

    Returns:
        Log-probabilities and entropies per row; computed once per distinct sequence.
    """
    body, output_layer = _parts(model)
    spoken = _spoken(body, batch, model.device, sight)
    mask = batch.mask.to(model.device)
    found = token_logps(
        output_layer,
        spoken,
        batch.targets.to(model.device)[mask],
        temperature=temperature,
        entropy_grad=entropy_grad,
    )
    index = batch.index.to(model.device)
    return ResponseLogps(
        logps=_unflatten(found.logps, mask)[index],
        entropy=_unflatten(found.entropy, mask)[index],
        mask=mask[index],
        values=None if value_head is None else _unflatten(value_head(spoken), mask)[index],
    )


def response_values(
    body: torch.nn.Module,
    head: torch.nn.Module,
    batch: MicroBatch,
    device: torch.device,
    sight: Sight | None = None,
) -> torch.Tensor:
    """Return a separate critic's value before each response token, float32 [n, T], 0 at padding."""
    mask = batch.mask.to(device)
    values = _unflatten(head(_spoken(body, batch, device, sight)), mask)
    return values[batch.index.to(device)]


def _spoken(
    body: Any, batch: MicroBatch, device: torch.device, sight: Sight | None
) -> torch.Tensor:
    """Return the hidden states from which the response tokens are predicted, flat."""
    lengths = batch.lengths.to(device)
    input_ids = batch.input_ids.to(device)
    mask = batch.mask.to(device)
    is_token = torch.arange(input_ids.shape[1], device=device) < lengths[:, None]
    reader, inputs = body, {"input_ids": input_ids}
    if any(batch.images) or (sight is not None and sight.always_looks):
        if sight is None:
            raise ValueError("the rows show pictures, and the model reads text alone")
        reader = sight.language_model(body)
        inputs = sight.inputs(body, input_ids, batch.images)
    hidden = reader(
        **inputs,
        attention_mask=None if bool(is_token.all()) else is_token.long(),
        use_cache=False,
    ).last_hidden_state
    rows = torch.arange(len(input_ids), device=device)[:, None].expand_as(mask)[mask]
    return hidden[rows, batch.positions.to(device)[mask]]


def _parts(model: Any) -> tuple[Any, Any]:
    """Return the transformer body and the output layer."""
    return model.base_model, model.get_output_embeddings()


def _unflatten(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


class _Answer(tuple):
    """What a body returns: a last hidden state, and None wherever a model asks for more."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


@contextmanager
def _answering(body: Any, hidden: torch.Tensor) -> Iterator[None]:
    """Let a body return hidden states without running any of its layers."""
    own = vars(body).pop("forward", None)
    body.forward = lambda *_, **__: _Answer([hidden])
    try:
        yield
    finally:
        del body.forward
        if own is not None:
            body.forward = own


def check_output_layer(model: PreTrainedModel) -> None:
    """Make sure that logits are the output layer of the last hidden state, nothing more.

    The layers before it do not run: with kernels for GPUs they could not on the CPU.

    Raises:
        ValueError: The model scales or caps its logits, so log-probabilities computed at response
            positions only would be wrong.
    """
    ids = torch.tensor([[0, 1]], device=model.device)
    body, output_layer = _parts(model)
    was_training = model.training
    model.eval()
    # A soft cap hardly changes the small logits of a fresh model: compare large ones.
    hook = output_layer.register_forward_hook(_enlarge)
    try:
        with torch.no_grad():
            hidden = output_layer.weight[None, : ids.shape[1]].clone()
            with _answering(body, hidden):
                whole = model(input_ids=ids, use_cache=False).logits
            direct = output_layer(hidden)
    finally:
        hook.remove()
        model.train(was_training)
    if not torch.allclose(whole, direct, rtol=1e-4, atol=1e-4 * _LARGE):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output layer (scaling or "
            "soft-capping), which the learner does not support; use a Qwen, Llama, SmolLM or "
            "Mistral model"
        )


def _enlarge(module: torch.nn.Module, inputs: tuple, logits: torch.Tensor) -> torch.Tensor:
    return logits * (_LARGE / logits.abs().max().clamp_min(1e-6))
