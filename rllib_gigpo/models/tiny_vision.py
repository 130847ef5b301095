"""A tiny image-text model from scratch: the tiny model's words and a Qwen2-VL body that sees.

Tokenizer and vocabulary are those of `tiny.py`, with the tokens that stand around a picture. The
architecture is Qwen2-VL: a vision tower for pictures of any size, and rotary positions in three
dimensions, as in the models that the paper trains.

Pictures are shrunk to at most `image_side` x `image_side` pixels and shifted so that white is 0.
On white paper only the ink then reaches the model, which a tower this small needs: centred at grey
it took several times as long to learn to read two digits.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rllib_gigpo.models import tiny
from rllib_gigpo.models.spec import ModelSpec, TinyVisionShape

BEFORE, AFTER, PICTURE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VISION_TOKENS = (BEFORE, AFTER, PICTURE, VIDEO)

_LAYOUT = 1  # part of every cache key: raise it when the files built from the same spec change
_PATCH, _MERGE = 8, 2
_WHITE, _SPREAD = [1.0] * 3, [0.15] * 3


def folder_name(spec: ModelSpec) -> str:
    """Cache key: two specs share it exactly when they build the same files."""
    content = {
        "layout": _LAYOUT,
        "vocabulary": tiny.vocabulary(spec.words),
        "shape": asdict(spec.tiny_vision_shape),
        "seed": spec.seed,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"tiny-vision-{digest[:16]}"


def build(spec: ModelSpec, folder: Path) -> None:
    """Write config, weights, tokenizer, chat template and image processor into `folder`."""
    shape = spec.tiny_vision_shape
    tokenizer = make_tokenizer(spec, shape.max_position_embeddings)
    tokenizer.save_pretrained(folder)
    make_model(tokenizer, shape, spec.seed).save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=_PATCH,
        merge_size=_MERGE,
        temporal_patch_size=1,
        image_mean=_WHITE,
        image_std=_SPREAD,
        size={"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": shape.image_side**2},
    ).save_pretrained(folder)


def make_tokenizer(spec: ModelSpec, max_length: int) -> transformers.PreTrainedTokenizerFast:
    """The tiny model's tokenizer with the tokens of pictures, and a template that places them."""
    words = [*tiny.vocabulary(spec.words), *VISION_TOKENS]
    tokenizer = tiny.make_tokenizer(words, max_length)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = _chat_template()
    return tokenizer


def make_model(
    tokenizer: transformers.PreTrainedTokenizerFast, shape: TinyVisionShape, seed: int
) -> transformers.PreTrainedModel:
    """Qwen2-VL with matrices drawn from N(0, `initializer_range`), by NumPy as in `tiny.py`."""
    ids: dict[str, Any] = {t: tokenizer.convert_tokens_to_ids(t) for t in VISION_TOKENS}
    half = shape.hidden_size // shape.num_heads // 2
    side = 3 * half // 8
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie,
        "bos_token_id": None,
        "eos_token_id": tiny.SPECIAL_TOKENS.index(tiny.EOS),
        "pad_token_id": tiny.SPECIAL_TOKENS.index(tiny.PAD),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half - 2 * side, side, side],
        },
    }
    vision = {
        "depth": shape.vision_layers,
        "embed_dim": shape.vision_size,
        "hidden_size": shape.hidden_size,
        "num_heads": shape.num_heads,
        "mlp_ratio": 2,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 1,
    }
    config = transformers.AutoConfig.for_model(
        "qwen2_vl",
        text_config=text,
        vision_config=vision,
        image_token_id=ids[PICTURE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[BEFORE],
        vision_end_token_id=ids[AFTER],
        tie_word_embeddings=shape.tie,
    )
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draws = np.random.default_rng(seed)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.dim() >= 2:
            matrix = draws.standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.data.copy_(torch.from_numpy(matrix * np.float32(shape.initializer_range)))
    return model


def _chat_template() -> str:
    escapes = "".join(
        f" | replace('{token}', '{token[0]} {token[1:-1]} {token[-1]}')"
        for token in (*tiny.SPECIAL_TOKENS, *VISION_TOKENS)
    )
    roles = ", ".join(f"'{role}': '{token}'" for role, token in tiny.ROLES.items())
    return (
        f"{{%- set roles = {{{roles}}} -%}}"
        "{%- for message in messages -%}"
        "{%- if message['role'] not in roles -%}"
        "{{- raise_exception('unknown role ' ~ message['role'] ~ ': use one of ' ~"
        " (roles | join(', '))) -}}"
        "{%- endif -%}"
        "{{- roles[message['role']] ~ ' ' -}}"
        "{%- set content = message['content'] -%}"
        "{%- set whole = [{'type': 'text', 'text': content}] -%}"
        "{%- for part in (whole if content is string else content) -%}"
        f"{{%- if part['type'] == 'image' -%}}{{{{- '{BEFORE}{PICTURE}{AFTER} ' -}}}}"
        f"{{%- else -%}}{{{{- (part['text']{escapes}) ~ ' ' -}}}}{{%- endif -%}}"
        "{%- endfor -%}"
        f"{{%- if message['role'] == 'assistant' -%}}{{{{- '{tiny.EOS} ' -}}}}{{%- endif -%}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{tiny.ROLES['assistant']}' -}}}}{{%- endif -%}}"
    )
