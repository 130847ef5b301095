"""How much memory each phase will take, and which setting lowers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import transformers

from rllib_gigpo.check.findings import Finding
from rllib_gigpo.check.parts import prompts_of, random_steps
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.memory_estimate import estimate, plan_of
from rllib_gigpo.models import materialize
from rllib_gigpo.models.loading import model_class
from rllib_gigpo.vision.sight import Sight, load_sight, vision_modules

_GIB = 2**30
# What to turn when a part is the largest of its phase.
_KNOBS = {
    "weights": "share them: learners(num_learners=..., sharding='fsdp'), or llm(lora=...)",
    "optimizer": "share it: learners(num_learners=..., sharding='fsdp'), or llm(lora=...)",
    "gradients": "share them: learners(num_learners=..., sharding='fsdp'), or llm(lora=...)",
    "frozen weights": "llm(base_dtype='bfloat16'), or learners(sharding='fsdp')",
    "reference": "learners(sharding='fsdp'), llm(lora=...), or kl_coeff=0, which keeps none",
    "gathered weights": "llm(dtype='bfloat16')",
    "pictures": "a smaller micro_batch_tokens",
    "activations": "learners(activation_checkpointing=True), or a smaller micro_batch_tokens",
    "logits": "a smaller micro_batch_tokens",
    "temporaries": "a smaller vocabulary or model; they are twice its largest matrix",
    "keys and values": "a smaller llm(max_num_seqs=...); vLLM takes less and queues the rest",
}
_KNOBS_OF_PHASE = {
    ("engine", "weights"): "llm(dtype='bfloat16'), or engine_options={'tensor_parallel_size': ...}",
    ("score", "activations"): "a smaller micro_batch_tokens",
}


def memory_part(config: GiGPOConfig, gpu_gib: float | None = None) -> Iterator[Finding]:
    """Estimate the memory of every phase.

    Args:
        config: The settings.
        gpu_gib: Memory of the GPUs in GiB; a learner that needs more is a fault. The keys and
            values of an engine are counted at their longest, so an engine over it is a note.
    """
    path = materialize(config.model_spec)
    sight = load_sight(path)
    if sight is not None and config.is_multi_agent:
        told = "not estimated: what pictures the prompts of a team show is not known beforehand"
        yield Finding("memory", "note", told)
        return
    pictures = () if sight is None else _pictures(config, sight)
    adapter = None if config.lora is None else adapter_parameters(path, config.lora)
    plan = plan_of(config, lora_parameters=adapter, pictures=pictures)
    phases = estimate(
        transformers.AutoConfig.from_pretrained(path, trust_remote_code=False), plan, sight
    )
    for phase, parts in phases.items():
        total = sum(parts.values()) / _GIB
        limit = gpu_gib if phase != "host" else None
        state = "ok"
        if limit is not None and total > limit:
            state = "FAULT" if phase != "engine" else "note"
        over = f", the GPU has {limit:g}" if state != "ok" else ""
        told = _told(phase, parts, recomputes=plan.activation_checkpointing)
        yield Finding("memory", state, f"{phase}: {total:.2f} GiB{over}; {told}")


def _pictures(config: GiGPOConfig, sight: Sight) -> tuple[tuple[int, int], ...]:
    """Return height and width of the pictures of the random prompt that shows most."""
    shown = [prompt.images for prompt in prompts_of(config, random_steps(config))]
    most = max(shown, key=lambda images: sum(sight.num_features(p.picture) for p in images))
    return tuple((p.picture.pixels.shape[0], p.picture.pixels.shape[1]) for p in most)


def _told(phase: str, parts: Mapping[str, int], *, recomputes: bool) -> str:
    largest = max(parts, key=lambda name: parts[name])
    # Recomputed already, they are like those of a pass that keeps none.
    same = "score" if recomputes and largest == "activations" else phase
    knob = _KNOBS_OF_PHASE.get((same, largest), _KNOBS[largest])
    return f"most of it {largest} ({parts[largest] / _GIB:.2f}): {knob}"


def adapter_parameters(path: str, lora: LoRASettings) -> int:
    """Return how many parameters a LoRA adapter has.

    Each adapted matrix of `in` columns and `out` rows gets rank x (in + out).

    Args:
        path: What `materialize` returned.
        lora: The adapter.
    """
    with torch.device("meta"):
        model = model_class(path).from_config(
            transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        )
    output, vision = model.get_output_embeddings(), tuple(vision_modules(model))
    return sum(
        lora.rank * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not output
        and not (vision and name.startswith(vision))
        and (lora.targets == "all-linear" or name.rsplit(".", 1)[-1] in lora.targets)
    )
