"""GiGPO, and every other algorithm, on question answering with a search tool.

How to run this script
----------------------
`python tuned_examples/search_gigpo.py --questions nq hotpotqa --retriever=http://HOST:8000 \
--eval-questions nq triviaqa popqa hotpotqa 2wiki musique bamboogle \
--engine=vllm --num-engines=8 --num-env-runners=8 --num-learners=8`

trains Qwen2.5-7B-Instruct with the paper's settings on the training questions of NQ and HotpotQA,
and evaluates it on those of seven sets (Hugging Face data sets, or local files), against a server
of Search-R1's `/retrieve` protocol, which docs/environments/search.md starts on HOST. Hardware:
sixteen GPUs with 80 GB, of which eight learn and eight generate. (The paper used eight H100, and
four for 3B.) Learners share the model (FSDP) and compute activations again for the backward pass;
`rllib-gigpo check --gpu-gib 74 tuned_examples/search_gigpo.py ...` says whether an update fits.

- `--model qwen2.5-3b`: the paper's other model.
- States count as equal from a similarity of 0.9, as in the paper; `--anchor exact` compares them
  letter by letter, `--similarity-threshold` moves the bound.
- `--algo NAME`: gigpo, grpo, rloo, ppo, dapo, ...; PPO holds a second model, the critic.

`... --model smollm2-135m --cpu-demo` shows the same path on a laptop: a supervised warm start of at
most 64 steps of an expert, then two iterations of 2 groups x 2 episodes.

`... --smoke` does so on the generated questions and a tiny model, in under a minute.

Results to expect
-----------------
The paper reports 47.2 % (7B) and 42.1 % (3B) exact match on average over seven data sets after 200
iterations, with about 0.9 tool calls for questions of one hop and 1.6 for several (Table 2; the
paper's figures, not reproduced here). `success_rate` and `tool_calls_mean` report these, each also
by data set, as in `success_rate/nq`; beside them, `repeated_query_share_mean`. The CPU demo is too
short to learn.
"""

from _choices import SERVER_THREADS, base_config, train_as
from _shared import cut_down, example_parser, run_example

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.agent.profiles.search import profile

# A tenth of the paper's 200 iterations, each of about 7 optimizer steps.
_WARMUP_STEPS = 140

_MODEL = "qwen2.5-7b"

parser = example_parser(
    "Search", iterations=200, best_return=1.0, evaluation_interval=50, tasks=512
)
parser.add_argument("--questions", nargs="+", default=["generated"], help="sources to train on")
parser.add_argument("--eval-questions", nargs="+", default=None, help="by default --questions")
parser.add_argument("--corpus", default=None, help="generated, questions, or a JSON lines file")
parser.add_argument("--retriever", default="bm25", help="bm25, or URLs of servers")


def paper_config(args) -> GiGPOConfig:
    """Return the paper's settings (App. E.1 and the authors' script)."""
    if args.retriever == "dense":
        raise ValueError(
            "--retriever dense would encode the corpus in every EnvRunner: start one server, "
            "python -m envs.search.server --retriever dense --encoder intfloat/e5-base-v2 "
            "--host 0.0.0.0, and name its URL"
        )
    if args.corpus and args.retriever.startswith("http"):
        raise ValueError(
            f"--corpus {args.corpus} with --retriever {args.retriever} has no effect: servers "
            "search their own; leave out one of the two"
        )
    tool = {"corpus": args.corpus, "retriever": args.retriever, "topk": 3, "horizon": 4}
    tested = args.eval_questions or args.questions
    config = (
        base_config(args, model=_MODEL)
        .environment("Search", env_config={**tool, "questions": args.questions, "split": "train"})
        .llm(
            dtype="bfloat16",
            max_prompt_tokens=4096,
            max_response_tokens=512,
            temperature=1.0,
            eval_temperature=0.0,
        )
        .stepping(step_threads=SERVER_THREADS)
        .agent(profile=profile())
        .evaluation(
            evaluation_config=GiGPOConfig.overrides(
                env_config={**tool, "questions": tested, "split": "test"}
            )
        )
    )
    return train_as(
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
        lr_warmup_steps=_WARMUP_STEPS,
        minibatch_size=512,
        clip_param=0.2,
        kl_coeff=0.001,
        kl_estimator="k3",
        invalid_action_penalty=0.01,
    )


def demo_config(args) -> GiGPOConfig:
    """Return the settings of the CPU demo."""
    return cut_down(paper_config(args), args)


if __name__ == "__main__":
    run_example(parser.parse_args(), paper=paper_config, demo=demo_config)
