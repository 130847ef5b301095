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
from ray import tune

from rllib_gigpo import GiGPO, GiGPOConfig, claims
from rllib_gigpo.progress import ProgressLines
from rllib_gigpo.resuming import train_to

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
_OF_THE_MACHINE = ("results", "num_cpus", "verbose", "tune_max_report_freq", "wandb_key")


def train(config: GiGPOConfig, args: argparse.Namespace) -> None:
    """Train until the arguments say stop, or go on with a run that was interrupted.

    Args:
        config: The settings.
        args: RLlib's arguments for examples and `results`, the folder.

    Raises:
        ValueError: The folder holds a run with other arguments, or `--as-test` was not passed.
    """
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


def claim(folder: Path, args: argparse.Namespace) -> None:
    """Make a folder the place of these arguments; one in which nothing was trained starts anew.

    Raises:
        ValueError: A run with others is there, or an argument is not for these environments.
    """
    if args.output is not None:
        raise ValueError(
            f"--output {args.output} is where RLlib writes trajectories of its own kind: leave it "
            "out; --results names the folder, and rollouts are always in it"
        )
    if not _has_trained(folder):
        shutil.rmtree(folder / "trials", ignore_errors=True)
        (folder / _ARGUMENTS).unlink(missing_ok=True)
    wanted = {name: value for name, value in vars(args).items() if name not in _OF_THE_MACHINE}
    claims.claim(folder, _ARGUMENTS, wanted, option="--results")


def _has_trained(folder: Path) -> bool:
    results = [folder / "metrics.jsonl", *folder.glob("trials/*/result.json")]
    return any(file.exists() and file.stat().st_size > 0 for file in results)


def with_arguments(config: GiGPOConfig, args: argparse.Namespace, gpus: float) -> GiGPOConfig:
    """Return the settings with RLlib's arguments on top.

    Args:
        config: The settings.
        args: RLlib's arguments for examples.
        gpus: GPUs of the cluster; where `--num-gpus-per-learner` is left out and there is one for
            each learner, each takes one.
    """
    if args.num_env_runners is not None:
        config.env_runners(num_env_runners=args.num_env_runners)
    given = {
        name: getattr(args, name)
        for name in ("num_learners", "num_gpus_per_learner", "num_cpus_per_learner")
        if getattr(args, name) is not None
    }
    learners = given.get("num_learners", config.num_learners) or 1
    config.learners(**{"num_gpus_per_learner": int(gpus >= learners), **given})
    if args.evaluation_interval > 0:
        config.evaluation(
            evaluation_interval=args.evaluation_interval,
            evaluation_num_env_runners=args.evaluation_num_env_runners,
            evaluation_duration=args.evaluation_duration,
        )
    if args.log_level is not None:
        config.debugging(log_level=args.log_level)
    if args.wandb_key is not None:
        os.environ["WANDB_API_KEY"] = args.wandb_key
        config.recording(trackers=["wandb"])
    return config


def _tuned(config: GiGPOConfig, args: argparse.Namespace, folder: Path) -> float:
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the newer output shows no columns of one's own
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
                stop={
                    "training_iteration": args.stop_iters,
                    _RETURN: args.stop_reward,
                    _STEPS: args.stop_timesteps,
                },
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
