"""Settings of one vLLM engine, the same on CPU and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rllib_gigpo.value_checks import (
    LARGEST_SEED,
    check_choice,
    check_resource,
    check_whole,
    is_number,
)

# vLLM's CPU default of 128 means that a shared prompt of fewer tokens never hits the prefix cache.
_CPU_BLOCK_SIZE = 32
_CPU_KV_CACHE_BYTES = 1 << 30
_LORA_SLOTS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM makes room for
_CPU_STEP_TOKENS = 4096
_MOST_BYTES = 2**50
_GPU_MEMORY_SHARE = 0.85


@dataclass(frozen=True)
class VLLMSettings:
    """How one engine runs. None takes the value that fits the device.

    Attributes:
        dtype: Weights and activations; "auto" takes the model folder's.
        max_model_len: Longest prompt plus response, in tokens.
        max_num_seqs: Most requests computed at once; more wait inside the engine.
        block_size: Tokens per block of the prefix cache; None is 32 on CPU, vLLM's choice on GPU.
        kv_cache_memory_bytes: Memory of the KV cache; None is 1 GiB on CPU, and on GPU what
            `gpu_memory_utilization` leaves beside the weights.
        gpu_memory_utilization: Share of a whole GPU's memory that the engine may use; None is 0.85
            of the part that `num_gpus` reserves.
        tensor_parallel_size: GPUs (or CPU processes) that share the model's layers.
        num_gpus: GPUs that Ray reserves for the engine; a fraction shares one GPU.
        num_cpus: CPUs that Ray reserves; on CPU also the engine's number of threads.
        enforce_eager: Skip compilation and CUDA graphs; None does so on CPU, where compiling costs
            a minute at every start.
        enable_lora: Accept LoRA adapters.
        max_lora_rank: Largest adapter rank, at most 512.
        enable_sleep_mode: `sleep` gives GPU memory back (one GPU shared with the learner).
        weight_transfer: vLLM's own road for new weights ("nccl", "ipc"), or None for the object
            store alone.
        seed: vLLM's own seed; every request carries its own.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    max_model_len: int = 4096
    max_num_seqs: int = 128
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int = 1
    num_gpus: float = 0.0
    num_cpus: float = 1.0
    enforce_eager: bool | None = None
    enable_lora: bool = False
    max_lora_rank: int = 32
    enable_sleep_mode: bool = False
    weight_transfer: Literal["nccl", "ipc"] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice("enforce_eager", self.enforce_eager, (None, True, False))
        check_choice("enable_lora", self.enable_lora, (True, False))
        check_choice("enable_sleep_mode", self.enable_sleep_mode, (True, False))
        check_choice("weight_transfer", self.weight_transfer, (None, "nccl", "ipc"))
        for name in ("max_model_len", "max_num_seqs", "tensor_parallel_size", "max_lora_rank"):
            check_whole(name, getattr(self, name), 1)
        if self.block_size is not None:
            check_whole("block_size", self.block_size, 1)
        if self.kv_cache_memory_bytes is not None:
            check_whole("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, _MOST_BYTES)
        check_whole("seed", self.seed, 0, LARGEST_SEED)
        check_resource("num_gpus", self.num_gpus)
        check_resource("num_cpus", self.num_cpus)
        if self.max_lora_rank > _LORA_SLOTS[-1]:
            raise ValueError(
                f"max_lora_rank is {self.max_lora_rank}: vLLM serves adapters of rank "
                f"{_LORA_SLOTS[-1]} at most; train a smaller one"
            )
        share = self.gpu_memory_utilization
        if share is not None and not is_number(share, 1e-9, 1.0):
            raise ValueError(
                f"gpu_memory_utilization is {share}: expected None or a share of "
                "the GPU's memory in (0, 1]"
            )
        if self.num_gpus > 1 and self.tensor_parallel_size == 1:
            raise ValueError(
                f"num_gpus={self.num_gpus:g} with tensor_parallel_size=1, which uses one GPU: set "
                f"num_gpus=1, or tensor_parallel_size={self.num_gpus:g}"
            )
        if self.num_gpus and self.num_gpus != self.tensor_parallel_size != 1:
            raise ValueError(
                f"num_gpus={self.num_gpus:g} with tensor_parallel_size="
                f"{self.tensor_parallel_size}: set num_gpus={self.tensor_parallel_size}"
            )
        if self.enable_sleep_mode and not self.num_gpus:
            raise ValueError(
                "enable_sleep_mode=True gives GPU memory back, but num_gpus is 0: set num_gpus or "
                "leave enable_sleep_mode off"
            )

    @property
    def gpu_memory_share(self) -> float:
        """The share of a whole GPU's memory that is in force."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        return _GPU_MEMORY_SHARE * min(1.0, self.num_gpus or 1.0)

    def engine_args(self, model: str, *, on_cpu: bool) -> dict[str, Any]:
        """Arguments of `vllm.EngineArgs` for one model.

        Args:
            model: Model folder or Hugging Face id.
            on_cpu: Whether the installed vLLM computes on the CPU.
        """
        args: dict[str, Any] = {
            "model": model,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "distributed_executor_backend": "uni" if self.tensor_parallel_size == 1 else "mp",
            "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
            "enable_sleep_mode": self.enable_sleep_mode,
            "seed": self.seed,
            # Only what a request asks for shapes its response, not the folder's defaults.
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            # Pictures come processed and normalised, as the learner sees them.
            "mm_device_do_normalize": False,
            "mm_processor_cache_gb": 0,
            "skip_mm_profiling": True,
        }
        if self.enable_lora:
            args |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": min(r for r in _LORA_SLOTS if r >= self.max_lora_rank),
            }
        if self.weight_transfer is not None:
            args["weight_transfer_config"] = {"backend": self.weight_transfer}
        if on_cpu:
            # vLLM's CPU runner dies when it splits the prompt of a request with a seed over two
            # steps ("CPU Generator does not use offset"), so a step must hold a whole prompt.
            args["enable_chunked_prefill"] = False
            args["max_num_batched_tokens"] = max(_CPU_STEP_TOKENS, self.max_model_len)
            args["block_size"] = self.block_size or _CPU_BLOCK_SIZE
            args["kv_cache_memory_bytes"] = self.kv_cache_memory_bytes or _CPU_KV_CACHE_BYTES
        else:
            args["block_size"] = self.block_size
            args["kv_cache_memory_bytes"] = self.kv_cache_memory_bytes
            args["gpu_memory_utilization"] = self.gpu_memory_share
        return args
