"""GiGPO, and every other algorithm, on Sokoban.

How to run this script
----------------------
`python tuned_examples/sokoban_gigpo.py --engine=vllm --num-engines=2 --num-env-runners=2 \
--num-learners=2`

trains Qwen2.5-1.5B-Instruct with the paper's settings on generated rooms of 6 x 6 cells with one
box, shown as text. `--levels=boxoban-levels/unfiltered/train --eval-levels=... --horizon=120` plays
level files instead. Hardware: four GPUs with 80 GB, of which two learn and two generate; learners
share the model (FSDP) and compute activations again for the backward pass, and `rllib-gigpo check
--gpu-gib 74 tuned_examples/sokoban_gigpo.py ...` says whether an update fits. `--algo NAME` trains
by gigpo, gigpo_dynamic, grpo, rloo, ppo, ...; PPO holds a second model, the critic.

`... --view rgb` shows pictures to Qwen2.5-VL-3B, as the authors do.

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop: a supervised warm start of at
most 64 steps of a solver, then two iterations of 2 groups x 2 episodes x up to 8 steps.

`... --smoke` does so with a tiny model, in under a minute; with `--view rgb` it sees pictures.

Results to expect
-----------------
The authors report 81.0 % success after 150 iterations of Qwen2.5-VL-3B (f_norm "none", their
README; not reproduced here), 76.9 % with "std" and 67.1 % of GRPO. That model sees pictures
(`--view rgb`); of text the figures are only a hint. The solver wins every room. The CPU demo is too
short to learn.
"""

from _choices import base_config, train_as
from _shared import cut_down, example_parser, run_example

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.agent.profiles.sokoban import picture_profile, profile, short_profile

_DEMO_STEPS = 8

_MODEL, _VISION_MODEL = "qwen2.5-1.5b", "qwen2.5-vl-3b"

parser = example_parser("Sokoban", iterations=150, evaluation_interval=5, tasks=128)
parser.add_argument("--view", default="text", choices=("text", "rgb"), help="what the model sees")
parser.add_argument("--size", type=int, nargs=2, metavar=("COLUMNS", "ROWS"), help="of rooms; 6 6")
parser.add_argument("--boxes", type=int, default=None, help="of a room; 1")
parser.add_argument("--horizon", type=int, default=15, help="steps of an episode")
parser.add_argument("--levels", default=None, help="level file or folder, in place of rooms")
parser.add_argument("--eval-levels", default=None, help="by default --levels")


def paper_config(args) -> GiGPOConfig:
    """Return the settings of the authors' script, which shows pictures; here `--view rgb` does."""
    _check_rooms(args)
    sees = args.view == "rgb"
    model = _VISION_MODEL if sees else _MODEL
    room = {
        "size": tuple(args.size or (6, 6)),
        "num_boxes": 1 if args.boxes is None else args.boxes,
        "search_depth": 30,
        "horizon": args.horizon,
        "view": args.view,
    }
    tested = {**room, "levels": args.eval_levels or args.levels}
    config = (
        base_config(args, model=model)
        .environment("Sokoban", env_config={**room, "levels": args.levels})
        .llm(
            dtype="bfloat16",
            max_prompt_tokens=1024,
            max_response_tokens=512,
            temperature=1.0,
            eval_temperature=0.4,
        )
        .agent(profile=picture_profile() if sees else profile())
        .evaluation(evaluation_config=GiGPOConfig.overrides(env_config=tested))
    )
    return train_as(
        config,
        args,
        model=model,
        num_groups=32,
        group_size=8,
        omega=1.0,
        gamma=0.95,
        f_norm="none",
        lr=1e-6,
        minibatch_size=64,
        clip_param=0.2,
        kl_coeff=0.01,
        kl_estimator="k3",
        invalid_action_penalty=0.1,
    )


def _check_rooms(args) -> None:
    for name in ("size", "boxes"):
        if args.levels and getattr(args, name) is not None:
            raise ValueError(
                f"--{name} {getattr(args, name)} with --levels {args.levels} has no effect: levels "
                "of files are as they are; leave out one of the two"
            )


def demo_config(args) -> GiGPOConfig:
    """Return the settings of the CPU demo."""
    config = cut_down(paper_config(args), args)
    room = {**config.env_config, "horizon": _DEMO_STEPS}
    return config.environment("Sokoban", env_config=room).agent(profile=short_profile())


if __name__ == "__main__":
    run_example(parser.parse_args(), paper=paper_config, demo=demo_config)
