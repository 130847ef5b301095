"""Pictures as vLLM's multimodal input.

The prompt and the pixels reach vLLM as the learner has them: placed, expanded and processed. vLLM's
own processor of the model, which may need torchvision, has no part in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rllib_gigpo.engines.base import EngineError, Request

if TYPE_CHECKING:
    from rllib_gigpo.vision.families import Tensors
    from rllib_gigpo.vision.sight import Sight

_MODALITY = "image"


def check_positions(model: str) -> None:
    """Refuse a model whose positions in pictures vLLM would mix up.

    transformers interleaves the rotary dimensions of a Qwen3-VL always, vLLM where its config says
    so, as the published ones do. One made by transformers' config class may not; on a tiny random
    model log-probabilities then differed by 0.1 to 0.5 wherever a prompt showed a picture.

    Args:
        model: Model folder or Hugging Face id.

    Raises:
        EngineError: The config does not say so.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if config.model_type != "qwen3_vl":
        return
    if not config.get_text_config().rope_parameters.get("mrope_interleaved"):
        raise EngineError(
            f"the config of the qwen3_vl {model!r} does not say that rotary dimensions are "
            "interleaved, and vLLM would give other log-probabilities than the learner: add "
            '"mrope_interleaved": true to text_config.rope_parameters in its config.json'
        )


def prompt_with_pictures(request: Request, sight: Sight) -> Any:
    """Return a request's prompt as vLLM's engine takes it.

    Args:
        request: A request that shows at least one picture.
        sight: The model's image side.
    """
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    placeholders = []
    for placed in request.images:
        (first, _), (last, length) = placed.runs[0], placed.runs[-1]
        seen = torch.zeros(last + length - first, dtype=torch.bool)
        for start, run in placed.runs:
            seen[start - first : start - first + run] = True
        is_embed = None if bool(seen.all()) else seen
        placeholders.append(PlaceholderRange(first, len(seen), is_embed))
    processed = [sight.process(placed.picture) for placed in request.images]
    tensors, fields = _fields(processed)
    return mm_input(
        request.prompt_ids.tolist(),
        MultiModalKwargsItems.from_hf_inputs(tensors, fields),  # pyright: ignore[reportArgumentType]
        {_MODALITY: [placed.picture.name for placed in request.images]},
        {_MODALITY: placeholders},
    )


def _fields(processed: list[Tensors]) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of all pictures, and how vLLM finds those of each one."""
    from vllm.multimodal.inputs import MultiModalFieldConfig

    if "image_grid_thw" in processed[0]:  # Qwen: patches of all pictures end to end
        tensors = _joined(processed)
        patches = tensors["image_grid_thw"].prod(-1)
        return tensors, {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(_MODALITY, patches),
            "image_grid_thw": MultiModalFieldConfig.batched(_MODALITY, keep_on_cpu=True),
        }
    if "pixel_attention_mask" in processed[0]:  # Idefics3: tiles of all pictures end to end
        tensors = _joined([{name: tensor[0] for name, tensor in p.items()} for p in processed])
        tiles = torch.tensor([p["pixel_values"].shape[1] for p in processed])
        tensors["num_patches"] = tiles
        return tensors, {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(_MODALITY, tiles),
            "pixel_attention_mask": MultiModalFieldConfig.flat_from_sizes(_MODALITY, tiles),
            "num_patches": MultiModalFieldConfig.batched(_MODALITY, keep_on_cpu=True),
        }
    return _joined(processed), {"pixel_values": MultiModalFieldConfig.batched(_MODALITY)}


def _joined(processed: list[Tensors]) -> Tensors:
    return {name: torch.cat([tensors[name] for tensors in processed]) for name in processed[0]}
