"""Which road weights take from the learner to the engines.

"ray"   the object store, through the CPU's memory; everywhere
"nccl"  vLLM's own transfer between GPUs
"ipc"   vLLM's own transfer inside the one GPU that learner and engine share
"""

from __future__ import annotations

from typing import Any, Literal

Road = Literal["ray", "nccl", "ipc"]


def choose_road(config: Any) -> Road:
    """Return the road that `engines(weight_sync=...)` asks for.

    Args:
        config: The algorithm's settings. "auto" takes the object store where an engine or the
            learner is on a CPU, where each learner holds a part of the model, and for adapters,
            which are small; IPC where learner and engine each ask Ray for a part of one GPU; NCCL
            elsewhere.
    """
    if config.weight_sync != "auto":
        return config.weight_sync
    on_gpus = config.engine_num_gpus > 0 and config.num_gpus_per_learner > 0
    is_whole = config.lora is None and config.sharding == "replicate"
    if config.engine != "vllm" or not is_whole or not on_gpus:
        return "ray"
    return "ipc" if _share_a_gpu(config) else "nccl"


def check_road(config: Any) -> None:
    """Refuse a road that does not lead from this learner to these engines.

    Raises:
        ValueError: One sentence that names the setting, its value and the cure.
    """
    road = config.weight_sync
    if road in ("auto", "ray"):
        return
    prefix = f"weight_sync={road!r} "
    cure = "; use weight_sync='auto' or 'ray'"
    if config.engine != "vllm":
        raise ValueError(
            f"{prefix}is vLLM's own transfer, but engine={config.engine!r}: set engine='vllm'{cure}"
        )
    if config.lora is not None:
        raise ValueError(
            f"{prefix}with lora: adapters are small and travel by the object store{cure}"
        )
    if config.sharding != "replicate":
        raise ValueError(
            f"{prefix}with sharding={config.sharding!r}: it sends from one learner, which holds a "
            f"part of the weights{cure}"
        )
    for name in ("engine_num_gpus", "num_gpus_per_learner"):
        if getattr(config, name) <= 0:
            raise ValueError(
                f"{prefix}moves weights from GPU to GPU, but {name}={getattr(config, name)}: give "
                f"learner and engines GPUs{cure}"
            )
    shares = _share_a_gpu(config)
    if road == "nccl" and shares:
        raise ValueError(
            f"{prefix}with num_gpus_per_learner={config.num_gpus_per_learner} and "
            f"engine_num_gpus={config.engine_num_gpus}: two members of an NCCL group cannot share "
            "a GPU; give each a whole one, or use weight_sync='ipc'"
        )
    if road == "ipc" and not shares:
        raise ValueError(
            f"{prefix}with num_gpus_per_learner={config.num_gpus_per_learner} and "
            f"engine_num_gpus={config.engine_num_gpus}: only processes on one GPU can do so; give "
            "both a fraction of it, such as 0.5, or use weight_sync='nccl'"
        )


def _share_a_gpu(config: Any) -> bool:
    return config.engine_num_gpus < 1 and config.num_gpus_per_learner < 1
