"""Tiny random image-text models of every supported family, as Hugging Face folders.

Hidden size 64, two layers, head_dim 32 (the smallest that vLLM's kernels accept). Weights are drawn
wide enough that the picture and its place show in the log-probabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from rllib_gigpo.encoding import Encoded, encode_chat
from rllib_gigpo.models import tiny
from rllib_gigpo.vision import Gallery, Picture
from rllib_gigpo.vision.sight import Sight

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava")
WORDS = ("where is the red box ? left right up down before now . 0 1 2 3",)

_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDEFICS_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)
_PICTURE = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics": "<image>",
    "llava": "<image>",
}
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def kind_of(family: str) -> str:
    """The builder's own name of a family's relatives."""
    if family.startswith("qwen"):
        return "qwen"
    return "llava" if family == "llava" else "idefics"


def template(kind: str) -> str:
    """A chat template that takes contents in parts, as those of image-text models do."""
    return (
        "{%- for message in messages -%}{{- '<' ~ message['role'] ~ '> ' -}}"
        "{%- for part in message['content'] -%}"
        f"{{%- if part['type'] == 'image' -%}}{{{{- '{_PICTURE[kind]}' -}}}}"
        "{%- else -%}{{- part['text'] ~ ' ' -}}{%- endif -%}{%- endfor -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
    )


def build_folder(folder: Path, family: str, *, tied: bool = True, seed: int = 0) -> Path:
    """Write model, tokenizer and image processor, and return the folder."""
    kind = kind_of(family)
    special = {"qwen": _QWEN_TOKENS, "idefics": _IDEFICS_TOKENS, "llava": ("<image>",)}[kind]
    tokenizer = tiny.make_tokenizer([*tiny.vocabulary(WORDS), *special], 512)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template(kind)
    tokenizer.save_pretrained(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    model = make_model(config_of(family, len(tokenizer), ids, tied=tied), seed)
    model.save_pretrained(folder)
    processor_of(family).save_pretrained(folder)
    return folder


def make_model(config: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # initialised to constants
                parameter.data += 0.1 * torch.randn_like(parameter)
            elif parameter.dim() > 1 and "language_model" not in name and "text_model" not in name:
                parameter.data = 0.2 * torch.randn_like(parameter)
    return model.eval()


def config_of(family: str, vocab_size: int, ids: dict[str, int], *, tied: bool) -> Any:
    text = {**_TEXT, "vocab_size": vocab_size, "tie_word_embeddings": tied}
    if kind_of(family) == "qwen":
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        }
        if family == "qwen3_vl":  # as published; transformers interleaves without asking
            text["rope_parameters"]["mrope_interleaved"] = True
        return AutoConfig.for_model(
            family,
            text_config=text,
            vision_config=_qwen_vision(family),
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=tied,
        )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    if family == "llava":
        return AutoConfig.for_model(
            "llava",
            text_config={"model_type": "llama", **text},
            vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **vision},
            image_token_id=ids["<image>"],
            image_seq_length=16,
            tie_word_embeddings=tied,
        )
    return AutoConfig.for_model(
        family,
        text_config={"model_type": "llama", **text},
        vision_config=vision,
        scale_factor=2,
        image_token_id=ids["<image>"],
        pad_token_id=0,
        tie_word_embeddings=tied,
    )


def _qwen_vision(family: str) -> dict[str, Any]:
    vision: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if family == "qwen2_vl":
        return {**vision, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    vision |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64}
    if family == "qwen2_5_vl":
        return {**vision, "window_size": 32, "fullatt_block_indexes": [1]}
    return {**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}


def processor_of(family: str) -> Any:
    """An image processor for small pictures: 8 x 8 pixels a patch."""
    if kind_of(family) == "qwen":
        return Qwen2VLImageProcessorPil(
            patch_size=8,
            temporal_patch_size=2,
            merge_size=2,
            size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        )
    if family == "llava":
        return LlavaImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        )
    kind = SmolVLMImageProcessorPil if family == "smolvlm" else Idefics3ImageProcessorPil
    return kind(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})


def picture(seed: int, height: int = 40, width: int = 56) -> Picture:
    """A picture of coloured noise in blocks of 8 x 8 pixels."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    pixels = blocks.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    return Gallery().hang(pixels)


def prompt_of(tokenizer: Any, sight: Sight, *parts: str | Picture) -> Encoded:
    """Encode a user's message of texts and pictures."""
    pictures = {part.name: part for part in parts if isinstance(part, Picture)}
    text = "".join(part.mark if isinstance(part, Picture) else part for part in parts)
    return encode_chat(tokenizer, [{"role": "user", "content": text}], pictures, sight)


def various_prompts(tokenizer: Any, sight: Sight) -> list[Encoded]:
    """One picture, two of different sizes with text between, none, and another one."""
    first, second = picture(0), picture(1, 72, 40)
    texts = (
        ("where is the ", first, "box ?"),
        (first, " before . now ", second),
        ("left or right",),
        ("where is the ", second, "box ?"),
    )
    return [prompt_of(tokenizer, sight, *parts) for parts in texts]


@torch.no_grad()
def plain_logps(model: Any, sight: Sight, prompt: Encoded, response_ids: Any) -> np.ndarray:
    """Log-probability [T] of each response token by transformers' own forward pass."""
    ids = torch.tensor([[*prompt.ids.tolist(), *map(int, response_ids)]])
    inputs: dict[str, Any] = {}
    if prompt.images:
        processed = [sight.process(placed.picture) for placed in prompt.images]
        axis = 1 if processed[0]["pixel_values"].dim() == 5 else 0
        inputs = {
            name: torch.cat([tensors[name] for tensors in processed], dim=axis)
            for name in processed[0]
        }
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == sight.family.image_token_id).int()
    logits = model(input_ids=ids, **inputs).logits[0].float()
    logps = logits.log_softmax(dim=-1)[len(prompt.ids) - 1 : -1]
    return logps.gather(1, ids[0, len(prompt.ids) :, None])[:, 0].numpy()
