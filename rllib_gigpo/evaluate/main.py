r"""Evaluates a model or a prompted agent on a fixed panel of tasks.

    rllib-gigpo evaluate ALFWorld --model runs/alfworld/checkpoint --tasks 140
    rllib-gigpo evaluate WebShop --model Qwen/Qwen2.5-7B-Instruct --prompting react
    rllib-gigpo evaluate ALFWorld --endpoint http://127.0.0.1:8000/v1 --model NAME \
        --prompting reflexion --tries 3

A model is an RLlib checkpoint, a Hugging Face id or folder, or what an OpenAI-compatible server
serves (`vllm serve`, ...). The panel is the same on every machine. Every episode is written down as
it ends, so the same command goes on where it was stopped. The output folder gets `episodes.jsonl`,
`result.json`, `table.md` and `table.tex`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_gigpo.commands import open_env, program


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate what the command line names."""
    parser = _parser()
    args = parser.parse_args(arguments)
    from rllib_gigpo.encoding import PromptTooLongError
    from rllib_gigpo.evaluate.endpoint import EndpointError
    from rllib_gigpo.evaluate.panel import evaluate
    from rllib_gigpo.stepping import EnvFailure

    try:
        spec, profile, env_config = open_env(args.env, args.env_config, args.profile)
        panel = _panel(args, env_config)
        chat = _chat(args, env_config, profile)
    except (ValueError, TypeError, OSError, ImportError) as error:
        parser.error(str(error))
    output = Path(args.output or _folder(args)).absolute()
    try:
        records = evaluate(
            panel, chat, spec, profile, output, workers=args.workers, told=_progress(args.quiet)
        )
    except (EndpointError, EnvFailure, PromptTooLongError) as error:
        print(f"error: {error}\nthe same command goes on from here", file=sys.stderr)
        return 2
    except ValueError as error:
        parser.error(str(error))
    finally:
        chat.close()
    _write(records, args, output)
    return 0


def _panel(args: argparse.Namespace, env_config: dict[str, Any]) -> Any:
    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.evaluate.panel import Panel
    from rllib_gigpo.evaluation import panel_seeds

    config = GiGPOConfig().evaluation(evaluation_duration=args.tasks)
    return Panel(
        model=args.model,
        env=args.env,
        env_config=env_config,
        seeds=tuple(panel_seeds(config)),
        samples=args.samples,
        prompting=args.prompting,
        tries=args.tries,
        max_steps=args.max_steps,
        seed=args.seed,
        decoding={
            "temperature": args.temperature,
            "max_response_tokens": args.max_response_tokens,
            "max_prompt_tokens": args.max_prompt_tokens,
            "endpoint": args.endpoint,
            "profile": args.profile,
        },
    )


def _chat(args: argparse.Namespace, env_config: dict[str, Any], profile: Any) -> Any:
    if args.endpoint:
        from rllib_gigpo.evaluate.endpoint import Endpoint

        return Endpoint(
            args.endpoint,
            args.model,
            temperature=args.temperature,
            max_tokens=args.max_response_tokens,
            stop=profile.stop,
            api_key=os.environ.get(args.api_key_env, ""),
        )
    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.evaluate.local import LocalModel, model_folder

    config = (
        GiGPOConfig()
        .environment(args.env, env_config=env_config)
        .agent(profile=profile)
        .llm(
            model=model_folder(args.model, args.checkpoint_kind),
            eval_temperature=args.temperature,
            max_prompt_tokens=args.max_prompt_tokens,
            max_response_tokens=args.max_response_tokens,
            max_num_seqs=args.workers,
        )
    )
    return LocalModel(config)


def _progress(quiet: bool) -> Any:
    def told(done: int, total: int) -> None:
        print(f"\r{done}/{total} episodes", end="\n" if done == total else "", flush=True)

    return None if quiet else told


def _write(records: Sequence[dict[str, Any]], args: argparse.Namespace, output: Path) -> None:
    from rllib_gigpo.compare.tables import latex_table, markdown_table
    from rllib_gigpo.evaluate.results import result_table, summarise
    from rllib_gigpo.tables import format_table

    summary = summarise(records)
    name = args.model if args.prompting == "plain" else f"{args.model}, {args.prompting}"
    header, rows = result_table(name, summary)
    (output / "result.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    (output / "table.md").write_text(markdown_table(header, rows), "utf-8")
    (output / "table.tex").write_text(latex_table(header, rows), "utf-8")
    title = f"{args.env}: {summary['tasks']} tasks, {args.samples} episodes each, success in %"
    print(format_table(title, header, rows))
    print(f"{output / 'result.json'}, table.md, table.tex, episodes.jsonl")


def _folder(args: argparse.Namespace) -> str:
    name = "".join(c if c.isalnum() else "-" for c in f"{args.env}-{args.model}-{args.prompting}")
    return f"runs/evaluate/{name}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("evaluate"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("env", help="name of an environment, gymnasium id, or module:Class")
    add("--env-config", default="{}", metavar="JSON")
    add("--profile", default=None, metavar="MODULE:NAME", help="by default the environment's own")
    add(
        "--model", required=True, help="checkpoint, Hugging Face id or folder, or the server's name"
    )
    add("--checkpoint-kind", default="full", choices=("full", "merged"), help="merged: of LoRA")
    add("--endpoint", default=None, metavar="URL", help="OpenAI-compatible server, up to /v1")
    add("--api-key-env", default="OPENAI_API_KEY", help="variable that holds the server's key")
    add("--prompting", default="plain", choices=("plain", "react", "reflexion"))
    add("--tries", type=int, default=1, help="tries of an episode, for reflexion")
    add("--tasks", type=int, default=128, help="tasks of the panel")
    add("--samples", type=int, default=1, help="episodes per task (k)")
    add("--temperature", type=float, default=0.4)
    add("--max-prompt-tokens", type=int, default=2048)
    add("--max-response-tokens", type=int, default=512)
    add("--max-steps", type=int, default=None)
    add("--seed", type=int, default=0, help="of the responses")
    add("--workers", type=int, default=16, help="episodes at once")
    add("--quiet", action="store_true", help="no progress")
    add("--output", default=None, help="folder; by default below runs/evaluate")
    return parser


if __name__ == "__main__":
    sys.exit(main())
