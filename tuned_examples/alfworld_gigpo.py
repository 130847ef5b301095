"""GiGPO on ALFWorld.

How to run this script
----------------------
`python tuned_examples/alfworld_gigpo.py --num-env-runners=2 --num-learners=2`

trains Qwen2.5-1.5B-Instruct with the paper's settings on the games in the folder of the environment
variable ALFWORLD_DATA (`alfworld-download` fetches them). Hardware: two GPUs with 80 GB.

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop with real games: a supervised
warm start of at most 64 steps, then two iterations of 2 groups x 2 episodes x up to 8 steps.

`... --smoke` does so on the games that ship with the package and a tiny model, in under a minute.

Results to expect
-----------------
The paper reports 86.7 +- 1.7 % success over all task types after 150 iterations (f_norm "std",
Table 1; the paper's figure, not reproduced here). The CPU demo is too short to learn: it shows that
every part works on real games.
"""

import json
import logging
import os
import sys
from pathlib import Path

import ray
import torch
from ray.rllib.examples.utils import (
    add_rllib_example_script_args,
    run_rllib_example_script_experiment,
)

from rllib_gigpo import GiGPO, GiGPOConfig
from rllib_gigpo.agent.profiles.alfworld import profile, short_profile
from rllib_gigpo.demo import report_iterations
from rllib_gigpo.models import materialize
from rllib_gigpo.record import Example, record
from rllib_gigpo.scripted import expert
from rllib_gigpo.sft import WarmStart, warm_start

_WARM_START_ROWS = 64
_DEMO_STEPS = 8

parser = add_rllib_example_script_args(default_iters=150, default_reward=10.0)
parser.set_defaults(algo="GiGPO", env="ALFWorld", evaluation_interval=5, evaluation_duration=128)
parser.add_argument("--model", default=None, help="model name, id or folder")
parser.add_argument("--split", default=None, help="folder below json_2.1.* of ALFWORLD_DATA")
parser.add_argument("--cpu-demo", action="store_true", help="two short iterations on this CPU")
parser.add_argument("--smoke", action="store_true", help="the CPU demo on shipped games")
parser.add_argument("--walkthroughs", default=None, help="JSON of winning commands per task id")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--results", default="runs/alfworld_demo", help="folder of the CPU demo")


def paper_config(args) -> GiGPOConfig:
    """Return the paper's settings (App. E.1)."""
    return (
        GiGPOConfig()
        .environment("ALFWorld", env_config={"split": args.split or "train", "horizon": 50})
        .llm(
            model=args.model or "Qwen/Qwen2.5-1.5B-Instruct",
            dtype="bfloat16",
            max_prompt_tokens=2048,
            max_response_tokens=512,
            temperature=1.0,
            eval_temperature=0.4,
        )
        .agent(profile=profile())
        .training(
            num_groups=16,
            group_size=8,
            omega=1.0,
            gamma=0.95,
            f_norm="std",
            lr=1e-6,
            minibatch_size=256,
            clip_param=0.2,
            kl_coeff=0.01,
            kl_estimator="k3",
            invalid_action_penalty=0.1,
        )
        .evaluation(
            evaluation_config=GiGPOConfig.overrides(
                env_config={"split": args.split or "valid_seen", "horizon": 50}
            )
        )
        .debugging(seed=args.seed)
    )


def demo_config(args) -> GiGPOConfig:
    """Return the paper's settings cut down to what a laptop does in minutes."""
    env_config = {
        "games": "shipped" if args.smoke else "real",
        "split": args.split or ("train" if args.smoke else "valid_train"),
        "horizon": _DEMO_STEPS,
    }
    is_tiny = args.model in (None, "tiny")
    return (
        paper_config(args)
        .environment("ALFWorld", env_config=env_config)
        .llm(
            model=args.model or "tiny",
            dtype="float32" if is_tiny else "bfloat16",
            max_prompt_tokens=1024,
            max_response_tokens=64,
        )
        .agent(profile=short_profile())
        .training(
            num_groups=2,
            group_size=2,
            lr=1e-3 if is_tiny else 1e-5,
            num_minibatches=2,
            micro_batch_tokens=4096,
        )
    )


def warm_start_examples(config: GiGPOConfig, args) -> list[Example]:
    """Record winning steps of games that the demo does not train on."""
    env = config.env_spec.make(config.env_config)
    trained = set(trained_tasks(config))
    task_ids = [task_id for task_id in env.unwrapped.task_ids() if task_id not in trained]
    walkthroughs = read_walkthroughs(args)
    if walkthroughs:
        task_ids = [task_id for task_id in task_ids if task_id in walkthroughs]
    policy = follow(walkthroughs) if walkthroughs else expert
    examples: list[Example] = []
    for task_id in task_ids[:: max(1, len(task_ids) // 16)]:
        examples += record(
            lambda: env,
            config.agent_profile,
            policy=policy,
            episodes=1,
            options=[{"task_id": task_id}],
        )
        if len(examples) >= _WARM_START_ROWS:
            break
    return examples[:_WARM_START_ROWS]


def trained_tasks(config: GiGPOConfig) -> list[str]:
    """Return the ids of the games that the demo's iterations will draw."""
    from rllib_gigpo.gigpo import training_tasks

    env = config.env_spec.make(config.env_config)
    tasks = [task for iteration in range(2) for task in training_tasks(config, iteration)]
    return [env.reset(seed=task.env_seed)[1]["task_id"] for task in tasks]


def read_walkthroughs(args) -> dict[str, list[str]]:
    """Read the winning commands, from --walkthroughs or from beside the data."""
    beside = Path(os.environ.get("ALFWORLD_DATA", ".")) / "walkthroughs.json"
    path = Path(args.walkthroughs) if args.walkthroughs else beside
    if args.smoke or not (args.walkthroughs or path.exists()):
        return {}
    return json.loads(path.read_text())


def follow(walkthroughs: dict[str, list[str]]):
    """Return a policy that plays the recorded commands of the game at hand."""
    progress: dict[str, int] = {}

    def policy(env, observation, info, rng) -> str:
        task_id = info["task_id"]
        number = progress.get(task_id, 0)
        progress[task_id] = number + 1
        return walkthroughs[task_id][number]

    return policy


def print_loss(step: int, loss: float) -> None:
    """Print every few steps."""
    if step % 5 == 0:
        print(f"  step {step + 1}: loss {loss:.3f}", flush=True)


def run_demo(args) -> None:
    """Warm start, then two iterations with everything printed."""
    config = demo_config(args)
    config.validate()
    results = Path(args.results).absolute()
    examples = warm_start_examples(config, args)
    is_tiny = args.model in (None, "tiny")
    print(f"warm start on {len(examples)} steps of games that are not trained on ...", flush=True)
    folder = warm_start(
        materialize(config.model_spec),
        examples,
        results / "warm_start",
        max_prompt_tokens=config.max_prompt_tokens,
        settings=WarmStart(
            steps=150 if is_tiny else 16,
            batch_size=8,
            lr=3e-3 if is_tiny else 1e-4,
            warmup_steps=4,
            dtype=config.dtype,
            token_budget=4096,
        ),
        on_step=print_loss,
    )
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    config.llm(model=str(folder), options={})
    report_iterations(config, iterations=2)


if __name__ == "__main__":
    args = parser.parse_args()
    if args.smoke or args.cpu_demo:
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // (2 if args.smoke else 1)))
        run_demo(args)
        sys.exit(0)
    run_rllib_example_script_experiment(paper_config(args), args, trainable=GiGPO)
