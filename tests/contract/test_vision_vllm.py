"""vLLM with pictures: in this process, and as an actor that a run on pictures is played with."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_gigpo import GiGPO, GiGPOConfig, register_llm_env
from rllib_gigpo.encoding import Encoded
from rllib_gigpo.engines.base import Completion, Engine, EngineError
from rllib_gigpo.engines.packing import checksums, pack, unpack
from rllib_gigpo.engines.published import Published, check_held, serve
from rllib_gigpo.engines.transformers_engine import TransformersEngine
from rllib_gigpo.learner import GiGPOTorchLearner
from rllib_gigpo.probe import TOLERANCE, check_probe, probe_prompt, probe_request
from rllib_gigpo.sampler import training_tasks
from tests.child import ROOT, call
from tests.picture_envs import TALKATIVE, Wall
from tests.tiny_runs import build_learner, module_of, tiny_config
from tests.vision_checks import check_vllm
from tests.vision_models import build_folder
from tests.with_vllm import REQUIRED, needs_vllm, skip_without_vllm, tiny_settings, vllm

_VISION = "model.vision_model.encoder.layers.0.mlp.fc1.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_folder(tmp_path_factory.mktemp("idefics"), "idefics3")


# What is served is what the learner computes ------------------------------------------------------


@pytest.mark.vllm
@needs_vllm
def test_vllm_and_plain_pass_agree_without_torchvision(tmp_path: Path):
    check_vllm("idefics3", tmp_path)


@pytest.mark.vllm
@needs_vllm
@pytest.mark.timeout(600)
def test_vllm_and_plain_pass_agree_in_qwen(tmp_path: Path):
    """vLLM's Qwen-VL modules import torchvision, which CI puts into a folder of its own."""
    torchvision = Path(sys.prefix) / "torchvision"
    if not torchvision.is_dir():
        if REQUIRED:
            pytest.fail(f"RLLIB_GIGPO_REQUIRE_VLLM=1, but there is no {torchvision}")
        pytest.skip(f"no {torchvision}: pip install --no-deps --target it torchvision==0.28.0")
    schemas = ROOT / "tests" / "torchvision_schemas"
    path = os.pathsep.join(map(str, (schemas, torchvision, ROOT)))
    call(check_qwen, tmp_path, env={"PYTHONPATH": path}, timeout=580)


def check_qwen(folder: str) -> None:
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        check_vllm(family, Path(folder, family))


@pytest.mark.vllm
@needs_vllm
def test_vllm_refuses_a_model_whose_positions_it_would_mix_up(tmp_path: Path):
    from rllib_gigpo.engines.vllm.engine import VLLMEngine

    folder = build_folder(tmp_path, "qwen3_vl")
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["rope_parameters"]["mrope_interleaved"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"qwen3_vl.*\"mrope_interleaved\": true"):
        VLLMEngine({"default_policy": str(folder)})


# The proof of a sync sees the vision tower --------------------------------------------------------


def config_of(folder: Path, **training: Any) -> GiGPOConfig:
    return tiny_config(**training).llm(
        model=str(folder), options={}, max_prompt_tokens=200, max_response_tokens=8
    )


@pytest.fixture(params=["transformers", vllm])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    if request.param == "vllm":
        from rllib_gigpo.engines.vllm.engine import VLLMEngine

        settings = tiny_settings(max_num_seqs=8, kv_cache_memory_bytes=1 << 20, enable_lora=False)
        built: Any = VLLMEngine({DEFAULT_MODULE_ID: folder}, settings)
    else:
        built = TransformersEngine({DEFAULT_MODULE_ID: folder})
    yield built
    built.close()


def load(engine: Engine, tensors: dict[str, torch.Tensor], version: int) -> None:
    parcel = Published("weights", pack(tensors), version, checksums(tensors))
    serve(engine, DEFAULT_MODULE_ID, parcel, parcel.packed)


def gap(engine: Engine, learner: GiGPOTorchLearner, prompt: Encoded) -> float:
    """What a probe finds: mean difference of log-probabilities per token."""
    completion = answer(engine, learner, prompt)
    expected = learner.response_logps(DEFAULT_MODULE_ID, prompt, completion.token_ids)
    return float(np.abs(completion.logps - expected).mean())


def answer(engine: Engine, learner: GiGPOTorchLearner, prompt: Encoded) -> Completion:
    request = probe_request(learner.config, DEFAULT_MODULE_ID, prompt, 0)
    return asyncio.run(engine.generate(request))


def test_an_engine_that_missed_one_tensor_of_the_vision_tower_is_found_twice(engine, folder):
    config = config_of(folder)
    learner = build_learner(config)
    prompt = probe_prompt(config)
    assert len(prompt.images) == 1
    old = unpack(learner.published(1)[DEFAULT_MODULE_ID].packed)[_VISION].clone()
    with torch.no_grad():
        for parameter in module_of(learner).lm.parameters():
            parameter.mul_(1.2)
    sent = learner.published(2)[DEFAULT_MODULE_ID]
    load(engine, {**unpack(sent.packed), _VISION: old}, 2)
    with pytest.raises(RuntimeError, match=rf"1 of \d+ differ or are missing \({_VISION}\)"):
        check_held(sent, engine.checksums(DEFAULT_MODULE_ID))
    completion = answer(engine, learner, prompt)
    logps = learner.response_logps(DEFAULT_MODULE_ID, prompt, completion.token_ids)
    with pytest.raises(RuntimeError, match="does not serve the learner's weights"):
        check_probe(completion, logps, 2, TOLERANCE["float32"])
    # Text alone does not show it.
    text = Encoded(np.arange(5, 15, dtype=np.int32))
    assert gap(engine, learner, text) < 1e-4
    load(engine, unpack(sent.packed), 2)
    check_held(sent, engine.checksums(DEFAULT_MODULE_ID))
    assert gap(engine, learner, prompt) < 1e-4


# A run whose engine is an actor -------------------------------------------------------------------


@pytest.fixture(scope="module")
def algorithm(local_ray, folder: Path) -> Iterator[Any]:
    skip_without_vllm()
    register_llm_env("Wall", Wall, TALKATIVE)
    config = (
        config_of(folder, omega=0.0, lr=0.01)
        .environment("Wall", env_config={"horizon": 2})
        .env_runners(num_env_runners=2)
        .engines(engine="vllm", engine_options={"kv_cache_memory_bytes": 1 << 24})
    )
    built = config.build_algo()
    yield built
    built.stop()


@pytest.mark.ray
@pytest.mark.vllm
def test_an_iteration_on_pictures_with_an_engine_actor(algorithm: GiGPO):
    assert len(algorithm.weights._probe_prompts[DEFAULT_MODULE_ID].images) == 1
    before = algorithm.first_learner(_vision_sums)
    for _ in range(2):
        learned = algorithm.train()["learners"][DEFAULT_MODULE_ID]
        # Recomputed old log-probabilities against the engine's own: prompts with one picture and,
        # in the second step, two.
        assert learned["engine_logp_gap"] < 1e-4
        assert learned["engine_logp_gap_max"] < 1e-3
    after = algorithm.first_learner(_vision_sums)
    assert before != after
    # The proof of the last sync passed with the tower that was trained; so it is what is served.
    (held,) = algorithm.weights.fleet.all_checksums(DEFAULT_MODULE_ID)
    assert {name: held[name] for name in after} == after
    played = algorithm.play(algorithm.env_runner_group, training_tasks(algorithm.config, 5))
    episode: Any = played.episodes[0]
    shown = [len(info["images"]) for info in episode.infos[:2]]
    assert shown == [1, 2]


def _vision_sums(learner: Any) -> dict[str, int]:
    sums = learner.published(0)[DEFAULT_MODULE_ID].checksums
    return {name: value for name, value in sums.items() if "vision_model" in name}


@pytest.mark.ray
@pytest.mark.vllm
def test_a_run_whose_engine_actor_kept_its_old_vision_tower_stops(algorithm: GiGPO, monkeypatch):
    weights = algorithm.weights
    publish = weights.fleet.publish
    old = algorithm.first_learner(_vision_tower)

    def forgetful(module_id: str, published: Published, send: Any) -> None:

        sent: Any = ray.get(published.packed)
        packed = {**sent, **pack(old)}
        publish(module_id, replace(published, packed=ray.put(packed)), send)

    algorithm.first_learner(_enlarge_the_tower)
    with monkeypatch.context() as patch:
        patch.setattr(weights.fleet, "publish", forgetful)
        with pytest.raises(RuntimeError, match="computes with other tensors"):
            weights.push(algorithm.num_updates)
        patch.setattr(weights, "_check_checksums", lambda: None)
        with pytest.raises(RuntimeError, match="log-probabilities differ from the learner's"):
            weights.push(algorithm.num_updates)
    weights.push(algorithm.num_updates)


def _vision_tower(learner: Any) -> dict[str, torch.Tensor]:
    parameters = learner.module[DEFAULT_MODULE_ID].lm.named_parameters()
    return {name: p.detach().clone() for name, p in parameters if "vision_model" in name}


def _enlarge_the_tower(learner: Any) -> None:
    with torch.no_grad():
        for name, parameter in learner.module[DEFAULT_MODULE_ID].lm.named_parameters():
            if "vision_model" in name:
                parameter.mul_(1.2)
