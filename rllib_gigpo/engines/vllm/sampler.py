"""Makes vLLM report log-probabilities after temperature and before top-p and top-k.

vLLM knows two modes: before temperature, or after top-p and top-k (renormalised). Training needs
the full distribution at the sampling temperature, so the sampler of every worker is replaced by a
subclass that takes the log-probabilities between the two steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def install(worker: Any) -> None:
    """Replace the sampler of one vLLM worker (both generations of vLLM's model runner).

    Raises:
        RuntimeError: The worker's sampler is of a class this function does not know.
    """
    runner = worker.model_runner
    if runner.sampler is None:  # a pipeline stage that does not sample
        return
    from vllm.v1.sample.sampler import Sampler

    if type(runner.sampler) is Sampler:
        runner.sampler = _sampler_class()()
        return
    from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

    if type(runner.sampler) is SamplerV2:
        # Holds per-request state that the runner has wired up, so it keeps its identity.
        runner.sampler.__class__ = _sampler_v2_class()
        return
    raise RuntimeError(
        f"vLLM samples with {type(runner.sampler).__name__}, which is not the sampler this package "
        "was written for: install vllm 0.32 or 0.33"
    )


def _sampler_class() -> type:
    """Subclass for vLLM's first model runner (the one that also serves CPUs)."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler

    class TemperatureLogpSampler(Sampler):
        def __init__(self) -> None:
            super().__init__("raw_logprobs")  # its own log-probabilities are not used
            self.logprobs_mode = "processed_logprobs"  # use those that `sample` returns

        def sample(
            self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            logps = None
            if sampling_metadata.max_num_logprobs is not None:
                tempered = logits
                if not sampling_metadata.all_greedy:
                    tempered = self.apply_temperature(
                        logits.clone(), sampling_metadata.temperature, sampling_metadata.all_random
                    )
                logps = self.compute_logprobs(tempered)
            sampled, _ = super().sample(logits, sampling_metadata, "raw_logprobs")
            return sampled, logps

        @staticmethod
        def gather_logprobs(
            logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
        ) -> LogprobsTensors:
            # The sampled token alone. vLLM's own version also counts ranks, by a function whose
            # compilation takes 6 to 16 s at the first request on a CPU.
            tokens = token_ids[:, None]
            return LogprobsTensors(
                logprob_token_ids=tokens.int(),
                logprobs=logprobs.gather(1, tokens),
                selected_token_ranks=token_ids.new_zeros(len(token_ids)),
            )

    return TemperatureLogpSampler


def _sampler_v2_class() -> type:
    """Subclass for vLLM's second model runner (its default on GPUs)."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    class TemperatureLogpSamplerV2(Sampler):
        def _sample_random(
            self,
            processed_logits: torch.Tensor,
            expanded_idx_mapping: torch.Tensor,
            idx_mapping_np: Any,
            pos: torch.Tensor,
            top_k: torch.Tensor | None,
            top_p: torch.Tensor | None,
            use_fused_sampler: bool,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # Top-p and top-k may mask in place.
            restricted = top_k is not None or top_p is not None
            tempered = processed_logits.clone() if restricted else processed_logits
            sampled, _ = super()._sample_random(
                processed_logits,
                expanded_idx_mapping,
                idx_mapping_np,
                pos,
                top_k,
                top_p,
                use_fused_sampler,
            )
            return sampled, tempered

    return TemperatureLogpSamplerV2
