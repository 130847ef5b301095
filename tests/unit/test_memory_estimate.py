"""The memory estimate: by hand where it counts, against a real pass where it simulates."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import transformers

from rllib_gigpo import sharding
from rllib_gigpo.memory_estimate import Plan, estimate, main, plan_of, table
from rllib_gigpo.recompute import allow_recompute, recompute_layers
from tests.child import call
from tests.tiny_runs import tiny_config

CONFIG = transformers.LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
# Embeddings 1000 x 64; per layer q and o 64 x 64, k and v 32 x 64, three matrices 64 x 128 and two
# norms of 64; the last norm 64.
LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64
PARAMETERS = 1000 * 64 + 3 * LAYER + 64
PLAN = Plan(sequence_tokens=32, response_tokens=8, micro_batch_tokens=128, engine_sequences=5)


def test_what_is_held_by_hand():
    plan = dataclasses.replace(PLAN, with_reference=True)
    update = estimate(CONFIG, plan)["update"]
    # fp32: weights, gradients and a reference once, AdamW's two moments.
    assert update["weights"] == update["gradients"] == update["reference"] == 4 * PARAMETERS
    assert update["optimizer"] == 8 * PARAMETERS
    # 128 // 32 = 4 rows of 8 response tokens, three buffers of fp32 logits.
    assert update["logits"] == 3 * 4 * 8 * 1000 * 4
    # Twice the largest matrix, the embeddings.
    assert update["temporaries"] == 2 * 4 * 1000 * 64


def test_an_engine_by_hand():
    engine = estimate(CONFIG, dataclasses.replace(PLAN, dtype="bfloat16"))["engine"]
    assert engine["weights"] == 2 * PARAMETERS
    # Keys and values, 3 layers, 2 heads of 16, bf16, 5 sequences of 32 tokens.
    assert engine["keys and values"] == 2 * 3 * 2 * 16 * 2 * 5 * 32


def test_an_adapter_by_hand():
    plan = dataclasses.replace(PLAN, lora_parameters=100, base_dtype="bfloat16", dtype="bfloat16")
    update = estimate(CONFIG, plan)["update"]
    assert (update["weights"], update["optimizer"], update["gradients"]) == (400, 800, 400)
    assert update["frozen weights"] == 2 * PARAMETERS


def test_a_team_by_hand():
    plan = dataclasses.replace(PLAN, with_reference=True, policies=2, untrained_policies=1)
    update = estimate(CONFIG, plan)["update"]
    # All three hold weights and a reference; what is not trained has no gradients and no moments.
    assert update["weights"] == update["reference"] == 3 * 4 * PARAMETERS
    assert (update["optimizer"], update["gradients"]) == (2 * 8 * PARAMETERS, 2 * 4 * PARAMETERS)
    adapters = dataclasses.replace(PLAN, lora_parameters=100, policies=2, num_learners=2)
    # One base for both adapters; where it is spread over two learners, each has one of its own.
    assert estimate(CONFIG, adapters)["update"]["frozen weights"] == 4 * PARAMETERS
    spread = dataclasses.replace(adapters, sharding="fsdp")
    assert estimate(CONFIG, spread)["update"]["frozen weights"] == 4 * PARAMETERS
    assert estimate(CONFIG, adapters)["update"]["weights"] == 2 * 4 * 100


def test_a_team_makes_a_plan():
    config = tiny_config().environment("ArithmeticTeam")
    config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent, *_, **__: "a")
    assert (plan_of(config).policies, plan_of(config).untrained_policies) == (2, 0)
    config.multi_agent(policies_to_train=["b"])
    assert (plan_of(config).policies, plan_of(config).untrained_policies) == (1, 1)


def test_sharding_divides_what_is_held_and_gathers_two_layers():
    plan = dataclasses.replace(PLAN, sharding="fsdp", num_learners=4)
    update = estimate(CONFIG, plan)["update"]
    assert update["weights"] == PARAMETERS
    assert update["gathered weights"] == 4 * (1000 * 64 + 64 + 2 * LAYER)
    phases = estimate(CONFIG, dataclasses.replace(plan, offload_to_cpu=True))
    assert "weights" not in phases["update"]
    assert phases["host"]["optimizer"] == 2 * PARAMETERS


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_backward_keeps_is_that_of_a_real_pass(dtype, checkpointing):
    plan = dataclasses.replace(PLAN, dtype=dtype, activation_checkpointing=checkpointing)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG).eval()
    if checkpointing:
        allow_recompute(model)
        recompute_layers(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")
    # Rows of different lengths, as micro-batches have them: attention reads a mask.
    ids, is_token = torch.zeros(4, 32, dtype=torch.long), torch.ones(4, 32, dtype=torch.long)
    is_token[0, 30:] = 0
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.base_model(input_ids=ids, attention_mask=is_token, use_cache=False)
    assert out.last_hidden_state.requires_grad
    expected = sum(kept.values())
    found = estimate(CONFIG, plan)
    copies = 2 * PARAMETERS if dtype == "bfloat16" else 0
    if checkpointing:
        # Beside the inputs of the layers, the insides of the one that is computed again, or
        # autocast's copies of all weights, whatever is more.
        expected += max(copies, found["score"]["activations"] - copies)
    assert found["update"]["activations"] == pytest.approx(expected, rel=0.01)


def test_a_critics_own_body_waits_for_the_backward_pass_too():
    alone = estimate(CONFIG, PLAN)["update"]
    both = estimate(CONFIG, dataclasses.replace(PLAN, with_critic_model=True))["update"]
    assert both["activations"] == 2 * alone["activations"]


def test_what_a_sharded_model_keeps_in_bf16_is_that_of_a_real_pass(tmp_path):
    expected = call(kept_sharded, tmp_path, timeout=280)
    plan = dataclasses.replace(PLAN, dtype="bfloat16", sharding="fsdp")
    assert estimate(CONFIG, plan)["update"]["activations"] == pytest.approx(expected, rel=0.01)


def kept_sharded(folder: str) -> int:
    """Bytes that are there for the backward pass once the weights are let go of again."""
    dist.init_process_group("gloo", f"file://{folder}/group", rank=0, world_size=1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG).eval()
    sharding.shard(model, torch.device("cpu"), dtype=torch.bfloat16)
    own = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    ids, is_token = torch.zeros(4, 32, dtype=torch.long), torch.ones(4, 32, dtype=torch.long)
    is_token[0, 30:] = 0
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out = sharding.run(
            model,
            lambda lm: lm.base_model(input_ids=ids, attention_mask=is_token, use_cache=False),
        )
    assert out.last_hidden_state.requires_grad
    sizes = [storage.nbytes() for storage in kept.values() if storage.data_ptr() not in own]
    dist.destroy_process_group()
    return sum(sizes)


def test_settings_make_a_plan(tmp_path, capsys):
    plan = plan_of(tiny_config(kl_coeff=0.1, micro_batch_tokens=77))
    assert (plan.sequence_tokens, plan.response_tokens) == (64 + 6, 6)
    assert (plan.micro_batch_tokens, plan.with_reference, plan.optimizer) == (77, True, "sgd")
    CONFIG.save_pretrained(tmp_path)
    main([str(tmp_path), "--sequence-tokens=32", "--response-tokens=8", "--dtype=float32"])
    printed = capsys.readouterr().out.strip()
    plan = Plan(sequence_tokens=32, response_tokens=8)
    assert printed == table(estimate(CONFIG, plan))
    assert printed.splitlines()[2].startswith("| score | weights | 0.00 |")
