"""The check of a GPU machine, on the CPU: the command works, and refuses where it cannot."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_check

FIGURES = {
    "parameters",
    "engine",
    "road",
    "rollout_tokens_per_s",
    "update_tokens_per_s",
    "mfu",
    "sync_s",
    "logp_gap",
    "logp_gap_max",
    "agrees",
}


@pytest.mark.ray
def test_the_dry_run_ends_with_its_figures(local_ray, capsys):
    assert gpu_check.main(["--dry-run", "--engine", "transformers"]) == 0
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert set(figures) == FIGURES
    assert figures["agrees"]
    assert figures["logp_gap_max"] < 1e-3
    assert figures["rollout_tokens_per_s"] > 0
    assert figures["update_tokens_per_s"] > 0
    # Embeddings, per layer q, k, v with biases, o, gate, up, down and two norms, the last norm.
    hidden, inner, kv = 64, 128, 32
    layer = hidden * (2 * hidden + 2 * kv + 3 * inner) + (hidden + 2 * kv) + 2 * hidden
    words = (figures["parameters"] - 2 * layer - hidden) / hidden
    assert words == gpu_check.VOCABULARY


def test_without_a_gpu_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_one_gpu_is_shared_by_sleep_and_ipc(tmp_path):
    gpu_check.build_model(tmp_path, "tiny")
    config = gpu_check.config_of(tmp_path, engine="vllm", on_gpu=True)
    config.validate()
    assert config.weight_road == "ipc"
    assert config.vllm_settings.enable_sleep_mode
    assert config.vllm_settings.num_gpus + config.num_gpus_per_learner == 1
    alone = gpu_check.config_of(tmp_path, engine="transformers", on_gpu=True)
    alone.validate()
    assert alone.weight_road == "ray"


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("TITAN", None)]
)
def test_the_peak_is_that_of_the_gpus_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert gpu_check.peak_flops() == peak


def test_utilisation_counts_both_passes(monkeypatch):
    monkeypatch.setattr(gpu_check, "peak_flops", lambda: 1e12)
    learned = {"engine_logp_gap": 0.03, "engine_logp_gap_max": 0.2}
    result = {
        "timers": {"old_logp": 1.0, "update": 3.0, "rollout": 2.0, "sync": 0.5},
        "env_runners": {"num_prompt_tokens": 600, "num_response_tokens": 400},
        "learners": {"default_policy": learned},
    }
    config = gpu_check.config_of("nowhere", engine="vllm", on_gpu=True)
    figures = gpu_check.figures_of(result, config, parameters=10**9)
    # 8 operations x 1e9 parameters x 1000 tokens in 4 s: 2e12 a second, of 1e12 promised.
    assert figures["mfu"] == 2.0
    assert figures["rollout_tokens_per_s"] == 200.0
    assert figures["agrees"]
    learned["engine_logp_gap"] = 0.2
    assert not gpu_check.figures_of(result, config, parameters=10**9)["agrees"]
