"""The commands; what they need is imported inside them."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from rllib_gigpo_cli import parsers

app = typer.Typer(
    name="rllib-gigpo",
    help="GiGPO for LLM agents on Ray RLlib: train, look, play, export.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Parser = Callable[[], argparse.ArgumentParser]

# Commands with an argument parser of their own, which `python -m rllib_gigpo.NAME` uses as well.
_MODULES: dict[str, tuple[str, Parser, str]] = {
    "quickstart": (
        "rllib_gigpo.quickstart",
        parsers.quickstart_parser,
        "Teach a tiny model to play KeyDoor in a minute.",
    ),
    "check": (
        "rllib_gigpo.check.main",
        parsers.check_parser,
        "Check a run on a CPU before it costs GPU hours.",
    ),
    "check-env": (
        "rllib_gigpo.check_env",
        parsers.check_env_parser,
        "Check an environment and its agent before training.",
    ),
    "record": (
        "rllib_gigpo.record",
        parsers.record_parser,
        "Record an expert's or random steps for a warm start.",
    ),
    "sft": ("rllib_gigpo.sft", parsers.sft_parser, "Train a model on recorded steps."),
    "compare": (
        "rllib_gigpo.compare.main",
        parsers.compare_parser,
        "Compare algorithms over seeds, with intervals.",
    ),
    "evaluate": (
        "rllib_gigpo.evaluate.main",
        parsers.evaluate_parser,
        "Evaluate a model or a prompted agent on a panel.",
    ),
    "export": (
        "rllib_gigpo.export",
        parsers.export_parser,
        "Write a checkpoint as a Hugging Face folder.",
    ),
}

RunArgument = Annotated[
    str, typer.Argument(help="run folder: recording(folder=...), else one below ~/ray_results")
]
EnvConfig = Annotated[str, typer.Option(metavar="JSON", help="constructor arguments")]
Profile = Annotated[
    str | None,
    typer.Option(metavar="MODULE:NAME", help="agent profile; default: the environment's"),
]
Imports = Annotated[list[str], typer.Option("--import", metavar="PLACE", help=parsers.IMPORT)]
Who = Annotated[str, typer.Option("--player", help="person, expert, random, or model")]
Model = Annotated[
    str | None,
    typer.Option(help="checkpoint, model name, id or folder; implies --player model"),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="of the model, 0 is greedy; default: the checkpoint's, else 0.4"),
]
PromptTokens = Annotated[int | None, typer.Option(help="limit of a prompt of the model")]
ResponseTokens = Annotated[int | None, typer.Option(help="limit of a response of the model")]
MaxSteps = Annotated[int | None, typer.Option(help="steps after which the episode is cut off")]
Trust = Annotated[bool, typer.Option("--trust-checkpoint", help=parsers.TRUST)]
TrustRun = Annotated[bool, typer.Option("--trust-run", help=parsers.TRUST_RUN)]


def main() -> None:
    """Run the console script."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("rllib-gigpo"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """GiGPO for LLM agents on Ray RLlib: train, look, play, export."""


def _pass_on(name: str, module: str, parser: Parser, text: str) -> None:
    # Options, --help among them, are for the command's own parser.
    settings = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }

    def command(context: typer.Context) -> None:
        arguments = list(context.args)
        # First of all, so that help and mistakes are told before anything heavy is imported.
        parser().parse_args(arguments)
        raise typer.Exit(_code(importlib.import_module(module).main(arguments)))

    app.command(name, help=text, add_help_option=False, context_settings=settings)(command)


def _code(result: Any) -> int:
    return result if isinstance(result, int) else 0


for _name, (_module, _parser, _text) in _MODULES.items():
    _pass_on(_name, _module, _parser, _text)


@contextmanager
def told() -> Iterator[None]:
    """Turn an error that a user can mend into one sentence and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def report(
    run: RunArgument,
    output: Annotated[str | None, typer.Option(help="HTML file; default: RUN/report.html")] = None,
    max_mb: Annotated[float, typer.Option(help="size that embedded rollouts may have")] = 40.0,
) -> None:
    """Write a run's report: one HTML file, without network."""
    with told():
        from rllib_gigpo.report import write_report

        path = write_report(run, output, max_mb=max_mb)
        typer.echo(f"{path} ({path.stat().st_size / 2**20:.1f} MB)")


@app.command()
def view(
    run: RunArgument,
    host: Annotated[str, typer.Option(help="where to listen; this machine alone")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 9265,
) -> None:
    """Serve a run's report; new iterations appear by themselves."""
    with told():
        from rllib_gigpo.report import RunServer

        try:
            server = RunServer(run, host=host, port=port)
        except OSError as error:
            raise OSError(
                f"cannot listen on {host}, port {port} ({error}): choose another --port, or 0 for "
                "a free one"
            ) from error
        with server:
            typer.echo(f"{server.url} shows {server.folder.path}; Ctrl-C ends it")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("ended")


@app.command()
def receipt(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Print what a run was, what it cost, and how to repeat it."""
    with told():
        import json

        from rllib_gigpo.playing.screen import printable
        from rllib_gigpo.recording.receipt import read_receipt, receipt_text
        from rllib_gigpo.report.data import open_run

        found = read_receipt(open_run(run).path)
        text = json.dumps(found, indent=1) if as_json else printable(receipt_text(found))
        typer.echo(text, nl=as_json)


@app.command()
def play(
    env: Annotated[str, typer.Argument(help="name of an environment, gymnasium id, module:Class")],
    env_config: EnvConfig = "{}",
    profile: Profile = None,
    seed: Annotated[int, typer.Option(help="reset seed")] = 0,
    player: Who = "person",
    model: Model = None,
    temperature: Temperature = None,
    max_prompt_tokens: PromptTokens = None,
    max_response_tokens: ResponseTokens = None,
    max_steps: MaxSteps = None,
    imports: Imports = [],  # noqa: B006 - Typer copies it
    trust: Trust = False,
) -> None:
    """Play an environment yourself, with exactly the model's prompt.

    Type an action, or a whole response that starts with "<"; "/actions" lists the possible actions,
    "/quit" ends the game.
    """
    with told():
        from rllib_gigpo.commands import open_env
        from rllib_gigpo.imports import import_places
        from rllib_gigpo.playing.play import play as play_episode
        from rllib_gigpo.playing.screen import Screen

        import_places(imports)
        opened = open_env(env, env_config, profile)
        if profile is None and model is not None:
            opened = _asked_as_trained(opened, env, model, trust=trust)
        wishes = _Wishes(
            player, model, seed, temperature, max_prompt_tokens, max_response_tokens, trust
        )
        episode = partial(play_episode, seed=seed, max_steps=max_steps)
        _show(episode, opened, wishes, {}, Screen())


@app.command()
def replay(
    file: Annotated[str, typer.Argument(help="RUN/rollouts/000001.jsonl or .parquet")],
    start: Annotated[int, typer.Option("--from", help="step from which someone else plays")] = 0,
    group: Annotated[int, typer.Option(help="group of the episode")] = 0,
    member: Annotated[int, typer.Option(help="its place in the group")] = 0,
    player: Who = "person",
    model: Model = None,
    temperature: Temperature = None,
    seed: Annotated[int, typer.Option(help="of the player's draws")] = 0,
    env: Annotated[str | None, typer.Option(help="default: as recorded")] = None,
    env_config: Annotated[str | None, typer.Option(metavar="JSON", help="as recorded")] = None,
    profile: Profile = None,
    max_prompt_tokens: PromptTokens = None,
    max_response_tokens: ResponseTokens = None,
    max_steps: MaxSteps = None,
    imports: Imports = [],  # noqa: B006 - Typer copies it
    trust: Trust = False,
    trust_run: TrustRun = False,
) -> None:
    """Re-create a recorded episode, and go on from one of its steps."""
    with told():
        from rllib_gigpo.commands import open_env
        from rllib_gigpo.imports import import_places
        from rllib_gigpo.playing.replay import check_start, load_episode, recorded_env
        from rllib_gigpo.playing.replay import replay as replay_episode
        from rllib_gigpo.playing.screen import Screen

        import_places(imports)
        recorded = load_episode(file, group=group, member=member)
        check_start(recorded, start)
        world = recorded_env(recorded, file, env, env_config, trust=trust_run)
        opened = open_env(*world, profile)
        wishes = _Wishes(
            player, model, seed, temperature, max_prompt_tokens, max_response_tokens, trust
        )
        known = recorded.run.get("settings")
        screen = Screen()
        screen.line(f"re-creating {start} of {recorded.length} steps (seed {recorded.seed}) ...")
        episode = partial(replay_episode, recorded, start=start, max_steps=max_steps)
        _show(episode, opened, wishes, known if isinstance(known, dict) else {}, screen)


def _asked_as_trained(
    opened: tuple[Any, Any, dict[str, Any]], env: str, model: str, *, trust: bool
) -> tuple[Any, Any, dict[str, Any]]:
    """Return what was opened with the agent profile of a checkpoint that was trained on it."""
    from rllib_gigpo.trained import find_checkpoint, trained_as

    spec, _, config = opened
    checkpoint = find_checkpoint(model)
    trained = None if checkpoint is None else trained_as(checkpoint, trust=trust)
    if trained is None or trained.env != env or trained.profile is None:
        return opened
    return spec, trained.profile, config


@dataclass(frozen=True)
class _Wishes:
    """The options that say who plays."""

    player: str
    model: str | None
    seed: int
    temperature: float | None
    max_prompt_tokens: int | None
    max_response_tokens: int | None
    trust: bool


def _show(
    episode: Callable[..., Any],
    opened: tuple[Any, Any, dict[str, Any]],
    wishes: _Wishes,
    known: Mapping[str, Any],
    screen: Any,
) -> None:
    """Let the chosen player play an episode on the screen.

    Args:
        episode: What plays it, of (env, profile, player).
        opened: Environment, agent profile and settings of the environment.
        wishes: The options that say who plays.
        known: Settings of the run that an episode was recorded in, for limits not given.
        screen: Where it is shown.
    """
    spec, agent, config = opened
    with (
        _seat(spec, agent, config, wishes, known, screen) as player,
        _playing(screen),
        closing(spec.make()) as env,
    ):
        screen.end(episode(env, agent, player, name=spec.name, watch=screen.outcome))


@contextmanager
def _seat(
    spec: Any,
    agent: Any,
    config: dict[str, Any],
    wishes: _Wishes,
    known: Mapping[str, Any],
    screen: Any,
) -> Iterator[Callable[[Any], Any]]:
    """Give the player that the options name.

    Args:
        spec: The environment.
        agent: The agent profile.
        config: Settings of the environment.
        wishes: The options.
        known: Settings of the run that an episode was recorded in, for limits not given.
        screen: Where prompts and responses are shown.
    """
    from rllib_gigpo.playing.players import ModelPlayer, Person, ScriptedPlayer
    from rllib_gigpo.playing.screen import answered
    from rllib_gigpo.scripted import expert, random_legal
    from rllib_gigpo.trained import playable

    who = wishes.player
    if wishes.model is not None or who == "model":
        if wishes.model is None:
            raise ValueError("--player model: say which one with --model")
        with playable(wishes.model, trust=wishes.trust) as model:
            limits = _limits(wishes, wishes.model, known)
            player = ModelPlayer(model, spec.name, config, agent, seed=wishes.seed, **limits)
            yield answered(screen, player)
        return
    policies = {"expert": expert, "random": random_legal}
    if who == "person":
        screen.line("an action per line; /actions lists the possible ones, /quit ends the game")
        yield Person(agent, screen.prompt, tell=screen.line)
    elif who in policies:
        yield answered(screen, ScriptedPlayer(policies[who], agent, wishes.seed))
    else:
        raise ValueError(f"--player {who}: expected person, expert, random, or model")


def _limits(wishes: _Wishes, model: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return limits and temperature: as given, else the checkpoint's, else the recorded run's."""
    from rllib_gigpo.trained import find_checkpoint, trained_as

    names = ("max_prompt_tokens", "max_response_tokens")
    found = {name: known[name] for name in names if isinstance(known.get(name), int)}
    checkpoint = find_checkpoint(model)
    if checkpoint is not None:
        trained = trained_as(checkpoint, trust=wishes.trust)
        found |= {name: getattr(trained, name) for name in names}
        found["temperature"] = trained.eval_temperature
    given = {name: getattr(wishes, name) for name in (*names, "temperature")}
    return found | {name: value for name, value in given.items() if value is not None}


@contextmanager
def _playing(screen: Any) -> Iterator[None]:
    from rllib_gigpo.playing.players import Quit
    from rllib_gigpo.playing.replay import ReplayError
    from rllib_gigpo.stepping import EnvFailure

    try:
        yield
    except (Quit, KeyboardInterrupt):
        screen.line("\nended by the player")
    except (EnvFailure, ReplayError) as error:
        raise ValueError(str(error)) from error
