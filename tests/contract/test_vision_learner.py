"""Updates on rows with pictures: what moves, what the engine then says, and what is exported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.policy.sample_batch import SampleBatch
from transformers import AutoModelForImageTextToText

from rllib_gigpo.checkpoints import Place, save_whole
from rllib_gigpo.encoding import Encoded
from rllib_gigpo.engines.base import Request, Sampling
from rllib_gigpo.engines.transformers_engine import TransformersEngine
from rllib_gigpo.export import export
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.models import load_tokenizer
from rllib_gigpo.rows import object_array
from rllib_gigpo.scoring import score_next_states
from rllib_gigpo.sequences import pack
from rllib_gigpo.vision.sight import load_sight
from tests.tiny_runs import build_learner, module_of, parameters, tiny_config, update
from tests.vision_models import build_folder, picture, plain_logps, prompt_of

RESPONSES = [np.array(ids, dtype=np.int32) for ids in ([5, 9], [9, 12, 7], [11], [6, 8])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_folder(tmp_path_factory.mktemp("qwen"), "qwen2_vl")


def prompts_of(folder: Path) -> list[Encoded]:
    tokenizer, sight = load_tokenizer(str(folder)), load_sight(str(folder))
    assert sight is not None
    shown = [picture(0), picture(1, 72, 40), picture(0), picture(2)]
    return [prompt_of(tokenizer, sight, "where is the ", p, "box ?") for p in shown]


def rows_of(folder: Path) -> SampleBatch:
    """Two groups of two episodes of one step."""
    prompts = prompts_of(folder)
    return SampleBatch(
        {
            "group": np.array([0, 0, 1, 1]),
            "episode": np.arange(4),
            "step": np.zeros(4, dtype=np.int64),
            "anchor": np.arange(4),
            "reward": np.array([1.0, 0.0, 0.0, 1.0]),
            "prompt_ids": object_array([prompt.ids for prompt in prompts]),
            "images": object_array([prompt.images for prompt in prompts]),
            "next_images": object_array([()] * 4),
            "response_ids": object_array(RESPONSES),
            "response_logps": object_array(
                [np.full(len(r), -3.5, dtype=np.float32) for r in RESPONSES]
            ),
        }
    )


def config_of(folder: Path, **llm: Any):
    return tiny_config(lr=0.02).llm(model=str(folder), options={}, **llm)


def moved(folder: Path, **llm: Any) -> set[str]:
    """First parts of the names of the parameters that an update changes."""
    learner = build_learner(config_of(folder, **llm))
    before = parameters(learner)
    update(learner, rows_of(folder))
    after = parameters(learner)
    return {
        ".".join(name.split(".")[:2])
        for name, value in before.items()
        if not torch.equal(value, after[name])
    }


def test_everything_is_trained_unless_the_tower_is_frozen(folder):
    assert moved(folder) == {"model.visual", "model.language_model"}
    assert moved(folder, freeze_vision_tower=True) == {"model.language_model"}


def test_lora_leaves_the_tower_alone(folder):
    pytest.importorskip("peft")
    assert moved(folder, lora=LoRASettings(rank=2)) == {"model.language_model"}


def test_micro_batches_do_not_change_the_step(folder):
    steps = []
    for budget in (1, 10_000):
        learner = build_learner(config_of(folder), micro_batch_tokens=budget)
        update(learner, rows_of(folder))
        steps.append(parameters(learner))
    for name, value in steps[0].items():
        assert torch.allclose(value, steps[1][name], atol=1e-6), name


def test_a_critic_values_states_that_show_pictures(folder):
    rows = rows_of(folder)
    prompts = prompts_of(folder)
    nothing = np.zeros(0, dtype=np.int32)
    rows["truncated"] = np.array([True, False, False, False])
    rows["next_prompt_ids"] = object_array([prompts[1].ids, nothing, nothing, nothing])
    rows["next_images"] = object_array([prompts[1].images, (), (), ()])
    learner = build_learner(config_of(folder), critic="head", estimator="gae", omega=0.0)
    module = module_of(learner)
    assert module.value_head is not None
    torch.manual_seed(0)
    for parameter in module.value_head.parameters():
        parameter.data = torch.randn_like(parameter)
    found = score_next_states(module, dict(rows.items()), token_budget=1000)
    # A value is read at the last token of the prompt, whatever comes after it.
    (batch,) = pack([prompts[1].ids], [RESPONSES[0]], 1, [prompts[1].images])
    (other,) = pack([prompts[0].ids], [RESPONSES[0]], 1, [prompts[0].images])
    with torch.no_grad():
        expected, elsewhere = (module.score(b, values=True).values[0, 0] for b in (batch, other))  # pyright: ignore[reportOptionalSubscript]
    assert found == pytest.approx([float(expected), 0.0, 0.0, 0.0], abs=1e-5)
    assert abs(float(expected - elsewhere)) > 1e-3
    update(learner, rows)


def test_the_engine_says_what_the_learner_says_after_an_update(folder):
    learner = build_learner(config_of(folder))
    update(learner, rows_of(folder))
    module = module_of(learner)
    engine = TransformersEngine({"default_policy": str(folder)})
    engine.load_weights("default_policy", module.policy_weights(), 1)

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(
                engine.generate(Request(p.ids, Sampling(max_tokens=5), n, str(n), images=p.images))
                for n, p in enumerate(prompts_of(folder))
            )
        )

    for prompt, answer in zip(prompts_of(folder), asyncio.run(ask()), strict=True):
        (batch,) = pack([prompt.ids], [answer.token_ids], 1, [prompt.images])
        with torch.no_grad():
            found = module.score(batch).logps[0].numpy()
        assert answer.logps == pytest.approx(found, abs=1e-4)


def test_an_exported_model_sees_the_same(folder, tmp_path):
    learner = build_learner(config_of(folder))
    update(learner, rows_of(folder))
    save_whole(
        Place.of(tmp_path / "run"),
        lambda to: learner.save_to_path(to / "learner_group" / "learner"),
    )
    out = export(tmp_path / "run", tmp_path / "out")
    model, report = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert "AutoModelForImageTextToText" in (out / "README.md").read_text()
    # The folder brings its own image processor: it is all that a user needs.
    tokenizer, sight = load_tokenizer(str(out)), load_sight(str(out))
    assert sight is not None
    prompt = prompt_of(tokenizer, sight, "where is the ", picture(0), "box ?")
    (batch,) = pack([prompt.ids], [RESPONSES[1]], 1, [prompt.images])
    with torch.no_grad():
        expected = module_of(learner).score(batch).logps[0].numpy()
    assert plain_logps(model.eval(), sight, prompt, RESPONSES[1]) == pytest.approx(
        expected, abs=1e-4
    )
