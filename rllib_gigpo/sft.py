"""Supervised warm start on the prompts and the token path of RL.

    recordings (`rllib_gigpo.record`) -> warm_start -> a model folder

    python -m rllib_gigpo.sft --model smollm2-135m --data expert.jsonl --output runs/warm_start

The folder is then the model of the RL run, `GiGPOConfig().llm(model=folder)`. It is there whole or
not at all, whenever the process is killed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_gigpo.checkpoints import whole_folder
from rllib_gigpo.encoding import encode_chat
from rllib_gigpo.models import (
    FROM_SCRATCH,
    ModelSpec,
    load_causal_lm,
    load_tokenizer,
    materialize,
    without_progress_bars,
)
from rllib_gigpo.record import Example, load_examples
from rllib_gigpo.sequences import MicroBatch, pack, response_logps
from rllib_gigpo.vision.pictures import strip_marks
from rllib_gigpo.vision.sight import Sight, load_sight
from rllib_gigpo_cli.parsers import sft_parser

# What `save_pretrained` of models, tokenizers and processors writes.
_MODEL_FILE = re.compile(
    r"(added_tokens|chat_template|config|generation_config|preprocessor_config|processor_config"
    r"|special_tokens_map|tokenizer|tokenizer_config|video_preprocessor_config|vocab)\.json"
    r"|(model|pytorch_model)[\w.-]*\.(safetensors|bin)(\.index\.json)?"
    r"|(tokenizer|spiece)\.model|chat_template\.jinja|(merges|vocab)\.txt"
)


@dataclass(frozen=True)
class WarmStart:
    """Settings of a warm start.

    Attributes:
        steps: Optimizer steps.
        batch_size: Examples per step.
        lr: Peak learning rate of AdamW; linear warm-up, then linear decay to a tenth.
        warmup_steps: Steps of the warm-up.
        seed: Seed of the order of the examples.
        token_budget: Padded tokens of one forward pass.
        dtype: What matrix products run in, "float32" or "bfloat16"; parameters stay fp32.
    """

    steps: int = 60
    batch_size: int = 64
    lr: float = 3e-3
    warmup_steps: int = 20
    seed: int = 0
    token_budget: int = 16384
    dtype: str = "float32"


def warm_start(
    model_path: str,
    examples: Sequence[Example],
    output: str | Path,
    *,
    settings: WarmStart = WarmStart(),
    max_prompt_tokens: int = 2048,
    on_step: Callable[[int, float], None] | None = None,
) -> Path:
    """Train a model on examples and save it as a Hugging Face folder.

    The loss is the mean negative log-probability of the response tokens.

    Args:
        model_path: What `materialize` returned.
        examples: Prompts and responses.
        output: Folder to write: new, empty, or a model and nothing else, which this one replaces.
        settings: Steps, batch size, learning rate.
        max_prompt_tokens: Longer prompts raise.
        on_step: Called with (step, loss).

    Returns:
        `output`.

    Raises:
        ValueError: No example, or an output folder that holds anything else than a model.
    """
    output = Path(output)
    check_output(output)
    if not examples:
        raise ValueError("warm_start needs at least one example, got none")
    tokenizer = load_tokenizer(model_path)
    sight = load_sight(model_path)
    encoded = [
        encode_chat(tokenizer, example.messages, example.pictures, sight) for example in examples
    ]
    prompts = [prompt.ids for prompt in encoded]
    responses = [_response_ids(tokenizer, example) for example in examples]
    longest = max(map(len, prompts))
    if longest > max_prompt_tokens:
        raise ValueError(
            f"an example's prompt has {longest} tokens, max_prompt_tokens is {max_prompt_tokens}: "
            "raise it or record with a shorter memory"
        )
    model = load_causal_lm(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    rng = np.random.default_rng(settings.seed)
    order = np.concatenate(
        [rng.permutation(len(examples)) for _ in range(_passes(settings, len(examples)))]
    )
    for step in range(settings.steps):
        chosen = order[step * settings.batch_size : (step + 1) * settings.batch_size]
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * _schedule(step, settings)
        optimizer.zero_grad(set_to_none=True)
        batches = pack(
            [prompts[i] for i in chosen],
            [responses[i] for i in chosen],
            settings.token_budget,
            [encoded[i].images for i in chosen],
        )
        tokens = sum(len(responses[i]) for i in chosen)
        loss = _backward(model, batches, tokens, settings, sight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_step is not None:
            on_step(step, loss)
    with whole_folder(output, keep_old=False) as folder:
        with without_progress_bars():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if sight is not None:
            sight.processor.save_pretrained(folder)
    return output


def check_output(output: Path) -> None:
    """Make sure that a model may be written to a folder, and take the place of what is there.

    Raises:
        ValueError: It is a file, or holds anything else than a model, or what has the name that
            the old model takes for a moment would be lost.
    """
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    if not is_free and not (output / "config.json").is_file():
        raise ValueError(
            f"output {str(output)!r} exists and is no model: name a folder that is new, empty, or "
            "a model to be replaced"
        )
    if is_free:
        return
    others = sorted(path.name for path in output.iterdir() if not _MODEL_FILE.fullmatch(path.name))
    if others:
        raise ValueError(
            f"output {str(output)!r} holds {', '.join(map(repr, others[:3]))} beside the files of "
            "a model, which would be lost with it: name a folder that is new"
        )
    previous = output.absolute().with_name(f"{output.absolute().name}.previous")
    if previous.exists():
        raise ValueError(
            f"the model in output {str(output)!r} is to be replaced, and {str(previous)!r} would "
            "be lost: move or remove it, or name a folder that is new"
        )


def _response_ids(tokenizer: Any, example: Example) -> np.ndarray:
    ids = tokenizer(example.response, add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id] if example.ends_turn else []
    return np.array([*ids, *end], dtype=np.int32)


def _passes(settings: WarmStart, num_examples: int) -> int:
    return -(-settings.steps * settings.batch_size // num_examples)


def _schedule(step: int, settings: WarmStart) -> float:
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 1.0 - 0.9 * done


def _backward(
    model: Any, batches: list[MicroBatch], tokens: int, settings: WarmStart, sight: Sight | None
) -> float:
    total = 0.0
    for batch in batches:
        with torch.autocast(model.device.type, torch.bfloat16, settings.dtype == "bfloat16"):
            loss = -response_logps(model, batch, sight=sight).logps.sum() / tokens
        loss.backward()
        total += loss.item()
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on what the command line names."""
    parser = sft_parser()
    args = parser.parse_args(arguments)
    is_tiny = args.model in FROM_SCRATCH
    try:
        check_output(Path(args.output))
        examples = [example for path in args.data for example in load_examples(path)]
        if not is_tiny:
            materialize(ModelSpec(args.model))
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    texts = [
        text
        for example in examples
        for text in (example.response, *(m["content"] for m in example.messages))
    ]
    words = tuple(map(strip_marks, texts))
    spec = ModelSpec(args.model, words, args.seed) if is_tiny else ModelSpec(args.model)
    lr = args.lr if args.lr is not None else 3e-3 if is_tiny else 1e-5
    print(
        f"{len(examples)} examples; {args.steps} steps of {args.batch_size}, lr {lr:g}", flush=True
    )

    def show(step: int, loss: float) -> None:
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step + 1}/{args.steps}: loss {loss:.3f}", flush=True)

    folder = warm_start(
        materialize(spec),
        examples,
        args.output,
        settings=WarmStart(
            steps=args.steps,
            batch_size=args.batch_size,
            lr=lr,
            warmup_steps=args.warmup_steps,
            seed=args.seed,
            token_budget=args.token_budget,
            dtype=args.dtype,
        ),
        max_prompt_tokens=args.max_prompt_tokens,
        on_step=show,
    )
    print(f"GiGPOConfig().llm(model={str(folder)!r})")


if __name__ == "__main__":
    main()
