"""From a model's name to its files, and from its files to tokenizer, model and stop tokens."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from rllib_gigpo.models import smollm2, tiny
from rllib_gigpo.models.cache import build_once
from rllib_gigpo.models.spec import SMOLLM2, TINY, TINY_VISION, ModelSpec
from rllib_gigpo.vision.families import MODEL_TYPES

_LOG = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


def materialize(spec: ModelSpec) -> str:
    """Return the Hugging Face folder or id that holds the model, building it where needed.

    `"tiny"`, `"tiny-vision"` and `"smollm2-135m"` are built once into `$RLLIB_GIGPO_CACHE` (default
    `~/.cache/rllib_gigpo`); processes and machines may do so at the same time. The same tiny spec
    gives the same weights everywhere. A Hugging Face id comes back as it is: whether it exists
    shows when it is loaded.

    Raises:
        ImportError: `"smollm2-135m"` without the package that holds its weights.
        ValueError: A folder that is missing or holds no safetensors model, a name that is neither
            a folder nor a Hugging Face id, or a tiny model without words.
    """
    if spec.name == TINY:
        with without_progress_bars():
            return str(build_once(tiny.folder_name(spec), lambda folder: tiny.build(spec, folder)))
    if spec.name == TINY_VISION:
        from rllib_gigpo.models import tiny_vision

        with without_progress_bars():
            name = tiny_vision.folder_name(spec)
            return str(build_once(name, lambda folder: tiny_vision.build(spec, folder)))
    if spec.name == SMOLLM2:
        with without_progress_bars():
            return str(build_once(smollm2.FOLDER_NAME, smollm2.build))
    folder = Path(spec.name).expanduser()
    if folder.exists():
        _require_model_folder(folder)
        return str(folder.absolute())
    if not _HUB_ID.fullmatch(spec.name):
        raise ValueError(
            f"model {spec.name!r} is no existing folder and no Hugging Face id: use {TINY!r}, "
            f"{TINY_VISION!r}, {SMOLLM2!r}, an id such as 'Qwen/Qwen2.5-1.5B-Instruct', or a "
            "folder with config.json and *.safetensors"
        )
    return spec.name


def load_tokenizer(path: str) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or id; it has a chat template and a pad token.

    Where the model defines no pad token, its end token pads: padded positions are masked wherever
    they occur, so the choice changes nothing. Special tokens that a user's text spells out become
    those tokens, as in every Hugging Face tokenizer; only the tiny model's template prevents it.

    Args:
        path: What `materialize` returned.

    Raises:
        ValueError: No tokenizer there, no chat template, or neither pad nor end token.
    """
    tokenizer = _load(transformers.AutoTokenizer.from_pretrained, "tokenizer", path)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {path!r} has no chat template: use the model's instruct version, or "
            "put a chat_template.jinja into its folder"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer of {path!r} has neither a pad token nor an end token: set "
                "pad_token in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    path: str, dtype: torch.dtype = torch.float32, **overrides: Any
) -> transformers.PreTrainedModel:
    """Load a causal language or image-text model in evaluation mode (no dropout).

    Args:
        path: What `materialize` returned.
        dtype: Type of the weights: float32 for the learner's master weights, another for serving.
        **overrides: Passed on to `from_pretrained`, for example `device_map`, `revision`, or
            `attn_implementation` (default `"sdpa"`).

    Raises:
        ValueError: No model there, no safetensors, an architecture that needs remote code, or a
            checkpoint that lacks weights of its own architecture or holds NaN or infinity.
    """
    settings: dict[str, Any] = {"attn_implementation": "sdpa"} | overrides
    model, report = _load(
        model_class(path).from_pretrained,
        "causal language model",
        path,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        **settings,
    )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(
            f"the checkpoint {path!r} lacks {len(missing)} weights of {type(model).__name__} "
            f"(the first: {missing[0]!r}), which would start random: use a complete checkpoint"
        )
    # A sum is NaN or infinite where a value is, and needs no second copy of a tensor.
    sums = {name: p.sum(dtype=torch.float32) for name, p in model.named_parameters()}
    broken = [name for name, total in sums.items() if not torch.isfinite(total)]
    if broken:
        raise ValueError(
            f"the checkpoint {path!r} holds NaN or infinity in {len(broken)} weights (the first: "
            f"{broken[0]!r}): it was saved by a run that had failed; use an earlier one"
        )
    return model.eval()


def model_class(path: str) -> Any:
    """Return transformers' class for the models of a folder or id: image-text where it sees."""
    return class_for(_load(transformers.AutoConfig.from_pretrained, "model config", path))


def class_for(config: transformers.PreTrainedConfig) -> Any:
    """Return transformers' class for an architecture: image-text where it sees."""
    if config.model_type in MODEL_TYPES:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def number_of_embeddings(path: str) -> int:
    """Return how many tokens the language model of a folder or id has embeddings for."""
    config = _load(transformers.AutoConfig.from_pretrained, "model config", path)
    return int(config.get_text_config().vocab_size)


def number_of_positions(path: str) -> int:
    """Return the longest prompt plus response, in tokens, of the model of a folder or id."""
    config = _load(transformers.AutoConfig.from_pretrained, "model config", path)
    return int(config.get_text_config().max_position_embeddings)


def load_generation_config(path: str) -> transformers.GenerationConfig:
    """Load the generation settings of a folder or id, from its config where it has no own file."""
    try:
        return transformers.GenerationConfig.from_pretrained(path)
    except OSError:
        config = _load(transformers.AutoConfig.from_pretrained, "model config", path)
        return transformers.GenerationConfig.from_model_config(config)


def number_of_parameters(model: torch.nn.Module) -> int:
    """Count the parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def stop_token_ids(
    tokenizer: transformers.PreTrainedTokenizerBase,
    generation_config: transformers.GenerationConfig,
) -> tuple[int, ...]:
    """Every token id that ends the model's turn, in ascending order.

    These are the end tokens of the generation settings, the tokenizer's end token, and the special
    token that the chat template writes after an answer (`<|im_end|>`, `<|eot_id|>`, ...).
    """
    listed = generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, _end_of_turn_id(tokenizer)]
    ids += listed if isinstance(listed, list) else [listed]
    return tuple(sorted({token_id for token_id in ids if isinstance(token_id, int)}))


def check_vocabulary(
    tokenizer: transformers.PreTrainedTokenizerBase, written: Iterable[int], rows: int, path: str
) -> None:
    """Check that a model has an embedding for what its tokenizer writes into every prompt.

    Tokenizers may know further tokens that no text of a task holds, as Gemma's does for pictures:
    those are told in the log, and a prompt that holds one ends the run at the engine.

    Args:
        tokenizer: The tokenizer, with its chat template.
        written: Token ids of a prompt in the model's chat template, and those that end a turn.
        rows: Embeddings of the model.
        path: For the message.

    Raises:
        ValueError: A token of the chat template, or one that ends a turn, has no embedding.
    """
    lacking = sorted({int(token_id) for token_id in written if token_id >= rows})
    cure = (
        "call model.resize_token_embeddings(len(tokenizer)) and save it, or use the tokenizer that "
        "the model was trained with"
    )
    if lacking:
        token = tokenizer.convert_ids_to_tokens(lacking[0])
        raise ValueError(
            f"the tokenizer of {path!r} writes {token!r}, token {lacking[0]}, but the model has "
            f"embeddings for {rows} tokens only: {cure}"
        )
    if len(tokenizer) > rows:
        _LOG.warning(
            "the tokenizer of %r knows %d tokens, its model has embeddings for %d: a prompt that "
            "holds one of the others ends the run; %s",
            path,
            len(tokenizer),
            rows,
            cure,
        )


def _end_of_turn_id(tokenizer: transformers.PreTrainedTokenizerBase) -> int | None:
    answer = "the-answer-itself"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    _, found, tail = str(text).rpartition(answer)
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"] if found else []
    special = {
        token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    return ids[0] if ids and ids[0] in special else None


def _require_model_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"model {str(folder)!r} is a file: name the folder with config.json and *.safetensors"
        )
    lacking = [name for name in ("config.json", "*.safetensors") if not any(folder.glob(name))]
    if lacking:
        raise ValueError(
            f"model folder {str(folder)!r} has no {' and no '.join(lacking)}: save the model there "
            "with model.save_pretrained(folder) and tokenizer.save_pretrained(folder)"
        )


def _load(load: Callable[..., Any], what: str, path: str, **settings: Any) -> Any:
    try:
        if not Path(path).is_dir():
            return load(path, trust_remote_code=False, **settings)
        with without_progress_bars():
            return load(path, trust_remote_code=False, **settings)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no {what} can be loaded from {path!r}: expected {TINY!r}, {SMOLLM2!r}, a reachable "
            "Hugging Face id, or a folder, with safetensors and an architecture that transformers "
            f"knows (remote code is never run); transformers says: {reason}"
        ) from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of local work, which takes a moment; downloads keep theirs."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
