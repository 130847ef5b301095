"""Evaluates a model or a prompted agent on a fixed panel of tasks.

    rllib-gigpo evaluate runs/alfworld/checkpoint --tasks 140
    rllib-gigpo evaluate WebShop --model Qwen/Qwen2.5-7B-Instruct --prompting react

`rllib_gigpo_cli.parsers.evaluate_parser` describes the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_gigpo.commands import json_object, open_env
from rllib_gigpo.imports import import_places
from rllib_gigpo.recording.plain import without_secrets
from rllib_gigpo.strangers import check_name, check_settings
from rllib_gigpo_cli.parsers import evaluate_parser

if TYPE_CHECKING:
    from rllib_gigpo.agent.profile import AgentProfile
    from rllib_gigpo.registry import LLMEnvSpec

_LIMITS = {"max_prompt_tokens": 2048, "max_response_tokens": 512, "temperature": 0.4}


@dataclass(frozen=True)
class _Player:
    """Who is evaluated, and where.

    Attributes:
        model: As it is named in tables and files; of a checkpoint, the folder that was found.
        env: Name of the environment.
        spec: Makes it.
        profile: The agent.
        env_config: Constructor arguments.
        max_steps: Steps after which an episode is cut off, or None.
        limits: `max_prompt_tokens`, `max_response_tokens` and `temperature`.
        checkpoint: Fingerprint of the checkpoint; None is another model.
    """

    model: str
    env: str
    spec: LLMEnvSpec
    profile: AgentProfile
    env_config: dict[str, Any]
    max_steps: int | None
    limits: dict[str, Any]
    checkpoint: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate what the command line names."""
    parser = evaluate_parser()
    args = parser.parse_args(arguments)
    from rllib_gigpo.checkpoints import CheckpointError
    from rllib_gigpo.encoding import PromptTooLongError
    from rllib_gigpo.evaluate.endpoint import EndpointError
    from rllib_gigpo.evaluate.panel import evaluate
    from rllib_gigpo.stepping import EnvFailure

    try:
        import_places(args.imports)
        player = _within_model(args, _player(args))
        panel = _panel(args, player)
        output = Path(args.output or _folder(args, player)).absolute()
        with _chat(args, player) as chat:
            records = evaluate(
                panel,
                chat,
                player.spec,
                player.profile,
                output,
                workers=args.workers,
                told=None if args.quiet else _told,
            )
    except (EndpointError, EnvFailure, PromptTooLongError) as error:
        print(f"error: {error}\nthe same command goes on from here", file=sys.stderr)
        return 2
    except (CheckpointError, ValueError, TypeError, OSError, ImportError) as error:
        parser.error(str(error))
    _write(records, args, player, output)
    return 0


def _player(args: argparse.Namespace) -> _Player:
    """Return what the options name; a checkpoint says what they leave open."""
    from rllib_gigpo.checkpoints import Place, fingerprint
    from rllib_gigpo.recording.plain import jsonable
    from rllib_gigpo.trained import find_checkpoint, trained_as

    named = None if args.endpoint else find_checkpoint(args.model or args.what)
    if args.model is None and named is None:
        raise ValueError(
            f"{args.what!r} is no checkpoint, nor a folder in which one trial has left some: name "
            "the model to evaluate on this environment with --model"
        )
    found = None if named is None else trained_as(named, trust=args.trust_checkpoint)
    env = args.what if args.model is not None or found is None else found.env
    # What a run says of its environment is not said of another one.
    own = found if found is not None and found.env == env else None
    typed = json_object(args.env_config, "--env-config")
    left = {} if own is None else {k: v for k, v in own.env_config.items() if k not in typed}
    if not args.trust_checkpoint:
        _check_told(str(named), env if args.model is None else None, left)
    config = {**left, **typed}
    spec, profile, _ = open_env(env, config, args.profile)
    if args.profile is None and own is not None and own.profile is not None:
        profile = own.profile
    limits = dict(_LIMITS)
    if found is not None:
        limits = {
            "max_prompt_tokens": found.max_prompt_tokens,
            "max_response_tokens": found.max_response_tokens,
            "temperature": found.eval_temperature,
        }
        told = ", ".join(f"{name}={value}" for name, value in limits.items())
        told = f"{without_secrets(env)} {json.dumps(without_secrets(jsonable(config)))}, {told}"
        print(f"taken from {named}: {told}; options replace these", flush=True)
        if own is None:
            print(
                f"it was trained on {without_secrets(found.env)}: what it says of that "
                "environment's settings, agent profile and step limit does not hold here; "
                "--env-config, --profile and --max-steps name them",
                flush=True,
            )
    given = {name: getattr(args, name) for name in limits if getattr(args, name) is not None}
    steps = own.max_episode_steps if args.max_steps is None and own is not None else args.max_steps
    # A run that goes on has other weights under the name that was typed.
    model = str(named) if named is not None else args.model or args.what
    content = None if named is None else fingerprint(Place.of(named))
    return _Player(model, env, spec, profile, config, steps, limits | given, content)


def _check_told(checkpoint: str, env: Any, settings: Mapping[str, Any]) -> None:
    """Make sure that what a checkpoint says of its environment runs nothing of its author's.

    Args:
        checkpoint: Its folder.
        env: The environment's name, where only the checkpoint tells it; else None.
        settings: The environment's settings that only the checkpoint tells.

    Raises:
        ValueError: It may; see `rllib_gigpo.strangers`.
    """
    named_by, otherwise = f"checkpoint {checkpoint!r}", "or say --trust-checkpoint if you trust it"
    if env is not None:
        cure = (
            "import what registers it, as in --import my_run.py, name it yourself, as in evaluate "
            f"ENV --model CHECKPOINT, {otherwise}"
        )
        check_name(env, named_by=named_by, cure=cure)
    cure = f"give the setting yourself with --env-config, {otherwise}"
    check_settings(settings, named_by=named_by, cure=cure)


def _within_model(args: argparse.Namespace, player: _Player) -> _Player:
    """Cut limits that nobody named down to what a model in this process can hold."""
    from rllib_gigpo.models import materialize, number_of_positions
    from rllib_gigpo.trained import find_checkpoint

    # A server knows its own limits, and a checkpoint's are those of its model.
    if args.endpoint or find_checkpoint(player.model) is not None:
        return player
    positions = number_of_positions(materialize(_config(args, player, player.model).model_spec))
    limits = fitting_limits(positions, args.max_prompt_tokens, args.max_response_tokens)
    if limits.items() <= player.limits.items():
        return player
    told = " ".join(f"--{name.replace('_', '-')}={limit}" for name, limit in limits.items())
    print(f"model {player.model!r} has {positions} positions, so {told}", flush=True)
    return replace(player, limits=player.limits | limits)


def fitting_limits(positions: int, prompt: int | None, response: int | None) -> dict[str, int]:
    """Return the limits of prompt and response; those that nobody named fit into the model.

    A response keeps its default unless that is more than half of the model, and the prompt gets
    what is left.

    Args:
        positions: Longest prompt plus response of the model, in tokens.
        prompt: The named limit of a prompt, or None.
        response: The same of a response.
    """
    most_prompt, most_response = _LIMITS["max_prompt_tokens"], _LIMITS["max_response_tokens"]
    if response is None:
        left = positions // 2 if prompt is None else positions - prompt
        response = max(1, min(most_response, left))
    if prompt is None:
        prompt = max(1, min(most_prompt, positions - response))
    return {"max_prompt_tokens": prompt, "max_response_tokens": response}


def _panel(args: argparse.Namespace, player: _Player) -> Any:
    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.evaluate.panel import Panel
    from rllib_gigpo.evaluation import panel_order, panel_seeds, task_at

    config = GiGPOConfig().evaluation(evaluation_duration=args.tasks)
    content = {} if player.checkpoint is None else {"checkpoint": player.checkpoint}
    with closing(player.spec.make()) as env:
        order = panel_order(env)
    if 0 < len(order) < args.tasks:
        print(
            f"{player.env} lists {len(order)} tasks, so some of the {args.tasks} are the same, and "
            f"the interval is too narrow: --tasks={len(order)} --samples=K plays each K times",
            flush=True,
        )
    return Panel(
        model=player.model,
        env=player.env,
        env_config=player.env_config,
        seeds=tuple(panel_seeds(config)),
        samples=args.samples,
        prompting=args.prompting,
        tries=args.tries,
        max_steps=player.max_steps,
        seed=args.seed,
        decoding={**player.limits, "endpoint": args.endpoint, "profile": args.profile, **content},
        task_ids=tuple(task_at(order, place) for place in range(args.tasks)) if order else None,
    )


@contextmanager
def _chat(args: argparse.Namespace, player: _Player) -> Iterator[Any]:
    """Give the model as a function of chat messages, and end it afterwards."""
    if args.endpoint:
        from rllib_gigpo.evaluate.endpoint import Endpoint

        chat: Any = Endpoint(
            args.endpoint,
            player.model,
            temperature=player.limits["temperature"],
            max_tokens=player.limits["max_response_tokens"],
            stop=player.profile.stop,
            api_key=os.environ.get(args.api_key_env, ""),
        )
        try:
            yield chat
        finally:
            chat.close()
        return
    from rllib_gigpo.evaluate.local import LocalModel
    from rllib_gigpo.trained import playable

    with playable(player.model, trust=args.trust_checkpoint) as model:
        chat = LocalModel(_config(args, player, model))
        try:
            yield chat
        finally:
            chat.close()


def _config(args: argparse.Namespace, player: _Player, model: str) -> Any:
    from rllib_gigpo.config import GiGPOConfig

    return (
        GiGPOConfig()
        .environment(player.env, env_config=player.env_config)
        .agent(profile=player.profile)
        .llm(
            model=model,
            eval_temperature=player.limits["temperature"],
            max_prompt_tokens=player.limits["max_prompt_tokens"],
            max_response_tokens=player.limits["max_response_tokens"],
            max_num_seqs=args.workers,
        )
    )


def _told(done: int, total: int) -> None:
    """Count on one line of a terminal; in a file, ten lines are enough."""
    if sys.stdout.isatty():
        print(f"\r{done}/{total} episodes", end="\n" if done == total else "", flush=True)
    elif done == total or 10 * done // total > 10 * (done - 1) // total:
        print(f"{done}/{total} episodes", flush=True)


def _write(
    records: Sequence[dict[str, Any]], args: argparse.Namespace, player: _Player, output: Path
) -> None:
    from rllib_gigpo.compare.tables import latex_table, markdown_table
    from rllib_gigpo.evaluate.results import result_table, summarise
    from rllib_gigpo.recording.folder import write_bytes, write_json
    from rllib_gigpo.tables import format_table

    summary = summarise(records)
    name = player.model if args.prompting == "plain" else f"{player.model}, {args.prompting}"
    header, rows = result_table(name, summary)
    write_json(output / "result.json", summary)
    write_bytes(output / "table.md", markdown_table(header, rows).encode())
    write_bytes(output / "table.tex", latex_table(header, rows).encode())
    each = f"{args.samples} episode{'s' if args.samples > 1 else ''} each"
    title = f"{without_secrets(player.env)}: {summary['tasks']} tasks, {each}, success in %"
    print(format_table(title, header, rows))
    print(f"{output / 'result.json'}, table.md, table.tex, episodes.jsonl")


def _folder(args: argparse.Namespace, player: _Player) -> str:
    named = f"{without_secrets(player.env)}-{player.model}-{args.prompting}"
    if player.checkpoint is not None:
        named += f"-{player.checkpoint[:8]}"
    return f"runs/evaluate/{''.join(c if c.isalnum() else '-' for c in named)}"


if __name__ == "__main__":
    sys.exit(main())
