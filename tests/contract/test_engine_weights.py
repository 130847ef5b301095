"""Every engine takes weights and adapters as the contract of `rllib_gigpo/engines/base.py` says.

Once per kind of engine; `test_engines.py` does the same for what it generates.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from engine_client import (
    EXACT,
    FRESH,
    MODELS,
    POLICY,
    PROMPT,
    Client,
    model_of,
    weights_of,
)
from tiny_models import forward_logps, tiny_adapter
from transformers import PreTrainedModel

from rllib_gigpo.engines.base import Completion, EngineError
from rllib_gigpo.engines.packing import checksums

# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", MODELS)
@pytest.mark.parametrize("sent", ["parameters", "state"])
def test_new_weights_serve_at_once(
    client: Client, references: dict[str, PreTrainedModel], policy: str, sent: str
) -> None:
    """Equal prompts are asked for again, so that a stale prefix cache would show."""
    prompt = np.arange(3, 103)
    old = client.one(prompt, policy=policy)
    new_model = model_of(policy, seed=11)
    tensors = new_model.named_parameters() if sent == "parameters" else new_model.state_dict()
    try:
        client.engine.load_weights(policy, dict(tensors), 7)
        new = client.one(prompt, policy=policy)
        assert client.engine.version(policy) == new.weight_version == 7
        expected = forward_logps(new_model, prompt, new.token_ids)
        np.testing.assert_allclose(new.logps, expected, atol=EXACT)
        stale = forward_logps(references[policy], prompt, new.token_ids)
        assert np.abs(new.logps - stale).mean() > 0.1
    finally:
        client.engine.load_weights(policy, weights_of(policy), 0)
    again = client.one(prompt, policy=policy)
    np.testing.assert_array_equal(old.token_ids, again.token_ids)
    np.testing.assert_allclose(old.logps, again.logps, atol=EXACT)


def test_a_small_change_of_one_layer_shows(
    client: Client, references: dict[str, PreTrainedModel]
) -> None:
    """Each parameter reaches the engine, not only the large ones."""
    policy = "qwen3-untied"
    model = model_of(policy)
    for name, parameter in model.named_parameters():
        original = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.05 * torch.randn_like(parameter)
        client.engine.load_weights(policy, dict(model.named_parameters()), 1)
        completion = client.one(policy=policy)
        expected = forward_logps(model, PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.logps, expected, atol=EXACT, err_msg=name)
        stale = forward_logps(references[policy], PROMPT, completion.token_ids)
        assert np.abs(completion.logps - stale).max() > 10 * EXACT, name
        with torch.no_grad():
            parameter.copy_(original)
    client.engine.load_weights(policy, weights_of(policy), 0)


def test_loading_one_policy_leaves_the_others(client: Client) -> None:
    before = client.one(policy=FRESH)
    client.engine.load_weights(POLICY, weights_of(POLICY, seed=5), 3)
    after = client.one(policy=FRESH)
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    np.testing.assert_allclose(before.logps, after.logps, atol=1e-6)
    assert client.engine.version(FRESH) == after.weight_version == 0
    client.engine.load_weights(POLICY, weights_of(POLICY), 0)


def test_loading_while_requests_run_is_refused(client: Client) -> None:
    async def scenario() -> Completion:
        request = client.request(max_tokens=200)
        task = asyncio.create_task(client.engine.generate(request))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"run"):
            client.engine.load_weights(POLICY, weights, 5)
        await client.engine.abort(request.request_id)
        return await task

    weights = weights_of(POLICY)
    version = client.engine.version(POLICY)
    assert client.run(scenario()).weight_version == version
    assert client.engine.version(POLICY) == version


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused(
    client: Client, references: dict[str, PreTrainedModel], fault: str
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = weights_of(POLICY, seed=4)
    parameter = tensors.pop(name)
    if fault == "unknown":
        tensors |= {name: parameter, "model.layers.7.mlp.up_proj.weight": parameter}
    if fault == "shape":
        tensors[name] = torch.nn.Parameter(parameter[:-1].clone())
    with pytest.raises(EngineError, match=r"up_proj"):
        client.engine.load_weights(POLICY, tensors, 5)
    completion = client.one()
    expected = forward_logps(references[POLICY], PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.logps, expected, atol=EXACT)


def test_unknown_policies_have_no_weights(client: Client) -> None:
    with pytest.raises(EngineError, match="nobody"):
        client.engine.load_weights("nobody", {}, 1)
    with pytest.raises(EngineError, match="nobody"):
        client.engine.version("nobody")


# --- adapters -----------------------------------------------------------------------------------


def assert_served_by(model: Any, completion: Completion) -> None:
    expected = forward_logps(model, PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.logps, expected, atol=EXACT)


@pytest.mark.parametrize("policy", MODELS)
def test_each_adapter_version_serves_like_its_merged_model(
    client: Client, references: dict[str, PreTrainedModel], policy: str
) -> None:
    family, tied = MODELS[policy]
    base = references[policy]
    for version in (1, 2, 3):
        adapter = tiny_adapter(family, tied=tied, seed=version)
        client.engine.load_adapter(policy, adapter.tensors, adapter.config, version)
        completion = client.one(policy=policy)
        assert completion.weight_version == client.engine.version(policy) == version
        assert_served_by(adapter.merged, completion)
        difference = completion.logps - forward_logps(base, PROMPT, completion.token_ids)
        assert np.abs(difference).mean() > 0.1
    new_base = model_of(policy, seed=5)
    client.engine.load_weights(policy, dict(new_base.named_parameters()), 4)
    assert_served_by(new_base, client.one(policy=policy))
    client.engine.load_weights(policy, weights_of(policy), 0)
    assert_served_by(base, client.one(policy=policy))


def test_an_adapter_of_fewer_layers_leaves_the_others_as_they_were(client: Client) -> None:
    """The second adapter's matrices only: nothing of the first one stays."""
    first = tiny_adapter("llama", tied=True, seed=1)
    second = tiny_adapter("llama", tied=True, seed=2)
    part = {name: value for name, value in second.tensors.items() if "down_proj" in name}
    config = {**second.config, "target_modules": ["down_proj"]}
    merged = model_of(POLICY)
    for name, module in merged.named_modules():
        if name.endswith("down_proj"):
            a, b = (part[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
            module.weight.data += 2.0 * b @ a
    client.engine.load_adapter(POLICY, first.tensors, first.config, 1)
    client.engine.load_adapter(POLICY, part, config, 2)
    assert_served_by(merged, client.one())
    client.engine.load_weights(POLICY, weights_of(POLICY), 0)


def test_an_adapter_that_does_not_fit_leaves_the_old_one(client: Client) -> None:
    old = tiny_adapter("llama", tied=True, seed=1)
    client.engine.load_adapter(POLICY, old.tensors, old.config, 1)
    new = tiny_adapter("llama", tied=True, seed=2)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    faults = [
        {**new.tensors, name.replace("q_proj", "x_proj"): new.tensors[name]},
        {**new.tensors, name: new.tensors[name][:, :-1]},
        {key: value for key, value in new.tensors.items() if key != name},
        {},
    ]
    for tensors in faults:
        with pytest.raises(EngineError, match="adapter"):
            client.engine.load_adapter(POLICY, tensors, new.config, 2)
    for config in ({"r": 4}, {**new.config, "use_rslora": True}):
        with pytest.raises(EngineError, match="configuration"):
            client.engine.load_adapter(POLICY, new.tensors, config, 2)
    completion = client.one()
    assert completion.weight_version == 1
    assert_served_by(old.merged, completion)
    with pytest.raises(EngineError, match="nobody"):
        client.engine.load_adapter("nobody", new.tensors, new.config, 2)
    client.engine.load_weights(POLICY, weights_of(POLICY), 0)


def test_an_adapter_while_requests_run_is_refused(client: Client) -> None:
    adapter = tiny_adapter("llama", tied=True)

    async def scenario() -> None:
        request = client.request(max_tokens=200)
        task = asyncio.create_task(client.engine.generate(request))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"run"):
            client.engine.load_adapter(POLICY, adapter.tensors, adapter.config, 5)
        await client.engine.abort(request.request_id)
        await task

    client.run(scenario())


# --- checksums ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", MODELS)
def test_checksums_are_those_of_what_was_loaded_last(client: Client, policy: str) -> None:
    family, tied = MODELS[policy]
    weights = weights_of(policy, seed=3)
    adapter = tiny_adapter(family, tied=tied, seed=1)
    try:
        client.engine.load_weights(policy, weights, 1)
        assert client.engine.checksums(policy) == checksums(weights)
        client.engine.load_adapter(policy, adapter.tensors, adapter.config, 2)
        assert client.engine.checksums(policy) == checksums(adapter.tensors)
        other = tiny_adapter(family, tied=tied, seed=2)
        client.engine.load_adapter(policy, other.tensors, other.config, 3)
        assert client.engine.checksums(policy) == checksums(other.tensors)
    finally:
        client.engine.load_weights(policy, weights_of(policy), 0)
    assert client.engine.checksums(policy) == checksums(weights_of(policy))
    with pytest.raises(EngineError, match="nobody"):
        client.engine.checksums("nobody")


# --- sleep --------------------------------------------------------------------------------------


def test_sleep_and_wake_keep_the_weights_that_were_loaded_last(
    client: Client, references: dict[str, PreTrainedModel]
) -> None:
    """Not those that the engine was started with, which are still on the disk."""
    first, second = model_of(POLICY, seed=8), model_of(POLICY, seed=9)
    try:
        client.engine.load_weights(POLICY, dict(first.named_parameters()), 6)
        before = client.one(seed=4)
        client.engine.sleep()
        client.engine.wake()
        after = client.one(seed=4)
        assert client.engine.version(POLICY) == after.weight_version == 6
        np.testing.assert_array_equal(before.token_ids, after.token_ids)
        np.testing.assert_allclose(before.logps, after.logps, atol=EXACT)
        assert_served_by(first, after)
        stale = forward_logps(references[POLICY], PROMPT, after.token_ids)
        assert np.abs(after.logps - stale).mean() > 0.1
        client.engine.sleep()
        client.engine.load_weights(POLICY, dict(second.named_parameters()), 7)
        client.engine.wake()
        asleep = client.one(seed=4)
        assert client.engine.version(POLICY) == asleep.weight_version == 7
        assert_served_by(second, asleep)
    finally:
        client.engine.load_weights(POLICY, weights_of(POLICY), 0)
