"""A two-layer copy of a model: its architecture and tokenizer, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from rllib_gigpo.models import load_tokenizer, number_of_parameters, without_progress_bars
from rllib_gigpo.models.loading import model_class

_LAYERS = 2
# A wider copy would take minutes for a step on a CPU.
MOST_PARAMETERS = 60_000_000
_NARROW = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def small_copy(path: str, folder: Path) -> tuple[Path, int]:
    """Write a small copy of a model with its tokenizer.

    It has two layers, and where that is still large, narrow ones.

    Args:
        path: What `materialize` returned.
        folder: Where to write it.

    Returns:
        The folder, and the number of parameters.

    Raises:
        ValueError: The architecture has settings that cannot be cut down.
    """
    made = model_class(path)
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    _cut(config, {"num_hidden_layers": _LAYERS})
    if _parameters(made, config) > MOST_PARAMETERS:
        _cut(config, _NARROW)
    torch.manual_seed(0)
    try:
        model = made.from_config(config)
    except (ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path!r} cannot be cut down to two layers: {error}") from error
    with without_progress_bars():
        model.save_pretrained(folder)
    load_tokenizer(path).save_pretrained(folder)
    return folder, number_of_parameters(model)


def parameters_of(path: str) -> int:
    """Return the number of parameters of a model folder or id."""
    return _parameters(
        model_class(path), transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    )


def _parameters(made: Any, config: Any) -> int:
    with torch.device("meta"):
        return number_of_parameters(made.from_config(config))


def _cut(config: Any, values: dict[str, int]) -> None:
    text = config.get_text_config()
    for name, value in values.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    if getattr(text, "max_window_layers", None) is not None:
        text.max_window_layers = min(text.max_window_layers, text.num_hidden_layers)
