"""What the tuned examples share: arguments, and the short demonstration on a CPU."""

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from _by_hand import set_by_hand
from _choices import add_choices
from _training import NO_STEP_LIMIT, check_arguments, train
from ray.rllib.examples.utils import add_rllib_example_script_args

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.demo import report_iterations
from rllib_gigpo.models import FROM_SCRATCH, materialize
from rllib_gigpo.presets import get_preset
from rllib_gigpo.record import Example, record
from rllib_gigpo.recording import RunFolder
from rllib_gigpo.sampler import training_tasks
from rllib_gigpo.scripted import Policy, expert
from rllib_gigpo.sft import WarmStart, warm_start

_WARM_START_ROWS = 64
_DEMO_ITERATIONS = 2
_MOST_SEEDS = 1000

ConfigOf = Callable[[argparse.Namespace], GiGPOConfig]


def example_parser(
    env: str,
    *,
    iterations: int,
    best_return: float | None = None,
    evaluation_interval: int,
    tasks: int,
) -> argparse.ArgumentParser:
    """Return RLlib's arguments with an environment's defaults, and our own.

    Args:
        env: Name of the environment.
        iterations: Training iterations.
        best_return: Mean return at which the run stops early; None where no return says that there
            is nothing left to learn. `--stop-reward` replaces it.
        evaluation_interval: Iterations between two evaluations.
        tasks: Tasks of an evaluation.
    """
    parser = add_rllib_example_script_args(
        default_iters=iterations, default_timesteps=NO_STEP_LIMIT
    )
    parser.set_defaults(
        env=env,
        stop_reward=best_return,
        evaluation_interval=evaluation_interval,
        evaluation_duration=tasks,
        checkpoint_freq=10,
        checkpoint_at_end=True,
        best_return=best_return,
    )
    add_choices(parser)
    parser.add_argument("--cpu-demo", action="store_true", help="two short iterations on this CPU")
    parser.add_argument(
        "--smoke", action="store_true", help="the CPU demo on what ships here, with a tiny model"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trackers", nargs="+", default=[], help="wandb, mlflow, trackio: what else is told of it"
    )
    parser.add_argument(
        "--results", default=None, help="folder of the run; by default below runs/, by name"
    )
    return parser


def run_example(
    args: argparse.Namespace,
    *,
    paper: ConfigOf,
    demo: ConfigOf,
    policy_of: Callable[[str], Policy | None] = lambda task_id: expert,
) -> None:
    """Train with the paper's settings, or show the same path on a CPU.

    Args:
        args: What the command line says; `base_config` and `train_as` of `_choices` read its flags.
            `results` is set where it was left out.
        paper: Returns the paper's settings.
        demo: Returns those of the demo.
        policy_of: From a task id to the policy whose steps the demo warms up on; None skips the
            task.

    Raises:
        ValueError: A setting is at fault, or an argument would change nothing.
    """
    check_arguments(args, paper(args))
    is_demo = args.smoke or args.cpu_demo
    args.results = args.results or _folder(args, "demo" if is_demo else args.algo)
    if not is_demo:
        train(paper(args), args)
        return
    # A tiny model gains nothing from more threads and leaves room for others.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // (2 if args.smoke else 1)))
    config = demo_settings(args, demo)
    config.validate()
    config.llm(model=str(_warm_start(config, policy_of, Path(args.results).absolute())), options={})
    if not ray.is_initialized():
        # On a cluster, such as under `ray job submit`, Ray takes its address from the environment.
        alone = {"address": "local", "num_cpus": 8, "include_dashboard": False}
        alone = {} if "RAY_ADDRESS" in os.environ else alone
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **alone)
    folder = Path(args.results).absolute()
    RunFolder(folder).clear()
    report_iterations(config.recording(folder=str(folder)), iterations=_DEMO_ITERATIONS)
    print(f"what happened, step by step: rllib-gigpo report {folder}")


def _folder(args: argparse.Namespace, kind: str) -> str:
    name = "".join(c if c.isalnum() else "-" for c in f"{args.env}".lower())
    return f"runs/{name}_{kind}"


def cut_down(config: GiGPOConfig, args: argparse.Namespace) -> GiGPOConfig:
    """Cut settings down to what a laptop does in minutes: 2 groups of 2, no evaluation.

    The algorithm stays what it is; one without groups plays 4 episodes.
    """
    tiny = "tiny-vision" if getattr(args, "view", "text") == "rgb" else "tiny"
    is_tiny = args.model in (None, *FROM_SCRATCH)
    group_size = min(2, config.group_size)
    (
        config.evaluation(evaluation_config=None)
        .engines(
            engine="transformers",
            num_engines=1,
            engine_num_gpus=0.0,
            engine_num_cpus=1.0,
            engine_sleep=False,
            engine_options={},
            weight_sync="auto",
            probe_tolerance=None,
        )
        .learners(offload_to_cpu=False, use_liger_kernel=False, activation_checkpointing=False)
        .llm(
            model=args.model or tiny,
            dtype="float32" if is_tiny else "bfloat16",
            base_dtype="float32",
            max_prompt_tokens=1024,
            max_response_tokens=64,
        )
        .training(
            num_groups=4 // group_size,
            group_size=group_size,
            max_sampling_rounds=2,
            lr=1e-3 if is_tiny else 1e-5,
            lr_warmup_steps=0,
            num_minibatches=2,
            micro_batch_tokens=4096,
        )
    )
    return config


def demo_settings(args: argparse.Namespace, demo: ConfigOf) -> GiGPOConfig:
    """Return the settings of a demo, with what `--set` says on top."""
    config = demo(args)
    set_by_hand(config, args.set, get_preset(args.algo), is_demo=True)
    return config


def warm_start_examples(
    config: GiGPOConfig, policy_of: Callable[[str], Policy | None]
) -> list[Example]:
    """Record at most 64 steps of tasks that the demo does not train on."""
    env = config.env_spec.make(config.env_config)

    def task_of(seed: int) -> str:
        # Where the environment names no tasks, a seed is one.
        return str(env.reset(seed=seed)[1].get("task_id", seed))

    played = {
        task_of(task.env_seed)
        for iteration in range(_DEMO_ITERATIONS)
        for task in training_tasks(config, iteration)
    }
    examples: list[Example] = []
    for seed in range(_MOST_SEEDS):
        task_id = task_of(seed)
        policy = policy_of(task_id)
        if task_id in played or policy is None:
            continue
        played.add(task_id)
        examples += record(lambda: env, config.agent_profile, policy=policy, episodes=1, seed=seed)
        if len(examples) >= _WARM_START_ROWS:
            break
    return examples[:_WARM_START_ROWS]


def _warm_start(
    config: GiGPOConfig, policy_of: Callable[[str], Policy | None], results: Path
) -> Path:
    examples = warm_start_examples(config, policy_of)
    print(f"warm start on {len(examples)} steps of tasks that are not trained on ...", flush=True)
    is_tiny = config.llm_model in FROM_SCRATCH
    steps = 150 if is_tiny else 16

    def told(step: int, loss: float) -> None:
        if step % (steps // 8) == 0 or step == steps - 1:
            print(f"  step {step + 1}/{steps}: loss {loss:.3f}", flush=True)

    return warm_start(
        materialize(config.model_spec),
        examples,
        results / "warm_start",
        max_prompt_tokens=config.max_prompt_tokens,
        settings=WarmStart(
            steps=steps,
            batch_size=8,
            lr=3e-3 if is_tiny else 1e-4,
            warmup_steps=4,
            dtype=config.dtype,
            token_budget=4096,
        ),
        on_step=told,
    )
