"""Whether a run's models have an embedding for what their tokenizers write into every prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllib_gigpo.encoding import encode_chat
from rllib_gigpo.models import (
    check_vocabulary,
    load_generation_config,
    load_tokenizer,
    materialize,
    number_of_embeddings,
    stop_token_ids,
)
from rllib_gigpo.vision.sight import load_sight

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

_QUESTION = [{"role": "user", "content": "question"}]


def check_vocabularies(config: GiGPOConfig) -> None:
    """Check the model of every module; see `check_vocabulary`.

    Raises:
        ValueError: A token of a chat template, or one that ends a turn, has no embedding.
    """
    specs = (config.get_config_for_module(module_id).model_spec for module_id in config.module_ids)
    for path in dict.fromkeys(map(materialize, specs)):
        tokenizer = load_tokenizer(path)
        prompt = encode_chat(tokenizer, _QUESTION, sight=load_sight(path)).ids
        ends = stop_token_ids(tokenizer, load_generation_config(path))
        check_vocabulary(tokenizer, [*prompt, *ends], number_of_embeddings(path), path)
