"""One command for a machine with one GPU and no network: does everything fit together, how fast?

`python -m benchmarks.gpu_check`, under 8 minutes. Builds a random Qwen2 of 0.4 or 1.3 billion
parameters (by the GPU's memory) with a small tokenizer of its own, and runs two iterations of GiGPO
in bf16 on KeyDoor: vLLM and the learner share the GPU, vLLM sleeps during the update, and weights
come by CUDA IPC. Where vLLM cannot be imported, the transformers engine plays in the learner's
process. The second iteration counts. It fails if engine and learner disagree.

`python -m benchmarks.gpu_check --dry-run` does the same on a CPU with a tiny model: it shows that
the command works, and its figures mean nothing. `--use-liger-kernel` trains with Liger's kernels:
the engine, which has its own, says whether they compute what they should.

Figures: `parameters`; `engine`; `road` of the weights; `rollout_tokens_per_s`, generated tokens
over the wall-clock of the rollout; `update_tokens_per_s`, prompt and response tokens over that of
the update; `mfu`, floating-point operations of log-probabilities (2 per parameter and token) and
update (6) over what the GPU's data sheet promises in dense bf16, or null where that is not known;
`sync_s`; `logp_gap` and `logp_gap_max`, difference between the engine's and the learner's
log-probabilities per token; `agrees`, whether the mean is below the limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer

from benchmarks.report import report
from rllib_gigpo import GiGPOConfig
from rllib_gigpo.probe import TOLERANCE

# hidden size, inner size, layers, heads, heads of keys and values
SHAPES = {
    "tiny": (64, 128, 2, 2, 1),
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
}
VOCABULARY = 1024
LARGE_GPU_BYTES = 60 << 30
# Dense bf16, from the data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "at 1 0 . key south west . door south . go north go south go east go west <think> I see the "
    "key and the door, so I go there first. </think> <action> go north </action> Pick up the key, "
    "then go to the door. user assistant system"
)


def build_model(folder: Path, size: str) -> int:
    """Write a random model and its tokenizer; return the number of parameters."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([CORPUS], vocab_size=VOCABULARY, show_progress=False)
    bpe.save_model(str(folder))
    tokenizer: Any = Qwen2Tokenizer(
        vocab=str(folder / "vocab.json"),
        merges=str(folder / "merges.txt"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.save_pretrained(folder)
    hidden, inner, layers, heads, kv_heads = SHAPES[size]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def config_of(folder: Path, *, engine: str, on_gpu: bool) -> GiGPOConfig:
    """Return the settings of the run."""
    small = not on_gpu
    config = (
        GiGPOConfig()
        .environment("KeyDoor", env_config={"size": 3, "horizon": 2 if small else 8})
        .llm(
            model=str(folder),
            dtype="bfloat16" if on_gpu else "float32",
            max_prompt_tokens=256,
            max_response_tokens=8 if small else 128,
            max_num_seqs=4 if small else 128,
        )
        .training(
            num_groups=2 if small else 16,
            group_size=2 if small else 8,
            num_minibatches=2,
            lr=1e-6,
            kl_coeff=0.0,
            # Episodes of a random model all end alike; entropy gives every row a gradient.
            entropy_coeff=1e-3,
        )
        .learners(num_gpus_per_learner=0.5 if on_gpu else 0)
        .engines(engine=engine)  # pyright: ignore[reportArgumentType]
    )
    if engine == "vllm" and on_gpu:
        options = {"gpu_memory_utilization": 0.4}
        config.engines(
            engine_num_gpus=0.5, engine_sleep=True, weight_sync="ipc", engine_options=options
        )
    elif engine == "vllm":
        config.engines(engine_options={"kv_cache_memory_bytes": 1 << 24})
    return config


def figures_of(result: Mapping[str, Any], config: GiGPOConfig, parameters: int) -> dict[str, Any]:
    """Return the figures of one iteration."""
    timers, played = result["timers"], result["env_runners"]
    learned = result["learners"][DEFAULT_MODULE_ID]
    tokens = played["num_prompt_tokens"] + played["num_response_tokens"]
    peak = peak_flops()
    computing = timers["old_logp"] + timers["update"]
    gap = float(learned["engine_logp_gap"])
    return {
        "parameters": parameters,
        "engine": config.engine,
        "road": config.weight_road,
        "rollout_tokens_per_s": round(played["num_response_tokens"] / timers["rollout"], 1),
        "update_tokens_per_s": round(tokens / timers["update"], 1),
        "mfu": peak and round((2 + 6) * parameters * tokens / computing / peak, 4),
        "sync_s": round(timers["sync"], 3),
        "logp_gap": round(gap, 6),
        "logp_gap_max": round(float(learned["engine_logp_gap_max"]), 6),
        "agrees": gap <= TOLERANCE[config.dtype],
    }


def peak_flops() -> float | None:
    """Operations per second that the GPU's data sheet promises, or None."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def choose_size() -> str:
    """Return the larger model where weights, gradients, optimizer and an engine fit."""
    total = torch.cuda.get_device_properties(0).total_memory
    return "1.5b" if total >= LARGE_GPU_BYTES else "0.5b"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, report, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check a machine with one GPU.")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--size", choices=("0.5b", "1.5b"), default=None)
    parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
    parser.add_argument("--use-liger-kernel", action="store_true", help="train with Liger's layers")
    args = parser.parse_args(arguments)
    on_gpu = not args.dry_run
    if on_gpu and not torch.cuda.is_available():
        print("torch sees no GPU: run this where one is, or add --dry-run", file=sys.stderr)
        return 2
    has_vllm = importlib.util.find_spec("vllm") is not None
    engine = ("vllm" if has_vllm else "transformers") if args.engine == "auto" else args.engine
    size = (args.size or choose_size()) if on_gpu else "tiny"
    if not ray.is_initialized():
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        parameters = build_model(Path(name), size)
        config = config_of(Path(name), engine=engine, on_gpu=on_gpu)
        config.learners(use_liger_kernel=args.use_liger_kernel)
        algorithm = config.build_algo()
        try:
            algorithm.train()
            figures = figures_of(algorithm.train(), config, parameters)
        finally:
            algorithm.stop()
    device = torch.cuda.get_device_name() if on_gpu else "the CPU (dry run: no figure counts)"
    report(
        f"Qwen2 of {parameters / 1e9:.2g} billion parameters on {device}",
        ("figure", "value"),
        [(name, str(value)) for name, value in figures.items()],
        figures,
    )
    return 0 if figures["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
