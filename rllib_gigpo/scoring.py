"""Scoring passes, and what the loss reads: rows to micro-batches, and back to columns.

Only rows whose tokens are held here are scored; another learner scores the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from rllib_gigpo.module import CausalLMModule
from rllib_gigpo.rows import Columns, object_array
from rllib_gigpo.sequences import MicroBatch, pack

InStep = Callable[[list[MicroBatch]], list[MicroBatch]]


class Scored(NamedTuple):
    """Per row, object arrays [N] of float32 [T]; None on a row that is not held here.

    Attributes:
        logps: Log-probabilities of the response tokens.
        values: Values before them; None on every row where nobody asked.
    """

    logps: np.ndarray
    values: np.ndarray


def held_rows(rows: Columns, chosen: np.ndarray) -> np.ndarray:
    """Return those of the chosen rows whose tokens this learner holds."""
    prompts = rows["prompt_ids"]
    return np.array([row for row in chosen if prompts[row] is not None], dtype=np.int64)


def pack_rows(rows: Columns, chosen: np.ndarray, token_budget: int) -> list[MicroBatch]:
    """Pack the chosen rows into micro-batches; all of them must be held here."""
    images = rows["images"][chosen] if "images" in rows else None
    return pack(rows["prompt_ids"][chosen], rows["response_ids"][chosen], token_budget, images)


def score_rows(
    module: CausalLMModule,
    rows: Columns,
    *,
    token_budget: int,
    in_step: InStep = list,
    reference: bool = False,
    values: bool = False,
) -> Scored:
    """Score every row held here.

    Args:
        module: The module.
        rows: The rows.
        token_budget: Padded tokens of one forward pass.
        in_step: Adds empty micro-batches where all learners must make as many passes.
        reference: Whether the frozen reference is asked.
        values: Whether the critic is asked too.
    """
    held = held_rows(rows, np.arange(len(rows["group"])))
    logps: list[np.ndarray | None] = [None] * len(rows["group"])
    found_values = list(logps)
    with torch.no_grad():
        for micro_batch in in_step(pack_rows(rows, held, token_budget)):
            scored = module.score(micro_batch, reference=reference, values=values)
            members = held[micro_batch.rows.numpy()]
            _unpad(scored.logps, scored.mask, members, logps)
            if scored.values is not None:
                _unpad(scored.values, scored.mask, members, found_values)
    return Scored(object_array(logps), object_array(found_values))


def score_next_states(
    module: CausalLMModule, rows: Columns, *, token_budget: int, in_step: InStep = list
) -> np.ndarray:
    """Value the states after truncated episodes.

    Args:
        module: The module.
        rows: The rows.
        token_budget: As in `score_rows`.
        in_step: As in `score_rows`.

    Returns:
        Values [N], on the last rows of the truncated episodes held here; 0 elsewhere.
    """
    found = np.zeros(len(rows["group"]))
    if "next_prompt_ids" not in rows:
        return found
    prompts = rows["next_prompt_ids"]
    has_next = [ids is not None and len(ids) > 0 for ids in prompts]
    asked = np.flatnonzero(has_next)
    # A value is read before the first response token, so any token does.
    anything = [np.zeros(1, dtype=np.int32)] * len(asked)
    images = rows["next_images"][asked] if "next_images" in rows else None
    with torch.no_grad():
        for micro_batch in in_step(pack(prompts[asked], anything, token_budget, images)):
            values = module.score(micro_batch, values=True).values
            assert values is not None
            found[asked[micro_batch.rows.numpy()]] = values[:, 0].cpu().numpy()
    return found


def _unpad(
    values: torch.Tensor, mask: torch.Tensor, members: np.ndarray, into: list[np.ndarray | None]
) -> None:
    """Put the values [n, T] of a micro-batch at the places of its rows, without their padding."""
    numbers, counts = values.float().cpu(), mask.cpu()
    for place, row in enumerate(members):
        into[row] = numbers[place][counts[place]].numpy()


_TOKEN_INPUTS = ("old_logps", "ref_logps", "response_logps")
_INPUTS = ("advantage", "old_values", "value_target")


def loss_inputs(
    rows: Columns, micro_batch: MicroBatch, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the columns of a micro-batch's rows as tensors, on the mask's device."""
    members = micro_batch.rows.numpy()
    inputs = {name: _padded(rows[name][members], mask) for name in _TOKEN_INPUTS if name in rows}
    for name in _INPUTS:
        if name not in rows:
            continue
        column = rows[name][members]
        if column.dtype == object:
            inputs[name] = _padded(column, mask)
        else:
            inputs[name] = torch.tensor(column, dtype=torch.float32, device=mask.device)
    for name in ("step_tokens", "step_rows"):
        inputs[name] = torch.tensor(rows[name][members], dtype=torch.float64)
    if "value_target" in inputs and inputs["value_target"].dim() == 1:
        inputs["value_target"] = inputs["value_target"][:, None].expand(mask.shape)
    return inputs


def _padded(values: np.ndarray, mask: torch.Tensor) -> torch.Tensor:
    """Return float32 [n, T] from n arrays of float32, 0 outside the mask."""
    flat = torch.from_numpy(np.concatenate([np.asarray(v, dtype=np.float32) for v in values]))
    out = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return out.masked_scatter_(mask, flat.to(mask.device))
