"""GiGPO, and every other algorithm, on ArithmeticTeam: a solver of sums and its verifier.

How to run this script
----------------------
`python tuned_examples/arithmetic_team_gigpo.py --engine=vllm --num-engines=1 --num-env-runners=2 \
--num-learners=2`

trains two Qwen2.5-1.5B-Instruct models, one for each agent, on sums of numbers up to 99. Hardware:
four GPUs with 80 GB, of which two learn and two generate, one engine for each policy. Learners
share both models (FSDP) and compute activations again for the backward pass; `rllib-gigpo check
--gpu-gib 74 tuned_examples/arithmetic_team_gigpo.py ...` says whether an update fits.
`--policies shared` trains one model in both roles, `--policies adapters` a LoRA adapter for each
role with the settings of the authors' LoRA scripts: with `--sharding=replicate` each learner holds
one base for both, while learners that share, as here, share a base for each. `--frozen verifier`
trains the solver against a verifier that does not learn. `--algo NAME` trains by gigpo, grpo, rloo,
ppo, dapo, ...

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop: a supervised warm start of at
most 64 steps of a half-random expert, then two iterations of 2 groups x 2 episodes.

`... --smoke` does so with a tiny model, in under a minute.

Results to expect
-----------------
None is published. `tests/learning/test_teams.py` trains a tiny model on sums of numbers up to 2, in
both roles, from a half-random start to nearly all episodes won. The CPU demo is too short to learn.
"""

from _choices import base_config, train_as
from _shared import cut_down, example_parser, run_example
from _teams import add_team_choices, as_team

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.scripted import half_expert

_AGENTS = ("solver", "verifier")
_MODEL = "qwen2.5-1.5b"

# The mean over both agents of nearly the most that an episode pays: 1 to the solver and 2 to the
# verifier, where the first answer is wrong and rejected. One that is right at once pays 1 to each.
_BEST_RETURN = 1.45

parser = example_parser(
    "ArithmeticTeam", iterations=100, best_return=_BEST_RETURN, evaluation_interval=5, tasks=128
)
add_team_choices(parser, _AGENTS)


def paper_config(args) -> GiGPOConfig:
    """Return settings in the manner of the paper's; it has no team."""
    config = (
        base_config(args, model=_MODEL)
        .environment("ArithmeticTeam", env_config={"largest": 99})
        .llm(dtype="bfloat16", max_prompt_tokens=256, max_response_tokens=64)
    )
    config = train_as(
        config,
        args,
        model=_MODEL,
        num_groups=16,
        group_size=8,
        omega=1.0,
        gamma=0.95,
        f_norm="std",
        lr=1e-6,
        minibatch_size=128,
        clip_param=0.2,
        kl_coeff=0.01,
        kl_estimator="k3",
        invalid_action_penalty=0.1,
    )
    return as_team(config, args, _AGENTS)


def demo_config(args) -> GiGPOConfig:
    """Return the settings of the CPU demo."""
    return cut_down(paper_config(args).environment(env_config={"largest": 4}), args)


if __name__ == "__main__":
    # The expert's games would leave the demo nothing to learn.
    run_example(
        parser.parse_args(),
        paper=paper_config,
        demo=demo_config,
        policy_of=lambda task_id: half_expert,
    )
