"""ALFWorld's fast engine beside the reference: equal step by step, and how much faster.

`python -m benchmarks.alfworld_parity --data FOLDER --games 400`, where the folder holds
`json_2.1.*` (repeat `--data` for several); without data the shipped games are played. Each game is
played on both engines at once: random commands with invalid ones between them, then the expert's to
the end, then a few more. Every text, the admissible commands, `won` and the inventory are compared.
"""

import argparse
import random
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.report import report, timed
from envs.alfworld import ALFWorld
from envs.alfworld.engine import Engine
from envs.alfworld.fast.engine import FastEngine, compiled
from envs.alfworld.fast.expert import Expert
from envs.alfworld.games import TASK_TYPES, Game, list_games
from envs.alfworld.textworld_engine import TextWorldEngine

EPISODES_PER_GAME = 8
STEPS = 50
INVALID_SHARE = 0.15
# Commands that change more than the agent's place; random walks would seldom draw them.
ACTING = ("take", "put", "move", "open", "close", "use", "heat", "clean", "cool", "slice")
INVALID = ("", "dance", "go to", "go to shelf 99", "TAKE MUG 1 FROM DESK 1", "look around")


class Comparison(NamedTuple):
    """Both engines on one game.

    Attributes:
        steps: Commands that were compared.
        difference: What differed first, "" if nothing did.
        reset_s: CPU seconds of the reference's reset, loading included.
        step_s: CPU seconds of all its steps.
        won: Whether the expert won; random commands may have taken a thing that nothing in the
            game can hold, which is a dead end.
    """

    steps: int
    difference: str
    reset_s: float
    step_s: float
    won: bool


def compare(
    reference: Engine, fast: Engine, game: Game, random_steps: int, seed: int
) -> Comparison:
    """Play one game on two engines at once until something differs or the walk ends."""
    rng = random.Random(seed)
    turn, reset_s = timed(lambda: reference.reset(game))
    other = fast.reset(game)
    expert = Expert(compiled(game))
    played: list[str] = []
    step_s, won, left = 0.0, turn.won, 3
    while True:
        inventories = reference.inventory(), fast.inventory()
        if turn != other or inventories[0] != inventories[1]:
            difference = f"{game.task_id} after {played}: {turn} {other} {inventories}"
            return Comparison(len(played), difference, reset_s, step_s, won)
        command = random_command(turn.admissible, rng)
        if len(played) >= random_steps and not won:
            try:
                command = expert.next_command(played)
            except RuntimeError:
                left = 0
        if not left:
            return Comparison(len(played), "", reset_s, step_s, won)
        left -= won
        played.append(command)
        turn, seconds = timed(lambda command=command: reference.step(command))
        other = fast.step(command)
        step_s += seconds
        won = won or turn.won


def expert_wins(game: Game) -> bool:
    """Return whether the expert wins within an episode's 50 steps."""
    engine, expert = FastEngine(), Expert(compiled(game))
    turn = engine.reset(game)
    played: list[str] = []
    while not turn.won and len(played) < STEPS:
        played.append(expert.next_command(played))
        turn = engine.step(played[-1])
    return turn.won


def random_command(admissible: Sequence[str], rng: random.Random) -> str:
    """Draw a command: often one that acts on things, sometimes one that is not admissible."""
    if rng.random() < INVALID_SHARE:
        return rng.choice([*INVALID, rng.choice(admissible).upper()])
    acting = [command for command in admissible if command.split()[0] in ACTING]
    return rng.choice(acting if acting and rng.random() < 0.6 else admissible)


def spread(games: Sequence[Game], count: int) -> list[Game]:
    """Return `count` games, as many of each task type as there are, spaced over the list."""
    by_type = [[game for game in games if game.task_type == kind] for kind in TASK_TYPES]
    mixed = [
        kinds[place * len(kinds) // len(games)]
        for place in range(len(games))
        for kinds in by_type
        if kinds
    ]
    return list(dict.fromkeys([*mixed, *games]))[:count]


class Speed(NamedTuple):
    """The fast engine alone, in `ALFWorld` environments.

    Attributes:
        first_load_ms: Milliseconds of each game's first load.
        reset_ms: Milliseconds of a reset once the game is loaded.
        fresh: Steps per second over games that were loaded just before.
        steps_per_s: Steps per second over the same games later.
        engine_steps_per_s: The same of the engine alone, as the reference is measured.
        mb_per_episode: Megabytes per live environment of games that are loaded.
        episodes: Live environments in the process.
    """

    first_load_ms: list[float]
    reset_ms: float
    fresh: float
    steps_per_s: float
    engine_steps_per_s: float
    mb_per_episode: float
    episodes: int


def measure_speed(chosen: Sequence[tuple[dict[str, Any], Game]]) -> Speed:
    """Play 8 random episodes of 50 steps in each game, again and again.

    Args:
        chosen: Games, each with the `ALFWorld` arguments that list it.
    """
    compiled.cache_clear()
    first_load_ms = [timed(lambda game=game: compiled(game))[1] * 1e3 for _, game in chosen]
    rng = random.Random(0)
    envs = [(ALFWorld(**kwargs), game) for kwargs, game in chosen for _ in range(EPISODES_PER_GAME)]
    rates = [steps_per_second(envs, rng) for _ in range(5)]
    engines = [(FastEngine(), game) for _, game in envs]
    engine_rate = max(engine_steps_per_second(engines, rng) for _ in range(3))
    tracemalloc.start()
    more = [(ALFWorld(**kwargs), game) for kwargs, game in [*chosen] * 4 * EPISODES_PER_GAME]
    for env, game in more:
        env.reset(seed=0, options={"task_id": game.task_id})
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    options = [(env, {"task_id": game.task_id}) for env, game in more]
    _, reset_s = timed(lambda: [env.reset(options=choice) for env, choice in options])
    return Speed(
        first_load_ms,
        reset_s / len(more) * 1e3,
        rates[0],
        max(rates),
        engine_rate,
        megabytes / len(more),
        len(envs) + len(more),
    )


def steps_per_second(envs: Sequence[tuple[ALFWorld, Game]], rng: random.Random) -> float:
    """Play all episodes in lockstep with random admissible commands until each has ended."""
    running = [(env, env.reset(options={"task_id": game.task_id})[1]) for env, game in envs]
    steps, start = 0, time.process_time()
    while running:
        after = []
        for env, info in running:
            command = rng.choice(info["admissible_actions"])
            _, _, terminated, truncated, following = env.step(command)
            if not (terminated or truncated):
                after.append((env, following))
        steps += len(running)
        running = after
    return steps / (time.process_time() - start)


def engine_steps_per_second(engines: Sequence[tuple[Engine, Game]], rng: random.Random) -> float:
    """Play 50 random admissible commands on each engine in lockstep."""
    turns = [engine.reset(game) for engine, game in engines]
    start = time.process_time()
    for _ in range(STEPS):
        for number, (engine, _) in enumerate(engines):
            turns[number] = engine.step(rng.choice(turns[number].admissible))
    return STEPS * len(engines) / (time.process_time() - start)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", action="append", help="folder with json_2.1.* (repeatable)")
    parser.add_argument("--split", help="split; default: valid_train, or the shipped train splits")
    parser.add_argument("--games", type=int, default=12, help="games to compare, of each folder")
    parser.add_argument("--random-steps", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    """Compare, measure and report."""
    options = arguments()
    if options.data:
        split = options.split or "valid_train"
        sets = [{"games": "real", "split": split, "data_dir": folder} for folder in options.data]
    else:
        splits = [options.split] if options.split else ["train", "train_put"]
        sets = [{"games": "shipped", "split": split, "data_dir": None} for split in splits]
    chosen = [
        (kwargs, game)
        for kwargs in sets
        for game in spread(list_games(**kwargs, task_types=None), options.games)
    ]
    reference, fast = TextWorldEngine(), FastEngine()
    results: list[Comparison] = []
    for seed, (_, game) in enumerate(chosen):
        results.append(compare(reference, fast, game, options.random_steps, seed))
        print(f"{seed + 1}/{len(chosen)} {results[-1].difference or 'equal'}", flush=True)
    reference.close()
    steps = sum(result.steps for result in results)
    reference_rate = steps / sum(result.step_s for result in results)
    speed = measure_speed(chosen[:: -(-len(chosen) // 16)])
    differences = sum(bool(result.difference) for result in results)
    first_load = sum(speed.first_load_ms) / len(speed.first_load_ms)
    figures = {
        "games": len(chosen),
        "steps_compared": steps,
        "differences": differences,
        "expert_success": sum(expert_wins(game) for _, game in chosen) / len(chosen),
        "reference_steps_per_s": round(reference_rate, 2),
        "reference_reset_ms": round(sum(r.reset_s for r in results) / len(results) * 1e3, 1),
        "steps_per_s": round(speed.steps_per_s),
        "fresh_steps_per_s": round(speed.fresh),
        "engine_steps_per_s": round(speed.engine_steps_per_s),
        "over_reference": round(speed.engine_steps_per_s / reference_rate),
        "first_load_ms": round(first_load, 2),
        "first_load_max_ms": round(max(speed.first_load_ms), 2),
        "reset_ms": round(speed.reset_ms, 5),
        "mb_per_episode": round(speed.mb_per_episode, 6),
    }
    report(
        f"{len(chosen)} games on both engines, {steps} steps, {differences} games differ;"
        f" {speed.episodes} live environments on the fast engine",
        ("", "reference", "fast"),
        [
            ("steps per CPU second, engine", reference_rate, speed.engine_steps_per_s),
            ("the same, whole environment", "", speed.steps_per_s),
            ("the same, games just loaded", "", speed.fresh),
            ("reset, ms", figures["reference_reset_ms"], figures["reset_ms"]),
            ("first load, ms (mean)", "", first_load),
            ("first load, ms (slowest)", "", max(speed.first_load_ms)),
            ("MB per live episode", "", figures["mb_per_episode"]),
        ],
        figures,
    )


if __name__ == "__main__":
    main()
