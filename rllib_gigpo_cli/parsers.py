"""The command lines of the commands that are also `python -m rllib_gigpo.NAME`.

They are here and not beside what they start, so that `--help`, and what is wrong with the options,
are told before Ray and PyTorch are imported, which takes seconds. Defaults that belong to a class
of `rllib_gigpo` are repeated as numbers; a test compares them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

_ENV = "name of an environment, gymnasium id, or module:Class"
_RUNS = "which runs what its author put into it"
TRUST = f"unpickle the checkpoint, {_RUNS}; for what is your own"
TRUST_WORLD = (
    f"unpickle the checkpoint and make the environment it names, {_RUNS}; for what is your own"
)
TRUST_RUN = f"make whatever environment run.json names, {_RUNS}; for runs of your own"
IMPORT = "module, or file such as my_run.py, that registers environments; may be repeated"
_ALSO_MODULES = ("quickstart", "check-env", "record", "sft", "export")
_OWN_PROFILE = "by default the environment's own"


def program(name: str) -> str:
    """Return how a command was called: as one of `rllib-gigpo`, or as a module."""
    if name not in _ALSO_MODULES or Path(sys.argv[0]).name == "rllib-gigpo":
        return f"rllib-gigpo {name}"
    return f"python -m rllib_gigpo.{name.replace('-', '_')}"


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return an empty parser; a description of several lines is shown as it is written."""
    raw, wrapped = argparse.RawDescriptionHelpFormatter, argparse.HelpFormatter
    lines = raw if "\n" in description else wrapped
    return argparse.ArgumentParser(
        prog=program(name), description=description, formatter_class=lines
    )


def quickstart_parser() -> argparse.ArgumentParser:
    """Return the parser of `quickstart`."""
    parser = _parser("quickstart", "GiGPO teaches a from-scratch language model to play KeyDoor.")
    add = parser.add_argument
    add("--algo", default="gigpo", metavar="NAME", help="a preset: gigpo, grpo, rloo, ppo, ...")
    add("--seed", type=int, default=0)
    add("--iterations", type=int, default=30)
    add("--output", default="runs/quickstart", help="folder, %(default)s")
    return parser


class _CheckParser(argparse.ArgumentParser):
    """Takes its options before and behind the config; what else is behind is the example's."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the options before the config, then those among the example's."""
        found = super().parse_args(args, namespace)
        behind = argparse.ArgumentParser(prog=self.prog, add_help=False, allow_abbrev=False)
        _add_check_options(behind)
        found, found.arguments = behind.parse_known_args(found.arguments, found)
        return found


def _add_check_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--no-step", action="store_true", help="leave out the training step")
    add("--gpu-gib", type=float, help="memory of a GPU; more than it is a fault")


def check_parser() -> argparse.ArgumentParser:
    """Return the parser of `check`."""
    parser = _CheckParser(
        prog=program("check"), description="Check a run before it costs GPU hours."
    )
    _add_check_options(parser)
    add = parser.add_argument
    add("config", help="file.py:NAME, module:NAME, or a tuned example")
    add("arguments", nargs=argparse.REMAINDER, help="the tuned example's own options")
    return parser


def check_env_parser() -> argparse.ArgumentParser:
    """Return the parser of `check-env`."""
    parser = _parser(
        "check-env", "Check an environment: its contract, its episodes, its prompts, its anchors."
    )
    _add_env(parser)
    add = parser.add_argument
    add("--episodes", type=int, default=64, help="per policy, %(default)s")
    add("--group-size", type=int, default=8, help="episodes per start, %(default)s")
    add("--seed", type=int, default=0)
    add("--gamma", type=float, default=0.95)
    add("--anchor", choices=("exact", "similarity"), default="exact")
    add("--similarity-threshold", type=float, help="of --anchor similarity, 0.9")
    measures = ("rapidfuzz", "difflib_reference")
    add("--similarity-measure", choices=measures, help="of --anchor similarity, rapidfuzz")
    add("--model", default="tiny", help="whose tokenizer counts; any name of llm(model=...)")
    return parser


def record_parser() -> argparse.ArgumentParser:
    """Return the parser of `record`."""
    parser = _parser("record", "Record episodes of an environment for a supervised warm start.")
    _add_env(parser)
    add = parser.add_argument
    add(
        "--policy",
        default="expert",
        help="expert, random, or module:function of (env, observation, info, rng); %(default)s",
    )
    add("--episodes", type=int, default=64)
    add("--seed", type=int, default=0, help="episode e resets with seed + e")
    add("--only-won", action="store_true", help="leave episodes out that fail")
    add("--output", required=True, help="JSON lines file to write")
    return parser


def sft_parser() -> argparse.ArgumentParser:
    """Return the parser of `sft`."""
    parser = _parser(
        "sft", "Train a model on recorded prompts and responses (see rllib-gigpo record)."
    )
    add = parser.add_argument
    models = "tiny (with the words of the data), smollm2-135m, id, folder"
    add("--model", required=True, help=models)
    add("--data", required=True, nargs="+", help="JSON lines files")
    add("--output", required=True, help="folder to write")
    add("--steps", type=int, default=60, help="optimizer steps, %(default)s")
    add("--batch-size", type=int, default=64, help="%(default)s")
    add("--lr", type=float, help="peak; by default 3e-3 for tiny, else 1e-5")
    add("--warmup-steps", type=int, default=20, help="%(default)s")
    add("--seed", type=int, default=0)
    add("--token-budget", type=int, default=16_384, help="of a micro-batch, %(default)s")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--max-prompt-tokens", type=int, default=2048, help="%(default)s")
    return parser


def export_parser() -> argparse.ArgumentParser:
    """Return the parser of `export`."""
    parser = _parser("export", "Write a trained policy as a Hugging Face folder.")
    add = parser.add_argument
    add("checkpoint", help="folder of an RLlib checkpoint")
    add("output", help="folder to write, new or empty")
    kinds = "full: all weights; of LoRA the adapter alone, or merged into its base; %(default)s"
    add("--kind", choices=("full", "adapter", "merged"), default="full", help=kinds)
    add("--module-id", default="default_policy", help="%(default)s")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="%(default)s")
    add("--base", help="folder or id of the base model, where it has moved")
    add("--trust-checkpoint", action="store_true", help=TRUST)
    return parser


def compare_parser() -> argparse.ArgumentParser:
    """Return the parser of `compare`."""
    parser = _parser(
        "compare",
        """\
Compare algorithms over seeds on one environment.

    rllib-gigpo compare --algos gigpo,grpo,rloo --seeds 5 --env KeyDoor
    rllib-gigpo compare --algos gigpo,grpo --config my_runs.py:config

All runs of a seed start from the same model and train for the same number of environment steps.
Each is a file when it is finished; the same command goes on where it was stopped. The output folder
gets comparison.md, comparison.tex, comparison.json and curves.png (success against environment
steps, tokens and wall-clock).""",
    )
    add = parser.add_argument
    add("--algos", default="gigpo,grpo,rloo", help="presets, by commas; the first is compared")
    add("--seeds", type=int, default=5)
    add("--env-steps", type=int, default=50_000, help="of each run, at least; %(default)s")
    add("--config", metavar="FILE:NAME", help="function (algo, seed) -> GiGPOConfig")
    add("--env", default="KeyDoor", help=f"{_ENV}; %(default)s")
    _add_world(parser, "constructor arguments", _OWN_PROFILE)
    add("--model", default="tiny", help="any name of llm(model=...); %(default)s")
    of_response = "8 in KeyDoor, 64 of tiny models elsewhere, else 512"
    _add_limits(parser, "64 in KeyDoor, else 2048", of_response)
    add("--episodes", type=int, default=128, help="per iteration, in groups of 8; %(default)s")
    warm = "random ones that teach tiny the format; %(default)s"
    add("--warm-episodes", type=int, default=400, help=warm)
    add("--tasks", type=int, default=128, help="of the evaluation panel; %(default)s")
    add("--set", default="{}", metavar="JSON", help="arguments of training(...), for every run")
    add("--workers", type=int, default=os.cpu_count() or 1, help="runs at once; %(default)s")
    add("--gpus-per-run", type=float, default=0.0, help="may be a fraction")
    add("--output", default="runs/compare", help="folder; %(default)s")
    return parser


def evaluate_parser() -> argparse.ArgumentParser:
    """Return the parser of `evaluate`."""
    parser = _parser(
        "evaluate",
        """\
Evaluate a model or a prompted agent on a fixed panel of tasks.

    rllib-gigpo evaluate runs/alfworld/checkpoint --tasks 140
    rllib-gigpo evaluate WebShop --model Qwen/Qwen2.5-7B-Instruct --prompting react
    rllib-gigpo evaluate ALFWorld --endpoint http://127.0.0.1:8000/v1 --model NAME \\
        --prompting reflexion --tries 3

A model is an RLlib checkpoint, a Hugging Face id or folder, or what an OpenAI-compatible server
serves (vllm serve, ...). A checkpoint brings its environment, agent profile, token limits and
temperature; options replace them. The panel is the same on every machine. Every episode is written
down as it ends, so the same command goes on where it was stopped. The output folder gets
episodes.jsonl, result.json, table.md and table.tex.""",
    )
    add = parser.add_argument
    what = f"{_ENV}; or a checkpoint, or the folder of a run that holds one"
    add("what", metavar="ENV_OR_CHECKPOINT", help=what)
    profile = "by default the checkpoint's, else the environment's own"
    _add_world(parser, "constructor arguments, on top of the checkpoint's", profile)
    models = "checkpoint, Hugging Face id or folder, or the server's name"
    add("--model", default=None, help=models)
    add("--endpoint", default=None, metavar="URL", help="OpenAI-compatible server, up to /v1")
    add("--api-key-env", default="OPENAI_API_KEY", help="variable that holds the server's key")
    add("--prompting", default="plain", choices=("plain", "react", "reflexion"))
    add("--tries", type=int, default=1, help="tries of an episode, for reflexion")
    add("--tasks", type=int, default=128, help="tasks of the panel, %(default)s")
    add("--samples", type=int, default=1, help="episodes per task (k)")
    held = "or what the model can hold"
    _add_limits(parser, f"the checkpoint's, else 2048 {held}", f"the checkpoint's, else 512 {held}")
    temperature = "by default the checkpoint's of evaluation, else 0.4"
    add("--temperature", type=float, default=None, help=temperature)
    add("--max-steps", type=int, default=None, help="steps after which an episode is cut off")
    add("--seed", type=int, default=0, help="of the responses")
    add("--workers", type=int, default=16, help="episodes at once, %(default)s")
    add("--quiet", action="store_true", help="no progress")
    add("--output", default=None, help="folder; by default below runs/evaluate")
    add("--trust-checkpoint", action="store_true", help=TRUST_WORLD)
    return parser


def _add_env(parser: argparse.ArgumentParser) -> None:
    """Add the environment's name, its arguments and its agent profile."""
    parser.add_argument("env", help=_ENV)
    profile = f"agent profile, or a function that makes it; {_OWN_PROFILE}"
    _add_world(parser, "constructor arguments, %(default)s", profile)


def _add_world(parser: argparse.ArgumentParser, arguments: str, profile: str) -> None:
    """Add the environment's arguments and its agent profile, with the help of each."""
    parser.add_argument("--env-config", default="{}", metavar="JSON", help=arguments)
    parser.add_argument("--profile", default=None, metavar="MODULE:NAME", help=profile)
    _add_import(parser)


def _add_import(parser: argparse.ArgumentParser) -> None:
    """Add `--import`, which may be given several times."""
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="PLACE", help=IMPORT
    )


def _add_limits(parser: argparse.ArgumentParser, prompt: str, response: str) -> None:
    """Add the limits of prompts and responses, with the words for what holds by default."""
    for name, fallback in (("prompt", prompt), ("response", response)):
        limit = f"by default {fallback}"
        parser.add_argument(f"--max-{name}-tokens", type=int, default=None, help=limit)
