"""A tiny Llama language model from scratch, with one token per word of its environment.

Text is split into tags (`<action>`), words (letters, digits, `_`, `/` and `-`, so `in/on` is one),
single punctuation marks and newlines; spaces only separate. Decoding joins tokens with single
spaces, so a text already spaced that way comes back as it was. Case is kept; a word outside the
vocabulary becomes `<unk>`.

The chat template writes a role token before each message and `<eos>` after each answer. Where the
content of a message spells a special token, the template pulls its letters apart (`<eos>` becomes
`< eos >`), so no observation can end a turn or pose as another role. Only text that bypasses the
template can carry special tokens.

The architecture is Llama because `AutoTokenizer`, which vLLM uses too, keeps a Llama folder's own
tokenizer. For Qwen2 it puts that family's byte-level tokenizer in its place without a word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

from rllib_gigpo.models.spec import ModelSpec, TinyShape

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ROLES = {"user": "<user>", "assistant": "<assistant>", "system": "<system>"}
SPECIAL_TOKENS = (PAD, EOS, UNK, *ROLES.values())
RESPONSE_TAGS = ("<think>", "</think>", "<action>", "</action>")

_LAYOUT = 1  # part of every cache key: raise it when the files built from the same spec change
_WORD_PATTERN = r"</?\w+>|[\w/\-]+|\n|[^\w\s]"


def folder_name(spec: ModelSpec) -> str:
    """Cache key: two specs share it exactly when they build the same files."""
    content = {
        "layout": _LAYOUT,
        "vocabulary": vocabulary(spec.words),
        "shape": asdict(spec.tiny_shape),
        "seed": spec.seed,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"tiny-{digest[:16]}"


def build(spec: ModelSpec, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template of the tiny model into `folder`."""
    words = vocabulary(spec.words)
    make_tokenizer(words, spec.tiny_shape.max_position_embeddings).save_pretrained(folder)
    make_model(len(words), spec.tiny_shape, spec.seed).save_pretrained(folder)


def vocabulary(texts: Sequence[str]) -> list[str]:
    """Every token of the tiny model in the order of its id.

    Special tokens and response tags come first, then the sorted words of `texts`, so the order
    and repetition of the texts do not matter.

    Raises:
        ValueError: The texts hold no word at all.
    """
    splitter = _word_splitter()
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
    if not words:
        raise ValueError(
            "the tiny model needs sample texts for its vocabulary: "
            'ModelSpec("tiny", words=("at 1 0 . key north west .", ...))'
        )
    first = (*SPECIAL_TOKENS, *RESPONSE_TAGS)
    return [*first, *sorted(words.difference(first))]


def make_tokenizer(words: Sequence[str], max_length: int) -> transformers.PreTrainedTokenizerFast:
    """Word-level tokenizer over the vocabulary, with the tiny model's chat template."""
    ids = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=UNK))
    backend.pre_tokenizer = _word_splitter()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=list(ROLES.values()),
        chat_template=_chat_template(),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_model(vocab_size: int, shape: TinyShape, seed: int) -> transformers.LlamaForCausalLM:
    """Llama with matrices drawn from N(0, `initializer_range`), biases 0 and norms 1.

    NumPy draws the numbers because its normal stream is the same on every processor; torch's
    depends on the vector instructions at hand.
    """
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=shape.max_position_embeddings,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=shape.tie,
        attention_bias=True,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        model = transformers.LlamaForCausalLM(config)
    draws = np.random.default_rng(seed)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 2:
            matrix = draws.standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.data.copy_(torch.from_numpy(matrix * np.float32(shape.initializer_range)))
    return model


def _word_splitter() -> tokenizers.pre_tokenizers.PreTokenizer:
    pattern = tokenizers.Regex(_WORD_PATTERN)
    return tokenizers.pre_tokenizers.Split(pattern, behavior="removed", invert=True)


def _chat_template() -> str:
    escapes = "".join(
        f" | replace('{token}', '{token[0]} {token[1:-1]} {token[-1]}')" for token in SPECIAL_TOKENS
    )
    roles = ", ".join(f"'{role}': '{token}'" for role, token in ROLES.items())
    return (
        f"{{%- set roles = {{{roles}}} -%}}"
        "{%- for message in messages -%}"
        "{%- if message['role'] not in roles -%}"
        "{{- raise_exception('unknown role ' ~ message['role'] ~ ': use one of ' ~"
        " (roles | join(', '))) -}}"
        "{%- endif -%}"
        f"{{{{- roles[message['role']] ~ ' ' ~ (message['content']{escapes}) ~ ' ' -}}}}"
        f"{{%- if message['role'] == 'assistant' -%}}{{{{- '{EOS} ' -}}}}{{%- endif -%}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{ROLES['assistant']}' -}}}}{{%- endif -%}}"
    )
