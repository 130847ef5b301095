"""LoRA: what is trained, what the reference is, what engines and checkpoints get."""

import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from transformers import AutoModelForCausalLM, PreTrainedModel

from rllib_gigpo import GiGPOConfig, LoRASettings, lora
from rllib_gigpo.engines.packing import unpack
from rllib_gigpo.learner import GiGPOTorchLearner
from rllib_gigpo.sequences import MicroBatch, pack, response_logps
from tests.contract.tiny_models import build_tiny_folder, tiny_model
from tests.tiny_runs import build_learner, module_of, random_rows, tiny_config, update

FAMILIES = ("qwen2", "qwen3", "llama")
MATRICES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
SETTINGS = LoRASettings(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """One folder per family; Llama's embeddings are not tied, the others' are."""
    root = tmp_path_factory.mktemp("models")
    return {f: str(build_tiny_folder(root / f, f, tied=f != "llama")) for f in FAMILIES}


@pytest.fixture(params=FAMILIES)
def folder(request, folders) -> str:
    return folders[request.param]


def lora_config(folder: str, settings: LoRASettings | None = SETTINGS, **llm) -> GiGPOConfig:
    config = tiny_config(lr=0.02, kl_coeff=0.01)
    return config.llm(model=folder, options={}, lora=settings, **llm)


def lora_learner(folder: str, settings: LoRASettings | None = SETTINGS, **llm) -> GiGPOTorchLearner:
    return build_learner(lora_config(folder, settings, **llm))


def trained_learner(folder: str, steps: int = 2) -> GiGPOTorchLearner:
    learner = lora_learner(folder)
    for iteration in range(steps):
        update(learner, random_rows(), iteration)
    return learner


def micro_batch() -> MicroBatch:
    rows = random_rows(seed=7)
    (batch,) = pack(rows["prompt_ids"], rows["response_ids"], 10_000)
    return batch


@torch.no_grad()
def logps(learner: GiGPOTorchLearner, *, reference: bool = False) -> torch.Tensor:
    return module_of(learner).score(micro_batch(), reference=reference).logps


@torch.no_grad()
def plain_logps(model: PreTrainedModel) -> torch.Tensor:
    return response_logps(model, micro_batch()).logps


def adapter(learner: GiGPOTorchLearner) -> dict[str, torch.Tensor]:
    return {n: p for n, p in module_of(learner).named_parameters() if "lora_" in n}


class TestSettings:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("rank", 0),
            ("rank", 2.0),
            ("rank", True),
            ("alpha", 0.0),
            ("alpha", float("inf")),
            ("dropout", 1.0),
            ("dropout", -0.1),
            ("targets", ()),
            ("targets", "q_proj"),
            ("targets", ["q_proj"]),
            ("targets", (1,)),
        ],
    )
    def test_faults_are_named(self, field, value):
        with pytest.raises(ValueError, match=f"LoRA {field}="):
            LoRASettings(**{field: value})

    def test_the_config_takes_settings_only(self):
        with pytest.raises(ValueError, match=r"lora=8: expected LoRASettings"):
            tiny_config().llm(lora=8).validate()

    def test_frozen_weights_alone_may_be_bfloat16(self):
        with pytest.raises(ValueError, match="base_dtype='bfloat16' without lora"):
            tiny_config().llm(base_dtype="bfloat16", dtype="bfloat16").validate()

    def test_a_bfloat16_base_needs_bfloat16_products(self):
        with pytest.raises(ValueError, match="base_dtype='bfloat16' with dtype='float32'"):
            tiny_config().llm(base_dtype="bfloat16", lora=SETTINGS).validate()

    def test_a_missing_peft_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(ImportError, match=r"pip install -e '\.\[lora\]'"):
            lora.add_adapter(tiny_model("llama", tied=True), SETTINGS, seed=0)


class TestAdapter:
    def test_every_matrix_but_embeddings_and_output_layer_gets_one(self, folder):
        module = module_of(lora_learner(folder))
        # Two blocks of seven matrices.
        expected = {
            f"model.layers.{block}.{part}.{name}"
            for block in (0, 1)
            for name in MATRICES
            for part in ["self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"]
        }
        assert set(lora.adapted_layers(module.lm)) == expected

    def test_named_targets_only(self, folder):
        learner = lora_learner(folder, LoRASettings(rank=2, targets=("v_proj", "q_proj")))
        names = {name.split(".")[-1] for name in lora.adapted_layers(module_of(learner).lm)}
        assert names == {"q_proj", "v_proj"}

    @pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens", "self_attn"])
    def test_an_unknown_target_is_named_with_the_known(self, target):
        with pytest.raises(ValueError, match=f"{target}'.*choose from {', '.join(MATRICES)}"):
            lora.add_adapter(
                tiny_model("llama", tied=False), LoRASettings(targets=("q_proj", target)), seed=0
            )

    def test_an_untrained_one_changes_nothing(self, folder):
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        assert torch.equal(logps(lora_learner(folder)), plain_logps(plain))

    def test_the_seed_decides_it(self, folders):
        def first(seed: int) -> torch.Tensor:
            model = tiny_model("llama", tied=True)
            lora.add_adapter(model, SETTINGS, seed)
            layers = list(lora.adapted_layers(model).values())
            return layers[0].lora_A["default"].weight.detach()

        torch.manual_seed(0)
        one = first(1)
        torch.manual_seed(1)
        assert torch.equal(one, first(1))
        assert not torch.equal(one, first(2))
        # q_proj has 64 inputs: uniform in +-1/8, whose standard deviation is 0.125 / sqrt(3).
        assert float(one.abs().max()) <= 0.125
        assert float(one.std()) == pytest.approx(0.0722, rel=0.15)

    def test_the_merged_matrix_is_what_the_formula_says(self):
        model = tiny_model("llama", tied=True)
        before = model.model.layers[0].self_attn.q_proj.weight.clone()
        lora.add_adapter(model, LoRASettings(rank=2, alpha=3.0, targets=("q_proj",)), seed=0)
        layer = lora.adapted_layers(model)["model.layers.0.self_attn.q_proj"]
        with torch.no_grad():
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            down.zero_()
            down[0, 5], down[1, 6] = 1.0, 10.0
            up[3, 0], up[3, 1] = 2.0, 4.0
        difference = lora.merged_weights(model)["model.layers.0.self_attn.q_proj.weight"] - before
        # (alpha / rank) B A = 1.5 * [2 * 1 at column 5, 4 * 10 at column 6] in row 3.
        expected = torch.zeros_like(before)
        expected[3, 5], expected[3, 6] = 3.0, 60.0
        torch.testing.assert_close(difference, expected, rtol=0, atol=1e-5)

    def test_dropout_works_on_passes_with_gradients_only(self, folders):
        learner = lora_learner(folders["llama"], LoRASettings(rank=4, dropout=0.5))
        with torch.no_grad():
            for parameter in adapter(learner).values():
                parameter += 0.1
        module = module_of(learner)
        module.train()
        still = logps(learner)
        assert torch.equal(still, logps(learner))
        assert not torch.allclose(module.score(micro_batch()).logps, still, atol=1e-2)
        assert torch.equal(still, logps(learner))


class TestTraining:
    def test_only_the_adapter_is_trained(self, folder):
        learner = lora_learner(folder)
        module = module_of(learner)
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        trained = {n for n, p in module.named_parameters() if p.requires_grad}
        assert trained == set(adapter(learner))
        assert len(trained) == 2 * 14  # A and B of 2 * 7 matrices
        optimizer = learner.get_optimizer(DEFAULT_MODULE_ID)
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert optimized == {id(p) for p in adapter(learner).values()}
        for iteration in range(2):
            update(learner, random_rows(), iteration)
        changed = {n for n, p in module.named_parameters() if not torch.equal(p, before[n])}
        assert changed == trained

    def test_the_reference_is_the_base_without_a_second_copy(self, folder):
        learner = lora_learner(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        start = plain_logps(plain)
        kl = [update(learner, random_rows(), iteration)["kl"] for iteration in range(3)]
        assert module_of(learner).reference is None
        assert torch.equal(logps(learner, reference=True), start)
        assert float((logps(learner) - start).abs().mean()) > 0.01
        # Adapters are back on and trainable after the reference has spoken.
        assert all(parameter.requires_grad for parameter in adapter(learner).values())
        assert abs(kl[0]) < 1e-6
        assert 0 < kl[1] < kl[2]

    def test_the_adapter_stays_trainable_while_it_is_off(self, folders):
        model = tiny_model("llama", tied=True)
        start = plain_logps(model)
        lora.add_adapter(model, SETTINGS, seed=0)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += 0.1 * (name in trained)
        adapted = plain_logps(model)
        assert not torch.allclose(adapted, start, atol=1e-2)
        with suppress(KeyError), lora.adapter_off(model):
            assert {n for n, p in model.named_parameters() if p.requires_grad} == trained
            assert torch.equal(plain_logps(model), start)
            raise KeyError
        assert torch.equal(plain_logps(model), adapted)

    def test_no_reference_without_kl(self, folders):
        config = lora_config(folders["llama"]).training(kl_coeff=0.0)
        with pytest.raises(ValueError, match="keeps no reference"):
            logps(build_learner(config), reference=True)

    def test_micro_batches_do_not_change_the_step(self, folder):
        whole, split = lora_learner(folder), lora_learner(folder)
        split.config.micro_batch_tokens = 16
        for learner in (whole, split):
            update(learner, random_rows())
        torch.testing.assert_close(adapter(split), adapter(whole), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
    def test_bfloat16_products_leave_the_adapter_fp32(self, folder, base_dtype):
        learner = lora_learner(folder, dtype="bfloat16", base_dtype=base_dtype)
        module = module_of(learner)
        exact = logps(lora_learner(folder))
        start = logps(learner)
        assert float((start - exact).abs().max()) < 0.2
        assert {p.dtype for p in adapter(learner).values()} == {torch.float32}
        others = {p.dtype for p in module.parameters() if not p.requires_grad}
        assert others == {getattr(torch, base_dtype)}
        for iteration in range(2):
            update(learner, random_rows(), iteration)
        assert torch.equal(logps(learner, reference=True), start)
        assert not torch.equal(logps(learner), start)
        assert {array.dtype for array in module.get_state().values()} == {np.dtype(np.float32)}


class TestWeights:
    def test_a_plain_model_with_the_merged_weights_says_the_same(self, folder):
        learner = trained_learner(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        weights = module_of(learner).policy_weights()
        # Every parameter under its own name, tied ones once.
        assert set(weights) == {name for name, _ in plain.named_parameters()}
        before = plain_logps(plain)
        plain.load_state_dict(weights, strict=False)
        torch.testing.assert_close(plain_logps(plain), logps(learner), rtol=0, atol=1e-5)
        assert float((plain_logps(plain) - before).abs().mean()) > 0.01

    def test_merging_leaves_the_policy_alone(self, folder):
        learner = trained_learner(folder)
        before = {n: p.detach().clone() for n, p in module_of(learner).named_parameters()}
        module_of(learner).policy_weights()
        after = dict(module_of(learner).named_parameters())
        torch.testing.assert_close(after, before, rtol=0, atol=0)

    def test_engines_get_their_own_type(self, folders):
        learner = lora_learner(folders["qwen2"], dtype="bfloat16", base_dtype="bfloat16")
        update(learner, random_rows())
        (packed,) = learner.packed_weights().values()
        sent = unpack(packed)
        exact = module_of(learner).policy_weights()
        assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in exact.items()}
        torch.testing.assert_close(sent, rounded, rtol=0, atol=0)

    def test_all_weights_are_sent_as_they_are_without_lora(self, folder):
        module = module_of(lora_learner(folder, None))
        parameters = dict(module.lm.named_parameters())
        weights = module.policy_weights()
        assert {n: t.data_ptr() for n, t in weights.items()} == {
            n: p.data_ptr() for n, p in parameters.items()
        }

    def test_there_is_no_adapter_without_lora(self, folders):
        with pytest.raises(ValueError, match="has no adapter"):
            module_of(lora_learner(folders["llama"], None)).adapter_weights()


class TestState:
    def test_holds_the_adapter_only(self, folder):
        learner = trained_learner(folder)
        state = module_of(learner).get_state()
        torch.testing.assert_close(
            {name: torch.from_numpy(array) for name, array in state.items()},
            {name: parameter.detach() for name, parameter in adapter(learner).items()},
            rtol=0,
            atol=0,
        )

    def test_nothing_is_sent_to_env_runners_by_it(self, folders):
        for settings in (None, SETTINGS):
            learner = lora_learner(folders["llama"], settings)
            assert module_of(learner).get_state(inference_only=True) == {}

    def test_a_restored_learner_goes_on_exactly(self, folder, tmp_path):
        first = trained_learner(folder)
        first.save_to_path(tmp_path)
        second = lora_learner(folder)
        second.restore_from_path(tmp_path)
        assert torch.equal(logps(second), logps(first))
        for learner in (first, second):
            update(learner, random_rows(seed=3), 2)
        torch.testing.assert_close(adapter(second), adapter(first), rtol=0, atol=0)
        assert torch.equal(logps(second), logps(first))

    @pytest.mark.parametrize(
        ("saved", "restored", "trains"),
        [
            (None, SETTINGS, "a LoRA adapter"),
            (SETTINGS, None, "all weights"),
            (SETTINGS, LoRASettings(rank=4, targets=("q_proj",)), "a LoRA adapter"),
            (LoRASettings(rank=4, targets=("q_proj",)), SETTINGS, "a LoRA adapter"),
        ],
    )
    def test_one_of_another_kind_of_run_is_refused(self, folders, saved, restored, trains):
        state = module_of(lora_learner(folders["llama"], saved)).get_state()
        module = module_of(lora_learner(folders["llama"], restored))
        with pytest.raises(ValueError, match=f"which trains {trains}: .* saved with"):
            module.set_state(state)

    def test_a_run_without_reference_may_go_on_with_one(self, folders):
        config = lora_config(folders["llama"], None)
        first = build_learner(config, kl_coeff=0.0)
        update(first, random_rows())
        second = build_learner(config)
        start = logps(second, reference=True)
        module_of(second).set_state(module_of(first).get_state())
        assert torch.equal(logps(second), logps(first))
        assert torch.equal(logps(second, reference=True), start)
