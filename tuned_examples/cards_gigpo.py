"""GiGPO, and every other algorithm, on Gym Cards: EZPoints, NumberLine, Blackjack or Points24.

How to run this script
----------------------
`python tuned_examples/cards_gigpo.py --game EZPoints --engine=vllm --num-engines=2 \
--num-env-runners=2 --num-learners=2`

trains Qwen2.5-1.5B-Instruct with the settings of the authors' script for the game, on text. There
is none for Points24; it takes those of EZPoints. Hardware: four GPUs with 80 GB, of which two learn
and two generate; learners share the model (FSDP) and compute activations again for the backward
pass, and `rllib-gigpo check --gpu-gib 74 tuned_examples/cards_gigpo.py ...` says whether an update
fits. `--algo NAME` trains by gigpo, grpo, rloo, ppo, dapo, ...; PPO holds a second model, the
critic.

`... --view rgb` shows pictures to Qwen2.5-VL-3B (NumberLine: Qwen2-VL-2B), as the authors do.

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop: a supervised warm start of at
most 64 steps of a half-random expert, then two iterations of 2 groups x 2 episodes.

`... --smoke` does so with a tiny model, in under a minute; with `--view rgb` it sees pictures.

Results to expect
-----------------
The authors report 100 % success on EZPoints with Qwen2.5-VL-3B and on NumberLine with Qwen2-VL-2B
(their README; not reproduced here). Those models see pictures: `--view rgb`. Basic strategy wins
about 43 % (4,000 seeds) of the games of Blackjack, and three deals in four of Points24 can be won.
The CPU demo is too short to learn.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from _choices import base_config, train_as
from _shared import cut_down, example_parser, run_example

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.agent.profiles.gym_cards import PROFILES, picture_profile, short_profile
from rllib_gigpo.scripted import half_expert


class Game(NamedTuple):
    """The settings in which the authors' scripts differ."""

    num_groups: int
    minibatch_size: int
    horizon: int
    iterations: int
    evaluation_interval: int
    best_return: float
    vision_model: str = "qwen2.5-vl-3b"


GAMES = {
    "EZPoints": Game(16, 128, 8, 100, 5, 10.0),
    "Points24": Game(16, 128, 22, 100, 5, 10.0),
    "NumberLine": Game(16, 16, 10, 20, 5, 1.0, "qwen2-vl-2b"),
    "Blackjack": Game(32, 32, 15, 200, 10, 1.0),
}

_MODEL = "qwen2.5-1.5b"

parser = example_parser(
    "EZPoints", iterations=100, best_return=10.0, evaluation_interval=5, tasks=128
)
parser.add_argument("--game", default="EZPoints", choices=GAMES)
parser.add_argument("--view", default="text", choices=("text", "rgb"), help="what the model sees")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what it leaves open is the game's."""
    name = parser.parse_args(arguments).game
    game = GAMES[name]
    parser.set_defaults(
        env=name,
        stop_iters=game.iterations,
        stop_reward=game.best_return,
        best_return=game.best_return,
        evaluation_interval=game.evaluation_interval,
    )
    return parser.parse_args(arguments)


def paper_config(args) -> GiGPOConfig:
    """Return the settings of the authors' script, which shows pictures; here `--view rgb` does."""
    game = GAMES[args.game]
    sees = args.view == "rgb"
    model = game.vision_model if sees else _MODEL
    config = (
        base_config(args, model=model)
        .environment(args.game, env_config={"horizon": game.horizon, "view": args.view})
        .llm(
            dtype="bfloat16",
            max_prompt_tokens=1024,
            max_response_tokens=512,
            temperature=1.0,
            eval_temperature=0.4,
        )
        .agent(profile=picture_profile(args.game) if sees else PROFILES[args.game]())
    )
    return train_as(
        config,
        args,
        model=model,
        num_groups=game.num_groups,
        group_size=8,
        omega=1.0,
        gamma=0.95,
        f_norm="none",
        lr=1e-6,
        minibatch_size=game.minibatch_size,
        clip_param=0.2,
        kl_coeff=0.01,
        kl_estimator="k3",
        invalid_action_penalty=0.1,
    )


def demo_config(args) -> GiGPOConfig:
    """Return the settings of the CPU demo."""
    return cut_down(paper_config(args), args).agent(profile=short_profile())


if __name__ == "__main__":
    # The expert's games would leave the demo nothing to learn.
    run_example(
        parse(), paper=paper_config, demo=demo_config, policy_of=lambda task_id: half_expert
    )
