"""What FSDP remembers of a model between passes, in a process that is a group by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.rllib.core import DEFAULT_MODULE_ID
from torch.distributed.fsdp import FSDPModule

from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.module import CausalLMModule
from rllib_gigpo.sequences import MicroBatch, pack
from tests.child import call
from tests.tiny_runs import bare_learner, random_rows, tiny_config


def micro_batch() -> MicroBatch:
    rows = random_rows()
    return pack(rows["prompt_ids"], rows["response_ids"], 10_000)[0]


def sharded_module(**llm: object) -> CausalLMModule:
    learner = bare_learner(tiny_config(kl_coeff=0.5).llm(**llm))
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    module.shard(torch.device("cpu"))
    return module


def known_passes() -> dict[str, list[int]]:
    """How many passes FSDP knows of, after a reference has scored and after the end of that."""
    module = sharded_module()
    parts: list[Any] = [m for m in module.reference.modules() if isinstance(m, FSDPModule)]
    states = [part._get_fsdp_state() for part in parts]
    groups = [group for state in states for group in state._fsdp_param_groups]

    def known() -> int:
        order = states[0]._comm_ctx.post_forward_order
        return len(order) + sum(len(group._post_forward_indices) for group in groups)

    found: dict[str, list[int]] = {"scored": [], "ended": []}
    answers = []
    for _ in range(3):
        with torch.no_grad():
            answers.append(module.score(micro_batch(), reference=True).logps)
        found["scored"].append(known())
        module.end_reference_passes()
        found["ended"].append(known())
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    return found


def gradient_types() -> list[str]:
    """Of an adapter whose reference made the very first pass."""
    module = sharded_module(lora=LoRASettings(rank=2), dtype="bfloat16", base_dtype="bfloat16")
    with torch.no_grad():
        module.score(micro_batch(), reference=True)
    module.score(micro_batch()).logps.sum().backward()
    gradients = [p.grad for p in module.lm.parameters() if p.requires_grad]
    return [str(None if gradient is None else gradient.dtype) for gradient in gradients]


def look(folder: str) -> list[Any]:
    """Both, in one process."""
    dist.init_process_group("gloo", f"file://{folder}/group", rank=0, world_size=1)
    found = [known_passes(), gradient_types()]
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[Any]:
    pytest.importorskip("peft")
    return call(look, tmp_path_factory.mktemp("group"), timeout=280)


def test_a_reference_does_not_remember_its_passes(found):
    passes = found[0]
    assert passes["ended"] == [0, 0, 0]
    assert passes["scored"][0] == passes["scored"][2] > 0


def test_an_adapters_reference_may_make_the_first_pass(found):
    assert found[1] == ["torch.float32"] * (2 * 7)  # A and B of the seven matrices of one layer
