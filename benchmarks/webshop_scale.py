"""WebShop on catalogues of any size: building, memory, and steps per second.

`python -m benchmarks.webshop_scale --products 1000 100000`, some minutes for the larger one. Each
catalogue is generated in the official file layout, compiled into a cache as any official file, and
opened by a process of its own. Every fifth step of the walk is a search that was never made before.

Figures, one object per size: `build_s` and `build_mb`, CPU seconds of compiling and the most
megabytes that it adds to its process meanwhile; `disk_mb`, size of the compiled files; `memory_mb`,
resident megabytes that opening and 20,000 steps add to a process, mapped pages of the files
included; `private_mb`, the part of it that other processes do not share; `steps_per_s`, per CPU
second of one thread. `full_catalogue` says what 1.18 million products would take, reckoned from the
largest size measured, if that is at least 100,000: `build_mb` and the files in proportion, the
unshared part, which is caches of a fixed size, as it is.
"""

import argparse
import multiprocessing
import os
import random
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.report import report, timed
from envs.webshop import WebShop
from envs.webshop.generate import write_official_files
from envs.webshop.reward import title_nouns

FULL = 1_180_000
_LARGE_ENOUGH = 100_000  # below it, what every catalogue takes outweighs what products take
EPISODES, WARM_UP_ROUNDS, ROUNDS = 100, 20, 200
FRESH_SHARE = 0.2


def walk(episodes: list[WebShop], rounds: int, rng: random.Random) -> float:
    """Step all episodes once a round; return CPU seconds of the steps alone."""
    seconds = 0.0
    offered = [["search"] for _ in episodes]
    for number, env in enumerate(episodes):
        env.reset(seed=number)
    for _ in range(rounds):
        actions = [draw(actions, env, rng) for actions, env in zip(offered, episodes, strict=True)]
        pairs = list(zip(episodes, actions, strict=True))
        answers, taken = timed(lambda pairs=pairs: [env.step(action) for env, action in pairs])
        seconds += taken
        for number, (_, _, terminated, truncated, info) in enumerate(answers):
            offered[number] = info["admissible_actions"]
            if terminated or truncated:
                offered[number] = episodes[number].reset()[1]["admissible_actions"]
    return seconds


def draw(offered: list[str], env: WebShop, rng: random.Random) -> str:
    """Draw a click, or where nothing can be clicked the same search; every fifth time a new one."""
    if rng.random() >= FRESH_SHARE:
        clicks = [action for action in offered if action.startswith("click")]
        return rng.choice(clicks) if clicks else "search[red mug]"
    product = env.catalogue.product(rng.randrange(len(env.catalogue)))
    words = rng.sample(product.title.lower().split(), 3)
    return f"search[{' '.join(words)} {rng.randrange(10**6)}]"


def measure(folder: Path) -> dict[str, float]:
    """Open a catalogue in this process, compiling it first where that is to be done."""
    title_nouns("a first title loads the tagger")
    before = memory_mb()
    _, build_s = timed(lambda: WebShop(products=folder, horizon=10**6).close())
    build_mb = peak_mb() - before["Rss"]
    episodes = [WebShop(products=folder, horizon=10**6) for _ in range(EPISODES)]
    rng = random.Random(0)
    walk(episodes, WARM_UP_ROUNDS, rng)
    seconds = walk(episodes, ROUNDS, rng)
    after = memory_mb()
    return {
        "build_s": build_s,
        "build_mb": build_mb,
        "memory_mb": after["Rss"] - before["Rss"],
        "private_mb": after["Private_Dirty"] - before["Private_Dirty"],
        "steps_per_s": EPISODES * ROUNDS / seconds,
    }


def memory_mb() -> dict[str, float]:
    """Return the resident and the unshared memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines}


def peak_mb() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def in_a_process(folder: Path) -> dict[str, float]:
    """Measure in a new process, whose memory holds nothing but the catalogue."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, folder).result()


def main() -> None:
    """Measure the sizes of the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--products", type=int, nargs="+", default=[1000, 100_000])
    sizes = parser.parse_args().products
    figures: dict[str, dict[str, float]] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as scratch:
            folder, cache = Path(scratch) / "official", Path(scratch) / "cache"
            folder.mkdir()
            os.environ["RLLIB_GIGPO_CACHE"] = str(cache)
            write_official_files(folder, size)
            # The first process compiles; the second shows what opening alone takes.
            built, found = in_a_process(folder), in_a_process(folder)
            disk = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / 1e6
        kept = {"build_s": built["build_s"], "build_mb": built["build_mb"], "disk_mb": disk}
        figures[str(size)] = {name: round(value, 1) for name, value in (found | kept).items()}
        print(f"{size:,} products: {figures[str(size)]}", flush=True)
    names = list(next(iter(figures.values())))
    rows = [(int(size), *(found[name] for name in names)) for size, found in figures.items()]
    if max(sizes) >= _LARGE_ENOUGH:
        largest, factor = figures[str(max(sizes))], FULL / max(sizes)
        figures["full_catalogue"] = {
            "build_mb": round(largest["build_mb"] * factor),
            "memory_mb": round(largest["private_mb"] + largest["disk_mb"] * factor),
        }
    report(
        f"{EPISODES} live episodes, {FRESH_SHARE:.0%} of the steps searches that are new",
        ("products", *(name.replace("_", " ") for name in names)),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
