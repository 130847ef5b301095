"""The memory estimate of models that see: by hand, against real passes, and a measured peak."""

from __future__ import annotations

import dataclasses
import gc
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ray.rllib.policy.sample_batch import SampleBatch

from rllib_gigpo.check.memory import memory_part
from rllib_gigpo.memory_estimate import Plan, estimate, main
from rllib_gigpo.memory_passes import Rows
from rllib_gigpo.models import load_causal_lm, load_tokenizer, number_of_parameters
from rllib_gigpo.recompute import allow_recompute, recompute_layers
from rllib_gigpo.rows import object_array
from rllib_gigpo.vision.sight import Sight, load_sight, vision_modules
from tests.child import call
from tests.tiny_runs import bare_learner, tiny_config, update
from tests.vision_models import build_folder, picture, processor_of, prompt_of

PLAN = Plan(
    sequence_tokens=64,
    response_tokens=8,
    micro_batch_tokens=3 * 64,
    pictures=((40, 56),),
    engine_sequences=5,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    families = ("qwen2_vl", "qwen3_vl", "idefics3")
    return {family: str(build_folder(root / family, family)) for family in families}


def loaded(path: str) -> tuple[Any, Sight]:
    sight = load_sight(path)
    assert sight is not None
    return transformers.AutoConfig.from_pretrained(path), sight


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "idefics3"])
def test_what_backward_keeps_is_that_of_a_real_pass(folders, family, checkpointing):
    config, sight = loaded(folders[family])
    found = estimate(
        config, dataclasses.replace(PLAN, activation_checkpointing=checkpointing), sight
    )
    model: Any = load_causal_lm(folders[family]).eval()
    if checkpointing:
        allow_recompute(model)
        recompute_layers(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, alive = {}, []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids, is_token = torch.zeros(3, 64, dtype=torch.long), torch.ones(3, 64, dtype=torch.long)
    is_token[0, 60:] = 0
    body, images = model.base_model, Rows(3, 64, sight, PLAN.pictures).images()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inputs = sight.inputs(body, ids, images)
        sight.language_model(body)(**inputs, attention_mask=is_token, use_cache=False)
    expected = sum(kept.values())
    if checkpointing:
        expected += found["score"]["activations"]  # the insides of the largest layer
    assert found["update"]["activations"] == pytest.approx(expected, rel=0.01)


def test_what_is_held_by_hand(folders):
    config, sight = loaded(folders["qwen2_vl"])
    model = load_causal_lm(folders["qwen2_vl"])
    (tower,) = vision_modules(model)
    whole, seen = number_of_parameters(model), number_of_parameters(model.get_submodule(tower))
    update = estimate(config, PLAN, sight)["update"]
    assert update["weights"] == update["gradients"] == 4 * whole
    # 3 rows with a picture of 40 x 56, which the processor makes 32 x 64: 4 x 8 patches of 2
    # frames of 8 x 8 RGB, fp32, and the grid, three int64; once kept and once put together.
    assert update["pictures"] == 2 * 3 * (4 * 8 * 2 * 8 * 8 * 3 * 4 + 3 * 8)
    still = estimate(config, dataclasses.replace(PLAN, freeze_vision_tower=True), sight)["update"]
    assert still["weights"] == still["gradients"] == 4 * (whole - seen)
    assert still["frozen weights"] == 4 * seen
    # Nothing of a frozen tower is kept for the backward pass.
    text = estimate(config, dataclasses.replace(PLAN, pictures=()))["update"]
    assert text["activations"] < update["activations"]
    assert still["activations"] == pytest.approx(text["activations"], rel=0.1)


def test_an_adapter_leaves_the_tower_alone(folders):
    config, sight = loaded(folders["qwen2_vl"])
    plan = dataclasses.replace(PLAN, lora_parameters=100)
    frozen = dataclasses.replace(PLAN, freeze_vision_tower=True)
    adapted, still = (estimate(config, each, sight)["update"] for each in (plan, frozen))
    assert adapted["activations"] == still["activations"]


def test_pictures_must_be_seen_and_fit(folders):
    config, sight = loaded(folders["qwen2_vl"])
    with pytest.raises(ValueError, match="reads text alone"):
        estimate(config, PLAN)
    many = dataclasses.replace(PLAN, pictures=((40, 56),) * 9)
    with pytest.raises(ValueError, match=r"9 pictures take 72 tokens and a row has 64"):
        estimate(config, many, sight)


def test_the_command_takes_a_picture(folders, capsys):
    main([folders["idefics3"], "--picture=40x56", "--sequence-tokens=64", "--response-tokens=8"])
    assert "| update | pictures |" in capsys.readouterr().out


def test_a_check_plays_to_see_the_pictures():
    config = (
        tiny_config()
        .environment("NumberLine", env_config={"view": "rgb"})
        .llm(model="tiny-vision", options={"image_side": 80}, max_prompt_tokens=200)
    )
    config.env_config.pop("horizon")
    found = {f.text.split(":")[0]: f.text for f in memory_part(config)}
    assert set(found) == {"score", "update", "engine"}


def test_a_measured_peak_is_near(tmp_path: Path):
    """Two updates of a learner in a process of its own, by its resident memory."""
    found = call(measured, tmp_path, timeout=280)
    assert found["estimated"] == pytest.approx(found["measured"], rel=0.15)


def measured(folder: str) -> dict[str, float]:
    """Peak of what a model of some size adds to the process, and what the estimate said; MiB."""
    torch.set_num_threads(1)
    plan = Plan(160 + 32, 32, micro_batch_tokens=8 * 192, pictures=((128, 128),) * 2)
    path = str(build_folder(Path(folder), "qwen2_vl"))
    settings = tiny_config(optimizer_name="adamw", micro_batch_tokens=plan.micro_batch_tokens)
    settings.llm(model=path, options={}, max_prompt_tokens=160, max_response_tokens=32)
    # What a small model's update imports and starts is no memory of the large one's.
    update(bare_learner(settings), _rows(path, loaded(path)[1], plan))
    _enlarge(path)
    config, sight = loaded(path)
    batch = _rows(path, sight, plan)
    expected = sum(estimate(config, plan, sight)["update"].values())
    gc.collect()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    learner = bare_learner(settings)
    # The second step is the first that has the optimizer's state beside the activations.
    for iteration in range(2):
        update(learner, batch, iteration)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"measured": (peak - before) / 2**20, "estimated": expected / 2**20}


def _enlarge(path: str) -> None:
    """Put a wider and deeper model into a folder, and let its processor leave pictures large."""
    config = transformers.AutoConfig.from_pretrained(path)
    for name, value in {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }.items():
        setattr(config.text_config, name, value)
    config.text_config.layer_types = ["full_attention"] * 6
    config.text_config.rope_parameters["mrope_section"] = [8, 12, 12]
    for name, value in {"depth": 6, "embed_dim": 256, "hidden_size": 512, "num_heads": 4}.items():
        setattr(config.vision_config, name, value)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    processor = processor_of("qwen2_vl")
    processor.size = {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    processor.save_pretrained(path)


def _rows(path: str, sight: Sight, plan: Plan) -> SampleBatch:
    """One micro-batch of rows with pictures of their own, all of the plan's length."""
    tokenizer, number = load_tokenizer(path), plan.micro_batch_tokens // plan.sequence_tokens
    prompts = []
    for row in range(number):
        shown = [picture(10 * row + place, *size) for place, size in enumerate(plan.pictures)]
        length = len(prompt_of(tokenizer, sight, *shown).ids)
        words = "left " * (plan.sequence_tokens - plan.response_tokens - length)
        prompts.append(prompt_of(tokenizer, sight, *shown, words))
    # Rows of different lengths: attention reads a mask.
    responses = [
        np.full(plan.response_tokens - (r > 3), 5 + r, dtype=np.int32) for r in range(number)
    ]
    return SampleBatch(
        {
            "group": np.zeros(number, dtype=np.int64),
            "episode": np.arange(number),
            "step": np.zeros(number, dtype=np.int64),
            "anchor": np.arange(number),
            "reward": np.arange(number, dtype=np.float64) ** 2,
            "prompt_ids": object_array([prompt.ids for prompt in prompts]),
            "images": object_array([prompt.images for prompt in prompts]),
            "next_images": object_array([()] * number),
            "response_ids": object_array(responses),
            "response_logps": object_array([np.full(len(r), -3.5, np.float32) for r in responses]),
        }
    )
