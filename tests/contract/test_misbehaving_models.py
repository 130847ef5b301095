"""What training does with every kind of model that misbehaves: docs/faults.md, "Models".

Each model is a copy of the tiny one with one thing broken.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from safetensors.torch import load_file, save_file

from rllib_gigpo.agent.profiles.key_door import profile
from rllib_gigpo.engines.batching import PolicyBatch
from rllib_gigpo.learner import GiGPOTorchLearner
from rllib_gigpo.learner_report import check_skipped
from rllib_gigpo.models import load_tokenizer, materialize
from rllib_gigpo.out_of_memory import OutOfMemory, is_out_of_memory, naming_memory
from tests.misbehaving_envs import Misbehaving, part
from tests.ray_runs import weights_of
from tests.tiny_runs import VOCABULARY, build_learner, module_of, parameters, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


@pytest.fixture
def copy(tmp_path) -> Path:
    """A folder of the tiny model that a test may damage."""
    folder = tmp_path / "model"
    shutil.copytree(materialize(tiny_config().model_spec), folder)
    return folder


def config_of(folder: Path | str):
    # The entropy's gradient moves the weights, whether or not the random model earns anything.
    config = tiny_config(entropy_coeff=0.1).llm(model=str(folder), options={})
    return config.recording(enabled=False)


def edit(path: Path, **changes: Any) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def one_iteration(config, iterations: int = 1) -> tuple[Any, dict, Any]:
    """The rows of the last iteration, its result, and the weights after it."""
    algorithm = config.build_algo()
    seen = []
    to_rows = algorithm._to_rows
    algorithm._to_rows = lambda episodes: seen.append(to_rows(episodes)) or seen[-1]
    result: Any = {}
    for _ in range(iterations):
        result = algorithm.train()
    weights = weights_of(algorithm)
    algorithm.stop()
    return seen[-1]["default_policy"], result, weights


def same_rows(one: Any, other: Any) -> bool:
    return all(
        a.tolist() == b.tolist()
        for name in ("prompt_ids", "response_ids")
        for a, b in zip(one[name], other[name], strict=True)
    )


# Tokenizers --------------------------------------------------------------------------------------


def test_without_a_chat_template_nothing_starts(copy):
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"has no chat template: use the model's instruct version"):
        config_of(copy).build_algo()


def test_with_neither_pad_nor_end_token_nothing_starts(copy):
    edit(copy / "tokenizer_config.json", pad_token=None, eos_token=None)
    with pytest.raises(ValueError, match=r"neither a pad token nor an end token: set pad_token"):
        config_of(copy).build_algo()


def test_a_missing_pad_token_changes_nothing(copy):
    rows, _, expected = one_iteration(config_of(materialize(tiny_config().model_spec)))
    edit(copy / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(str(copy)).pad_token == "<eos>"
    again, _, found = one_iteration(config_of(copy))
    assert same_rows(rows, again)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_template_that_strips_thoughts_strips_none_of_what_is_trained(copy):
    # Qwen3's template removes what stands before </think> from earlier answers. Answers never go
    # through a template here: rows hold the engine's own tokens.
    path = copy / "chat_template.jinja"
    template = path.read_text()
    thoughts = "(message['content'].split('</think>')[-1])"
    assert "(message['content']" in template
    path.write_text(template.replace("(message['content']", f"({thoughts}", 1))
    tokenizer = load_tokenizer(str(copy))
    turns = [{"role": "assistant", "content": "<think> go </think> <action> go up </action>"}]
    assert "go </think>" not in tokenizer.apply_chat_template(turns, tokenize=False)

    rows, _, expected = one_iteration(config_of(materialize(tiny_config().model_spec)))
    thinking = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert any(set(thinking) & set(ids.tolist()) for ids in rows["response_ids"])
    again, _, found = one_iteration(config_of(copy))
    assert same_rows(rows, again)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_without_end_token_and_stop_string_every_response_is_cut_and_told(copy, caplog):
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").write_text(template.replace("'<eos> '", "''"))
    edit(copy / "tokenizer_config.json", eos_token=None)
    edit(copy / "generation_config.json", eos_token_id=None)
    edit(copy / "config.json", eos_token_id=None)
    config = config_of(copy).agent(profile=replace(profile(), stop=()))
    with caplog.at_level(logging.WARNING):
        rows, result, _ = one_iteration(config)
    assert "names no end token, and the agent no stop string" in caplog.text
    assert {len(ids) for ids in rows["response_ids"]} == {6}  # max_response_tokens
    assert result["env_runners"]["response_cut_rate"] == 1.0


def test_a_token_beyond_the_embedding_ends_the_run_where_a_prompt_holds_it(copy, caplog):
    tokenizer = load_tokenizer(str(copy))
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(copy)
    config = config_of(copy).environment("Misbehaving", env_config={"horizon": 3})
    with caplog.at_level(logging.WARNING):
        algorithm = config.build_algo()
    told = f"knows {VOCABULARY + 1} tokens, its model has embeddings for {VOCABULARY}"
    assert told in caplog.text
    algorithm.train()
    Misbehaving.misbehave({"step": part(0, "a zebra")})
    with pytest.raises(RuntimeError, match=rf"token id {VOCABULARY} is outside the vocabulary of"):
        algorithm.train()
    Misbehaving.behave()
    algorithm.stop()


def test_a_token_beyond_the_embedding_in_the_template_lets_nothing_start(copy):
    tokenizer = load_tokenizer(str(copy))
    tokenizer.add_tokens(["<turn>"])
    tokenizer.chat_template = "<turn> " + tokenizer.chat_template
    tokenizer.save_pretrained(copy)
    message = rf"writes '<turn>', token {VOCABULARY}, but the model has embeddings for {VOCABULARY}"
    with pytest.raises(ValueError, match=message):
        config_of(copy).build_algo()


# Weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
def test_tied_and_untied_weights_are_trained_and_served(tie):
    config = tiny_config(entropy_coeff=0.1).recording(enabled=False)
    config.llm(options={**config.llm_options, "tie": tie})
    start = parameters(build_learner(config))
    assert ("lm_head.weight" in start) is not tie
    # Every sync compares what the engine computes with to the learner's weights, bit by bit.
    _, _, after = one_iteration(config, iterations=2)
    assert ("lm_head.weight" in after) is not tie
    assert not torch.equal(after["model.embed_tokens.weight"], start["model.embed_tokens.weight"])


def test_weights_that_hold_nan_do_not_start(copy):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.embed_tokens.weight"][7, 3] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    message = r"holds NaN or infinity in 1 weights \(the first: 'model.embed_tokens.weight'\)"
    with pytest.raises(ValueError, match=message):
        build_learner(config_of(copy))


def test_weights_that_become_nan_end_the_run_at_the_next_sync():
    algorithm = tiny_config().recording(enabled=False).build_algo()
    algorithm.train()
    learner: Any = algorithm.learner_group._learner
    with torch.no_grad():
        module_of(learner).lm.get_input_embeddings().weight[7, 3] = float("inf")
    with pytest.raises(Exception, match="its weights hold NaN or too large values"):
        algorithm.train()
    assert algorithm.num_updates == 2
    algorithm.stop()


class Poisoned(GiGPOTorchLearner):
    """Its losses are NaN in the iterations from this one on."""

    begins = 1
    updates = 0

    def before_gradient_based_update(self, **kwargs: Any) -> None:
        self.updates += 1
        super().before_gradient_based_update(**kwargs)

    def compute_loss_for_module(self, **kwargs: Any) -> torch.Tensor:
        loss = super().compute_loss_for_module(**kwargs)
        return loss * float("nan") if self.updates > self.begins else loss


def test_steps_that_are_left_out_one_after_the_other_end_the_run():
    # With omega=1 and a KL every row is computed, so that every step has a loss.
    config = tiny_config(max_skipped_steps=2, kl_coeff=0.1).recording(enabled=False)
    algorithm = config.learners(learner_class=Poisoned).build_algo()
    first = algorithm.train()["learners"][DEFAULT_MODULE_ID]
    assert (first["skipped_steps"], first["skipped_steps_in_a_row"]) == (0, 0)
    good = weights_of(algorithm)
    second = algorithm.train()["learners"][DEFAULT_MODULE_ID]
    assert (second["skipped_steps"], second["skipped_steps_in_a_row"]) == (1, 1)
    message = (
        r"the last 2 optimizer steps of module 'default_policy' were left out because their "
        r"gradients were not finite \(max_skipped_steps=2\)"
    )
    with pytest.raises(RuntimeError, match=message):
        algorithm.train()
    torch.testing.assert_close(weights_of(algorithm), good, rtol=0, atol=0)
    algorithm.stop()


def test_a_step_that_is_taken_ends_the_row():
    check_skipped({"a": 9.0, "b": 0.0}, 10)
    with pytest.raises(RuntimeError, match="last 10 optimizer steps of module 'b'"):
        check_skipped({"a": 9.0, "b": 10.0}, 10)


# Memory ------------------------------------------------------------------------------------------

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.1 GiB. GPU 0 has 80 GiB.")


class Greedy(GiGPOTorchLearner):
    def compute_loss_for_module(self, **kwargs: Any) -> torch.Tensor:
        raise CUDA


def test_out_of_memory_in_the_update_names_the_phase_and_the_knob():
    config = tiny_config(kl_coeff=0.1, micro_batch_tokens=4096).recording(enabled=False)
    algorithm = config.learners(learner_class=Greedy).build_algo()
    with pytest.raises(OutOfMemory) as error:
        algorithm.train()
    algorithm.stop()
    assert str(error.value).startswith(
        "out of memory in the phase 'update': lower training(micro_batch_tokens=...), now 4096; "
        "then set learners(activation_checkpointing=True); then "
    )
    assert "CUDA out of memory. Tried to allocate 3.1 GiB" in str(error.value)


def test_out_of_memory_in_an_engine_names_the_phase_and_the_knob(monkeypatch):
    algorithm = tiny_config().recording(enabled=False).build_algo()

    def step(batch: PolicyBatch) -> None:
        raise CUDA

    monkeypatch.setattr(PolicyBatch, "step", step)
    message = r"^out of memory in the phase 'rollout': lower llm\(max_num_seqs=...\), now 256"
    with pytest.raises(OutOfMemory, match=message) as error:
        algorithm.train()
    assert str(error.value).count("out of memory in the phase") == 1
    algorithm.stop()


def test_a_process_that_ray_ends_for_its_memory_is_told_as_such(monkeypatch):
    algorithm = tiny_config().recording(enabled=False).build_algo()
    found = ray.exceptions.OutOfMemoryError(
        "Task was killed due to the node running low on memory.\nMemory on the node was 125 GB"
    )

    def play(*_: Any) -> None:
        raise found

    monkeypatch.setattr(algorithm.sampler, "collect", play)
    with pytest.raises(OutOfMemory, match=r"phase 'rollout': .*now 0 \(OutOfMemoryError: Task was"):
        algorithm.train()
    algorithm.stop()


# The first lines of what is raised by PyTorch 2.13, vLLM 0.32 and Ray 2.60.
SAID = [
    CUDA,
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    OSError(12, "Cannot allocate memory"),
    ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ValueError(
        "Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 71.2 GiB)."
    ),
    ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory."),
]


@pytest.mark.parametrize("error", SAID, ids=lambda error: str(error)[:30])
def test_every_way_of_saying_so_is_understood(error):
    assert is_out_of_memory(error)
    wrapped = RuntimeError("the engine died")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)
    config = tiny_config().engines(engine="vllm", engine_options={"gpu_memory_utilization": 0.5})
    message = r"'engines': lower .*gpu_memory_utilization.*, now 0\.5"
    with pytest.raises(OutOfMemory, match=message), naming_memory("engines", config):
        raise wrapped
    config.engines(engine_options={}, engine_num_gpus=0.5)
    # 0.85 of half a GPU
    message = r"gpu_memory_utilization.*, now 0\.425"
    with pytest.raises(OutOfMemory, match=message), naming_memory("engines", config):
        raise wrapped


def test_other_errors_pass_as_they_are():
    assert not is_out_of_memory(ValueError("the memory of an agent holds nothing"))
    with pytest.raises(ZeroDivisionError), naming_memory("update", SimpleNamespace()):
        raise ZeroDivisionError


def test_the_innermost_phase_is_told():
    config = tiny_config()
    phases = naming_memory("learn", config), naming_memory("ref_logp", config)
    with pytest.raises(OutOfMemory, match="the phase 'ref_logp'") as error, phases[0], phases[1]:
        raise CUDA
    # So it is where another process has told it.
    remote = RuntimeError(f"learner 1 of 2 failed: OutOfMemory: {error.value}\nTraceback ...")
    with pytest.raises(OutOfMemory) as again, naming_memory("learn", config):
        raise remote
    assert str(again.value) == str(error.value)
