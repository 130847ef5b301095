"""GiGPO, and every other algorithm, on SearchTeam: one agent searches, another answers.

How to run this script
----------------------
`python tuned_examples/search_team_gigpo.py --questions hotpotqa.jsonl --engine=vllm \
--num-engines=2 --num-env-runners=4 --num-learners=4`

trains two Qwen2.5-3B-Instruct models, one for each agent, with the settings of the paper's search
task. Hardware: eight GPUs with 80 GB, of which four learn and four generate, two engines for each
policy. Learners share both models (FSDP) and compute activations again for the backward pass;
`rllib-gigpo check --gpu-gib 74 tuned_examples/search_team_gigpo.py ...` says whether an update
fits. Without `--questions` it plays the generated world. It trains on the training questions and
evaluates on those of the test. `--policies shared` trains one model in both roles, `--policies
adapters` a LoRA adapter for each role with the settings of the authors' LoRA scripts: with
`--sharding=replicate` each learner holds one base for both, while learners that share, as here,
share a base for each. `--frozen searcher` trains the answerer alone. `--algo NAME` trains by gigpo,
grpo, rloo, ppo, dapo, ...

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop: a supervised warm start of at
most 64 steps of an expert, then two iterations of 2 groups x 2 episodes.

`... --smoke` does so with a tiny model, in under a minute.

Results to expect
-----------------
Dr.MAS reports +15.2 points (average of 16) of its per-agent normalisation for a team on search
(arXiv 2602.08847; another team, not reproduced here); `normalize_over="agent"`, the default, is
that normalisation. The CPU demo is too short to learn.
"""

from _choices import SERVER_THREADS, base_config, train_as
from _shared import cut_down, example_parser, run_example
from _teams import add_team_choices, as_team

from rllib_gigpo import GiGPOConfig

_AGENTS = ("searcher", "answerer")
_MODEL = "qwen2.5-3b"

parser = example_parser(
    "SearchTeam", iterations=200, best_return=1.0, evaluation_interval=50, tasks=256
)
parser.add_argument("--questions", default="generated", help="a source that envs.search reads")
add_team_choices(parser, _AGENTS)


def paper_config(args) -> GiGPOConfig:
    """Return the settings of the paper's search task, with twice the turns for two agents."""
    asked = {"questions": args.questions, "horizon": 8}
    config = (
        base_config(args, model=_MODEL)
        .environment("SearchTeam", env_config={**asked, "split": "train"})
        .llm(
            dtype="bfloat16",
            max_prompt_tokens=4096,
            max_response_tokens=512,
            eval_temperature=0.0,
        )
        .stepping(step_threads=SERVER_THREADS)
        .evaluation(evaluation_config=GiGPOConfig.overrides(env_config={**asked, "split": "test"}))
    )
    config = train_as(
        config,
        args,
        model=_MODEL,
        num_groups=256,
        group_size=5,
        omega=1.0,
        gamma=0.95,
        f_norm="std",
        anchor="similarity",
        similarity_threshold=0.9,
        lr=1e-6,
        minibatch_size=512,
        clip_param=0.2,
        kl_coeff=0.001,
        kl_estimator="k3",
        invalid_action_penalty=0.01,
    )
    return as_team(config, args, _AGENTS)


def demo_config(args) -> GiGPOConfig:
    """Return the settings of the CPU demo."""
    return cut_down(paper_config(args), args)


if __name__ == "__main__":
    run_example(parser.parse_args(), paper=paper_config, demo=demo_config)
