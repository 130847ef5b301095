"""GiGPO on WebShop.

How to run this script
----------------------
`python tuned_examples/webshop_gigpo.py --products=webshop --num-env-runners=2 --num-learners=2`

trains Qwen2.5-1.5B-Instruct with the paper's settings on WebShop's official files in the given
folder (`items_shuffle*.json`, `items_ins_v2*.json`). Hardware: two GPUs with 80 GB.

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop: a supervised warm start of at
most 64 steps of an expert, then two iterations of 2 groups x 2 episodes x up to 8 steps.

`... --smoke` does so on the generated catalogue and a tiny model, in under a minute.

Results to expect
-----------------
The paper reports a score of 83.5 and 67.4 +- 4.5 % success after 150 iterations (f_norm "none",
Table 1; the paper's figures, not reproduced here). `score_mean` and `success_rate` report the two.
The CPU demo is too short to learn.
"""

from _shared import cut_down, example_parser, run_example

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.agent.profiles.webshop import profile, short_profile

_DEMO_STEPS = 8

parser = example_parser(
    "WebShop", iterations=150, best_return=10.0, evaluation_interval=5, tasks=128
)
parser.add_argument("--products", default="generated", help="official items file or its folder")
parser.add_argument("--goals", default="synthetic", choices=("synthetic", "human"))


def paper_config(args) -> GiGPOConfig:
    """Return the paper's settings (App. E.1)."""
    shop = {"products": args.products, "goals": args.goals, "horizon": 15}
    return (
        GiGPOConfig()
        .environment("WebShop", env_config={**shop, "split": "train"})
        .llm(
            model=args.model or "Qwen/Qwen2.5-1.5B-Instruct",
            dtype="bfloat16",
            max_prompt_tokens=4096,
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
            f_norm="none",
            lr=1e-6,
            minibatch_size=64,
            clip_param=0.2,
            kl_coeff=0.01,
            kl_estimator="k3",
            invalid_action_penalty=0.1,
        )
        .evaluation(evaluation_config=GiGPOConfig.overrides(env_config={**shop, "split": "test"}))
        .debugging(seed=args.seed)
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
