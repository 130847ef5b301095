"""Tiny random Hugging Face model folders that every engine can serve.

Hidden size 64, two layers, head_dim 32 (the smallest that vLLM's kernels accept), 300 words. The
weights are drawn wide enough that the next-token distribution is far from uniform: a stale or
wrong weight shows in the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

Family = Literal["qwen2", "qwen3", "llama"]

VOCAB_SIZE = 300
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, VOCAB_SIZE))]
"""Token id -> word: token 57 is "w57"; the text of several tokens is joined by spaces."""

_CONFIGS: dict[Family, type[PreTrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
}


def tiny_config(family: Family, *, tied: bool) -> PreTrainedConfig:
    """Configuration of the tiny model of a family, input and output embeddings tied or not."""
    return _CONFIGS[family](
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )


def tiny_model(family: Family, *, tied: bool, seed: int = 0) -> PreTrainedModel:
    """A random fp32 model; equal seeds give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, tied=tied), dtype=torch.float32
        )
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # initialised to constants
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer over `WORDS`.

    `AutoTokenizer` keeps it in Qwen3 and Llama folders; for Qwen2 it puts that family's byte-level
    pieces around the same vocabulary, so text of a Qwen2 folder has no spaces.
    """
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def build_tiny_folder(folder: Path, family: Family, *, tied: bool, seed: int = 0) -> Path:
    """Write model and tokenizer as a Hugging Face folder and return it."""
    tiny_model(family, tied=tied, seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def build_tiny_folders(root: Path, models: Mapping[str, tuple[Family, bool]]) -> dict[str, Path]:
    """Write a folder per model, of its family and whether its embeddings are tied."""
    return {
        name: build_tiny_folder(root / name, family, tied=tied)
        for name, (family, tied) in models.items()
    }


@dataclass(frozen=True)
class TinyAdapter:
    """A random LoRA adapter: its peft files' content, and the same model with it merged in."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    merged: PreTrainedModel


@torch.no_grad()
def tiny_adapter(family: Family, *, tied: bool, seed: int = 0, rank: int = 4) -> TinyAdapter:
    """An adapter on all attention and MLP matrices of `tiny_model(family, tied=tied)`.

    W' = W + (alpha / rank) B A, with alpha = 2 rank.
    """
    merged = tiny_model(family, tied=tied)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    targets = sorted(
        {name.split(".")[-1] for name, _ in merged.named_modules() if name.endswith("_proj")}
    )
    for name, module in merged.named_modules():
        if name.endswith("_proj"):
            rows, columns = module.weight.shape
            a = 0.3 * torch.randn(rank, columns, generator=generator)
            b = 0.1 * torch.randn(rows, rank, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            module.weight += 2.0 * b @ a
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
    }
    return TinyAdapter(tensors, config, merged)


@torch.no_grad()
def forward_logps(
    model: PreTrainedModel,
    prompt_ids: Sequence[int] | np.ndarray,
    response_ids: Sequence[int] | np.ndarray,
    temperature: float = 1.0,
) -> np.ndarray:
    """Log-probability [T] of each response token by one plain forward pass in the model's dtype."""
    ids = torch.tensor([[*map(int, prompt_ids), *map(int, response_ids)]])
    logits = model(input_ids=ids).logits[0].float() / temperature
    logps = logits.log_softmax(dim=-1)[len(prompt_ids) - 1 : -1]
    return logps.gather(1, ids[0, len(prompt_ids) :, None])[:, 0].numpy()
