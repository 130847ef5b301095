"""Two learners that share an image-text model by FSDP take the steps of one learner.

One of them has no row with a picture, and must gather the vision tower's weights all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch

from rllib_gigpo import sharding
from rllib_gigpo.models import load_causal_lm, load_tokenizer
from rllib_gigpo.rows import RowData, complete_batch, object_array
from rllib_gigpo.sequences import empty_batch, nothing_of, pack, response_logps
from rllib_gigpo.sharding import is_sharded
from rllib_gigpo.vision.sight import freeze_vision, load_sight
from tests.child import call
from tests.learner_pairs import Pair
from tests.tiny_runs import build_learner, parameters, tiny_config, update
from tests.vision_models import FAMILIES, build_folder, picture, prompt_of

RESPONSES = ([5, 9, 7], [9, 12], [11, 6])
FROZEN = {"qwen2_5_vl", "smolvlm"}  # their relatives are trained whole
# Each row is a micro-batch of its own; the loss has its KL, so that a reference looks too.
BASE: dict[str, Any] = {"kl_coeff": 0.5, "lr": 0.05, "micro_batch_tokens": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_folder(tmp_path_factory.mktemp("qwen"), "qwen3_vl")


@pytest.fixture(scope="module")
def llm(folder: Path) -> dict[str, Any]:
    return {"model": str(folder), "options": {}}


@pytest.fixture(scope="module")
def pair(local_ray, llm: dict[str, Any]):
    how = {"sharding": "fsdp", "activation_checkpointing": True}
    pair = Pair(BASE, learners=how, llm=llm)
    yield pair
    pair.algorithm.stop()


def rows(folder: Path) -> SampleBatch:
    """A long prompt with two pictures and two short ones without: one learner's, the other's."""
    tokenizer, sight = load_tokenizer(str(folder)), load_sight(str(folder))
    assert sight is not None
    prompts = [
        prompt_of(tokenizer, sight, "where is the ", picture(0), "box ?", picture(1)),
        prompt_of(tokenizer, sight, "left or right"),
        prompt_of(tokenizer, sight, "up or down now"),
    ]
    return SampleBatch(
        {
            "group": np.zeros(3, dtype=np.int64),
            "episode": np.arange(3),
            "step": np.zeros(3, dtype=np.int64),
            "anchor": np.arange(3),
            "reward": np.array([1.0, 0.0, 0.2]),
            "prompt_ids": object_array([prompt.ids for prompt in prompts]),
            "images": object_array([prompt.images for prompt in prompts]),
            "next_images": object_array([()] * 3),
            "response_ids": object_array([np.array(r, dtype=np.int32) for r in RESPONSES]),
            "response_logps": object_array([np.full(len(r), -3.5, np.float32) for r in RESPONSES]),
        }
    )


@pytest.mark.ray
def test_two_learners_step_like_one_where_one_sees_nothing(pair: Pair, folder, llm):
    batch = rows(folder)
    plan = pair.config.minibatch_plan
    everything = complete_batch(batch.copy()).as_multi_agent()
    (data, _), _ = RowData(everything, plan).shard(2)
    shard: Any = data.batch
    seeing, *blind = shard.policy_batches[DEFAULT_MODULE_ID]["learner"].tolist()
    assert seeing not in blind
    alone = build_learner(tiny_config(**BASE).llm(**llm))
    before = parameters(alone)
    for iteration in range(2):
        expected = update(alone, batch, iteration)
        for report in pair.update(batch, iteration):
            for name in ("gradient_norm", "kl", "policy_loss"):
                assert report[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    expected_weights, (first, second) = parameters(alone), pair.weights()
    torch.testing.assert_close(first, expected_weights, rtol=1e-3, atol=1e-5)
    assert second == {}
    tower = [name for name in before if ".visual." in name]
    assert not any(torch.equal(first[name], before[name]) for name in tower)


@pytest.mark.ray
def test_each_learner_holds_a_part_of_the_vision_tower(pair: Pair):
    def share(learner: Any) -> float:
        tower = learner.module[DEFAULT_MODULE_ID].lm.model.visual
        held = [p.to_local().numel() for p in tower.parameters() if is_sharded(p)]
        return sum(held) / sum(p.numel() for p in tower.parameters())

    shares = pair.each(share)
    assert sum(shares) == 1.0
    assert max(shares) < 0.6


def test_every_family_can_be_sharded(tmp_path: Path):
    """In a process of its own, which is all of its group."""
    call(check_families, tmp_path, timeout=280)


def check_families(folder: str) -> None:
    """Rows with a picture, without one, and no rows: what the plain model says, and gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group", rank=0, world_size=1)
    said = np.array(RESPONSES[0], dtype=np.int32)
    for family in FAMILIES:
        path = str(build_folder(Path(folder, family), family))
        tokenizer, sight, plain = load_tokenizer(path), load_sight(path), load_causal_lm(path)
        assert sight is not None
        if family in FROZEN:
            freeze_vision(plain)
        batches = [empty_batch()]
        for parts in (("where is the ", picture(0), "box ?"), ("left or right",)):
            prompt = prompt_of(tokenizer, sight, *parts)
            batches += pack([prompt.ids], [said], 1, [prompt.images])
        for dtype, gap in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
            model = load_causal_lm(path).eval()
            if family in FROZEN:
                freeze_vision(model)
            sharding.shard(model, torch.device("cpu"), dtype=dtype)
            for batch in batches:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
                    sight.always_looks = False
                    expected = response_logps(plain, batch, sight=sight)
                    sight.always_looks = True
                    found = sharding.run(model, response_logps, batch, sight=sight)
                torch.testing.assert_close(found.logps, expected.logps, rtol=0, atol=gap)
                nothing_of(found).backward()
                nothing_of(expected).backward()
            assert without_gradient(model) == without_gradient(plain)
    dist.destroy_process_group()


def without_gradient(model: Any) -> set[str]:
    """Parameters that no pass has used, as the last layer of LLaVA's tower."""
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}
