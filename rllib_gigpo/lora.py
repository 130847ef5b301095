"""LoRA: low-rank matrices beside frozen ones, W x + (alpha / rank) B A x (arXiv 2106.09685, Eq. 3).

The matrices are injected into the model where it stands, so its names, its body and its output
layer stay what they were; "the adapter" means all of them together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from rllib_gigpo.sharding import gathered, keeps, whole
from rllib_gigpo.value_checks import is_number, is_whole
from rllib_gigpo.vision.sight import vision_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "default"  # peft's own name of a model's only adapter


@dataclass(frozen=True)
class LoRASettings:
    """How a policy is adapted.

    Attributes:
        rank: Columns of B and rows of A.
        alpha: The adapter's output is multiplied by alpha / rank.
        targets: Last names of the adapted matrices, such as `("q_proj", "v_proj")`; "all-linear"
            adapts every linear layer but the output layer.
        dropout: Share of the adapter's inputs dropped in the passes that carry gradients, and in
            no other. Above 0 the ratio differs from 1 on the weights that sampled, and the draws
            depend on how rows are packed.

    Raises:
        ValueError: A value out of range.
    """

    rank: int = 32
    alpha: float = 32.0
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not is_whole(self.rank, 1):
            raise ValueError(f"LoRA rank={self.rank!r}: expected a whole number of at least 1")
        if not is_number(self.alpha) or self.alpha <= 0:
            raise ValueError(f"LoRA alpha={self.alpha!r}: expected a number above 0")
        if not is_number(self.dropout, 0.0) or self.dropout >= 1:
            raise ValueError(f"LoRA dropout={self.dropout!r}: expected a number in [0, 1)")
        named = isinstance(self.targets, tuple) and all(isinstance(t, str) for t in self.targets)
        is_all = isinstance(self.targets, str) and self.targets == "all-linear"
        if not is_all and not (named and self.targets):
            raise ValueError(
                f"LoRA targets={self.targets!r}: expected 'all-linear' or a tuple of names, such "
                "as ('q_proj', 'v_proj')"
            )


def add_adapter(model: PreTrainedModel, settings: LoRASettings, seed: int) -> None:
    """Inject an untrained adapter, which changes no output, and freeze everything else.

    Its parameters are fp32 whatever the model's dtype: B is 0, A is uniform in
    +-1/sqrt(inputs), as peft draws it, but by NumPy, whose stream is the same on every machine, so
    that all learners start from the same adapter.

    Args:
        model: The base model; it is changed.
        settings: Rank, scale and targets.
        seed: Decides A.

    Raises:
        ImportError: peft is not installed.
        ValueError: A target that is no linear layer of the model.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(
            "LoRA needs peft, which is not installed: pip install -e '.[lora]' in rllib-gigpo's "
            "folder"
        ) from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  (peft divides it only)
        target_modules=_targets(model, settings),
        # Of an image-text model the language model alone is adapted: engines serve no other.
        exclude_modules=_under(vision_modules(model)),
        lora_dropout=settings.dropout,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(config, model, _NAME)
    draws = np.random.default_rng(seed)
    for layer in adapted_layers(model).values():
        down, up = layer.lora_A[_NAME], layer.lora_B[_NAME]
        down.float()
        up.float()
        limit = np.float32(down.in_features**-0.5)
        uniform = draws.random(tuple(down.weight.shape), dtype=np.float32)
        with torch.no_grad():
            down.weight.copy_(torch.from_numpy((2 * uniform - 1) * limit))
            up.weight.zero_()


def _under(modules: list[str]) -> str | None:
    """Return a pattern of the names of everything inside some modules."""
    return rf"({'|'.join(map(re.escape, modules))})(\..*)?" if modules else None


def _targets(model: PreTrainedModel, settings: LoRASettings) -> list[str]:
    output_layer = model.get_output_embeddings()
    left_out = re.compile(_under(vision_modules(model)) or "(?!)")
    known = {
        name.rsplit(".", 1)[-1]
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
        and layer is not output_layer
        and not left_out.fullmatch(name)
    }
    if settings.targets == "all-linear":
        return sorted(known)
    unknown = [target for target in settings.targets if target not in known]
    if unknown:
        raise ValueError(
            f"LoRA target {unknown[0]!r} is no inner linear layer of {type(model).__name__}: "
            f"choose from {', '.join(sorted(known))}"
        )
    return sorted(settings.targets)


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Name to peft layer of the matrices with an adapter, in the order of the model."""
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def share_base(models: Sequence[PreTrainedModel]) -> None:
    """Let models that were adapted from the same weights hold these once; adapters stay apart."""
    held: dict[str, torch.nn.Parameter] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                first = held.setdefault(name.replace(".base_layer.", "."), parameter)
                parameter.data = first.data


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Let the model compute what it did before it was adapted."""
    layers = adapted_layers(model).values()
    # peft's `enable_adapters` would also freeze the adapter, and FSDP decides at its first pass,
    # which may be this one, in which type the gradients of what is not frozen are kept.
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def drop_inputs(model: PreTrainedModel) -> None:
    """Turn the adapter's dropout on; `model.eval()` turns it off."""
    for layer in adapted_layers(model).values():
        layer.lora_dropout.train()


def merged_weights(
    model: PreTrainedModel, device: torch.device | str | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights of the plain model that computes what the adapted one does.

    Args:
        model: An adapted model, or a plain one.
        device: Where each tensor goes as soon as it is computed; None leaves it.

    Returns:
        Hugging Face name to tensor, tied ones once: W + (alpha / rank) B A in fp32 where there is
        an adapter, the model's own tensor elsewhere. Of a sharded model all learners must ask, and
        the first one alone gets an answer.
    """
    layers = adapted_layers(model) if is_adapted(model) else {}
    tied = _tied_names(model)
    weights = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name or name in tied:
            continue
        owner, _, leaf = name.partition(".base_layer.")
        if owner in layers and leaf == "weight":
            with torch.no_grad():
                tensor = tensor.float() + layers[owner].get_delta_weight(_NAME)
        complete = whole(tensor)
        if keeps(tensor):
            weights[f"{owner}.{leaf}" if leaf else name] = complete.to(device or complete.device)
    return weights


def _tied_names(model: PreTrainedModel) -> set[str]:
    if not model.config.get_text_config().tie_word_embeddings:
        return set()
    return set(getattr(model, "_tied_weights_keys", None) or ())


def adapter_weights(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the adapter as peft's files hold it.

    Returns:
        Tensors by their names in adapter_model.safetensors, and the content of
        adapter_config.json.
    """
    held = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" in name
    }
    tensors = gathered(held, lambda tensor: tensor)
    config: Any = model.peft_config[_NAME]  # pyright: ignore[reportIndexIssue]
    return tensors, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name_or_path,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": sorted(config.target_modules),
        "bias": "none",
        "inference_mode": True,
    }


def is_adapted(model: PreTrainedModel) -> bool:
    """Whether the model carries an adapter."""
    return _NAME in getattr(model, "peft_config", {})
