"""Liger's kernels, by Triton's interpreter, take the steps of the layers that they replace.

In fp32, as the interpreter computes in NumPy, which has no bfloat16. In a process of their own:
Triton chooses its interpreter when it is imported, and Liger replaces the classes of a model's
type.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.learner import GiGPOTorchLearner
from rllib_gigpo.liger import use_liger_kernels
from rllib_gigpo.lora import LoRASettings
from tests.child import call
from tests.missing import skip_or_fail
from tests.tiny_runs import (
    bare_learner,
    build_learner,
    module_of,
    parameters,
    random_rows,
    tiny_config,
    update,
)

LAYERS = ["input_layernorm", "mlp", "norm", "post_attention_layernorm"]


def configs() -> dict[str, GiGPOConfig]:
    return {
        # The policy, its reference, and the critic's body.
        "three models": tiny_config(kl_coeff=0.5, critic="model", estimator="gae", omega=0.0),
        "recomputing": tiny_config().learners(activation_checkpointing=True),
        "adapter": tiny_config().llm(lora=LoRASettings(rank=2)),
    }


def compare() -> dict[str, dict[str, Any]]:
    """One update with and without, for each configuration."""
    from tests import interpreted_triton

    interpreted_triton.prepare()
    rows = random_rows(4, group_size=2)
    # Liger changes the classes of the type, so the plain learners come first.
    plain = {name: _step(config, rows) for name, config in configs().items()}
    with_kernels = {
        name: _step(config.learners(use_liger_kernel=True), rows)
        for name, config in configs().items()
    }
    return {
        name: {
            "norms": [plain[name][1], with_kernels[name][1]],
            "moved": _distance(plain[name][0], plain[name][2]),
            "apart": _distance(plain[name][2], with_kernels[name][2]),
            "layers": with_kernels[name][3],
        }
        for name in plain
    }


def _step(config: GiGPOConfig, rows: Any) -> tuple[dict, float, dict, list[list[str]]]:
    """The parameters before, the gradient's norm, those after, and Liger's layers per model."""
    learner = build_learner(config)
    before = parameters(learner)
    norm = update(learner, rows)["gradient_norm"]
    return before, norm, parameters(learner), _layers(learner)


def _layers(learner: GiGPOTorchLearner) -> list[list[str]]:
    module = module_of(learner)
    models = filter(None, (module.lm, module.reference, module.value_body))
    return [
        sorted(
            {
                name.rsplit(".", 1)[-1]
                for name, layer in model.named_modules()
                if "liger" in layer.forward.__module__
            }
        )
        for model in models
    ]


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    for package in ("liger_kernel", "triton"):
        if importlib.util.find_spec(package) is None:
            skip_or_fail(f"{package} is not installed")
    return call(compare, env={"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize(
    ("name", "models"), [("three models", 3), ("recomputing", 1), ("adapter", 1)]
)
def test_the_step_is_the_same(found, name: str, models: int):
    one = found[name]
    assert one["layers"] == [LAYERS] * models
    assert one["norms"][1] == pytest.approx(one["norms"][0], rel=1e-5)
    assert one["moved"] > 1e-4
    assert one["apart"] < 1e-4 * one["moved"]


def test_a_type_without_kernels_is_refused():
    pytest.importorskip("liger_kernel")

    class Config:
        model_type = "gpt2"

    class Model:
        config = Config()

    with pytest.raises(ValueError, match=r"type 'gpt2': Liger has kernels for .*qwen2, .*; set"):
        use_liger_kernels(Model())  # pyright: ignore[reportArgumentType]


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[liger\]'"):
        use_liger_kernels(None)  # pyright: ignore[reportArgumentType]


def test_kernels_do_not_run_while_models_are_built_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """Here they refuse to, as they do without an interpreter; a second policy is of their type."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    patched = []

    def on_gpus_only(*_: Any) -> None:
        raise RuntimeError("Pointer argument cannot be accessed from Triton")

    def use(model: Any) -> None:
        patched.append(model)
        monkeypatch.setattr(type(model.base_model.norm), "forward", on_gpus_only)

    monkeypatch.setattr("rllib_gigpo.module.use_liger_kernels", use)
    config = tiny_config(kl_coeff=0.5, critic="model", estimator="gae", omega=0.0)
    config.environment("ArithmeticTeam").learners(use_liger_kernel=True)
    config.env_config = {}
    agents = {"solver", "verifier"}
    config.multi_agent(policies=agents, policy_mapping_fn=lambda agent, *_, **__: agent)
    bare_learner(config)
    assert len(patched) == 2 * 3


def test_learners_without_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="num_gpus_per_learner=0: Liger's kernels need a GPU"):
        tiny_config().learners(use_liger_kernel=True).validate()
    tiny_config().learners(use_liger_kernel=True, num_gpus_per_learner=1).validate()
