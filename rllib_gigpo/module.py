"""The policy as an RLModule: a causal language model and, if needed, its reference and critic."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override
from ray.rllib.utils.numpy import convert_to_numpy
from transformers import PreTrainedModel

from rllib_gigpo import lora, sharding
from rllib_gigpo.critic import CriticKind, ValueHead
from rllib_gigpo.liger import use_liger_kernels
from rllib_gigpo.models import (
    ModelSpec,
    load_causal_lm,
    materialize,
)
from rllib_gigpo.recompute import allow_recompute, recompute_layers
from rllib_gigpo.sequences import (
    MicroBatch,
    ResponseLogps,
    check_output_layer,
    response_logps,
    response_values,
)
from rllib_gigpo.vision.sight import Sight, freeze_vision, load_sight


class CausalLMModule(TorchRLModule):
    """A Hugging Face causal LM that scores responses.

    Trained parameters are fp32 (master weights); `autocast_dtype` is what the matrix products run
    in. With LoRA they are the adapter's, and the frozen base is its own reference: the model with
    the adapter off.

    `model_config` keys: `spec` (ModelSpec), `autocast_dtype` ("float32" or "bfloat16"),
    `with_reference` (keep the initial policy to compare with), `temperature` (of the training
    rollouts), `critic` (None, "head": values from the policy's own body, or "model": from a body of
    its own, which starts as the policy's), `freeze_vision_tower` (of an image-text model),
    `activation_checkpointing` (compute the insides of layers again in the backward pass),
    `use_liger_kernel` (in all of its models), and where LoRA trains `lora` (LoRASettings),
    `base_dtype` (of the frozen weights) and `seed` (of the adapter's first weights).
    """

    lm: Any  # a transformers.PreTrainedModel

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
        self.lora: lora.LoRASettings | None = self.model_config.get("lora")
        self.reference = None
        if self.lora is not None:
            self.lm = self._load_model(path, getattr(torch, self.model_config["base_dtype"]))
            lora.add_adapter(self.lm, self.lora, self.model_config["seed"])
        else:
            self.lm = self._load_model(path)
            if self.model_config["with_reference"]:
                self.reference = self._load_model(path).requires_grad_(False)
        check_output_layer(self.lm)
        self.sight: Sight | None = load_sight(path)
        is_frozen = self.model_config.get("freeze_vision_tower", False)
        if is_frozen and self.sight is None:
            raise ValueError(
                f"llm(freeze_vision_tower=True) with the text model {spec.name!r}, which has no "
                "vision tower: leave it out"
            )
        if is_frozen:
            freeze_vision(self.lm)
        self.critic: CriticKind | None = self.model_config.get("critic")
        self.value_head = self.value_body = None
        if self.critic is not None:
            self.value_head = ValueHead(self.lm.config.get_text_config().hidden_size)
        if self.critic == "model":
            value_model = self._load_model(path)
            if is_frozen:
                freeze_vision(value_model)
            self.value_body = value_model.base_model
        self._autocast = self.model_config["autocast_dtype"] == "bfloat16"
        self._recomputes = self.model_config.get("activation_checkpointing", False)
        if self._recomputes:
            for model in filter(None, (self.lm, self.value_body)):
                allow_recompute(model)
        self._device: torch.device | None = None
        self._gathered: dict[str, Any] | None = None

    def _load_model(self, path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model = load_causal_lm(path, dtype=dtype)
        if self.model_config.get("use_liger_kernel", False):
            use_liger_kernels(model)
        return model

    def shard(self, device: torch.device, *, offload_to_cpu: bool = False) -> None:
        """Spread the models over all learners; the value head, which is small, stays whole.

        Args:
            device: Where this learner computes.
            offload_to_cpu: Keep in the host's memory what is not being used.
        """
        if self.sight is not None:
            self.sight.always_looks = True
        dtype = torch.bfloat16 if self._autocast else torch.float32
        for model in filter(None, (self.lm, self.reference, self.value_body)):
            sharding.shard(model, device, dtype=dtype, offload_to_cpu=offload_to_cpu)
        if self.value_head is not None:
            self.value_head.to(device)
        self._device = device

    def score(
        self,
        batch: MicroBatch,
        *,
        reference: bool = False,
        entropy_grad: bool = False,
        values: bool = False,
    ) -> ResponseLogps:
        """Log-probabilities of a micro-batch's responses under the policy or its reference.

        Args:
            batch: The rows.
            reference: Whether the frozen reference is asked.
            entropy_grad: Whether the entropy carries a gradient.
            values: Whether the critic is asked too.

        Raises:
            ValueError: The module was built without a reference, or without a critic.
        """
        if values and self.value_head is None:
            raise ValueError("this module has no critic: build it with critic='head' or 'model'")
        if not reference:
            head = self.value_head if values and self.critic == "head" else None
            scored = self._run(self.lm, batch, entropy_grad, head)
            if values and head is None:
                return scored._replace(values=self._values_of_model(batch))
            return scored
        if not self.model_config["with_reference"]:
            raise ValueError(
                "this module keeps no reference model: build it with with_reference=True "
                "(a kl_coeff above 0 does)"
            )
        if self.reference is not None:
            return self._run(self.reference, batch, entropy_grad)
        with torch.no_grad(), lora.adapter_off(self.lm):
            return self._run(self.lm, batch, entropy_grad)

    def end_reference_passes(self) -> None:
        """Let a sharded reference forget its passes; all learners must do so."""
        if self.reference is not None and self._device is not None:
            sharding.forget_passes(self.reference)

    def _values_of_model(self, batch: MicroBatch) -> torch.Tensor:
        body: Any = self.value_body
        device = self._prepare_pass(body)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return sharding.run(
                body, response_values, self.value_head, batch, device=device, sight=self.sight
            )

    def _prepare_pass(self, model: Any) -> torch.device:
        """Set what a pass of the model does beside computing; return where it computes."""
        # Dropout would make the ratio differ from 1 on the very weights that sampled the tokens.
        model.eval()
        if torch.is_grad_enabled() and self._recomputes:
            recompute_layers(model)
        return self._device or model.device

    def critic_parameters(self) -> list[torch.nn.Parameter]:
        """Trained parameters that only the critic has."""
        parts = [part for part in (self.value_body, self.value_head) if part is not None]
        return [p for part in parts for p in part.parameters() if p.requires_grad]

    def policy_parameters(self) -> list[torch.nn.Parameter]:
        """Trained parameters of the policy; with critic="head" the critic's body too."""
        return [p for p in self.lm.parameters() if p.requires_grad]

    def _run(
        self,
        model: Any,
        batch: MicroBatch,
        entropy_grad: bool,
        value_head: ValueHead | None = None,
    ) -> ResponseLogps:
        device = self._prepare_pass(model)
        if self.lora is not None and self.lora.dropout > 0 and torch.is_grad_enabled():
            lora.drop_inputs(model)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return sharding.run(
                model,
                response_logps,
                batch,
                temperature=self.model_config["temperature"],
                entropy_grad=entropy_grad,
                value_head=value_head,
                sight=self.sight,
            )

    def policy_weights(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """Weights of the policy as one plain model, an adapter merged into its base.

        Args:
            device: Where each tensor goes as soon as it is computed; None leaves it.

        Returns:
            Hugging Face parameter name to tensor, tied ones once. Tensors that nothing had to be
            computed for are the module's own, not copies.
        """
        return lora.merged_weights(self.lm, device)

    def adapter_weights(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the adapter as peft's files hold it: tensors by name, and adapter_config.json.

        Raises:
            ValueError: All weights are trained; there is no adapter.
        """
        if self.lora is None:
            raise ValueError(
                "this module trains all weights and has no adapter: build it with "
                "llm(lora=LoRASettings(...))"
            )
        return lora.adapter_weights(self.lm)

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
        """Return what a checkpoint holds, as NumPy arrays.

        With LoRA that is the adapter; the frozen weights are those of the model's folder or id.
        `inference_only`, which is what RLlib sends to EnvRunners, is empty: they build no module,
        and their engines get `policy_weights`. Of a sharded module that is what `gather` holds.
        """
        if inference_only:
            return {}
        if self._gathered is not None:
            return self._gathered
        state: Any = convert_to_numpy(self._kept())
        return state

    def gather(self) -> None:
        """Hold the state of a sharded module, whole, until `release`; all learners must do so."""
        self._gathered = sharding.gathered(self._kept(), convert_to_numpy)

    def release(self) -> None:
        """Let go of what `gather` held."""
        self._gathered = None

    @override(RLModule)
    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` returned.

        Raises:
            ValueError: Parameters are missing or unknown, as in the state of another kind of run.
        """
        kept = self._kept()
        # A state need not hold the reference, which comes from the model's folder anyway.
        missing = [n for n in kept if n not in state and not _is_reference(n)]
        unknown = [n for n in state if n not in kept and not _is_reference(n)]
        if missing or unknown:
            trains = "all weights" if self.lora is None else "a LoRA adapter"
            raise ValueError(
                f"the state does not fit this module, which trains {trains}: {len(missing)} "
                f"parameters are missing and {len(unknown)} unknown (such as "
                f"{(missing + unknown)[0]!r}); restore it with the llm(model=..., lora=...) "
                "settings that it was saved with"
            )
        super().set_state(
            {
                name: sharding.part_like(kept[name], torch.as_tensor(value))
                for name, value in state.items()
                if name in kept
            }
            if self._device is not None
            else state
        )

    def _kept(self) -> dict[str, torch.Tensor]:
        state = self.state_dict()
        if self.lora is None:
            return state
        trained = {name for name, value in self.named_parameters() if value.requires_grad}
        return {name: tensor for name, tensor in state.items() if name in trained}


def _is_reference(name: str) -> bool:
    return name.startswith("reference.")


def place(modules: Sequence[CausalLMModule], device: torch.device | str) -> None:
    """Move modules to a device; policies with adapters on one model hold its frozen weights once.

    Args:
        modules: The modules; changed where they stand.
        device: Where they go.
    """
    bases: dict[tuple, Any] = {}
    for module in modules:
        if module.lora is not None:
            key = (module.model_config["spec"], module.model_config["base_dtype"])
            # Shared before it moves: the device needs room for one base, however many policies.
            lora.share_base([bases.setdefault(key, module.lm), module.lm])
        module.to(device)
