"""Engines with pictures: the transformers engine in every family, vLLM where it runs here."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rllib_gigpo.encoding import Encoded
from rllib_gigpo.engines.base import (
    Completion,
    Engine,
    EngineError,
    Request,
    Sampling,
    generate_batch,
)
from rllib_gigpo.engines.packing import checksums
from rllib_gigpo.engines.transformers_engine import TransformersEngine
from rllib_gigpo.lora import LoRASettings, adapter_weights, add_adapter
from rllib_gigpo.models import ModelSpec, load_causal_lm, load_tokenizer, materialize
from rllib_gigpo.sequences import pack, response_logps
from rllib_gigpo.vision import PlacedPicture
from rllib_gigpo.vision.sight import Sight, load_sight
from tests.vision_models import (
    FAMILIES,
    build_folder,
    make_model,
    picture,
    plain_logps,
    prompt_of,
)

EXACT = 1e-4
_ROOT = Path(__file__).parents[2]


def loaded(folder: Path) -> tuple[Any, Sight, Any]:
    sight = load_sight(str(folder))
    assert sight is not None
    return load_tokenizer(str(folder)), sight, load_causal_lm(str(folder))


def prompts_of(tokenizer: Any, sight: Sight) -> list[Encoded]:
    """Two pictures of different sizes in several places, a text, and a repeated prompt."""
    first, second = picture(0), picture(1, 72, 40)
    texts = (
        ("where is the ", first, "box ?"),
        (first, " before . now ", second),
        ("left or right",),
        ("where is the ", second, "box ?"),
        ("where is the ", first, "box ?"),
    )
    return [prompt_of(tokenizer, sight, *parts) for parts in texts]


def ask(engine: Engine, prompts: Sequence[Encoded], tokens: int = 6) -> list[Completion]:
    requests = [
        Request(p.ids, Sampling(max_tokens=tokens), number, str(number), images=p.images)
        for number, p in enumerate(prompts)
    ]
    return asyncio.run(generate_batch(engine, requests))


def check(model: Any, sight: Sight, prompts: list[Encoded], answers: list[Completion]) -> int:
    """Compare with transformers' own pass; returns the number of tokens compared.

    That pass cannot tell an answer that says the token of pictures from one that shows some: what
    comes from there on is left out.
    """
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 6
        said = [*answer.token_ids.tolist(), sight.family.image_token_id]
        known = said.index(sight.family.image_token_id)
        if known:
            expected = plain_logps(model, sight, prompt, said[:known])
            assert answer.logps[:known] == pytest.approx(expected, abs=EXACT)
        compared += known
    return compared


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


# vLLM --------------------------------------------------------------------------------------------

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and os.environ.get("RLLIB_GIGPO_REQUIRE_VLLM") != "1",
    reason="vLLM is not installed",
)


def check_adapter(engine: Engine, folder: Path, prompts: list[Encoded], sight: Sight) -> None:
    """An adapter of the language model, as the learner has it."""
    pytest.importorskip("peft")
    model = load_causal_lm(str(folder))
    add_adapter(model, LoRASettings(rank=4, alpha=8.0), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.manual_seed(0)
            parameter.data = 0.1 * torch.randn_like(parameter)
    tensors, config = adapter_weights(model)
    engine.load_adapter("default_policy", tensors, config, 1)
    assert engine.checksums() == checksums(tensors)
    plain = load_causal_lm(str(folder))
    gaps = []
    for prompt, answer in zip(prompts, ask(engine, prompts), strict=True):
        (batch,) = pack([prompt.ids], [answer.token_ids], 1, [prompt.images])
        with torch.no_grad():
            found = response_logps(model, batch, sight=sight).logps[0].numpy()
            without = response_logps(plain, batch, sight=sight).logps[0].numpy()
        assert answer.logps == pytest.approx(found, abs=EXACT)
        gaps.append(np.abs(without - found).max())
    assert min(gaps) > 1e-3


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_adapters_of_the_language_model_are_served(family: str, tmp_path: Path):
    tokenizer, sight, _ = loaded(build_folder(tmp_path, family))
    engine = TransformersEngine({"default_policy": str(tmp_path)})
    check_adapter(engine, tmp_path, prompts_of(tokenizer, sight), sight)


def check_vllm(family: str, folder: Path) -> None:
    """Answers before and after syncs: of an adapter, and of everything, the vision tower too."""
    from rllib_gigpo.engines.vllm.engine import VLLMEngine
    from rllib_gigpo.engines.vllm.settings import VLLMSettings

    tokenizer, sight, model = loaded(build_folder(folder, family))
    settings = VLLMSettings(
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 20,
        enable_lora=True,
        max_lora_rank=8,
    )
    engine = VLLMEngine({"default_policy": str(folder)}, settings)
    try:
        prompts = prompts_of(tokenizer, sight)
        assert check(model, sight, prompts, ask(engine, prompts)) >= 15
        check_adapter(engine, folder, prompts, sight)
        changed = make_model(model.config, seed=1)
        engine.load_weights("default_policy", dict(changed.named_parameters()), 1)
        assert check(changed, sight, prompts, ask(engine, prompts)) >= 15
    finally:
        engine.close()


@pytest.mark.vllm
@needs_vllm
def test_vllm_refuses_a_family_that_it_computes_otherwise(tmp_path: Path):
    from rllib_gigpo.engines.vllm.engine import VLLMEngine

    folder = build_folder(tmp_path, "qwen3_vl")
    with pytest.raises(EngineError, match=r"qwen3_vl with other log-probabilities.*transformers"):
        VLLMEngine({"default_policy": str(folder)})


@pytest.mark.vllm
@needs_vllm
def test_vllm_and_plain_pass_agree_without_torchvision(tmp_path: Path):
    check_vllm("idefics3", tmp_path)


@pytest.mark.vllm
@needs_vllm
def test_vllm_and_plain_pass_agree_in_qwen(tmp_path: Path):
    """vLLM's Qwen-VL modules import torchvision, which CI puts into a folder of its own."""
    torchvision = Path(sys.prefix) / "torchvision"
    if not torchvision.is_dir():
        if os.environ.get("RLLIB_GIGPO_REQUIRE_VLLM") == "1":
            pytest.fail(f"RLLIB_GIGPO_REQUIRE_VLLM=1, but there is no {torchvision}")
        pytest.skip(f"no {torchvision}: pip install --no-deps --target it torchvision==0.28.0")
    schemas = _ROOT / "tests" / "torchvision_schemas"
    code = (
        "import sys; from pathlib import Path; "
        "from tests.contract.test_vision_engines import check_vllm; "
        "check_vllm('qwen2_vl', Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (schemas, torchvision, _ROOT)))},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
