"""Checks of what generates: settings of engines, and which belong to which engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rllib_gigpo.engines.roads import check_road
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.value_checks import check_range

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

# What `VLLMSettings` calls otherwise than the config.
_VLLM_NAMES = {
    "enable_sleep_mode": "engine_sleep",
    "num_gpus": "engine_num_gpus",
    "num_cpus": "engine_num_cpus",
}
# What `GiGPOConfig.vllm_settings` takes from elsewhere.
OF_OTHER_SETTINGS = {
    "dtype": "llm(dtype=...)",
    "max_model_len": "llm(max_prompt_tokens=..., max_response_tokens=...)",
    "max_num_seqs": "llm(max_num_seqs=...)",
    "num_gpus": "engines(engine_num_gpus=...)",
    "num_cpus": "engines(engine_num_cpus=...)",
    "enable_lora": "llm(lora=...)",
    "max_lora_rank": "llm(lora=...)",
    "enable_sleep_mode": "engines(engine_sleep=...)",
    "weight_transfer": "engines(weight_sync=...)",
    "seed": "debugging(seed=...)",
}
_VLLM_NAME = re.compile(rf"\b(?:{'|'.join(_VLLM_NAMES)})\b")


def check_engine(config: GiGPOConfig) -> Iterator[str]:
    """Yield what is wrong with the settings of engines, a sentence each.

    Raises:
        ValueError: The same, of a setting alone.
    """
    if config.probe_tolerance is not None:
        check_range("probe_tolerance", config.probe_tolerance, 0.0, math.inf)
    check_road(config)
    if config.engine == "transformers":
        for name, default in (
            ("num_engines", 1),
            ("engine_num_gpus", 0.0),
            ("engine_sleep", False),
        ):
            if getattr(config, name) != default:
                yield (
                    f"{name}={getattr(config, name)!r} is of the vLLM engines: set engine='vllm', "
                    f"or leave it at {default!r}"
                )
        if config.engine_options:
            yield (
                f"engine_options={config.engine_options!r} are of the vLLM engines: set "
                "engine='vllm', or leave them empty"
            )
        return
    taken, free = set(OF_OTHER_SETTINGS), set(VLLMSettings.__dataclass_fields__)
    for name in config.engine_options:
        if name in taken:
            yield (
                f"engine_options={config.engine_options!r}: {name} has a setting of its own, which "
                f"others read too; use {OF_OTHER_SETTINGS[name]}"
            )
            return
        if name not in free:
            yield (
                f"engine_options={config.engine_options!r}: engines have no option {name!r}; "
                f"expected some of {', '.join(sorted(free - taken))}"
            )
            return
    try:
        _ = config.vllm_settings
    except (TypeError, ValueError) as error:
        fault = _VLLM_NAME.sub(lambda found: _VLLM_NAMES[found.group()], str(error))
        yield f"engine_options={config.engine_options!r}: {fault}"
