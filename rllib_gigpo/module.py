"""The policy as an RLModule: a causal language model and, if needed, its frozen reference."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override

from rllib_gigpo.models import ModelSpec, load_causal_lm, materialize
from rllib_gigpo.sequences import MicroBatch, ResponseLogps, check_output_layer, response_logps


class CausalLMModule(TorchRLModule, InferenceOnlyAPI):
    """A Hugging Face causal LM that scores responses.

    Parameters are kept in fp32 (master weights); `autocast_dtype` is what the matrix products run
    in. `model_config` keys: `spec` (ModelSpec), `autocast_dtype` ("float32" or "bfloat16"),
    `with_reference` (keep a frozen copy of the initial weights), `temperature` (of the training
    rollouts).
    """

    @override(RLModule)
    def setup(self) -> None:
        """Load the weights."""
        try:
            self._load()
        except AttributeError as error:
            # RLModuleSpec.build replaces AttributeErrors of setup by one that hides the cause.
            raise RuntimeError(f"the language model could not be built: {error!r}") from error

    def _load(self) -> None:
        spec: ModelSpec = self.model_config["spec"]
        path = materialize(spec)
        self.lm = load_causal_lm(path, dtype=torch.float32)
        check_output_layer(self.lm)
        self.reference = None
        if self.model_config["with_reference"]:
            self.reference = load_causal_lm(path, dtype=torch.float32).requires_grad_(False)
        self._autocast = self.model_config["autocast_dtype"] == "bfloat16"

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        """Name what the engines do not need."""
        return ["reference"]

    def score(
        self, batch: MicroBatch, *, reference: bool = False, entropy_grad: bool = False
    ) -> ResponseLogps:
        """Log-probabilities of a micro-batch's responses under the policy or its reference."""
        model = self.reference if reference else self.lm
        if model is None:
            raise ValueError(
                "this module keeps no reference model: build it with with_reference=True "
                "(a kl_coeff above 0 does)"
            )
        # Dropout would make the ratio differ from 1 on the very weights that sampled the tokens.
        model.eval()
        device = self.lm.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._autocast):
            return response_logps(
                model,
                batch,
                temperature=self.model_config["temperature"],
                entropy_grad=entropy_grad,
            )

    def policy_weights(self) -> dict[str, torch.Tensor]:
        """Hugging Face parameter names and tensors of the policy, tied ones once."""
        tied = set(getattr(self.lm, "_tied_weights_keys", None) or ())
        if not self.lm.config.tie_word_embeddings:
            tied = set()
        return {
            name: tensor.detach()
            for name, tensor in self.lm.state_dict().items()
            if name not in tied
        }

    @override(RLModule)
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Score the micro-batch under the key "micro_batch"; RLlib's generic entry."""
        return {"logps": self.score(batch["micro_batch"]).logps}

    @override(RLModule)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the parameters as NumPy arrays; `inference_only` leaves the reference out."""
        return super().get_state(
            components, not_components=not_components, inference_only=inference_only, **kwargs
        )
