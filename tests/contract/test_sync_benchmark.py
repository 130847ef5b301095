"""The benchmark of the sync of weights, with a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks import sync as benchmark
from tests.with_vllm import needs_vllm

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    needs_vllm,
]


def test_its_figures_are_of_one_sync_and_one_iteration(local_ray, capsys):
    benchmark.main(["--model", "tiny", "--dtype", "float32", "--repeats", "1"])
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert set(figures) == {"sync_s", "proof_s", "sync_share", "megabytes", "load"}
    assert 0 < figures["sync_share"] < 1
    # Two layers of 64 x 64 x 4 and 64 x 128 x 3 matrices are 0.33 MB in fp32; some words and the
    # biases come on top.
    assert figures["megabytes"] == 0.3
