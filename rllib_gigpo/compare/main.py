"""Compares algorithms over seeds on one environment.

    rllib-gigpo compare --algos gigpo,grpo,rloo --seeds 5 --env KeyDoor
    rllib-gigpo compare --algos gigpo,grpo --config my_runs.py:config

All runs of a seed start from the same model and train for the same number of environment steps.
Each is a file when it is finished; the same command goes on where it was stopped. The output folder
gets `comparison.md`, `comparison.tex`, `comparison.json` and `curves.png` (success against
environment steps, tokens and wall-clock).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_gigpo_cli.parsers import compare_parser

if TYPE_CHECKING:
    from rllib_gigpo.compare.runs import ConfigOf
    from rllib_gigpo.config import GiGPOConfig

_SETTINGS = "settings.json"
# How the tiny model learns on a CPU; the benchmark of learning changes what a task needs.
TINY_TRAINING = {
    "lr": 1e-3,
    "critic_lr": 1e-3,
    "adam_betas": (0.9, 0.99),
    "weight_decay": 0.0,
    "kl_coeff": 0.0,
    "num_minibatches": 10,
    "invalid_action_penalty": 0.0,
    "old_logp": "engine",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what the command line names."""
    parser = compare_parser()
    args = parser.parse_args(arguments)
    import logging

    import ray

    from rllib_gigpo.claims import claim
    from rllib_gigpo.compare.runs import planned_runs, read_results, train_all
    from rllib_gigpo.imports import import_places

    output = Path(args.output).absolute()
    (output / "runs").mkdir(parents=True, exist_ok=True)
    try:
        import_places(args.imports)
        runs = planned_runs(args.algos.split(","), args.seeds, args.env_steps)
        config_of = _own(args.config) if args.config else _named(args, output)
        for run in runs:
            config_of(run.algo, run.seed).validate()
        if not any((output / "runs").iterdir()):
            (output / _SETTINGS).unlink(missing_ok=True)
        claim(output, _SETTINGS, _settings(args), option="--output")
    except (ValueError, TypeError, ImportError) as error:
        parser.error(str(error))
    waiting = sum(not (output / "runs" / run.file).exists() for run in runs)
    print(f"{len(runs)} runs, {len(runs) - waiting} of them finished before", flush=True)
    started_here = waiting > 0 and not ray.is_initialized()
    if started_here:
        alone = (
            {}
            if "RAY_ADDRESS" in os.environ
            else {"address": "local", "num_cpus": max(args.workers, 1)}
        )
        ray.init(
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", **_import_path(args)}},
            **alone,
        )
    start = time.perf_counter()
    trained = train_all(
        runs, config_of, output / "runs", workers=args.workers, gpus_per_run=args.gpus_per_run
    )
    for number, run in enumerate(trained, 1):
        seconds = time.perf_counter() - start
        left = seconds / number * (waiting - number)
        told = f"{number}/{waiting} {run.algo} seed {run.seed}"
        print(f"{told}: {seconds:.0f} s, about {left:.0f} s left", flush=True)
    if started_here:
        ray.shutdown()
    env = config_of(runs[0].algo, 0).env
    write_comparison(read_results(runs, output / "runs"), args.env_steps, output, str(env))
    return 0


def _import_path(args: argparse.Namespace) -> dict[str, str]:
    """Return where workers look for the files that were named, besides where they always do."""
    from rllib_gigpo.imports import folders_of

    config = [args.config.rpartition(":")[0]] if args.config else []
    folders = folders_of([*args.imports, *config])
    known = [path] if (path := os.environ.get("PYTHONPATH")) else []
    return {"PYTHONPATH": os.pathsep.join([*folders, *known])} if folders else {}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what decides the results of a run, besides what stands in its file's name."""
    free = ("algos", "seeds", "env_steps", "imports", "workers", "gpus_per_run", "output")
    return {name: value for name, value in vars(args).items() if name not in free}


def write_comparison(results: Any, env_steps: int, output: Path, env: str) -> None:
    """Write and print the table, and draw the curves.

    Args:
        results: Runs by algorithm.
        env_steps: Environment steps that all runs have trained on.
        output: Folder to write to.
        env: Name of the environment, for titles.
    """
    from rllib_gigpo.compare.plots import plot_curves
    from rllib_gigpo.compare.tables import HEADER, comparison_rows, latex_table, markdown_table
    from rllib_gigpo.tables import format_table

    rows = comparison_rows(results, env_steps)
    title = f"{env}, {env_steps:,} environment steps"
    (output / "comparison.md").write_text(f"# {title}\n\n{markdown_table(HEADER, rows)}")
    (output / "comparison.tex").write_text(latex_table(HEADER, rows))
    told = [dict(zip(HEADER, row, strict=True)) for row in rows]
    (output / "comparison.json").write_text(json.dumps({"env": env, "rows": told}, indent=1) + "\n")
    picture = plot_curves(results, output / "curves.png", title)
    print(format_table(title, HEADER, rows))
    print(f"{output / 'comparison.md'}, .tex, .json; curves: {picture}")


def _own(name: str) -> ConfigOf:
    """Return the user's function from (algorithm, seed) to settings."""
    from rllib_gigpo.check.loading import load_named

    found = load_named(name)
    if not callable(found):
        raise TypeError(f"--config {name} is a {type(found).__name__}: expected a function")

    config_of: Any = found
    return config_of


def _named(args: argparse.Namespace, output: Path) -> ConfigOf:
    """Return the function for `--env` and `--model`."""
    from rllib_gigpo.commands import json_object, open_env
    from rllib_gigpo.compare.start import starting_model
    from rllib_gigpo.config import GiGPOConfig

    _, profile, env_config = open_env(args.env, args.env_config, args.profile)
    own = json_object(args.set, "--set", "arguments of training(...)")
    is_tiny = args.model == "tiny"
    in_key_door = args.env == "KeyDoor"
    prompt_limit = args.max_prompt_tokens or (64 if in_key_door else 2048)
    response_limit = args.max_response_tokens or (8 if in_key_door else 64 if is_tiny else 512)

    def config_of(algo: str, seed: int) -> GiGPOConfig:
        config = GiGPOConfig.preset(algo).environment(args.env, env_config=env_config)
        config.agent(profile=profile).debugging(seed=seed)
        config.llm(
            model=args.model,
            max_prompt_tokens=prompt_limit,
            max_response_tokens=response_limit,
            eval_temperature=1.0 if is_tiny else 0.4,
        )
        group_size = min(8, config.group_size)
        config.training(num_groups=args.episodes // group_size, group_size=group_size)
        if is_tiny:
            config.training(**TINY_TRAINING)
            model = starting_model(config, output / "models", seed, args.warm_episodes)
            config.llm(model=model, options={})
        config.training(**own)
        return config.evaluation(evaluation_duration=args.tasks)

    return config_of


if __name__ == "__main__":
    sys.exit(main())
