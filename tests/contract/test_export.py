"""Exported folders load in plain transformers, peft and vLLM, and say what the learner says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from tiny_models import Family, build_tiny_folder, forward_logps
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rllib_gigpo import GiGPO, LoRASettings
from rllib_gigpo.checkpoints import Place, save_whole
from rllib_gigpo.export import export, main
from rllib_gigpo.learner import GiGPOTorchLearner
from rllib_gigpo.models import materialize
from rllib_gigpo.module import CausalLMModule
from rllib_gigpo.sequences import pack
from tests.child import run_python
from tests.tiny_runs import build_learner, module_of, random_rows, tiny_config, update
from tests.with_vllm import needs_vllm

EXACT = 1e-5
LORA = LoRASettings(rank=4, alpha=8)
FAMILIES: tuple[Family, ...] = ("qwen2", "qwen3", "llama")
PROMPT = np.arange(40, 60, dtype=np.int32)
RESPONSE = np.array([57, 3, 120, 44, 299, 8, 1], dtype=np.int32)


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """One base folder per family; Llama's embeddings are not tied, the others' are."""
    root = tmp_path_factory.mktemp("bases")
    folders = {f: build_tiny_folder(root / f, f, tied=f != "llama") for f in FAMILIES}
    for folder in folders.values():
        (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }} w7")
        GenerationConfig(eos_token_id=[1, 7], temperature=0.6, do_sample=True).save_pretrained(
            folder
        )
    return folders


class Trained:
    """A learner after two updates, and its checkpoint laid out as an algorithm's."""

    def __init__(self, base: Path, folder: Path, lora: LoRASettings | None):
        config = tiny_config(lr=0.02).llm(model=str(base), options={}, lora=lora)
        self.learner: GiGPOTorchLearner = build_learner(config)
        start = logps_of(module_of(self.learner))
        for iteration in range(2):
            update(self.learner, random_rows(), iteration)
        self.logps = logps_of(module_of(self.learner))
        assert np.abs(self.logps - start).mean() > 0.01
        self.checkpoint = folder
        save_whole(
            Place.of(folder),
            lambda to: self.learner.save_to_path(to / "learner_group" / "learner"),
        )


@torch.no_grad()
def logps_of(module: CausalLMModule, prompt=PROMPT, response=RESPONSE) -> np.ndarray:
    (batch,) = pack([prompt], [response], 1000)
    return module.score(batch).logps[0].numpy()


@pytest.fixture(scope="module")
def trained(bases, tmp_path_factory):
    """Make or find the run of a family, with or without LoRA."""
    made: dict[tuple[str, bool], Trained] = {}

    def find(family: str, *, lora: bool) -> Trained:
        key = (family, lora)
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[key] = Trained(bases[family], folder, LORA if lora else None)
        return made[key]

    return find


def assert_says(model, logps: np.ndarray) -> None:
    found = forward_logps(model, PROMPT, RESPONSE)
    np.testing.assert_allclose(found, logps, rtol=0, atol=EXACT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["full", "merged"])
def test_transformers_loads_a_whole_model(trained, tmp_path, family, kind):
    run = trained(family, lora=kind == "merged")
    folder = export(run.checkpoint, tmp_path / "out", kind)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert_says(model, run.logps)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_an_adapter(trained, tmp_path, family):
    run = trained(family, lora=True)
    folder = export(run.checkpoint, tmp_path / "out", "adapter")
    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_says(model, run.logps)
    # 2 blocks of 7 matrices with A and B each, and nothing of the base.
    assert len(load_file(folder / "adapter_model.safetensors")) == 28


def test_tokenizer_template_and_stop_tokens_come_along(trained, bases, tmp_path):
    folder = export(trained("llama", lora=True).checkpoint, tmp_path / "out", "merged")
    tokenizer, original = map(AutoTokenizer.from_pretrained, (folder, bases["llama"]))
    talk = [{"role": "user", "content": "w3 w250"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "w3 w250 w7"
    assert tokenizer.get_vocab() == original.get_vocab()
    assert tokenizer("w3 w250 w7")["input_ids"] == [3, 250, 7]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 7]


def test_the_model_card_tells_what_the_folder_is(trained, tmp_path):
    run = trained("llama", lora=True)
    cards = {
        kind: (export(run.checkpoint, tmp_path / kind, kind) / "README.md").read_text()
        for kind in ("merged", "adapter")
    }
    assert cards["merged"].startswith("---\nlibrary_name: transformers\n")
    assert cards["adapter"].startswith("---\nlibrary_name: peft\n")
    for card in cards.values():
        assert "# llama, trained with GiGPO" in card
        assert "LoRA of rank 4, alpha 8" in card


@pytest.mark.parametrize("kind", ["full", "merged", "adapter"])
def test_bfloat16_rounds_once(trained, tmp_path, kind):
    run = trained("qwen2", lora=kind != "full")
    file = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    exact = load_file(export(run.checkpoint, tmp_path / "exact", kind) / file)
    half = load_file(export(run.checkpoint, tmp_path / "half", kind, dtype="bfloat16") / file)
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in exact.items()}
    torch.testing.assert_close(half, rounded, rtol=0, atol=0)
    if kind != "adapter":
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
        assert model.dtype == torch.bfloat16


def test_a_base_that_has_moved_can_be_named(trained, bases, tmp_path):
    run = trained("llama", lora=True)
    moved = bases["llama"].rename(tmp_path / "elsewhere")
    try:
        with pytest.raises(ValueError, match="no existing folder"):
            export(run.checkpoint, tmp_path / "out", "merged")
        folder = export(run.checkpoint, tmp_path / "out", "merged", base=str(moved))
        assert_says(AutoModelForCausalLM.from_pretrained(folder), run.logps)
    finally:
        moved.rename(bases["llama"])


class TestRefusals:
    def test_full_of_a_lora_run(self, trained, tmp_path):
        with pytest.raises(ValueError, match=r"trained a LoRA adapter.*kind='merged'"):
            export(trained("llama", lora=True).checkpoint, tmp_path / "out", "full")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("kind", ["merged", "adapter"])
    def test_adapter_of_a_full_run(self, trained, tmp_path, kind):
        with pytest.raises(ValueError, match=r"trained all weights.*kind='full'"):
            export(trained("llama", lora=False).checkpoint, tmp_path / "out", kind)

    def test_unknown_kind_and_dtype(self, trained, tmp_path):
        checkpoint = trained("llama", lora=True).checkpoint
        with pytest.raises(ValueError, match=r"kind='lora': expected one of 'full', 'adapter'"):
            export(checkpoint, tmp_path / "out", "lora")
        with pytest.raises(ValueError, match="dtype='float16': expected one of 'float32'"):
            export(checkpoint, tmp_path / "out", "merged", dtype="float16")

    def test_an_unknown_policy(self, trained, tmp_path):
        with pytest.raises(ValueError, match=r"module_id 'critic'.*holds \['default_policy'\]"):
            export(trained("llama", lora=True).checkpoint, tmp_path / "out", module_id="critic")

    def test_a_folder_that_is_no_checkpoint(self, bases, tmp_path):
        with pytest.raises(ValueError, match="is no checkpoint of GiGPO"):
            export(bases["llama"], tmp_path / "out")

    def test_an_output_that_holds_files(self, trained, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="exists already"):
            export(trained("llama", lora=False).checkpoint, tmp_path)

    def test_the_command_line_says_so_in_one_line(self, trained, tmp_path, capsys):
        checkpoint = trained("llama", lora=True).checkpoint
        with pytest.raises(SystemExit):
            main([str(checkpoint), str(tmp_path / "out")])
        assert "use kind='merged'" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["a file is cut off", "the copy has no manifest"])
def test_a_checkpoint_that_is_not_whole_is_refused_in_one_line(trained, tmp_path, capsys, damage):
    copy = tmp_path / "copy"
    shutil.copytree(trained("llama", lora=False).checkpoint, copy)
    if damage == "a file is cut off":
        state = copy / "learner_group/learner/rl_module/default_policy/module_state.pkl"
        state.write_bytes(state.read_bytes()[:-1])
    else:
        (copy / "manifest.json").unlink()
    with pytest.raises(SystemExit):
        main([str(copy), str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert "is not whole" in told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_the_command_line_exports(trained, tmp_path, capsys):
    run = trained("llama", lora=True)
    folder = tmp_path / "out"
    main([str(run.checkpoint), str(folder), "--kind", "merged", "--dtype", "float32"])
    assert str(folder) in capsys.readouterr().out
    assert_says(AutoModelForCausalLM.from_pretrained(folder), run.logps)


def test_reading_a_checkpoint_needs_no_ray(trained, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("export used Ray")

    for name in ("init", "put", "get", "remote"):
        monkeypatch.setattr(ray, name, refuse)
    folder = export(trained("llama", lora=True).checkpoint, tmp_path / "out", "merged")
    assert (folder / "model.safetensors").exists()


@pytest.mark.ray
@pytest.mark.parametrize("lora", [None, LORA])
def test_a_run_exports_from_itself_and_from_its_checkpoint(local_ray, tmp_path, lora):
    config = tiny_config(invalid_action_penalty=0.5).llm(lora=lora)
    kind = "merged" if lora else "full"
    algorithm = config.build_algo()
    try:
        algorithm.train()
        checkpoint = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        weights = exported_weights(algorithm, tmp_path / "running", kind)
        assert_served(algorithm, weights)
        with pytest.raises(ValueError, match=r"'critic': this algorithm trains"):
            export(algorithm, tmp_path / "other", kind, module_id="critic")
    finally:
        algorithm.stop()
    base = AutoModelForCausalLM.from_pretrained(materialize(config.model_spec))
    assert any(not torch.equal(weights[n], p) for n, p in base.named_parameters())
    saved = exported_weights(checkpoint, tmp_path / "saved", kind)
    torch.testing.assert_close(saved, weights, rtol=0, atol=0)
    restored = GiGPO.from_checkpoint(checkpoint)
    try:
        assert_served(restored, weights)
    finally:
        restored.stop()


@pytest.mark.ray
def test_merged_weights_reach_remote_engines(local_ray, tmp_path):
    config = tiny_config().llm(lora=LORA).learners(num_learners=1).env_runners(num_env_runners=1)
    algorithm = config.build_algo()
    try:
        algorithm.train()
        assert_served(algorithm, exported_weights(algorithm, tmp_path / "out", "merged"))
    finally:
        algorithm.stop()


def exported_weights(source: GiGPO | str, folder: Path, kind: str) -> dict[str, torch.Tensor]:
    return load_file(export(source, folder, kind) / "model.safetensors")


def assert_served(algorithm: GiGPO, weights: dict[str, torch.Tensor]) -> None:
    def served(runner) -> dict[str, np.ndarray]:  # nested: Ray's workers cannot import this file
        (batch,) = runner.engine._batches.values()
        return {name: tensor.numpy() for name, tensor in batch.model.state_dict().items()}

    runners = algorithm.env_runner_group
    local = runners.num_remote_workers() == 0
    (engine,) = runners.foreach_env_runner(served, local_env_runner=local)
    found = {name: torch.from_numpy(engine[name]) for name in weights}
    torch.testing.assert_close(found, weights, rtol=0, atol=0)


@pytest.mark.vllm
@needs_vllm
def test_vllm_loads_every_kind(trained, bases, tmp_path):
    runs = {kind: trained("qwen2", lora=kind != "full") for kind in ("full", "merged", "adapter")}
    folders = {
        kind: str(export(run.checkpoint, tmp_path / kind, kind)) for kind, run in runs.items()
    }
    task = {
        "prompt": PROMPT.tolist(),
        "max_tokens": 8,
        "folders": [folders["full"], folders["merged"]],
        "adapters": {folders["adapter"]: str(bases["qwen2"])},
    }
    done = run_python(Path(__file__).with_name("plain_vllm.py"), json.dumps(task))
    said = json.loads(done.stdout.splitlines()[-1])
    for kind, run in runs.items():
        tokens = np.array(said[folders[kind]]["token_ids"], dtype=np.int32)
        expected = logps_of(module_of(run.learner), response=tokens)
        np.testing.assert_allclose(said[folders[kind]]["logps"], expected, rtol=0, atol=1e-4)
