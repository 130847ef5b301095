"""GiGPO, and every other algorithm, on WebShop.

How to run this script
----------------------
`python tuned_examples/webshop_gigpo.py --products=webshop --engine=vllm --num-engines=2 \
--num-env-runners=2 --num-learners=2`

trains Qwen2.5-1.5B-Instruct with the paper's settings on WebShop's official files in the given
folder (`items_shuffle*.json`, `items_ins_v2*.json`). Hardware: four GPUs with 80 GB, of which two
learn and two generate; twice as many for 7B. (The paper used two H100, and four for 7B.) Learners
share the model (FSDP) and compute activations again for the backward pass; `rllib-gigpo check
--gpu-gib 74 tuned_examples/webshop_gigpo.py ...` says whether an update fits.

- `--model qwen2.5-7b`, `--model qwen2.5-7b --lora`: the other models of the paper and its scripts;
  `--model qwen3-1.7b` is Qwen3 (no KL, two episodes per test task).
- `--algo NAME`: gigpo, gigpo_dynamic, grpo, rloo, ppo_token, dapo, ...; `--algo gigpo_no_step` and
  `--algo gigpo_no_episode` are the ablations of Figure 4. The paper's PPO is `ppo_token`, with a
  critic over tokens; that of `ppo` is over steps. Both hold a second model, the critic: with 7B,
  `--num-learners=8`.
- `--omega 0.8`: a point of the paper's sweep of omega from 0 to 1.4; `--f-norm std`: the other F.

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop: a supervised warm start of at
most 64 steps of an expert, then two iterations of 2 groups x 2 episodes x up to 8 steps.

`... --smoke` does so on the generated catalogue and a tiny model, in under a minute.

Results to expect
-----------------
The paper reports, as score / % success after 150 iterations (the paper's figures, not reproduced
here): 83.5 / 67.4 +- 4.5 (1.5B) and 86.2 / 75.2 +- 3.8 (7B) with f_norm "none", 83.1 / 65.0 and
84.4 / 72.8 with "std", GRPO 75.8 / 56.8 and 79.3 / 66.1, PPO (`ppo_token`) 73.8 / 51.5 and 81.4 /
68.7 (Table 1). Omega 0, 0.4, 0.8, 1.4 on 1.5B: 56.6, 65.8, 68.3, 56.3 % success. DAPO 84.6 / 66.1,
gigpo_dynamic 87.5 / 75.0. There are none for LoRA, Qwen3 and `ppo`. `score_mean` and `success_rate`
report the two. The CPU demo is too short to learn.
"""

from _choices import base_config, train_as
from _shared import cut_down, example_parser, run_example

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.agent.profiles.webshop import profile, short_profile

_DEMO_STEPS = 8

_MODEL = "qwen2.5-1.5b"

parser = example_parser(
    "WebShop", iterations=150, best_return=10.0, evaluation_interval=5, tasks=128
)
parser.add_argument("--products", default="generated", help="official items file or its folder")
parser.add_argument("--goals", default="synthetic", choices=("synthetic", "human"))


def paper_config(args) -> GiGPOConfig:
    """Return the paper's settings (App. E.1)."""
    shop = {"products": args.products, "goals": args.goals, "horizon": 15}
    config = (
        base_config(args, model=_MODEL)
        .environment("WebShop", env_config={**shop, "split": "train"})
        .llm(
            dtype="bfloat16",
            max_prompt_tokens=4096,
            max_response_tokens=512,
            temperature=1.0,
            eval_temperature=0.4,
        )
        .agent(profile=profile())
        .evaluation(
            evaluation_config=GiGPOConfig.overrides(env_config={**shop, "split": "test"}),
            evaluation_samples_per_task=2 if args.model == "qwen3-1.7b" else 1,
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
        f_norm="none",
        lr=1e-6,
        minibatch_size=64,
        clip_param=0.2,
        kl_coeff=0.01,
        kl_estimator="k3",
        invalid_action_penalty=0.1,
    )


def demo_config(args) -> GiGPOConfig:
    """Return the settings of the CPU demo."""
    config = cut_down(paper_config(args), args)
    shop = {**config.env_config, "horizon": _DEMO_STEPS}
    return config.environment("WebShop", env_config=shop).agent(
        profile=short_profile(), on_long_prompt="shorten_observation"
    )


if __name__ == "__main__":
    run_example(parser.parse_args(), paper=paper_config, demo=demo_config)
