"""Rollouts against what they could be: no environment time, no rollout at all, and lockstep.

`python -m benchmarks.rollout`, about eight minutes on two quiet cores. A language model on vLLM
(on the transformers engine where vLLM is not installed) answers every turn with 16 tokens, whatever
it says, so that each comparison is between equal work; both sides run in one process and start with
an empty prefix cache. Episodes have 5 to 50 turns in even steps, or 10 each.

Figures: `tokens_vs_lockstep` and `wall_vs_lockstep`, generated tokens and wall-clock over those of
a loop in which all episodes take their turns together and finished ones keep generating until the
last has ended, as verl-agent's does; `wall_over_no_env`, wall-clock with environment steps of 50 ms
over the same with 0 ms; `wall_over_engine`, wall-clock of 10 turns over that of the same requests
sent to the engine at once, with as many running together; `lockstep_over_async`, wall-clock of
lockstep over asynchronous turns when 5 % of the environment steps take 500 ms;
`vllm_tokens_per_cpu_s`, `transformers_tokens_per_cpu_s`, generated tokens per CPU second of 64
requests with 150 prompt tokens, without and (`_shared`) with 100 of them in common;
`load`, the machine's load average before and after, which tells whether to trust the wall-clock.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch

from benchmarks.report import report, timed
from envs.spaces import TextSpace
from rllib_gigpo.agent import AgentProfile, ChatTemplate, NoMemory
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.engines.base import Engine, Request, Sampling, generate_batch
from rllib_gigpo.games import Game
from rllib_gigpo.models import ModelSpec, load_causal_lm, load_tokenizer, materialize
from rllib_gigpo.rollout import play_groups
from rllib_gigpo.rollout_types import GroupTask, RolloutSettings
from rllib_gigpo.stepping import Stepper, StepSettings

POLICY = "default_policy"
TURN_TOKENS = 16
SHORTEST, LONGEST, EQUAL = 5, 50, 10
STEP_S, SLOW_S, SLOW_SHARE = 0.05, 0.5, 0.05
REQUESTS, SHARED_TOKENS, OWN_TOKENS = 64, 100, 50
RULES = (
    "You walk through a house with many rooms and look for things. Every turn you are told what is "
    "in front of you. Think about it, and then say in one short sentence what to do next."
)


class House(gymnasium.Env[str, str]):
    """Ends after as many steps as reset's option `turns` says, whatever is done.

    Args:
        seconds: From (reset seed, step) to how long the step takes.
    """

    def __init__(self, seconds: Callable[[int, int], float] = lambda seed, step: 0.0):
        self.observation_space = self.action_space = TextSpace()
        self._seconds = seconds
        self._seed = self._turns = self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._seed, self._turns, self._step = seed or 0, (options or {})["turns"], 0
        return self._seen(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the time of a step."""
        time.sleep(self._seconds(self._seed, self._step))
        self._step += 1
        return self._seen(), 0.0, self._step >= self._turns, False, {}

    def _seen(self) -> str:
        words = random.Random(f"{self._seed}:{self._step}").choices(
            ["door", "table", "lamp", "key", "window", "stairs", "box", "chair"], k=6
        )
        return f"Room {self._seed}, turn {self._step}: you see a {', a '.join(words)}."


def slow_step(seed: int, step: int) -> float:
    """Seconds of a step of which 5 % are slow."""
    return SLOW_S if random.Random(f"slow:{seed}:{step}").random() < SLOW_SHARE else 0.0


@dataclass
class Bench:
    """A model on an engine, and what it takes to play with it.

    Attributes:
        engine: The engine.
        tokenizer: The model's.
        weights: Its weights; loading them anew empties the prefix cache.
        requests: What the last rollout asked.
    """

    engine: Engine
    tokenizer: Any
    weights: Mapping[str, torch.Tensor]
    requests: list[Request] = field(default_factory=list)

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.engine.load_weights(POLICY, self.weights, 0)

    def play(
        self,
        turns: Sequence[int],
        *,
        seconds: Callable[[int, int], float] = lambda seed, step: 0.0,
        lockstep: bool = False,
    ) -> tuple[float, float, int]:
        """Play one episode per entry of `turns`; return wall-clock, CPU seconds and tokens."""
        profile = AgentProfile(ChatTemplate(user="{observation}", system=RULES), memory=NoMemory())
        settings = RolloutSettings(Sampling(max_tokens=TURN_TOKENS), seed=0, lockstep=lockstep)
        tasks = [
            GroupTask(group, env_seed=group, size=1, options={"turns": count})
            for group, count in enumerate(turns)
        ]
        idle = [Game(House(seconds), "House") for _ in tasks]
        self.forget()
        self.requests = []
        playing = play_groups(
            tasks,
            engine=_Listening(self.engine, self.requests),  # pyright: ignore[reportArgumentType]
            profile=profile,
            encoder=PromptEncoder(self.tokenizer, profile, 512),
            acquire=idle.pop,
            release=idle.append,
            stepper=Stepper(StepSettings(threads=len(tasks))),
            settings=settings,
        )
        start = time.perf_counter()
        rollout, cpu = timed(lambda: asyncio.run(playing))
        wall = time.perf_counter() - start
        episodes: list[Any] = rollout.episodes
        tokens = sum(len(ids) for episode in episodes for ids in episode.get_actions())
        return wall, cpu, tokens

    def send_at_once(self, requests: Sequence[Request]) -> tuple[float, float, int]:
        """Send the requests together; return wall-clock, CPU seconds and tokens."""
        self.forget()
        start = time.perf_counter()
        completions, cpu = timed(lambda: asyncio.run(generate_batch(self.engine, requests)))
        wall = time.perf_counter() - start
        return wall, cpu, sum(len(completion.token_ids) for completion in completions)

    def tokens_per_cpu_s(self, *, shared: bool, count: int = REQUESTS) -> float:
        """Generated tokens per CPU second; the best of two, because compilation comes first."""
        rng = np.random.default_rng(0)
        low, high = 1000, len(self.tokenizer)
        if high <= low:
            low = 10
        start = rng.integers(low, high, SHARED_TOKENS)

        def request(number: int) -> Request:
            head = start if shared else rng.integers(low, high, SHARED_TOKENS)
            prompt = np.concatenate([head, rng.integers(low, high, OWN_TOKENS)]).astype(np.int32)
            return Request(prompt, Sampling(max_tokens=TURN_TOKENS), number, f"r{number}", POLICY)

        requests = [request(number) for number in range(count)]
        best = 0.0
        for _ in range(2):
            self.forget()
            _, seconds = timed(lambda: asyncio.run(generate_batch(self.engine, requests)))
            best = max(best, count * TURN_TOKENS / seconds)
        return best


class _Listening:
    """An engine that keeps what it is asked."""

    def __init__(self, engine: Engine, heard: list[Request]):
        self._engine = engine
        self._heard = heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Request) -> Any:
        self._heard.append(request)
        return await self._engine.generate(request)


def build(kind: str, model: str, *, concurrency: int, dtype: str) -> Bench:
    """Load a model into an engine."""
    folder = materialize(ModelSpec(model, words=_words() if model == "tiny" else ()))
    if kind == "vllm":
        from rllib_gigpo.engines.vllm.engine import VLLMEngine
        from rllib_gigpo.engines.vllm.settings import VLLMSettings

        settings = VLLMSettings(
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=512,
            max_num_seqs=concurrency,
        )
        engine: Any = VLLMEngine({POLICY: folder}, settings)
    else:
        from rllib_gigpo.engines.transformers_engine import TransformersEngine

        engine = TransformersEngine(
            {POLICY: folder}, dtype=dtype, max_model_len=512, max_num_seqs=concurrency
        )
    weights = dict(load_causal_lm(folder, dtype=getattr(torch, dtype)).named_parameters())
    return Bench(engine, load_tokenizer(folder), weights)


def _words() -> tuple[str, ...]:
    env = House()
    told = [env.reset(seed=seed, options={"turns": 1})[0] for seed in range(50)]
    return (RULES, *told, " ".join(map(str, range(100))))


def spread(episodes: int, longest: int = LONGEST) -> list[int]:
    """Turns of each episode, from 5 to the longest in even steps, shuffled."""
    turns = np.linspace(SHORTEST, longest, episodes).round().astype(int).tolist()
    return random.Random(0).sample(turns, len(turns))


def measure_rollouts(bench: Bench, episodes: int, longest: int) -> tuple[dict, list[tuple]]:
    """Return the ratios, and the rows of the table."""
    uneven, even, all_long = spread(episodes, longest), [EQUAL] * episodes, [longest] * episodes
    rows: list[tuple] = []

    def measure(lengths: str, way: str, work: Callable[[], tuple[float, float, int]]) -> float:
        wall, cpu, tokens = work()
        rows.append((lengths, way, wall, cpu, tokens))
        print(f"{lengths}, {way}: {tokens:,} tokens in {wall:.1f} s", file=sys.stderr, flush=True)
        return wall

    bench.play([1] * episodes)  # compilation and first allocations
    span, equal = f"{SHORTEST} to {longest} turns", f"{EQUAL} turns"
    played = measure(equal, "asynchronous, steps of 0 ms", lambda: bench.play(even))
    sent = measure(
        equal,
        "all requests at once",
        # Ids and seeds as they were: the same responses.
        lambda: bench.send_at_once(bench.requests),
    )
    slow = measure(
        equal,
        "asynchronous, 5 % of the steps 500 ms",
        lambda: bench.play(even, seconds=slow_step),
    )
    slow_lockstep = measure(
        equal,
        "lockstep, 5 % of the steps 500 ms",
        lambda: bench.play(even, seconds=slow_step, lockstep=True),
    )
    free = measure(span, "asynchronous, steps of 0 ms", lambda: bench.play(uneven))
    busy = measure(
        span,
        "asynchronous, steps of 50 ms",
        lambda: bench.play(uneven, seconds=lambda seed, step: STEP_S),
    )
    together = measure(
        span,
        "lockstep, finished episodes keep generating",
        lambda: bench.play(all_long, lockstep=True),
    )
    figures = {
        "tokens_vs_lockstep": round(rows[-2][4] / rows[-1][4], 3),
        "wall_vs_lockstep": round(free / together, 3),
        "wall_over_no_env": round(busy / free, 3),
        "wall_over_engine": round(played / sent, 3),
        "cpu_over_engine": round(rows[0][3] / rows[1][3], 3),
        "lockstep_over_async": round(slow_lockstep / slow, 3),
    }
    return figures, rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Measure rollouts against what they could be.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--longest", type=int, default=LONGEST, help="turns of the longest episode")
    parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    args = parser.parse_args(arguments)
    has_vllm = importlib.util.find_spec("vllm") is not None
    main_kind = ("vllm" if has_vllm else "transformers") if args.engine == "auto" else args.engine
    load = [os.getloadavg()[0]]
    figures: dict[str, object] = {}
    rows: list[tuple] = []
    kinds = ["transformers", "vllm"] if has_vllm and args.engine == "auto" else [main_kind]
    speeds = []
    for kind in kinds:
        bench = build(kind, args.model, concurrency=args.episodes, dtype=args.dtype)
        for shared in (False, True):
            name = f"{kind}_tokens_per_cpu_s{'_shared' if shared else ''}"
            speed = bench.tokens_per_cpu_s(shared=shared, count=args.requests)
            figures[name] = round(speed, 1)
            print(f"{name}: {speed:,.1f}", file=sys.stderr, flush=True)
            speeds.append((kind, f"{'shared' if shared else 'own'} prompt starts", speed))
        if kind == main_kind:
            ratios, rows = measure_rollouts(bench, args.episodes, args.longest)
            figures = {**ratios, **figures}
        bench.engine.close()
    load.append(os.getloadavg()[0])
    figures["load"] = [round(value, 1) for value in load]
    report(
        f"{args.model} in {args.dtype}, {args.episodes} episodes on the {main_kind} engine, "
        f"{TURN_TOKENS} tokens a turn, {torch.get_num_threads()} threads",
        ("episodes", "way", "wall-clock s", "CPU s", "tokens", "tokens per CPU s"),
        [
            *((*row, row[4] / row[3]) for row in rows),
            *(
                (f"{args.requests} requests", f"{kind}, {prompts}", "", "", "", speed)
                for kind, prompts, speed in speeds
            ),
        ],
        figures,
    )


if __name__ == "__main__":
    main()
