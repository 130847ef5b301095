"""Language models by name: every model is a Hugging Face folder or id.

    ModelSpec -> materialize -> folder or id -> load_tokenizer, load_causal_lm, vLLM

So the learner, the transformers engine and vLLM load the same files the same way. A `ModelSpec`
is plain data: it travels in the algorithm's config, and every process materializes it where it
runs.
"""

from rllib_gigpo.models.loading import (
    check_vocabulary,
    load_causal_lm,
    load_generation_config,
    load_tokenizer,
    materialize,
    model_class,
    number_of_embeddings,
    number_of_parameters,
    number_of_positions,
    stop_token_ids,
    without_progress_bars,
)
from rllib_gigpo.models.spec import FROM_SCRATCH, ModelSpec, TinyShape, TinyVisionShape

__all__ = [
    "FROM_SCRATCH",
    "ModelSpec",
    "TinyShape",
    "TinyVisionShape",
    "check_vocabulary",
    "load_causal_lm",
    "load_generation_config",
    "load_tokenizer",
    "materialize",
    "model_class",
    "number_of_embeddings",
    "number_of_parameters",
    "number_of_positions",
    "stop_token_ids",
    "without_progress_bars",
]
