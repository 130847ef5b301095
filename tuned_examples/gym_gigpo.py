"""GiGPO, and every other algorithm, on a gymnasium environment told in words.

How to run this script
----------------------
`python tuned_examples/gym_gigpo.py --env gym:FrozenLake-v1`

trains a tiny model from scratch on FrozenLake. Hardware: two CPU cores. FrozenLake, Taxi,
CliffWalking, Blackjack and MiniGrid have texts of their own; of any other id, the model reads what
the environment prints (docs/environments/foreign.md). `--env-config '{"kwargs": {"is_slippery":
false}}'` sets its arguments, `--model qwen2.5-1.5b` another model, `--algo NAME` the algorithm.

`--env my_module:MyEnv` trains on an environment of your own, and `--profile my_module:profile` asks
the model as that profile, or the function that makes it, does.

It trains for `--stop-iters` iterations: which return cannot be bettered is the environment's to
know, and `--stop-reward` names one at which to stop. Environments behind `mcp:` and `openenv:` take
their steps in threads, as they wait for servers.

`... --cpu-demo` does a warm start on random legal moves, which teaches the format, and two
iterations of 2 groups x 2 episodes; `--smoke` the same.

Results to expect
-----------------
The paper has no figures for these environments, and none were measured here: one works through
the settings with `rllib-gigpo check-env gym:FrozenLake-v1` and `rllib-gigpo compare`. On slippery
ice even the best way fails often.
"""

import json

from _choices import SERVER_THREADS, base_config, train_as
from _shared import cut_down, example_parser, run_example

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.commands import load_profile
from rllib_gigpo.scripted import random_legal

_MODEL = "tiny"
# Environments of these names wait for servers.
_SERVED = ("mcp:", "openenv:")

parser = example_parser("gym:FrozenLake-v1", iterations=100, evaluation_interval=10, tasks=64)
parser.add_argument("--env-config", type=json.loads, default={}, metavar="JSON")
parser.add_argument(
    "--profile", metavar="MODULE:NAME", help="an AgentProfile, or a function that makes it"
)


def paper_config(args) -> GiGPOConfig:
    """Return settings for a tiny model; a large one needs the paper's learning rate."""
    is_tiny = (args.model or _MODEL) == "tiny"
    config = (
        base_config(args, model=_MODEL)
        .environment(args.env, env_config=args.env_config)
        .llm(
            dtype="float32" if is_tiny else "bfloat16",
            max_prompt_tokens=1024,
            max_response_tokens=32 if is_tiny else 512,
            temperature=1.0,
            eval_temperature=0.4,
        )
        .stepping(step_threads=SERVER_THREADS if args.env.startswith(_SERVED) else 0)
    )
    if args.profile:
        config.agent(profile=load_profile(args.profile))
    return train_as(
        config,
        args,
        model=_MODEL,
        num_groups=16,
        group_size=8,
        omega=1.0,
        gamma=0.95,
        f_norm="std",
        lr=1e-3 if is_tiny else 1e-6,
        minibatch_size=256,
        clip_param=0.2,
        kl_coeff=0.01,
        kl_estimator="k3",
        invalid_action_penalty=0.1,
    )


def demo_config(args) -> GiGPOConfig:
    """Return the settings of the CPU demo."""
    return cut_down(paper_config(args), args)


if __name__ == "__main__":
    run_example(
        parser.parse_args(),
        paper=paper_config,
        demo=demo_config,
        policy_of=lambda task_id: random_legal,
    )
