"""Every supported family: places, positions, log-probabilities and gradients against transformers'.

The reference is the family's own forward pass with the pixels of every row; ours looks at each
distinct picture once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rllib_gigpo.encoding import Encoded
from rllib_gigpo.lora import LoRASettings, adapter_weights, add_adapter
from rllib_gigpo.models import ModelSpec, load_causal_lm, load_tokenizer, materialize
from rllib_gigpo.module import CausalLMModule
from rllib_gigpo.sequences import check_output_layer, pack, response_logps
from rllib_gigpo.vision import Gallery
from rllib_gigpo.vision.sight import Sight, freeze_vision, load_sight, vision_modules
from tests.vision_models import (
    FAMILIES,
    build_folder,
    picture,
    plain_logps,
    prompt_of,
    various_prompts,
)


@dataclass
class Loaded:
    folder: str
    tokenizer: Any
    sight: Sight
    model: Any

    def prompts(self) -> list[Encoded]:
        return various_prompts(self.tokenizer, self.sight)


RESPONSES = [np.array(ids, dtype=np.int32) for ids in ([5, 9, 12], [9], [10, 11], [5, 9, 12])]


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request, tmp_path_factory) -> Loaded:
    folder = str(build_folder(tmp_path_factory.mktemp(request.param), request.param))
    sight = load_sight(folder)
    assert sight is not None
    return Loaded(folder, load_tokenizer(folder), sight, load_causal_lm(folder))


def rows(loaded: Loaded, prompts: list[Encoded]) -> Any:
    (batch,) = pack([p.ids for p in prompts], RESPONSES, 10**6, [p.images for p in prompts])
    return batch


def test_the_learner_computes_what_transformers_does(loaded):
    prompts = loaded.prompts()
    with torch.no_grad():
        found = response_logps(loaded.model, rows(loaded, prompts), sight=loaded.sight)
    for row, (prompt, response) in enumerate(zip(prompts, RESPONSES, strict=True)):
        expected = plain_logps(loaded.model, loaded.sight, prompt, response)
        assert found.logps[row][found.mask[row]].numpy() == pytest.approx(expected, abs=1e-4)


def test_what_a_picture_shows_matters(loaded):
    prompts = [prompt_of(loaded.tokenizer, loaded.sight, picture(seed), "box ?") for seed in (2, 3)]
    assert np.array_equal(prompts[0].ids, prompts[1].ids)
    first, second = (plain_logps(loaded.model, loaded.sight, p, RESPONSES[0]) for p in prompts)
    assert np.abs(first - second).max() > 1e-2


def test_each_distinct_picture_is_looked_at_once(loaded, monkeypatch):
    seen = []
    look = loaded.sight.features

    def counted(body, pictures):
        pictures = list(pictures)
        seen.extend(p.key for p in pictures)
        return look(body, pictures)

    monkeypatch.setattr(loaded.sight, "features", counted)
    # Each row's pictures are objects of their own, as if they came from different runners.
    with torch.no_grad():
        response_logps(loaded.model, rows(loaded, loaded.prompts()), sight=loaded.sight)
    assert sorted(seen) == sorted({picture(0).key, picture(1, 72, 40).key})


def test_rows_that_differ_in_their_pictures_alone_are_not_one(loaded):
    prompts = [prompt_of(loaded.tokenizer, loaded.sight, picture(seed), "box ?") for seed in (2, 3)]
    (batch,) = pack(
        [prompts[0].ids] * 3,
        [RESPONSES[0]] * 3,
        10**6,
        [prompts[0].images, prompts[1].images, prompts[0].images],
    )
    assert batch.index.tolist() == [0, 1, 0]


def test_an_answer_may_hold_the_token_of_pictures(loaded):
    """What a model says is text to it, even where it says the token that pictures stand for."""
    prompt = loaded.prompts()[0]
    response = np.array([loaded.sight.family.image_token_id, 9], dtype=np.int32)
    (batch,) = pack([prompt.ids], [response], 10**6, [prompt.images])
    with torch.no_grad():
        found = response_logps(loaded.model, batch, sight=loaded.sight)
    # Its first token is predicted from the prompt, so transformers can say what is right.
    expected = plain_logps(loaded.model, loaded.sight, prompt, [9])
    (other,) = pack([prompt.ids], [np.array([9], np.int32)], 10**6, [prompt.images])
    with torch.no_grad():
        plain = response_logps(loaded.model, other, sight=loaded.sight)
    assert plain.logps[0, 0].item() == pytest.approx(expected[0], abs=1e-4)
    assert torch.isfinite(found.logps).all()


def test_gradients_reach_the_vision_tower_unless_it_is_frozen(loaded):
    model = load_causal_lm(loaded.folder)
    parts = [model.get_submodule(name) for name in vision_modules(model)]
    batch = rows(loaded, loaded.prompts())
    response_logps(model, batch, sight=loaded.sight).logps.sum().backward()
    assert all(
        max(p.grad.abs().max() for p in part.parameters() if p.grad is not None) > 0
        for part in parts
    )
    text_gradient = model.get_input_embeddings().weight.grad.clone()  # pyright: ignore
    frozen = load_causal_lm(loaded.folder)
    freeze_vision(frozen)
    response_logps(frozen, batch, sight=loaded.sight).logps.sum().backward()
    for name in vision_modules(frozen):
        assert all(p.grad is None for p in frozen.get_submodule(name).parameters())
    found = frozen.get_input_embeddings().weight.grad  # pyright: ignore
    assert torch.allclose(found, text_gradient, atol=1e-5)  # pyright: ignore


def test_lora_adapts_the_language_model_alone(loaded):
    pytest.importorskip("peft")
    model = load_causal_lm(loaded.folder)
    add_adapter(model, LoRASettings(rank=2), seed=0)
    tensors, _ = adapter_weights(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == len(tensors) > 0
    left_out = tuple(f"base_model.model.{name}." for name in vision_modules(model))
    assert not [name for name in tensors if name.startswith(left_out)]


def test_the_output_layer_is_all_there_is(loaded):
    check_output_layer(loaded.model)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(family, tmp_path):
    folder = str(build_folder(tmp_path, family))
    loaded = Loaded(folder, load_tokenizer(folder), load_sight(folder), load_causal_lm(folder))  # pyright: ignore
    for prompt in loaded.prompts():
        ids = torch.from_numpy(prompt.ids).long()[None]
        found = loaded.sight.positions(len(prompt.ids), prompt.images)
        assert found is not None
        if not prompt.images:
            assert (found == np.arange(len(prompt.ids))).all()
            continue
        grids = torch.cat(
            [loaded.sight.process(placed.picture)["image_grid_thw"] for placed in prompt.images]
        )
        types = (ids == loaded.sight.family.image_token_id).int()
        expected, _ = loaded.model.model.get_rope_index(ids, types, image_grid_thw=grids)
        assert np.array_equal(found, expected[:, 0].numpy())


def test_positions_by_hand():
    """A picture of 1 x 2 x 3 tokens after two words: it starts at 2, and text goes on at 2 + 3."""
    from types import SimpleNamespace

    from rllib_gigpo.vision.families import QwenVL

    config = SimpleNamespace(image_token_id=7, vision_config=SimpleNamespace(spatial_merge_size=2))
    positions = QwenVL(config).positions(10, [(2, (1, 2, 3))])
    assert positions is not None
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],  # time
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],  # rows
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],  # columns
    ]


# The module and the models ------------------------------------------------------------------------


def module(spec: ModelSpec, **settings: Any) -> CausalLMModule:
    model_config = {
        "spec": spec,
        "autocast_dtype": "float32",
        "with_reference": False,
        "temperature": 1.0,
        **settings,
    }
    return CausalLMModule(model_config=model_config)


def test_a_frozen_tower_stays_out_of_the_optimizer(tmp_path):
    spec = ModelSpec(str(build_folder(tmp_path, "qwen2_5_vl")))
    trained, frozen = module(spec), module(spec, freeze_vision_tower=True)
    vision = {id(p) for p in frozen.lm.get_submodule("model.visual").parameters()}
    assert not vision & {id(p) for p in frozen.policy_parameters()}
    assert len(trained.policy_parameters()) == len(frozen.policy_parameters()) + len(vision)
    # Engines are sent the whole model either way.
    assert set(frozen.policy_weights()) == set(trained.policy_weights())


def test_a_text_model_has_no_tower_to_freeze():
    with pytest.raises(Exception, match="'tiny', which has no vision tower"):
        module(ModelSpec("tiny", words=("go left",)), freeze_vision_tower=True)


@pytest.fixture(scope="module")
def tiny_vision(tmp_path_factory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLIB_GIGPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        return materialize(ModelSpec("tiny-vision", words=("Go left now",), seed=3))


def test_the_tiny_model_sees(tiny_vision):
    tokenizer, sight = load_tokenizer(tiny_vision), load_sight(tiny_vision)
    assert sight is not None
    white = Gallery().hang(np.full((300, 300, 3), 255, dtype=np.uint8))
    prompt = prompt_of(tokenizer, sight, "Go ", white, "left")
    # 300 x 300 pixels shrink to 80 x 80: 5 x 5 tokens of 16 x 16.
    assert prompt.images[0].runs == ((3, 25),)
    assert tokenizer.decode(prompt.ids[28:].tolist()) == "<|vision_end|> left <assistant>"
    # White is 0, as the docstring of the model promises.
    assert sight.process(white)["pixel_values"].abs().max() < 1e-5
    model = load_causal_lm(tiny_vision)
    response = [int(tokenizer.convert_tokens_to_ids("now"))]
    (batch,) = pack([prompt.ids], [np.array(response, np.int32)], 1, [prompt.images])
    with torch.no_grad():
        found = response_logps(model, batch, sight=sight).logps[0].numpy()
    assert found == pytest.approx(plain_logps(model, sight, prompt, response), abs=1e-4)


def test_the_tiny_model_is_the_same_everywhere(tmp_path, monkeypatch, tiny_vision):
    monkeypatch.setenv("RLLIB_GIGPO_CACHE", str(tmp_path))
    spec = ModelSpec("tiny-vision", words=("now left Go",), seed=3)
    again = materialize(spec)
    assert again.rsplit("/", 1)[1] == tiny_vision.rsplit("/", 1)[1]
    ours, theirs = load_causal_lm(again), load_causal_lm(tiny_vision)
    assert all(
        torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    other = materialize(
        ModelSpec("tiny-vision", words=("now left Go",), options={"image_side": 64})
    )
    assert other != again


def test_texts_of_the_tiny_model_cannot_pose_as_pictures(tiny_vision):
    tokenizer, sight = load_tokenizer(tiny_vision), load_sight(tiny_vision)
    assert sight is not None
    prompt = prompt_of(tokenizer, sight, "Go <|image_pad|> left", picture(0))
    assert len(prompt.images) == 1


def test_models_without_an_image_processor_are_refused(tmp_path):
    folder = build_folder(tmp_path, "llava")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"no image processor .*preprocessor_config\.json"):
        load_sight(str(folder))


def test_text_models_need_no_torchvision_and_no_image_processor(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLIB_GIGPO_CACHE", str(tmp_path))
    assert load_sight(materialize(ModelSpec("tiny", words=("go left",)))) is None
