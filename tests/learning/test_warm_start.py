"""The warm start teaches the response format, and nothing about the game."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from envs.key_door import KeyDoor
from rllib_gigpo.agent.profiles.key_door import profile as key_door_profile
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.engines.base import Completion, Engine, Request, Sampling, generate_batch
from rllib_gigpo.engines.transformers_engine import TransformersEngine
from rllib_gigpo.models import ModelSpec, load_tokenizer, materialize
from rllib_gigpo.record import record
from rllib_gigpo.sft import WarmStart, warm_start
from rllib_gigpo.vocabulary import collect_words

PROFILE = key_door_profile()
# Held out from the recordings, which use seeds below 100.
SEEDS = range(1000, 1200)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLIB_GIGPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        return materialize(ModelSpec("tiny", words=collect_words(KeyDoor(), PROFILE)))


def answers(folder: str) -> list[str]:
    """One response at temperature 1 to the first prompt of every held-out episode."""
    encoder = PromptEncoder(load_tokenizer(folder), PROFILE, 64)
    sampling = Sampling(max_tokens=8, stop=PROFILE.stop)
    requests = []
    for seed in SEEDS:
        observation, _ = KeyDoor().reset(seed=seed)
        ids = encoder.tokenize([{"role": "user", "content": observation}]).ids
        requests.append(Request(ids, sampling, seed, str(seed)))
    engine: Engine = TransformersEngine({"default_policy": folder})
    completions: list[Completion] = asyncio.run(generate_batch(engine, requests))
    engine.close()
    return [encoder.decode(completion.token_ids) for completion in completions]


def valid_share(responses: list[str]) -> float:
    actions = [PROFILE.read(response) for response in responses]
    return float(np.mean([a.is_valid and a.text in KeyDoor.actions for a in actions]))


def test_random_legal_play_teaches_the_format_of_key_door(untrained, tmp_path):
    examples = record(KeyDoor, PROFILE, episodes=100)
    losses: list[float] = []
    folder = warm_start(
        untrained,
        examples,
        tmp_path,
        settings=WarmStart(steps=40, batch_size=64, warmup_steps=10),
        on_step=lambda step, loss: losses.append(loss),
    )
    # The best possible loss of "<action> go <direction> </action>" with random directions is
    # ln 4 / 4 tokens = 0.347 per token; an untrained model is near ln(vocabulary) = 3.5.
    assert losses[0] > 2.0
    assert 0.3 < float(np.mean(losses[-5:])) < 0.45
    assert valid_share(answers(untrained)) < 0.05
    taught = answers(str(folder))
    assert valid_share(taught) >= 0.9
    # Nothing is learned about where to go: all four directions stay in use.
    directions = [PROFILE.read(response).text for response in taught]
    assert min(directions.count(action) for action in KeyDoor.actions) > len(SEEDS) / 10
