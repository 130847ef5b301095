"""Every bundled environment: speed, memory, repeated states, and its solver.

`python -m benchmarks.environments`, two minutes on one core. Real data are used where their folder
is found (`--data`, the environment variable RLLIB_GIGPO_SHARED_DATA, or `../shared/data`), else
what ships or is generated. All rates are per CPU second of this one thread; what the server
processes of AppWorld take is not in them, and only 4 of its episodes are live.

Figures, one object per environment: `steps_per_s`, steps under a random policy with many episodes
live, without drawing the actions; `reference_steps_per_s`, the same of the benchmark's own package
in the same run, or null; `reset_ms`, milliseconds of a reset once its task is loaded;
`mb_per_episode`, megabytes of resident memory per live episode of loaded tasks; `repeat_share`,
share of the random policy's steps whose anchor state occurs again in their group of 8;
`solver_success`, share of 100 fixed winnable tasks that the expert wins, or null without an expert;
`winnable_share`, share of the tasks looked at for them that can be won, by the environment's own
`is_winnable()`; 1 where it has none.
"""

import argparse
import functools
import gc
import json
import multiprocessing
import os
import random
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import report, timed
from envs.catalog import ENVIRONMENTS, make
from rllib_gigpo.anchor_study import play_groups, study
from rllib_gigpo.games import SOLO_AGENT, Game
from rllib_gigpo.grouping import AnchorRule
from rllib_gigpo.registry import get_env_spec
from rllib_gigpo.scripted import expert, play_episode, random_legal

TASKS, EPISODES = 16, 512
WARM_UP_ROUNDS, ROUNDS = 5, 25
REFERENCE_EPISODES, REFERENCE_STEPS = 2, 15
GROUP_SIZE = 8
SOLVED_TASKS, LOOKED_AT = 100, 400
_GOLDEN = 0.6180339887498949
DEFAULT_NAMES = (*ENVIRONMENTS, "gym:FrozenLake-v1")
# Live episodes that are server processes: hundreds at once are no sensible load.
FEW_EPISODES = {"AppWorld": 4}
DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

Config = Mapping[str, Any]


class Figures(NamedTuple):
    """What is reported of one environment; see the module."""

    steps_per_s: float
    reference_steps_per_s: float | None
    reset_ms: float
    mb_per_episode: float
    repeat_share: float
    solver_success: float | None
    winnable_share: float | None


class Episode:
    """A live episode, stepped with what its environment takes as action."""

    def __init__(self, env: Any, seed: int):
        self.env = env
        self.is_team = hasattr(env, "possible_agents")
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        """Start over with the same task."""
        self.seen = self._by_agent(*self.env.reset(seed=self.seed))
        self.is_over = False

    def draw(self, rng: random.Random) -> Any:
        """Draw a legal action, or one for each agent that acts."""
        drawn = {
            agent: random_legal(self.env, observation, info, rng)
            for agent, (observation, info) in self.seen.items()
        }
        return drawn if self.is_team else drawn[SOLO_AGENT]

    def take(self, answer: tuple) -> None:
        """Take over what a step returned."""
        observation, _, terminated, truncated, info = answer
        self.seen = self._by_agent(observation, info)
        if self.is_team:
            terminated, truncated = terminated["__all__"], truncated["__all__"]
        self.is_over = bool(terminated or truncated)

    def _by_agent(self, observation: Any, info: Any) -> dict[Any, tuple[Any, Mapping]]:
        if not self.is_team:
            return {SOLO_AGENT: (observation, info)}
        return {agent: (text, info.get(agent, {})) for agent, text in observation.items()}


def measure_speed(make_env: Callable[[], Any], episodes: int) -> tuple[float, float, float]:
    """Return steps per second, milliseconds of a reset, and megabytes per live episode.

    Args:
        make_env: Makes one environment.
        episodes: Number of live episodes.
    """
    rng = random.Random(0)
    # What only the first episodes cost, such as imports and the tasks themselves, is not counted.
    first = [Episode(make_env(), number % TASKS) for number in range(episodes)]
    play_rounds(first, WARM_UP_ROUNDS, rng)
    before = resident_mb()
    second = [Episode(make_env(), number % TASKS) for number in range(episodes)]
    play_rounds(second, WARM_UP_ROUNDS, rng)
    mb = max(0.0, resident_mb() - before) / episodes
    steps, seconds = play_rounds(second, ROUNDS, rng)
    _, reset_s = timed(lambda: [episode.env.reset(seed=episode.seed) for episode in second])
    for episode in (*first, *second):
        episode.env.close()
    return steps / seconds, reset_s / episodes * 1e3, mb


def play_rounds(episodes: Sequence[Episode], rounds: int, rng: random.Random) -> tuple[int, float]:
    """Step all episodes once a round, start those over that end, return steps and CPU seconds."""
    steps, step_s = 0, 0.0
    for _ in range(rounds):
        ready = [(episode.env, episode.draw(rng)) for episode in episodes]
        answers, seconds = timed(lambda ready=ready: [env.step(action) for env, action in ready])
        step_s += seconds
        steps += len(answers)
        for episode, answer in zip(episodes, answers, strict=True):
            episode.take(answer)
            if episode.is_over:
                episode.reset()
    return steps, step_s


def resident_mb() -> float:
    """Return the resident memory of this process in megabytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_reference(name: str, config: Config) -> float | None:
    """Return the steps per second of the benchmark's own package, None where there is none."""
    if name != "ALFWorld":
        return None
    try:
        env = make(name, **{**config, "engine": "textworld"})
    except ImportError as error:
        print(f"no reference for {name}: {error}", flush=True)
        return None
    seconds = 0.0
    for seed in range(REFERENCE_EPISODES):
        episode, rng = Episode(env, seed), random.Random(seed)
        for _ in range(REFERENCE_STEPS):
            action = episode.draw(rng)
            answer, taken = timed(lambda action=action: env.step(action))
            episode.take(answer)
            seconds += taken
    env.close()
    return REFERENCE_EPISODES * REFERENCE_STEPS / seconds


def repeat_share(name: str, make_env: Callable[[], Any]) -> float:
    """Return the share of a random policy's steps whose state is met again in their group."""
    groups = play_groups(
        make_env(),
        get_env_spec(name).profile(),
        random_legal,
        groups=TASKS,
        group_size=GROUP_SIZE,
    )
    return study(groups, AnchorRule()).repeat_share


class Solved(NamedTuple):
    """How an expert does: shares of the winnable tasks, and of all that were looked at."""

    success: float
    winnable_share: float


def solved_by_expert(name: str, make_env: Callable[[], Any]) -> Solved | None:
    """Let the expert play 100 fixed tasks that can be won; None without an expert.

    Raises:
        RuntimeError: Too few tasks can be won.
    """
    env = make_env()
    own = env.unwrapped
    if not hasattr(own, "expert_action"):
        return None
    game, profile = Game(env, name), get_env_spec(name).profile()
    looked_at, played, won = 0, 0, 0
    for seed, options in enumerate(candidates(own)):
        looked_at += 1
        game.reset(seed, options)
        if hasattr(own, "is_winnable") and not own.is_winnable():
            continue
        episode = play_episode(game, profile, expert, random.Random(0), seed=seed, options=options)
        played += 1
        won += bool(episode.verdict.get("won"))
        if played == SOLVED_TASKS:
            break
    game.close()
    if played < SOLVED_TASKS:
        raise RuntimeError(f"{name}: {played} of {looked_at} tasks can be won: expected 100")
    return Solved(won / played, played / looked_at)


def candidates(env: Any) -> list[dict[str, str] | None]:
    """Return the reset options of fixed tasks, spread over all; None leaves it to the seed."""
    if not hasattr(env, "task_ids"):
        return [None] * LOOKED_AT
    ids = env.task_ids()
    # Steps of the golden ratio: any first hundred of them are spread over all tasks.
    return [{"task_id": ids[int(number * _GOLDEN % 1.0 * len(ids))]} for number in range(LOOKED_AT)]


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder for unpacked data and compiled catalogues; nothing of it is left behind."""
    kept = os.environ.get("RLLIB_GIGPO_CACHE")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["RLLIB_GIGPO_CACHE"] = scratch
        yield Path(scratch)
    if kept is None:
        del os.environ["RLLIB_GIGPO_CACHE"]
    else:
        os.environ["RLLIB_GIGPO_CACHE"] = kept


def real_configs(data: Path, scratch: Path) -> dict[str, Config]:
    """Unpack the real data that are there; return constructor arguments that play them."""
    found: dict[str, Config] = {}
    games = data / "alfworld" / "games_valid_train_move.tar.xz"
    if games.exists():
        with tarfile.open(games) as archive:
            archive.extractall(scratch, filter="data")
        found["ALFWorld"] = {"games": "real", "split": "valid_train", "data_dir": str(scratch)}
    if (data / "webshop").is_dir():
        found["WebShop"] = {"products": str(data / "webshop"), "num_products": 1000}
    questions = sorted((data / "searchqa").glob("*_passages.jsonl"))
    if questions:
        corpus = data / "searchqa" / "corpus_hotpot_musique.jsonl"
        found["Search"] = {
            "questions": [str(path) for path in questions],
            "corpus": str(corpus) if corpus.exists() else "questions",
            "split": "all",
        }
    return found


def shipped_config(name: str) -> Config:
    """Return constructor arguments that need no download."""
    return ENVIRONMENTS[name].contract_kwargs if name in ENVIRONMENTS else {}


def measure(name: str, config: Config) -> Figures:
    """Measure one environment."""
    make_env = functools.partial(get_env_spec(name).make, config)
    steps_per_s, reset_ms, mb = measure_speed(make_env, FEW_EPISODES.get(name, EPISODES))
    solved = solved_by_expert(name, make_env)
    return Figures(
        steps_per_s=round(steps_per_s, 1),
        reference_steps_per_s=_rounded(measure_reference(name, config), 2),
        reset_ms=round(reset_ms, 4),
        mb_per_episode=round(mb, 5),
        repeat_share=round(repeat_share(name, make_env), 4),
        solver_success=None if solved is None else solved.success,
        winnable_share=None if solved is None else round(solved.winnable_share, 4),
    )


def in_a_process(work: Callable[..., Figures], *arguments: Any) -> Figures:
    """Call in a process of its own: memory that another environment freed would hide this one's."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def main() -> None:
    """Measure what the command line says and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of the real data")
    parser.add_argument(
        "--env-config", type=json.loads, default={}, help="JSON of further constructor arguments"
    )
    parser.add_argument("names", nargs="*", help="environments to measure; by default all")
    options = parser.parse_args()
    data = options.data or Path(os.environ.get("RLLIB_GIGPO_SHARED_DATA", DEFAULT_DATA))
    figures: dict[str, Figures] = {}
    sources = {}
    with scratch_folder() as scratch:
        real = real_configs(data, scratch)
        for name in options.names or DEFAULT_NAMES:
            sources[name] = "real" if name in real else "shipped"
            config = {**real.get(name, shipped_config(name)), **options.env_config}
            start = time.perf_counter()
            try:
                figures[name] = in_a_process(measure, name, config)
            except ImportError as error:
                print(f"{name} is left out: {error}", flush=True)
                continue
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    report(
        f"{EPISODES} live episodes of {TASKS} tasks, random legal actions, one thread",
        ("environment", "data", *(field.replace("_", " ") for field in Figures._fields)),
        [
            (name, sources[name], *("-" if value is None else value for value in found))
            for name, found in figures.items()
        ],
        {name: found._asdict() for name, found in figures.items()},
    )


if __name__ == "__main__":
    main()
