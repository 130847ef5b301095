"""What the run folder costs a run of the paper's size: CPU time and bytes per iteration.

    python benchmarks/run_folder.py [--groups 8] [--prompt-tokens 800]

Writes the rollouts of synthetic groups of 8 episodes with 50 steps each, by the code that a run
uses, in this thread. Prompts repeat some of their text, as real ones do. The last line is JSON.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_gigpo.advantages import gigpo
from rllib_gigpo.games import SOLO_AGENT, SoloRecorder
from rllib_gigpo.grouping import AnchorRule
from rllib_gigpo.models import ModelSpec, load_tokenizer, materialize
from rllib_gigpo.recording.folder import RunFolder, write_bytes, write_lines
from rllib_gigpo.recording.rollout_rows import Iteration, parquet_of, rollouts_of
from rllib_gigpo.rows import episodes_to_batch, modules_of, step_table

_MEMBERS, _STEPS, _STATES = 8, 50, 40
_RESPONSE_TOKENS = 120


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Cost of the run folder.")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=800)
    args = parser.parse_args()
    tokenizer = load_tokenizer(materialize(ModelSpec("smollm2-135m")))
    rng = np.random.default_rng(0)
    states = rng.integers(100, 40_000, (_STATES, args.prompt_tokens)).astype(np.int32)
    episodes = [
        _episode(group, member, states, rng)
        for group in range(args.groups)
        for member in range(_MEMBERS)
    ]
    batch = episodes_to_batch(episodes, AnchorRule("exact"))
    advantages = {module: gigpo(step_table(rows)) for module, rows in modules_of(batch)}
    iteration = Iteration(1, episodes, batch, advantages)
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(path)
        start = time.thread_time()
        rollouts = rollouts_of(iteration, lambda ids: str(tokenizer.decode(ids.tolist())), None)
        write_bytes(folder.rollout_file(1, "parquet"), parquet_of(rollouts))
        write_lines(folder.rollout_file(1), rollouts.rows)
        seconds = time.thread_time() - start
        sizes = {kind: _mb(folder.rollout_file(1, kind)) for kind in ("jsonl", "parquet")}
    figures = {"rows": len(rollouts.rows), "cpu_seconds": round(seconds, 2), "mb": sizes}
    print(f"{len(rollouts.rows)} rows: {seconds:.2f} s of CPU, {sizes} MB")
    print(json.dumps(figures))


def _mb(path: Path) -> float:
    return round(path.stat().st_size / 2**20, 2)


def _episode(
    group: int, member: int, states: np.ndarray, rng: np.random.Generator
) -> SingleAgentEpisode:
    recorder = SoloRecorder()
    visited = rng.integers(0, len(states), _STEPS + 1)

    def info(state: int) -> dict:
        return {SOLO_AGENT: {"observation": f"state {state}", "anchor": f"state {state}"}}

    recorder.start({SOLO_AGENT: states[visited[0]]}, info(visited[0]))
    for step in range(_STEPS):
        tokens = rng.integers(100, 40_000, _RESPONSE_TOKENS).astype(np.int32)
        is_last = step == _STEPS - 1
        recorder.step(
            observations={SOLO_AGENT: states[visited[step + 1]]},
            actions={SOLO_AGENT: tokens},
            rewards={SOLO_AGENT: float(is_last)},
            infos=info(visited[step + 1]),
            terminated=is_last,
            truncated=False,
            extras={
                SOLO_AGENT: {
                    "action_logp": np.full(len(tokens), -1.0, np.float32),
                    "action_text": "go to desk 1",
                    "format_is_valid": True,
                    "weight_version": 0,
                    "finish_reason": "stop",
                }
            },
        )
    episode = recorder.episode
    episode.custom_data.update(group=group, member=member, numbers={}, env_seed=group)
    return episode


if __name__ == "__main__":
    main()
