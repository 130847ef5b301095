"""One sentence for every way of running out of memory: in which phase, and what to lower.

PyTorch, vLLM, Ray and the operating system each say it in words of their own, far from the setting
that decides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

# By name: torch.OutOfMemoryError and ray.exceptions.OutOfMemoryError, and what Ray makes of either
# when it crosses processes.
_TYPES = ("OutOfMemoryError", "MemoryError")
_WORDS = (
    "out of memory",
    "can't allocate memory",  # PyTorch's allocator on CPUs
    "Cannot allocate memory",  # the operating system
    "CUBLAS_STATUS_ALLOC_FAILED",
    "low on memory",  # Ray's monitor, of a process that it ended
    "memory pressure",
    "No available memory for the cache blocks",  # vLLM's start
    "less than desired GPU memory utilization",
    "KV cache is needed, which is larger than the available KV cache memory",
)
_TOLD = "out of memory in the phase "
_LEARNING = ("old_logp", "ref_logp", "advantages", "update", "learn")


class OutOfMemory(RuntimeError):  # noqa: N818 - what happened, not a bug here
    """A phase ran out of memory; the message names it and what to lower."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that memory ran out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        names = {name for kind in type(error).__mro__ for name in kind.__name__.split("(")}
        if any(name.rstrip(")") in _TYPES for name in names):
            return True
        if any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def cure(phase: str, config: GiGPOConfig) -> str:
    """Return which setting to lower after a phase ran out of memory, with its present value."""
    if phase in _LEARNING:
        steps = [f"lower training(micro_batch_tokens=...), now {config.micro_batch_tokens}"]
        if not config.activation_checkpointing:
            steps.append("set learners(activation_checkpointing=True)")
        if config.sharding != "fsdp":
            steps.append("set learners(sharding='fsdp')")
        if config.lora is None:
            steps.append("train an adapter with llm(lora=LoRASettings(...))")
        return "; then ".join(steps)
    if phase == "setup":
        is_sharded = config.sharding == "fsdp"
        step = "raise learners(" if is_sharded else "set learners(sharding='fsdp', "
        adapter = "; or llm(lora=LoRASettings(...))" if config.lora is None else ""
        return (
            "the learners' models and optimizer states do not fit: "
            f"{step}num_learners=...), now {config.num_learners}{adapter}"
        )
    if phase == "grouping":  # the rows of an iteration lie in the driver's memory
        return (
            "lower training(num_groups=..., group_size=...), now "
            f"{config.num_groups} and {config.group_size}"
        )
    slots = f"lower llm(max_num_seqs=...), now {config.max_num_seqs}"
    if config.engine == "vllm":
        share = config.vllm_settings.gpu_memory_share
        sleep = "" if config.engine_sleep else "; where learners share its GPU, engine_sleep=True"
        return (
            "lower engines(engine_options={'gpu_memory_utilization': ...}), now "
            f"{share:g}; then {slots}{sleep}"
        )
    return f"{slots}; then env_runners(num_env_runners=...), now {config.num_env_runners}"


@contextmanager
def naming_memory(phase: str, config: GiGPOConfig) -> Iterator[None]:
    """Turn whatever says that memory ran out into one sentence.

    Args:
        phase: What is being done; the innermost one is told.
        config: The settings.

    Raises:
        OutOfMemory: Memory ran out.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(sentence(phase, config, error)) from error


def sentence(phase: str, config: GiGPOConfig, error: BaseException) -> str:
    """Return what is told when a phase ran out of memory.

    An error from another process may hold such a sentence already: then it is that one.
    """
    _, found, rest = str(error).partition(_TOLD)
    if found:
        return f"{found}{rest.splitlines()[0]}"
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{_TOLD}{phase!r}: {cure(phase, config)} ({type(error).__name__}: {first})"
