"""How much memory a run needs, part by part and phase by phase, before it is started.

Weights, optimizer state and the cache of keys and values are counted. What the backward pass keeps
is not guessed by a formula: see `memory_passes`.

    python -m rllib_gigpo.memory_estimate Qwen/Qwen2.5-7B-Instruct --num-learners 8 --sharding fsdp
    python -m rllib_gigpo.memory_estimate Qwen/Qwen2-VL-2B-Instruct --picture 300x300

Not counted: the runtime (about 0.6 GB of a CPU process, a CUDA context), freed memory that an
allocator keeps for later, the copy of the weights on their way to the engines, what an engine's
vision tower works on.

Shapes: P parameters, T tokens of a micro-batch, R response tokens of it, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rllib_gigpo.chunked import CHUNK_ELEMENTS
from rllib_gigpo.memory_passes import Rows, passes
from rllib_gigpo.models.loading import class_for
from rllib_gigpo.recompute import repeated_layers
from rllib_gigpo.vision.sight import Sight, load_sight, vision_modules
from rllib_gigpo.weight_sync import never_trained

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rllib_gigpo.config import GiGPOConfig

_FP32, _BF16 = 4, 2
_STATES = {"adamw": 2, "sgd": 0}
# What one chunk of logits becomes: logits, log-probabilities, their gradient.
_LOGIT_BUFFERS = 3


@dataclass(frozen=True)
class Plan:
    """What decides how much memory is needed.

    Attributes:
        sequence_tokens: Prompt and response of the longest row.
        response_tokens: Its response.
        micro_batch_tokens: Padded tokens of one pass.
        dtype: What matrix products and engines run in.
        lora_parameters: Parameters of the adapter, None where all weights are trained.
        base_dtype: Type of the frozen weights, with an adapter.
        with_reference: Whether a frozen copy is kept beside the trained weights.
        with_critic_model: Whether a critic has a body of its own.
        optimizer: "adamw" or "sgd".
        num_learners: Learners that share the model, with "fsdp".
        sharding: "replicate" or "fsdp".
        offload_to_cpu: Whether the parts of a sharded model are kept on the host.
        activation_checkpointing: Whether the insides of layers are computed again.
        engine_sequences: Sequences that one engine decodes at once.
        pictures: Height and width of each picture that a row shows; those of different rows are
            taken to be different.
        freeze_vision_tower: Whether the language model alone is trained.
        policies: Policies of a team that are trained, all of this kind.
        untrained_policies: Policies of a team that are not.
    """

    sequence_tokens: int
    response_tokens: int
    micro_batch_tokens: int = 16384
    dtype: str = "float32"
    lora_parameters: int | None = None
    base_dtype: str = "float32"
    with_reference: bool = False
    with_critic_model: bool = False
    optimizer: str = "adamw"
    num_learners: int = 1
    sharding: str = "replicate"
    offload_to_cpu: bool = False
    activation_checkpointing: bool = False
    engine_sequences: int = 256
    pictures: tuple[tuple[int, int], ...] = ()
    freeze_vision_tower: bool = False
    policies: int = 1
    untrained_policies: int = 0


def plan_of(
    config: GiGPOConfig,
    lora_parameters: int | None = None,
    pictures: tuple[tuple[int, int], ...] = (),
) -> Plan:
    """Return the plan that settings make, with rows as long as they may be.

    Policies of a team are taken to be alike; what `algorithm_config_overrides_per_module` gives one
    of them is not looked at.

    Args:
        config: The settings.
        lora_parameters: Parameters of the adapter, with `llm(lora=...)`.
        pictures: Height and width of each picture that a row shows.
    """
    untrained = len(never_trained(config))
    return Plan(
        sequence_tokens=config.max_prompt_tokens + config.max_response_tokens,
        response_tokens=config.max_response_tokens,
        micro_batch_tokens=config.micro_batch_tokens,
        dtype=config.dtype,
        lora_parameters=lora_parameters,
        base_dtype=config.base_dtype,
        with_reference=config.kl_coeff > 0 and config.lora is None,
        with_critic_model=config.critic == "model",
        optimizer=config.optimizer_name,
        num_learners=max(1, config.num_learners or 0),
        sharding=config.sharding,
        offload_to_cpu=config.offload_to_cpu,
        activation_checkpointing=config.activation_checkpointing,
        engine_sequences=config.max_num_seqs,
        pictures=pictures,
        freeze_vision_tower=config.freeze_vision_tower,
        policies=len(config.module_ids) - untrained,
        untrained_policies=untrained,
    )


def estimate(
    config: PreTrainedConfig, plan: Plan, sight: Sight | None = None
) -> dict[str, dict[str, int]]:
    """Return bytes per part, for each phase of an iteration.

    Args:
        config: Architecture of the model.
        plan: The rest.
        sight: The model's image side, where rows show pictures.

    Returns:
        Phase to part to bytes: "score" and "update" on one learner's device, "host" beside it where
        parts are offloaded, "engine" on one engine's.

    Raises:
        ValueError: Pictures without an image side, or that take more tokens than a row has.
    """
    if plan.pictures and sight is None:
        raise ValueError(
            f"pictures={plan.pictures} for a {config.model_type}, which reads text alone: leave "
            "them out, or choose an image-text model"
        )
    text: Any = config.get_text_config()
    outline = _outline(config)
    is_sharded = plan.sharding == "fsdp"
    shards = plan.num_learners if is_sharded else 1
    # A sharded model gathers narrow weights, and the base of an adapter may be narrow: autocast
    # makes copies of neither.
    is_narrow = plan.dtype == "bfloat16" and (
        is_sharded or (plan.lora_parameters is not None and plan.base_dtype == "bfloat16")
    )
    held = _held(outline, plan)
    parts = {name: math.ceil(size / shards) for name, size in held.items()}
    rows = max(1, plan.micro_batch_tokens // plan.sequence_tokens)
    found = passes(
        lambda: _model(config, torch.bfloat16 if is_narrow else torch.float32),
        Rows(rows, plan.sequence_tokens, sight if plan.pictures else None, plan.pictures),
        bf16=plan.dtype == "bfloat16",
        recompute=plan.activation_checkpointing,
        freeze=plan.freeze_vision_tower or plan.lora_parameters is not None,
    )
    bodies = 1 + plan.with_critic_model
    gathered: dict[str, int] = {}
    if shards > 1:
        # All outside the layers, and the layer at work with the one that is being fetched.
        width = _width(plan.dtype)
        gathered = {"gathered weights": (bodies * outline.outside + 2 * outline.layer) * width}
    # Autocast keeps the narrow copies of the weights to the end of a pass.
    copies = outline.parameters * _BF16 if plan.dtype == "bfloat16" and not is_narrow else 0
    # Policy and critic both wait for the backward pass of their common loss.
    kept = bodies * found.kept
    if plan.activation_checkpointing:
        kept += max(copies, found.scored)
    pixels = {"pictures": found.pictures} if plan.pictures else {}
    logits = min(
        _LOGIT_BUFFERS * max(CHUNK_ELEMENTS, text.vocab_size) * _FP32,
        _LOGIT_BUFFERS * rows * plan.response_tokens * text.vocab_size * _FP32,
    )
    at_rest = {name: size for name, size in parts.items() if name != "gradients"}
    on_device = {} if plan.offload_to_cpu else at_rest
    gradients = {} if plan.offload_to_cpu else {"gradients": parts["gradients"]}
    phases = {
        "score": {
            **on_device,
            **gathered,
            **pixels,
            "activations": found.scored + copies,
            "logits": logits,
        },
        "update": {
            **on_device,
            **gradients,
            **gathered,
            **pixels,
            "activations": kept,
            "logits": logits,
            # The largest matrix has a gradient by two ways, and a step works on copies of it.
            "temporaries": 2 * outline.largest * _FP32,
        },
        "engine": {
            "weights": outline.parameters * _width(plan.dtype),
            "keys and values": cache_bytes(config, plan),
        },
    }
    if plan.offload_to_cpu:
        phases["host"] = parts
    return phases


def cache_bytes(config: PreTrainedConfig, plan: Plan) -> int:
    """Return bytes of keys and values of all sequences at their longest."""
    text: Any = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * head * _width(plan.dtype)
    return per_token * plan.engine_sequences * plan.sequence_tokens


@dataclass(frozen=True)
class _Outline:
    """Numbers of parameters.

    Of all, of the largest layer, outside the layers, of the largest matrix, and of what
    `freeze_vision_tower` freezes.
    """

    parameters: int
    layer: int
    outside: int
    largest: int
    vision: int


def _outline(config: PreTrainedConfig) -> _Outline:
    with FakeTensorMode():
        model = _model(config, torch.float32)
        layers = [sum(p.numel() for p in layer.parameters()) for layer in repeated_layers(model)]
        sizes = [p.numel() for p in model.parameters()]
        vision = sum(
            p.numel()
            for name in vision_modules(model)
            for p in model.get_submodule(name).parameters()
        )
    return _Outline(sum(sizes), max(layers), sum(sizes) - sum(layers), max(sizes), vision)


def _held(outline: _Outline, plan: Plan) -> dict[str, int]:
    """Return what all learners together hold of one copy, in bytes."""
    whole = outline.parameters
    still = outline.vision if plan.freeze_vision_tower else 0
    trained = whole - still if plan.lora_parameters is None else plan.lora_parameters
    trained += whole - still if plan.with_critic_model else 0
    members = plan.policies + plan.untrained_policies
    held = {
        "weights": members * trained * _FP32,
        "optimizer": _STATES[plan.optimizer] * plan.policies * trained * _FP32,
        "gradients": plan.policies * trained * _FP32,
    }
    if plan.lora_parameters is not None:
        # Adapters share their base, unless it is spread.
        bases = 1 if plan.sharding == "replicate" else members
        held["frozen weights"] = bases * whole * _width(plan.base_dtype)
    elif still:
        held["frozen weights"] = members * still * (1 + plan.with_critic_model) * _FP32
    if plan.with_reference:
        held["reference"] = members * whole * _FP32
    return held


def _model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    return class_for(config).from_config(config, dtype=dtype).eval()


def _width(dtype: str) -> int:
    return _BF16 if dtype == "bfloat16" else _FP32


def table(phases: Mapping[str, Mapping[str, int]]) -> str:
    """Return phases and parts as lines of a Markdown table, in GiB."""
    lines = ["| phase | part | GiB |", "| --- | --- | --- |"]
    for phase, parts in phases.items():
        for part, size in parts.items():
            lines.append(f"| {phase} | {part} | {size / 2**30:.2f} |")
        lines.append(f"| {phase} | all | {sum(parts.values()) / 2**30:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table for a Hugging Face model."""
    parser = argparse.ArgumentParser(description="Estimate the memory of a run.")
    add = parser.add_argument
    add("model", help="Hugging Face id or folder; only its config is read")
    add("--sequence-tokens", type=int, default=2560)
    add("--response-tokens", type=int, default=512)
    add("--micro-batch-tokens", type=int, default=16384)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add("--num-learners", type=int, default=1)
    add("--sharding", default="replicate", choices=("replicate", "fsdp"))
    add("--engine-sequences", type=int, default=256)
    add("--picture", type=_size, help="HEIGHTxWIDTH of the pictures that a row shows")
    add("--pictures-per-row", type=int, default=1)
    for flag in (
        "with-reference",
        "freeze-vision-tower",
        "offload-to-cpu",
        "activation-checkpointing",
    ):
        add(f"--{flag}", action="store_true")
    args = vars(parser.parse_args(arguments))
    import transformers

    path, picture, count = (args.pop(name) for name in ("model", "picture", "pictures_per_row"))
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    plan = Plan(**args, pictures=(picture,) * count if picture else ())
    print(table(estimate(config, plan, load_sight(path) if picture else None)))


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    return int(height), int(width)


if __name__ == "__main__":
    main()
