"""A sweep over omega, gamma and F_norm by Ray Tune, several trials at once, seeds included.

How to run this script
----------------------
`python tuned_examples/sweep_gigpo.py --env KeyDoor --scheduler grid --seeds 3`

trains every omega x gamma x F_norm x seed on a tiny model. Hardware: two CPU cores; with a large
model, `--model qwen2.5-1.5b --num-gpus-per-learner 1 --engine vllm --gpus-per-engine 1` places a
learner and an engine of each trial on GPUs with 80 GB, one each; of smaller models, in fractions.

- `--scheduler asha` stops the worse trials early, `--scheduler pbt` lets good ones replace bad ones
  and changes omega, gamma and F_norm on the way.
- Stopped by anything, kill -9 included, the same command goes on from the last checkpoints; another
  one refuses the folder.
- `--set '{"max_prompt_tokens": 4096, "num_minibatches": 5}'` replaces any other setting: the
  prompts of WebShop and Search need 4096 tokens. `--profile` names an agent of your own.
- `--smoke` sweeps four trials of two iterations.

The results folder holds `table.md`, `heat_map.png` and the trials, each with its run folder.

Results to expect
-----------------
The paper's sweep of omega on WebShop (1.5B; the paper's figures, not reproduced here) rises from
56.6 % success at 0 to 68.3 % at 0.8 and falls to 56.3 % at 1.4. On KeyDoor
omega 0 is GRPO, below omega 1 (docs/learning.md).
"""

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from _by_hand import set_by_hand
from _choices import MODELS, check_engine_arguments, check_results, vllm_engines
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.claims import claim
from rllib_gigpo.commands import json_object, load_profile
from rllib_gigpo.compare.start import starting_model
from rllib_gigpo.compare.sweeps import HEADER, heat_map, sweep_rows, trials_of
from rllib_gigpo.presets import get_preset
from rllib_gigpo.tables import format_table
from rllib_gigpo.tune_results import release_results

METRIC = "env_runners/success_rate"
# What may differ when a sweep goes on.
_FREE = ("results", "concurrent")
# Arguments of vLLM engines, with their defaults.
_OF_ENGINES = {"gpus_per_engine": 0.0, "cpus_per_engine": 1.0, "engine_options": "{}"}
# What `--set` leaves to the flags.
_FLAGS = {
    "model": "--model",
    "omega": "--omegas",
    "gamma": "--gammas",
    "f_norm": "--f-norms",
    "engine": "--engine",
    "engine_num_gpus": "--gpus-per-engine",
    "engine_num_cpus": "--cpus-per-engine",
    "engine_options": "--engine-options",
    "folder": "--results",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: An argument would change nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--env", default="KeyDoor")
    add("--env-config", type=json.loads, default={}, metavar="JSON")
    add("--profile", metavar="MODULE:NAME", help="agent profile; default: the environment's")
    add("--model", default="tiny", help=f"{', '.join(MODELS)}, or any name, id or folder")
    add("--scheduler", choices=("grid", "asha", "pbt"), default="grid")
    add("--omegas", type=float, nargs="+", default=[0.0, 0.4, 0.8, 1.0, 1.4])
    add("--gammas", type=float, nargs="+", default=[0.9, 0.95, 1.0])
    add("--f-norms", nargs="+", choices=("std", "none"), default=["std", "none"])
    add("--seeds", type=int, default=None, help="runs of every setting or population; 3")
    add("--population", type=int, default=4, help="trials per seed of --scheduler pbt")
    add("--iterations", type=int, default=30)
    add("--episodes", type=int, default=128, help="per iteration, in groups of 8")
    add("--cpus-per-trial", type=float, default=1.0, help="may be a fraction")
    add("--num-gpus-per-learner", type=float, default=0.0, help="may be a fraction")
    add("--engine", choices=("transformers", "vllm"), default="transformers")
    add("--gpus-per-engine", type=float, default=0.0, help="may be a fraction")
    add("--cpus-per-engine", type=float, default=1.0, help="may be a fraction")
    add("--engine-options", default="{}", metavar="JSON", help="other fields of VLLMSettings")
    add("--set", default="{}", metavar="JSON", help="any other settings, by their names")
    add("--concurrent", type=int, default=0, help="trials at once; 0: as many as fit")
    add("--results", default="runs/sweep", help="folder; the same one is gone on with")
    add("--smoke", action="store_true", help="four trials of two iterations")
    args = parser.parse_args(arguments)
    check_engine_arguments(args, _OF_ENGINES)
    if args.scheduler != "pbt" and args.population != parser.get_default("population"):
        raise ValueError(
            f"--population {args.population} with --scheduler {args.scheduler} has no effect: "
            "leave it out, or use --scheduler pbt"
        )
    if args.smoke:
        args.omegas, args.gammas, args.f_norms = [0.0, 1.0], [0.95], ["std"]
        args.population, args.iterations, args.episodes = 2, 2, 16
        args.cpus_per_trial = 0.5
    args.seeds = args.seeds or (2 if args.smoke else 3)
    return args


def sweep_config(args: argparse.Namespace) -> GiGPOConfig:
    """Return the settings of a trial, with what is swept."""
    chosen = MODELS[args.model].name if args.model in MODELS else args.model
    is_tiny = chosen == "tiny"
    config = (
        GiGPOConfig()
        .environment(args.env, env_config=args.env_config)
        .llm(
            model=chosen,
            max_prompt_tokens=64 if args.env == "KeyDoor" else 2048,
            max_response_tokens=8 if is_tiny else 512,
            dtype="float32" if is_tiny else "bfloat16",
        )
        .training(num_groups=max(1, args.episodes // 8), group_size=8, num_minibatches=10)
        .resources(num_cpus_for_main_process=args.cpus_per_trial)
        .learners(
            num_gpus_per_learner=args.num_gpus_per_learner,
            activation_checkpointing=args.num_gpus_per_learner > 0,
        )
        .debugging(seed=0)
    )
    if is_tiny:
        config.training(lr=1e-3, adam_betas=(0.9, 0.99), weight_decay=0.0, kl_coeff=0.0)
        config.training(invalid_action_penalty=0.0, old_logp="engine")
    if args.engine == "vllm":
        # On a CPU the engines of all trials share one memory; vLLM would take half of it for each.
        small = {"kv_cache_memory_bytes": 1 << 26} if is_tiny and not args.gpus_per_engine else {}
        options = json_object(args.engine_options, "--engine-options", "fields of VLLMSettings")
        engines = vllm_engines(args.gpus_per_engine, small | options)
        config.engines(engine_num_cpus=args.cpus_per_engine, **engines)
    if args.profile:
        config.agent(profile=load_profile(args.profile))
    set_by_hand(config, args.set, get_preset("gigpo"), flags=_FLAGS)
    return config


def space(args: argparse.Namespace, config: GiGPOConfig) -> GiGPOConfig:
    """Add what is swept: every setting and seed, or a population to start from."""
    # The population's settings are drawn; every seed has one of its own.
    choose: Any = tune.choice if args.scheduler == "pbt" else tune.grid_search
    seeds: Any = tune.grid_search(list(range(args.seeds)))
    return config.training(
        omega=choose(args.omegas), gamma=choose(args.gammas), f_norm=choose(args.f_norms)
    ).debugging(seed=seeds)


def scheduler(args: argparse.Namespace) -> Any:
    """Return Tune's scheduler; None runs every trial to its end."""
    if args.scheduler == "asha":
        return ASHAScheduler(
            time_attr="training_iteration",
            metric=METRIC,
            mode="max",
            max_t=args.iterations,
            grace_period=max(1, args.iterations // 4),
        )
    if args.scheduler == "pbt":
        return PopulationBasedTraining(
            time_attr="training_iteration",
            metric=METRIC,
            mode="max",
            perturbation_interval=max(1, args.iterations // 6),
            hyperparam_mutations={
                "omega": args.omegas,
                "gamma": args.gammas,
                "f_norm": args.f_norms,
            },
        )
    return None


def tuner(args: argparse.Namespace, folder: Path) -> tune.Tuner:
    """Return a new tuner, or that of an interrupted sweep in the folder."""
    release_results()
    config = sweep_config(args)
    config.llm(model=starting_model(config, folder / "models", seed=0))
    trials = str(folder / "trials")
    param_space: Any = space(args, config)  # Tune takes RLlib's configs, its types do not say so
    if tune.Tuner.can_restore(trials):
        print(f"going on with the sweep in {trials}", flush=True)
        return tune.Tuner.restore(trials, "GiGPO", param_space=param_space, resume_errored=True)
    return tune.Tuner(
        "GiGPO",
        param_space=param_space,
        tune_config=tune.TuneConfig(
            scheduler=scheduler(args),
            num_samples=args.population if args.scheduler == "pbt" else 1,
            max_concurrent_trials=args.concurrent or None,
            reuse_actors=False,
        ),
        run_config=tune.RunConfig(
            name="trials",
            storage_path=str(folder),
            stop={"training_iteration": args.iterations},
            checkpoint_config=tune.CheckpointConfig(
                # A population copies from checkpoints that others made a while ago.
                checkpoint_frequency=1,
                num_to_keep=4 if args.scheduler == "pbt" else 2,
                checkpoint_at_end=True,
            ),
            verbose=1,
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep, tabulate, draw."""
    args = parse(arguments)
    check_results(args.results)
    sweep_config(args).validate()
    folder = Path(args.results).absolute()
    wanted = {name: value for name, value in vars(args).items() if name not in _FREE}
    claim(folder, "arguments.json", wanted, option="--results")
    (folder / "models").mkdir(exist_ok=True)
    if not ray.is_initialized():
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **_alone())
    results = tuner(args, folder).fit()
    for error in results.errors:
        print(f"a trial failed: {error}", flush=True)
    trials = trials_of([results[i] for i in range(len(results))], METRIC)
    table = format_table(
        f"{args.env}: {METRIC} over {args.seeds} seeds", HEADER, sweep_rows(trials)
    )
    (folder / "table.md").write_text(f"```\n{table}\n```\n")
    print(table)
    print(f"heat map: {heat_map(trials, folder / 'heat_map.png', f'{args.env}: {METRIC}')}")


def _alone() -> dict[str, Any]:
    """On a cluster Ray takes its address from the environment."""
    if "RAY_ADDRESS" in os.environ:
        return {}
    workers = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    return {"include_dashboard": False, "runtime_env": workers}


if __name__ == "__main__":
    main()
