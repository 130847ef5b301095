"""LoRA adapters as vLLM takes them: files to read, under a name and number never used before."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_numbers = itertools.count(1)


@contextlib.contextmanager
def adapter_request(
    policy_id: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], version: int
) -> Iterator[LoRARequest]:
    """Lend the adapter's files to vLLM, which keeps the adapter in memory once it has read them.

    vLLM knows adapters by number and cached prefixes by name; reusing either would serve an older
    version.
    """
    from vllm.lora.request import LoRARequest

    number = next(_numbers)
    with tempfile.TemporaryDirectory(prefix="rllib-gigpo-adapter-") as folder:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            Path(folder) / "adapter_model.safetensors",
        )
        (Path(folder) / "adapter_config.json").write_text(json.dumps(dict(config), default=list))
        yield LoRARequest(f"{policy_id}-version{version}-{number}", number, folder)
