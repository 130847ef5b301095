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
            which are small; IPC where learner and all engines fit on one GPU by the parts of it
            that they ask Ray for; NCCL where no two of them can be on the same; else the object
            store again.
    """
    if config.weight_sync != "auto":
        return config.weight_sync
    on_gpus = config.engine_num_gpus > 0 and config.num_gpus_per_learner > 0
    is_whole = config.lora is None and config.sharding == "replicate"
    if config.engine != "vllm" or not is_whole or not on_gpus:
        return "ray"
    if share_one_gpu(config):
        return "ipc"
    return "nccl" if _have_their_own(config) else "ray"


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
    parts = (
        f"with num_gpus_per_learner={config.num_gpus_per_learner}, engine_num_gpus="
        f"{config.engine_num_gpus} and {_num_engines(config)} engines in all"
    )
    if road == "nccl" and not _have_their_own(config):
        raise ValueError(
            f"{prefix}{parts}: two members of an NCCL group cannot share a GPU; give each a whole "
            "one, or use weight_sync='auto'"
        )
    if road == "ipc" and not share_one_gpu(config):
        raise ValueError(
            f"{prefix}{parts}: only processes on one GPU can do so; give learner and engines "
            "fractions of it that come to 1 at most, or use weight_sync='auto'"
        )


def share_one_gpu(config: Any) -> bool:
    """Return whether learner and all engines, which ask for GPUs, fit on one."""
    return _fit(config.num_gpus_per_learner + config.engine_num_gpus * _num_engines(config))


def _have_their_own(config: Any) -> bool:
    """Return whether neither two engines of a policy nor learner and engine can share a GPU.

    Engines of two policies may: each policy has a group of its own.
    """
    engines_apart = config.num_engines == 1 or not _fit(2 * config.engine_num_gpus)
    return engines_apart and not _fit(config.num_gpus_per_learner + config.engine_num_gpus)


def _fit(gpus: float) -> bool:
    return round(gpus, 4) <= 1  # as finely as Ray counts


def _num_engines(config: Any) -> int:
    return config.num_engines * len(config.module_ids)
