"""Trains a tuned example with Ray Tune: a folder of its own, and the same command goes on with it.

It takes the arguments of RLlib's example scripts, whose own function for that
(`run_rllib_example_script_experiment`) neither says where results go nor goes on after a stop.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import ray
from _by_hand import names_set
from _choices import as_option, check_results
from ray import tune
from ray.rllib.examples.utils import add_rllib_example_script_args

from rllib_gigpo import GiGPO, GiGPOConfig, claims
from rllib_gigpo.progress import ProgressLines
from rllib_gigpo.resuming import train_to
from rllib_gigpo.tune_results import release_results

_RETURN = "env_runners/episode_return_mean"
_STEPS = "env_runners/num_env_steps_sampled_lifetime"
_SHOWN = {
    "training_iteration": "iter",
    "time_total_s": "total time (s)",
    _STEPS: "env steps",
    "env_runners/success_rate": "success",
    _RETURN: "return",
}
# What may differ between the first command and the one that goes on.
_ARGUMENTS = "arguments.json"
_OF_THE_MACHINE = ("results", "num_cpus", "verbose", "tune_max_report_freq", "trackers")
_OF_THE_EXAMPLE = ("best_return",)
# The paper trains for a number of iterations, whatever their steps.
NO_STEP_LIMIT = 10**12

# RLlib's arguments that mean nothing here, and what one wants instead.
_STACK = "RLlib's new API stack and PyTorch are what there is"
_WITHOUT_EFFECT = {
    "output": "rollouts are always in the folder that --results names",
    "framework": _STACK,
    "old_api_stack": _STACK,
    "enable_new_api_stack": _STACK,
    "num_gpus": "--num-gpus-per-learner and --gpus-per-engine say who takes GPUs",
    "num_envs_per_env_runner": "a runner plays all its episodes at once",
    "num_agents": "the environment says which agents there are",
    "num_aggregator_actors_per_learner": "rows go to the learners as they are",
    "evaluation_duration_unit": "--evaluation-duration counts episodes",
    "evaluation_parallel_to_training": "--evaluation-num-env-runners=N plays with N runners",
    "wandb_key": "a command line is seen by everybody: set WANDB_API_KEY where Ray starts, and use "
    "--trackers wandb",
    "wandb_project": "the variable WANDB_PROJECT names it",
    "wandb_run_name": "a run is named by its algorithm and its environment",
    "as_release_test": "--as-test compares with --stop-reward",
    "local_mode": "--num-env-runners=0 --num-learners=0 keeps both in this process",
}


def train(config: GiGPOConfig, args: argparse.Namespace) -> None:
    """Train until the arguments say stop, or go on with a run that was interrupted.

    Args:
        config: The settings.
        args: RLlib's arguments for examples and `results`, the folder.

    Raises:
        ValueError: The folder holds a run with other arguments, or would be lost with the job; or
            `--as-test` was not passed.
    """
    check_results(args.results)
    folder = Path(args.results).absolute()
    ray.init(num_cpus=args.num_cpus or None, ignore_reinit_error=True)
    config = with_arguments(config, args, gpus=ray.cluster_resources().get("GPU", 0))
    config.copy(copy_frozen=False).validate()
    claim(folder, args)
    print(
        f"run folder: {folder}\n  while it trains: rllib-gigpo view {folder}\n"
        f"  at any time:     rllib-gigpo report {folder}\n"
        "  stopped by anything, the same command goes on from the last checkpoint",
        flush=True,
    )
    best = _alone(config, args, folder) if args.no_tune else _tuned(config, args, folder)
    print(f"best return {best:.3f}; what happened, step by step: rllib-gigpo report {folder}")
    if args.as_test and best < args.stop_reward:
        raise ValueError(f"best return {best:.3f}: expected at least {args.stop_reward}")


def check_arguments(args: argparse.Namespace, config: GiGPOConfig) -> None:
    """Refuse RLlib's arguments that would change nothing.

    Args:
        args: RLlib's arguments for examples.
        config: What the example's `paper_config` returned.

    Raises:
        ValueError: One differs from its default, or `--as-test` has no return to compare with.
    """
    plain = vars(add_rllib_example_script_args().parse_args([]))
    for name, cure in _WITHOUT_EFFECT.items():
        if getattr(args, name) != plain[name]:
            raise ValueError(f"{_as_typed(name, args)} has no effect: leave it out; {cure}")
    if args.env != config.env:
        raise ValueError(
            f"--env {args.env}, but this example trains on {config.env}: leave it out, or run the "
            "example of that environment"
        )
    if args.as_test and args.stop_reward is None:
        raise ValueError(
            "--as-test without --stop-reward: this example has no return that every run should "
            "reach; say which one, as in --stop-reward 0.5"
        )
    if args.evaluation_num_env_runners and args.evaluation_interval <= 0:
        raise ValueError(
            f"{_as_typed('evaluation_num_env_runners', args)} with "
            f"{_as_typed('evaluation_interval', args)}, which evaluates nothing: leave out one of "
            "the two"
        )
    if not args.no_tune:
        return
    plain = {"num_samples": 1, "max_concurrent_trials": None, "stop_timesteps": NO_STEP_LIMIT}
    # --as-test compares the best return with it.
    plain |= {} if args.as_test else {"stop_reward": args.best_return}
    for name, value in plain.items():
        if getattr(args, name) != value:
            raise ValueError(
                f"{_as_typed(name, args)} with --no-tune, which makes one run of --stop-iters "
                "iterations: leave out one of the two"
            )


def _as_typed(name: str, args: argparse.Namespace) -> str:
    value = getattr(args, name)
    return as_option(name) if value is True else f"{as_option(name)} {value}"


def claim(folder: Path, args: argparse.Namespace) -> None:
    """Make a folder the place of these arguments; one in which nothing was trained starts anew.

    Raises:
        ValueError: A run with others is there.
    """
    if not _has_trained(folder):
        shutil.rmtree(folder / "trials", ignore_errors=True)
        (folder / _ARGUMENTS).unlink(missing_ok=True)
    free = (*_OF_THE_MACHINE, *_OF_THE_EXAMPLE)
    wanted = {name: value for name, value in vars(args).items() if name not in free}
    claims.claim(folder, _ARGUMENTS, wanted, option="--results")


def _has_trained(folder: Path) -> bool:
    results = [folder / "metrics.jsonl", *folder.glob("trials/*/result.json")]
    return any(file.exists() and file.stat().st_size > 0 for file in results)


def with_arguments(config: GiGPOConfig, args: argparse.Namespace, gpus: float) -> GiGPOConfig:
    """Return the settings with the arguments that say where it runs on top.

    Several learners share the model, unless `--sharding` says otherwise, and learners on GPUs keep
    the inputs of layers alone for the backward pass: the models of the paper need both to fit.

    Args:
        config: The settings.
        args: RLlib's arguments for examples, and `sharding`.
        gpus: GPUs of the cluster; where `--num-gpus-per-learner` is left out and there is one for
            each learner, each takes one.

    Raises:
        ValueError: Engines are to run on GPUs, and learners would be left with the CPU.
    """
    if args.num_env_runners is not None:
        config.env_runners(num_env_runners=args.num_env_runners)
    given = {
        name: getattr(args, name)
        for name in ("num_learners", "num_gpus_per_learner", "num_cpus_per_learner")
        if getattr(args, name) is not None
    }
    learners = given.get("num_learners", config.num_learners) or 1
    if "num_gpus_per_learner" not in given and gpus < learners and config.engine_num_gpus > 0:
        raise ValueError(
            f"{learners} learners beside engines on GPUs, and the cluster has {gpus:g} GPUs now: "
            "wait until its nodes are there, or say --num-gpus-per-learner"
        )
    given.setdefault("num_gpus_per_learner", int(gpus >= learners))
    if "activation_checkpointing" not in names_set(args.set):
        given["activation_checkpointing"] = given["num_gpus_per_learner"] > 0
    config.learners(sharding=args.sharding or ("fsdp" if learners > 1 else "replicate"), **given)
    if args.evaluation_interval > 0:
        config.evaluation(
            evaluation_interval=args.evaluation_interval,
            evaluation_num_env_runners=args.evaluation_num_env_runners,
            evaluation_duration=args.evaluation_duration,
        )
    else:
        config.evaluation(evaluation_config=None)
    if args.log_level is not None:
        config.debugging(log_level=args.log_level)
    return config.recording(trackers=args.trackers)


def stop_at(args: argparse.Namespace) -> dict[str, float]:
    """Return at what a trial stops, by Tune's names of results."""
    by_return = {} if args.stop_reward is None else {_RETURN: args.stop_reward}
    return {"training_iteration": args.stop_iters, _STEPS: args.stop_timesteps, **by_return}


def _tuned(config: GiGPOConfig, args: argparse.Namespace, folder: Path) -> float:
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the newer output shows no columns of one's own
    release_results()
    trials = str(folder / "trials")
    param_space: Any = config  # Tune takes RLlib's configs, its types do not say so
    if tune.Tuner.can_restore(trials):
        print(f"going on with the run in {trials}", flush=True)
        tuner = tune.Tuner.restore(trials, GiGPO, param_space=param_space, resume_errored=True)
    else:
        tuner = tune.Tuner(
            GiGPO,
            param_space=param_space,
            tune_config=tune.TuneConfig(
                num_samples=args.num_samples, max_concurrent_trials=args.max_concurrent_trials
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(folder),
                stop=stop_at(args),
                verbose=args.verbose,
                progress_reporter=tune.CLIReporter(
                    metric_columns=_SHOWN, max_report_frequency=args.tune_max_report_freq
                ),
                checkpoint_config=tune.CheckpointConfig(
                    checkpoint_frequency=args.checkpoint_freq,
                    num_to_keep=2,
                    checkpoint_at_end=args.checkpoint_at_end,
                ),
            ),
        )
    results = tuner.fit()
    if results.errors:
        raise results.errors[0]
    frames = (results[number].metrics_dataframe for number in range(len(results)))
    return max(max(frame[_RETURN].tolist()) for frame in frames if frame is not None)


def _alone(config: GiGPOConfig, args: argparse.Namespace, folder: Path) -> float:
    """Train without Tune, a line per iteration, for all iterations."""
    lines = ProgressLines(args.stop_iters)
    lines.header()
    returns = []

    def told(result: dict[str, Any]) -> None:
        lines.row(result["training_iteration"], result)
        returns.append(float(result["env_runners"]["episode_return_mean"]))

    train_to(
        config,
        folder,
        args.stop_iters,
        then=lambda algorithm: None,
        on_result=told,
        checkpoint_every=args.checkpoint_freq or args.stop_iters,
    )
    return max(returns, default=float("-inf"))
