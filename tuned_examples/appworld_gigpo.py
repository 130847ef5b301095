"""GiGPO, and every other algorithm, on AppWorld: everyday tasks by code.

How to run this script
----------------------
`python tuned_examples/appworld_gigpo.py --python-executable=/opt/appworld/bin/python \
--root=/data/appworld --engine=vllm --num-engines=4 --num-env-runners=8 --num-learners=4`

trains Qwen2.5-7B-Instruct on AppWorld's training tasks; docs/environments/appworld.md tells how
AppWorld is set up. Every running episode is a server process of AppWorld, so plan CPU cores and
memory for 16 x 8 of them. Hardware: eight GPUs with 80 GB, of which four learn and four generate;
learners share the model (FSDP) and compute activations again for the backward pass, and
`rllib-gigpo check --gpu-gib 74 tuned_examples/appworld_gigpo.py ...` says whether an update fits.
`--algo ppo` holds a second model, the critic, and needs `--num-learners=8`.

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop with the shipped world: a
supervised warm start of at most 64 steps of its expert, then two iterations of 2 groups x 2
episodes.

`... --smoke` does so with a tiny model, in a minute.

Results to expect
-----------------
The paper has no figures for AppWorld, and none were measured here: the settings are those that the
paper uses for ALFWorld, with the longer prompts and responses that code needs. `success_rate` is
the share of tasks whose unit tests all pass, `score_mean` that of the passed tests. The CPU demo is
too short to learn.
"""

from _choices import base_config, train_as
from _shared import cut_down, example_parser, run_example

from rllib_gigpo import GiGPOConfig

# A tenth of 200 iterations, each of about 16 optimizer steps.
_WARMUP_STEPS = 320

_MODEL = "qwen2.5-7b"

parser = example_parser(
    "AppWorld", iterations=200, best_return=10.0, evaluation_interval=10, tasks=57
)
parser.add_argument("--python-executable", default=None, help="interpreter that has appworld")
parser.add_argument(
    "--root", default=None, help="AppWorld's root folder; by default the shipped world"
)


def paper_config(args) -> GiGPOConfig:
    """Return ALFWorld's settings of the paper (App. E.1), with room for code."""
    if args.root and not args.python_executable:
        raise ValueError(
            f"--root {args.root} without --python-executable has no effect, as the shipped world "
            "is played: name the interpreter that has appworld, or leave the root out"
        )
    place = {"python_executable": args.python_executable, "root": args.root}
    world = place if args.python_executable else {"world": "shipped"}
    config = (
        base_config(args, model=_MODEL)
        .environment("AppWorld", env_config={**world, "horizon": 50})
        .llm(
            dtype="bfloat16",
            max_prompt_tokens=8192,
            max_response_tokens=1024,
            temperature=1.0,
            eval_temperature=0.4,
        )
        .stepping(step_threads=16)
        .agent(on_long_prompt="shorten_observation")
        .evaluation(evaluation_config=GiGPOConfig.overrides(env_config={**world, "split": "dev"}))
    )
    return train_as(
        config,
        args,
        model=_MODEL,
        num_groups=16,
        group_size=8,
        omega=1.0,
        gamma=0.95,
        f_norm="std",
        lr=1e-6,
        lr_warmup_steps=_WARMUP_STEPS,
        minibatch_size=256,
        clip_param=0.2,
        kl_coeff=0.01,
        kl_estimator="k3",
        invalid_action_penalty=0.1,
    )


def demo_config(args) -> GiGPOConfig:
    """Return the settings of the CPU demo: the shipped world, short episodes."""
    args.python_executable = args.root = None
    config = cut_down(paper_config(args), args)
    return config.environment(env_config={"world": "shipped", "horizon": 4}).llm(
        max_response_tokens=128
    )


if __name__ == "__main__":
    run_example(parser.parse_args(), paper=paper_config, demo=demo_config)
