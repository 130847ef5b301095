"""Settings of the learners: how many there are, and who holds what."""

from __future__ import annotations

from typing import Any, Literal, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.utils.annotations import override

from rllib_gigpo.settings.base import UNSET, SettingsBase


class LearnerSettings(SettingsBase):
    """Where it is learned: `learners`."""

    def _set_learner_defaults(self) -> None:
        self.sharding: Literal["replicate", "fsdp"] = "replicate"
        self.offload_to_cpu = False
        self.activation_checkpointing = False
        self.use_liger_kernel = False

    @override(AlgorithmConfig)
    def learners(
        self,
        *,
        sharding: Literal["replicate", "fsdp"] = UNSET,
        offload_to_cpu: bool = UNSET,
        activation_checkpointing: bool = UNSET,
        use_liger_kernel: bool = UNSET,
        **kwargs: Any,
    ) -> Self:
        """Set how many learners there are, and how they share the work; never what is learned.

        Args:
            sharding: "replicate": every learner holds the whole model. "fsdp": each holds a part of
                its weights, gradients and optimizer state, and gathers the weights layer by layer
                (FSDP2); needs at least two learners.
            offload_to_cpu: With "fsdp", keep those parts in the host's memory.
            activation_checkpointing: Keep only the inputs of the layers for the backward pass,
                which computes their insides again: less memory for a second forward pass.
            use_liger_kernel: Compute norms, rotary positions and gated layers with Liger's fused
                kernels, on GPUs: faster, and fewer activations are kept.
            **kwargs: RLlib's settings, such as `num_learners` and `num_gpus_per_learner`.
        """
        values = dict(locals())
        super().learners(**kwargs)
        return self._take(values)
