"""Two learners that share an image-text model by FSDP take the steps of one learner.

One of them has no row with a picture, and must gather the vision tower's weights all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch

from rllib_gigpo.models import load_tokenizer
from rllib_gigpo.rows import RowData, complete_batch, object_array
from rllib_gigpo.sharding import is_sharded
from rllib_gigpo.vision.sight import load_sight
from tests.learner_pairs import Pair
from tests.tiny_runs import build_learner, parameters, tiny_config, update
from tests.vision_models import build_folder, picture, prompt_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

RESPONSES = ([5, 9, 7], [9, 12], [11, 6])
# Each row is a micro-batch of its own; the loss has its KL, so that a reference looks too.
BASE: dict[str, Any] = {"kl_coeff": 0.5, "lr": 0.05, "micro_batch_tokens": 1}


@pytest.fixture(scope="module", params=[False, True], ids=["trained tower", "frozen tower"])
def frozen(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_folder(tmp_path_factory.mktemp("qwen"), "qwen3_vl")


@pytest.fixture(scope="module")
def llm(folder: Path, frozen: bool) -> dict[str, Any]:
    return {"model": str(folder), "options": {}, "freeze_vision_tower": frozen}


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


def test_two_learners_step_like_one_where_one_sees_nothing(pair: Pair, folder, llm, frozen: bool):
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
    moved = [name for name in tower if not torch.equal(first[name], before[name])]
    assert len(moved) == (0 if frozen else len(tower))


def test_each_learner_holds_a_part_of_the_vision_tower(pair: Pair):
    def share(learner: Any) -> float:
        tower = learner.module[DEFAULT_MODULE_ID].lm.model.visual
        held = [p.to_local().numel() for p in tower.parameters() if is_sharded(p)]
        return sum(held) / sum(p.numel() for p in tower.parameters())

    shares = pair.each(share)
    assert sum(shares) == 1.0
    assert max(shares) < 0.6
