"""GiGPO, and every other algorithm, on ALFWorld.

How to run this script
----------------------
`python tuned_examples/alfworld_gigpo.py --engine=vllm --num-engines=2 --num-env-runners=2 \
--num-learners=2`

trains Qwen2.5-1.5B-Instruct with the paper's settings on the games in the folder of the environment
variable ALFWORLD_DATA (`alfworld-download` fetches them). Hardware: four GPUs with 80 GB, of which
two learn and two generate; twice as many for 7B. (The paper used two H100, and four for 7B.)
Learners share the model (FSDP) and compute activations again for the backward pass;
`rllib-gigpo check --gpu-gib 74 tuned_examples/alfworld_gigpo.py ...` says whether an update fits.

- `--model qwen2.5-7b`, `--model qwen2.5-7b --lora`, `--model llama-3.2-3b`: the other models.
- `--algo NAME`: gigpo, gigpo_dynamic, grpo, rloo, ppo_token, dapo, gspo, hgpo, ... The paper's PPO
  is `ppo_token`, with a critic over tokens; that of `ppo` is over steps. Both play 128 episodes of
  128 tasks, without groups, and hold a second model, the critic: with 7B, `--num-learners=8`.
- `--algo gigpo_no_step`, `--algo gigpo_no_episode`, `--f-norm none`: the ablations of Figure 4.

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop with real games: a supervised
warm start of at most 64 steps, then two iterations of 2 groups x 2 episodes x up to 8 steps.

`... --smoke` does so on the games that ship with the package and a tiny model, in under a minute.

Results to expect
-----------------
The paper reports, over all task types after 150 iterations (Table 1; the paper's figures, not
reproduced here): GiGPO with f_norm "std" 86.7 +- 1.7 % (1.5B) and 90.8 +- 1.3 % (7B), with "none"
86.1 and 90.2 %, GRPO 72.8 and 77.6 %, RLOO 69.7 and 75.5 %, PPO (`ppo_token`) 54.4 and 80.4 %.
It has none for LoRA, Llama and `ppo`. The CPU demo is too short to learn: it shows that every part
works on real games.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from _choices import base_config, train_as
from _shared import cut_down, example_parser, run_example

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.agent.profiles.alfworld import profile, short_profile
from rllib_gigpo.scripted import Policy, expert

_DEMO_STEPS = 8

_MODEL = "qwen2.5-1.5b"

parser = example_parser(
    "ALFWorld", iterations=150, best_return=10.0, evaluation_interval=5, tasks=128
)
parser.add_argument("--split", default=None, help="folder below json_2.1.* of ALFWORLD_DATA")
parser.add_argument("--walkthroughs", default=None, help="JSON of winning commands per task id")


def paper_config(args) -> GiGPOConfig:
    """Return the paper's settings (App. E.1)."""
    config = (
        base_config(args, model=_MODEL)
        .environment("ALFWorld", env_config={"split": args.split or "train", "horizon": 50})
        .llm(
            dtype="bfloat16",
            max_prompt_tokens=2048,
            max_response_tokens=512,
            temperature=1.0,
            eval_temperature=0.4,
        )
        .agent(profile=profile())
        .evaluation(
            evaluation_config=GiGPOConfig.overrides(
                env_config={"split": args.split or "valid_seen", "horizon": 50}
            )
        )
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
        minibatch_size=256,
        clip_param=0.2,
        kl_coeff=0.01,
        kl_estimator="k3",
        invalid_action_penalty=0.1,
    )


def demo_config(args) -> GiGPOConfig:
    """Return the settings of the CPU demo."""
    env_config = {
        "games": "shipped" if args.smoke else "real",
        "split": args.split or ("train" if args.smoke else "valid_train"),
        "horizon": _DEMO_STEPS,
    }
    return (
        cut_down(paper_config(args), args)
        .environment("ALFWorld", env_config=env_config)
        .agent(profile=short_profile())
    )


def policy_of(args) -> Callable[[str], Policy | None]:
    """Return what plays a game for the warm start: its walkthrough where there are any.

    They come from `--walkthroughs`, or from a file beside the data; the expert plays without them.

    Raises:
        ValueError: `--walkthroughs` comes without a warm start on real games.
    """
    if args.walkthroughs and (args.smoke or not args.cpu_demo):
        raise ValueError(
            f"--walkthroughs {args.walkthroughs} without --cpu-demo has no effect: only its warm "
            "start plays real games by them; leave it out"
        )
    beside = Path(os.environ.get("ALFWORLD_DATA", ".")) / "walkthroughs.json"
    path = Path(args.walkthroughs) if args.walkthroughs else beside
    if args.smoke or not (args.walkthroughs or path.exists()):
        return lambda task_id: expert
    walkthroughs = json.loads(path.read_text())
    return lambda task_id: follow(walkthroughs[task_id]) if task_id in walkthroughs else None


def follow(commands: list[str]) -> Policy:
    """Return a policy that plays recorded commands."""
    left = iter(commands)
    return lambda env, observation, info, rng: next(left)


if __name__ == "__main__":
    args = parser.parse_args()
    run_example(args, paper=paper_config, demo=demo_config, policy_of=policy_of(args))
