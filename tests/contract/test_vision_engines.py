"""The transformers engine with pictures, in every family."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rllib_gigpo.encoding import Encoded
from rllib_gigpo.engines.base import (
    Completion,
    EngineError,
    Request,
    Sampling,
)
from rllib_gigpo.engines.transformers_engine import TransformersEngine
from rllib_gigpo.models import ModelSpec, materialize
from rllib_gigpo.vision import PlacedPicture
from rllib_gigpo.vision.sight import Sight
from tests.vision_checks import ask, check, check_adapter, loaded, prompts_of
from tests.vision_models import FAMILIES, build_folder, make_model, picture, prompt_of

# The transformers engine -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_plain_pass_agree(family: str, tmp_path: Path):
    tokenizer, sight, model = loaded(build_folder(tmp_path, family))
    engine = TransformersEngine({"default_policy": str(tmp_path)})
    prompts = prompts_of(tokenizer, sight)
    assert check(model, sight, prompts, ask(engine, prompts)) >= 15
    # New weights, those of the vision tower too: nothing of the old ones is left.
    changed = make_model(model.config, seed=1)
    engine.load_weights("default_policy", dict(changed.named_parameters()), 1)
    answers = ask(engine, prompts)
    assert check(changed, sight, prompts, answers) >= 15
    assert {answer.weight_version for answer in answers} == {1}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return build_folder(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


def test_prompts_share_their_start_only_as_far_as_they_see_the_same(qwen: Path):
    tokenizer, sight, model = loaded(qwen)
    start = "left right up down before now " * 3  # 18 tokens, more than the engine's least share
    same, other = picture(0), picture(5)
    assert same.pixels.shape == other.pixels.shape
    prompts = [
        prompt_of(tokenizer, sight, start, shown, tail)
        for shown, tail in ((same, "left"), (same, "right"), (other, "left"))
    ]
    assert np.array_equal(prompts[0].ids, prompts[2].ids)
    (start_at, length), *_ = prompts[0].images[0].runs
    engine = TransformersEngine({"default_policy": str(qwen)})

    async def play() -> tuple[list[Completion], list[int]]:
        """Answers, and the prompt tokens that were computed rather than shared, one by one."""
        text = prompt_of(tokenizer, sight, "where is the box ?")
        busy = asyncio.create_task(
            engine.generate(Request(text.ids, Sampling(max_tokens=100), 9, "busy"))
        )
        await asyncio.sleep(0)
        answers, counts = [], []
        for number, prompt in enumerate(prompts):
            before = engine.stats()["prefilled_tokens"]
            request = Request(
                prompt.ids, Sampling(max_tokens=6), number, str(number), images=prompt.images
            )
            answers.append(await engine.generate(request))
            counts.append(engine.stats()["prefilled_tokens"] - before)
        assert not busy.done()
        await busy
        return answers, counts

    answers, counts = asyncio.run(play())
    check(model, sight, prompts, answers)
    whole = len(prompts[0].ids)
    assert counts[1:] == [
        # The same picture and its end marker are shared: the last word and <assistant> are new.
        whole - (start_at + length + 1),
        # Equal token ids with another picture: only what stands before the picture is shared.
        whole - start_at,
    ]


def test_a_shared_start_may_end_inside_no_picture_but_after_one(qwen: Path):
    """Three prompts with two pictures each, admitted together, sharing the first picture."""
    tokenizer, sight, model = loaded(qwen)
    first = picture(0)
    prompts = [
        prompt_of(tokenizer, sight, "where is the red box ? left right ", first, "now ", other)
        for other in (picture(6), picture(7), picture(6))
    ]
    engine = TransformersEngine({"default_policy": str(qwen)})
    assert check(model, sight, prompts, ask(engine, prompts)) >= 12


def test_pictures_are_looked_at_once_per_version_of_the_weights(qwen: Path, monkeypatch):
    tokenizer, sight, model = loaded(qwen)
    looked: list[bytes] = []
    features = Sight.features

    def counted(self, body, pictures):
        pictures = list(pictures)
        looked.extend(shown.key for shown in pictures)
        return features(self, body, pictures)

    monkeypatch.setattr(Sight, "features", counted)
    engine = TransformersEngine({"default_policy": str(qwen)})
    for tail in ("left", "right"):
        ask(engine, [prompt_of(tokenizer, sight, picture(0), tail)])
    assert looked == [picture(0).key]
    engine.load_weights("default_policy", dict(model.named_parameters()), 1)
    ask(engine, [prompt_of(tokenizer, sight, picture(0), "left")])
    assert looked == [picture(0).key] * 2


def test_text_models_refuse_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLIB_GIGPO_CACHE", str(tmp_path))
    folder = materialize(ModelSpec("tiny", words=("go left",)))
    engine = TransformersEngine({"default_policy": folder})
    shown = PlacedPicture(picture(0), ((0, 1),))
    request = Request(np.arange(3, dtype=np.int32), Sampling(), 0, "r", images=(shown,))
    with pytest.raises(EngineError, match="shows 1 picture"):
        asyncio.run(engine.generate(request))


def test_a_prompt_may_not_end_in_a_picture(qwen: Path):
    tokenizer, sight, _ = loaded(qwen)
    prompt = prompt_of(tokenizer, sight, picture(0))
    ((start, length),) = prompt.images[0].runs
    cut = Encoded(prompt.ids[: start + length], prompt.images)
    engine = TransformersEngine({"default_policy": str(qwen)})
    with pytest.raises(EngineError, match="ends in a picture"):
        ask(engine, [cut])


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_adapters_of_the_language_model_are_served(family: str, tmp_path: Path):
    tokenizer, sight, _ = loaded(build_folder(tmp_path, family))
    engine = TransformersEngine({"default_policy": str(tmp_path)})
    check_adapter(engine, tmp_path, prompts_of(tokenizer, sight), sight)
