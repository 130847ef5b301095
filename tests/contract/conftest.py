"""One engine of each kind, which serves six tiny random models; a test runs once per kind.

For the tests of every engine's contract; other files have engines of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_client import MAX_MODEL_LEN, MODELS, Client, model_of
from tiny_models import build_tiny_folders
from transformers import PreTrainedModel

from rllib_gigpo.engines.base import Engine
from tests.with_vllm import tiny_settings, vllm


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_tiny_folders(tmp_path_factory.mktemp("models"), MODELS)


@pytest.fixture(scope="module")
def references() -> dict[str, PreTrainedModel]:
    return {policy: model_of(policy) for policy in MODELS}


@pytest.fixture(scope="module", params=["transformers", vllm])
def engine(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Engine]:
    if request.param == "vllm":
        from rllib_gigpo.engines.vllm.engine import VLLMEngine

        built: Engine = VLLMEngine(folders, tiny_settings(max_model_len=MAX_MODEL_LEN))
    else:
        from rllib_gigpo.engines.transformers_engine import TransformersEngine

        built = TransformersEngine(
            folders, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=16
        )
    yield built
    built.close()
    built.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop owns an engine."""
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture
def client(engine: Engine, loop: asyncio.AbstractEventLoop) -> Client:
    return Client(engine, loop)
