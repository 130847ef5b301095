"""The commands; what they need is imported inside them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="rllib-gigpo",
    help="GiGPO for LLM agents on Ray RLlib: train, look, play, export.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Commands with an argument parser of their own, which `python -m rllib_gigpo.NAME` uses as well.
_MODULES = {
    "quickstart": ("rllib_gigpo.quickstart", "Teach a tiny model to play KeyDoor in a minute."),
    "check": ("rllib_gigpo.check.main", "Check a run on a CPU before it costs GPU hours."),
    "check-env": ("rllib_gigpo.check_env", "Check an environment and its agent before training."),
    "record": ("rllib_gigpo.record", "Record an expert's or random steps for a warm start."),
    "sft": ("rllib_gigpo.sft", "Train a model on recorded steps."),
    "compare": ("rllib_gigpo.compare.main", "Compare algorithms over seeds, with intervals."),
    "evaluate": ("rllib_gigpo.evaluate.main", "Evaluate a model or a prompted agent on a panel."),
    "export": ("rllib_gigpo.export", "Write a checkpoint as a Hugging Face folder."),
}

RunArgument = Annotated[str, typer.Argument(help="run folder, see recording(folder=...)")]
EnvConfig = Annotated[str, typer.Option(metavar="JSON", help="constructor arguments")]
Profile = Annotated[
    str | None,
    typer.Option(metavar="MODULE:NAME", help="agent profile; default: the environment's"),
]
Who = Annotated[str, typer.Option("--player", help="person, expert, random, or model")]
Model = Annotated[str | None, typer.Option(help="model name, id or folder; implies --player model")]
Temperature = Annotated[float, typer.Option(help="of the model; 0 is greedy")]
PromptTokens = Annotated[int | None, typer.Option(help="limit of a prompt of the model")]
ResponseTokens = Annotated[int | None, typer.Option(help="limit of a response of the model")]
MaxSteps = Annotated[int | None, typer.Option(help="steps after which the episode is cut off")]


def main() -> None:
    """Run the console script."""
    app()


def _pass_on(name: str, module: str, text: str) -> None:
    # Options, --help among them, go to the module's own parser.
    settings = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }

    def command(context: typer.Context) -> None:
        raise typer.Exit(_code(importlib.import_module(module).main(list(context.args))))

    app.command(name, help=text, add_help_option=False, context_settings=settings)(command)


def _code(result: Any) -> int:
    return result if isinstance(result, int) else 0


for _name, (_module, _text) in _MODULES.items():
    _pass_on(_name, _module, _text)


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
    """Serve a run's report while it goes on; new iterations appear by themselves."""
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

        from rllib_gigpo.recording.receipt import read_receipt, receipt_text
        from rllib_gigpo.report.data import open_run

        found = read_receipt(open_run(run).path)
        typer.echo(json.dumps(found, indent=1) if as_json else receipt_text(found), nl=as_json)


@app.command()
def play(
    env: Annotated[str, typer.Argument(help="name of an environment, gymnasium id, module:Class")],
    env_config: EnvConfig = "{}",
    profile: Profile = None,
    seed: Annotated[int, typer.Option(help="reset seed")] = 0,
    player: Who = "person",
    model: Model = None,
    temperature: Temperature = 0.4,
    max_prompt_tokens: PromptTokens = None,
    max_response_tokens: ResponseTokens = None,
    max_steps: MaxSteps = None,
) -> None:
    """Play an environment yourself, with exactly the model's prompt.

    Type an action, or a whole response that starts with "<"; "/quit" ends the game.
    """
    with told():
        from rllib_gigpo.commands import open_env
        from rllib_gigpo.playing.play import play as play_episode

        spec, agent, config = open_env(env, env_config, profile)
        limits = _limits({}, max_prompt_tokens, max_response_tokens)
        screen, chosen = _seat(spec, agent, config, player, model, temperature, seed, limits)
        with _playing(screen):
            played = play_episode(
                spec.make(),
                agent,
                chosen,
                name=spec.name,
                seed=seed,
                max_steps=max_steps,
                watch=screen.outcome,
            )
            screen.end(played)


@app.command()
def replay(
    file: Annotated[str, typer.Argument(help="RUN/rollouts/000001.jsonl or .parquet")],
    start: Annotated[int, typer.Option("--from", help="step from which someone else plays")] = 0,
    group: Annotated[int, typer.Option(help="group of the episode")] = 0,
    member: Annotated[int, typer.Option(help="its place in the group")] = 0,
    player: Who = "person",
    model: Model = None,
    temperature: Temperature = 0.4,
    seed: Annotated[int, typer.Option(help="of the player's draws")] = 0,
    env: Annotated[str | None, typer.Option(help="default: as recorded")] = None,
    env_config: Annotated[str | None, typer.Option(metavar="JSON", help="as recorded")] = None,
    profile: Profile = None,
    max_prompt_tokens: PromptTokens = None,
    max_response_tokens: ResponseTokens = None,
    max_steps: MaxSteps = None,
) -> None:
    """Re-create a recorded episode up to a step, and go on with another player."""
    with told():
        import json

        from rllib_gigpo.commands import open_env
        from rllib_gigpo.playing.replay import load_episode
        from rllib_gigpo.playing.replay import replay as replay_episode

        recorded = load_episode(file, group=group, member=member)
        name = env or recorded.run.get("env")
        if not isinstance(name, str):
            raise ValueError(f"{file} lies in no run folder: say --env and --env-config")
        settings = env_config or json.dumps(recorded.run.get("env_config") or {})
        spec, agent, config = open_env(name, settings, profile)
        limits = _limits(recorded.run.get("settings"), max_prompt_tokens, max_response_tokens)
        screen, chosen = _seat(spec, agent, config, player, model, temperature, seed, limits)
        screen.line(f"re-creating {start} of {recorded.length} steps (seed {recorded.seed}) ...")
        with _playing(screen):
            played = replay_episode(
                recorded,
                spec.make(),
                agent,
                chosen,
                start=start,
                name=spec.name,
                max_steps=max_steps,
                watch=screen.outcome,
            )
            screen.end(played)


def _limits(settings: Any, prompt: int | None, response: int | None) -> dict[str, int]:
    """Return the token limits that were given, else those that a run was recorded with."""
    known = settings if isinstance(settings, dict) else {}
    wanted = {
        "max_prompt_tokens": known.get("max_prompt_tokens") if prompt is None else prompt,
        "max_response_tokens": known.get("max_response_tokens") if response is None else response,
    }
    return {name: value for name, value in wanted.items() if isinstance(value, int)}


def _seat(
    spec: Any,
    agent: Any,
    config: dict[str, Any],
    who: str,
    model: str | None,
    temperature: float,
    seed: int,
    limits: dict[str, int],
) -> tuple[Any, Callable[[Any], Any]]:
    """Return the screen and the player that the options name."""
    from rllib_gigpo.playing.players import ModelPlayer, Person, ScriptedPlayer
    from rllib_gigpo.playing.screen import Screen, answered
    from rllib_gigpo.scripted import expert, random_legal

    screen = Screen()
    if model is not None or who == "model":
        if model is None:
            raise ValueError("--player model: say which one with --model")
        chosen = ModelPlayer(
            model, spec.name, config, agent, temperature=temperature, seed=seed, **limits
        )
        return screen, answered(screen, chosen)
    if who == "person":
        return screen, Person(agent, screen.prompt)
    policies = {"expert": expert, "random": random_legal}
    if who not in policies:
        raise ValueError(f"--player {who}: expected person, expert, random, or model")
    return screen, answered(screen, ScriptedPlayer(policies[who], agent, seed))


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
