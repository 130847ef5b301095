"""vLLM in this process, behind the engine contract."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rllib_gigpo.engines.adapters import check_adapter
from rllib_gigpo.engines.base import Completion, EngineError, Request
from rllib_gigpo.engines.packing import Checksums
from rllib_gigpo.engines.vllm.adapter import adapter_request
from rllib_gigpo.engines.vllm.pictures import check_positions, prompt_with_pictures
from rllib_gigpo.engines.vllm.process import (
    EngineDiedError,
    EngineThread,
    import_vllm,
    process_kept,
)
from rllib_gigpo.engines.vllm.requests import Ticket, check_request, sampling_params
from rllib_gigpo.engines.vllm.sampler import install
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.engines.vllm.weights import (
    Shapes,
    adapter_checksums,
    begin_update,
    end_update,
    fitting,
    load_into_worker,
    parameter_shapes,
    weight_checksums,
)
from rllib_gigpo.vision.sight import Sight, load_sight

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

_SETTLING_STEPS = 8


@dataclass
class _Policy:
    """One served model; changed on the engine thread alone."""

    llm: LLMEngine
    shapes: Shapes
    optional: frozenset[str]
    vocab_size: int
    sight: Sight | None = None
    version: int = 0
    adapter: _Adapter | None = None


@dataclass(frozen=True)
class _Adapter:
    """The adapter that serves a policy: how vLLM knows it, and what was sent."""

    request: LoRARequest
    tensors: Mapping[str, torch.Tensor]
    scale: float


class VLLMEngine:
    """vLLM as an `Engine`, stepped by one thread of this process.

    One per process. It initialises torch.distributed's default process group and draws from
    torch's global random generator while requests run, so a training process should rather talk to
    an engine in a process of its own (`RemoteVLLMEngine`).

    Args:
        models: Policy id to model folder or Hugging Face id. The folder's tokenizer finds stop
            strings. All policies run on the same device and each has its own KV cache.
        settings: How each model runs.

    Raises:
        ImportError: vLLM is not installed.
        EngineError: This process already runs a vLLM engine, or vLLM would compute a model
            otherwise than the learner.
    """

    def __init__(
        self, models: Mapping[str, str | Path], settings: VLLMSettings | None = None
    ) -> None:
        self.settings = settings or VLLMSettings()
        self._tickets: dict[str, Ticket] = {}
        self._policies: dict[str, _Policy] = {}
        self._sleeping = False
        self._thread = EngineThread(self._fail_all)
        try:
            self._thread.call(partial(self._start, dict(models)))
        except BaseException:
            self._thread.close()
            raise
        atexit.register(self.close)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response in tokens."""
        return self.settings.max_model_len

    async def generate(self, request: Request) -> Completion:
        """Continue one prompt; see `Engine.generate`."""
        policy = self._policy(request.policy_id)
        if request.request_id in self._tickets:
            raise EngineError(f"request id {request.request_id!r} is running already")
        if self._sleeping:
            raise EngineError("the engine sleeps: call wake() before generate()")
        check_request(
            request,
            max_model_len=self.max_model_len,
            vocab_size=policy.vocab_size,
            sees=policy.sight is not None,
        )
        ticket = Ticket(request)
        self._tickets[request.request_id] = ticket
        self._thread.post(partial(self._add, ticket))
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._thread.post(partial(self._abort, ticket))
            raise
        finally:
            del self._tickets[request.request_id]

    async def abort(self, request_id: str) -> None:
        """End a running request; see `Engine.abort`."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._thread.post(partial(self._abort, ticket))

    def load_weights(
        self, policy_id: str, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        """Replace all weights of a policy and drop its adapter; see `Engine.load_weights`.

        An engine that sleeps takes back only the memory of the weights.
        """
        policy = self._policy(policy_id)
        tensors = fitting(tensors, policy.shapes, policy.optional)
        self._thread.call(partial(self._load_weights, policy_id, policy, tensors, version))

    def load_adapter(
        self,
        policy_id: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        version: int,
    ) -> None:
        """Serve a policy with a LoRA adapter; see `Engine.load_adapter`.

        An engine that sleeps takes back only the memory of the weights, adapters included.

        Raises:
            EngineError: Also when the engine was started without `enable_lora`.
        """
        policy = self._policy(policy_id)
        if not self.settings.enable_lora:
            raise EngineError("the engine takes no LoRA adapters: set enable_lora=True")
        scale = check_adapter(tensors, config, policy.shapes)
        kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        with adapter_request(policy_id, kept, config, version) as request:
            adapter = _Adapter(request, kept, scale)
            self._thread.call(partial(self._load_adapter, policy_id, policy, adapter, version))

    def checksums(self, policy_id: str = "default_policy") -> Checksums:
        """Checksums of what all workers hold; see `Engine.checksums`."""
        policy = self._policy(policy_id)
        return self._thread.call(partial(self._checksums, policy))

    def init_transfer(self, policy_id: str, info: Mapping[str, Any]) -> None:
        """Connect a policy to a trainer by vLLM's own transfer (`settings.weight_transfer`).

        Args:
            policy_id: The policy.
            info: What vLLM's trainer engine sends.
        """
        call = partial(self._transfer, policy_id, "init_weight_transfer_engine", init_info=info)
        self._thread.call(call)

    def start_update(self, policy_id: str) -> None:
        """Make a policy ready to receive new weights.

        An engine that sleeps takes back only the memory of the weights.

        Raises:
            EngineError: While requests run.
        """
        self._thread.call(partial(self._start_update, policy_id, self._policy(policy_id)))

    def receive(self, policy_id: str, info: Any) -> None:
        """Receive what vLLM's trainer engine announces."""
        self._thread.call(partial(self._transfer, policy_id, "update_weights", update_info=info))

    def finish_update(self, policy_id: str, version: int) -> None:
        """Put what was received into effect."""
        policy = self._policy(policy_id)
        self._thread.call(partial(self._finish_update, policy_id, policy, version))

    def version(self, policy_id: str = "default_policy") -> int:
        """Version of the weights now serving the policy; 0 before the first load."""
        return self._policy(policy_id).version

    def sleep(self) -> None:
        """Give back the device memory of weights and KV cache (with `enable_sleep_mode`).

        Until `wake`, requests are refused.

        Raises:
            EngineError: While requests run.
        """
        self._thread.call(self._sleep)

    def wake(self) -> None:
        """Take the memory back; weights are those of the last `load_weights`."""
        self._thread.call(self._wake)

    def close(self) -> None:
        """End running requests with an error and free everything."""
        atexit.unregister(self.close)
        self._thread.close()
        self._fail_all(EngineError("the engine was closed while the request ran"))

    def _policy(self, policy_id: str) -> _Policy:
        policy = self._policies.get(policy_id)
        if policy is None:
            raise EngineError(
                f"unknown policy {policy_id!r}: this engine serves {sorted(self._policies)}"
            )
        return policy

    # Everything below runs on the engine thread.

    def _start(self, models: Mapping[str, str | Path]) -> None:
        import_vllm()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        for policy_id, model in models.items():
            check_positions(str(model))
            shapes, optional = parameter_shapes(str(model))
            args = self.settings.engine_args(str(model), on_cpu=current_platform.is_cpu())
            with process_kept():
                # vLLM schedules larger batches for offline use than for a server.
                llm = LLMEngine.from_engine_args(EngineArgs(**args), UsageContext.LLM_CLASS)
            self._thread.engines[policy_id] = llm
            llm.collective_rpc(install)
            self._policies[policy_id] = _Policy(
                llm, shapes, optional, llm.model_config.get_vocab_size(), load_sight(str(model))
            )

    def _add(self, ticket: Ticket) -> None:
        if self._thread.error is not None:
            ticket.fail(self._thread.error)
            return
        from vllm.exceptions import VLLMClientError

        request = ticket.request
        policy = self._policies[request.policy_id]
        ticket.version = policy.version
        try:
            ticket.internal_id = policy.llm.add_request(
                request.request_id,
                self._prompt(policy, request),
                sampling_params(request),
                lora_request=policy.adapter.request if policy.adapter else None,
            )
        except (VLLMClientError, ValueError) as error:
            ticket.fail(EngineError(str(error)))
            return
        # vLLM then hands the output over itself, also the partial output of an aborted request.
        state: Any = policy.llm.output_processor.request_states[ticket.internal_id]
        state.queue = ticket

    def _prompt(self, policy: _Policy, request: Request) -> Any:
        from vllm.inputs import tokens_input

        if request.images and policy.sight is not None:
            return prompt_with_pictures(request, policy.sight)
        return tokens_input(np.asarray(request.prompt_ids).tolist())

    def _abort(self, ticket: Ticket) -> None:
        if ticket.internal_id is not None and self._thread.error is None:
            llm = self._policies[ticket.request.policy_id].llm
            llm.abort_request([ticket.internal_id], internal=True)

    def _load_weights(
        self, policy_id: str, policy: _Policy, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        self._make_room(policy_id, policy)
        try:
            _on_workers(policy, load_into_worker, tensors=tensors)
        except Exception as error:  # the weights may be half old, half new
            raise EngineDiedError(f"loading weights of {policy_id!r} failed: {error}") from error
        policy.adapter = None  # vLLM drops adapters with the base weights that they adapt
        policy.version = version

    def _make_room(self, policy_id: str, policy: _Policy) -> None:
        self._settle(policy_id, policy)
        if self._sleeping and self.settings.enable_sleep_mode:
            policy.llm.wake_up(["weights"])

    def _start_update(self, policy_id: str, policy: _Policy) -> None:
        self._make_room(policy_id, policy)
        policy.llm.collective_rpc(begin_update)
        self._transfer(policy_id, "start_weight_update")

    def _finish_update(self, policy_id: str, policy: _Policy, version: int) -> None:
        self._transfer(policy_id, "finish_weight_update")
        policy.llm.collective_rpc(end_update)
        policy.adapter = None
        policy.version = version

    def _transfer(self, policy_id: str, method: str, **arguments: Any) -> None:
        try:
            self._policy(policy_id).llm.collective_rpc(method, kwargs=arguments)
        except Exception as error:  # the weights may be half old, half new
            raise EngineDiedError(f"{method} of {policy_id!r} failed: {error}") from error

    def _load_adapter(
        self, policy_id: str, policy: _Policy, adapter: _Adapter, version: int
    ) -> None:
        self._make_room(policy_id, policy)
        try:
            policy.llm.add_lora(adapter.request)
            if policy.adapter is not None:
                policy.llm.remove_lora(policy.adapter.request.lora_int_id)
        except ValueError as error:
            raise EngineError(f"vLLM refuses the adapter of {policy_id!r}: {error}") from error
        except Exception as error:  # after an error of the GPU nothing here computes any more
            message = f"loading the adapter of {policy_id!r} failed: {error}"
            raise EngineDiedError(message) from error
        policy.adapter = adapter
        policy.version = version

    def _checksums(self, policy: _Policy) -> Checksums:
        if policy.adapter is None:
            found = policy.llm.collective_rpc(weight_checksums)
        else:
            found = _on_workers(
                policy,
                adapter_checksums,
                number=policy.adapter.request.lora_int_id,
                tensors=policy.adapter.tensors,
                scale=policy.adapter.scale,
            )
        first, *others = found
        return {
            name: sum_
            for name, sum_ in first.items()
            if all(other.get(name) == sum_ for other in others)
        }

    def _settle(self, policy_id: str, policy: _Policy) -> None:
        """Refuse while requests run; drop what was computed with the old weights."""
        running = policy.llm.get_num_unfinished_requests()
        if running:
            raise EngineError(
                f"{running} requests of policy {policy_id!r} still run: await or abort them first"
            )
        if policy.sight is not None:
            policy.llm.reset_encoder_cache()
        for _ in range(_SETTLING_STEPS):
            if policy.llm.reset_prefix_cache():
                return
            policy.llm.step()  # a batch that was scheduled ahead still holds blocks
        raise EngineDiedError(f"the KV cache of policy {policy_id!r} stays in use without requests")

    def _sleep(self) -> None:
        for policy_id, policy in self._policies.items():
            self._settle(policy_id, policy)
        if self.settings.enable_sleep_mode and not self._sleeping:
            for policy in self._policies.values():
                policy.llm.sleep(level=1)
        self._sleeping = True

    def _wake(self) -> None:
        if self.settings.enable_sleep_mode and self._sleeping:
            for policy in self._policies.values():
                tags = policy.llm.model_executor.sleeping_tags
                policy.llm.wake_up(sorted(tags))
        self._sleeping = False

    def _fail_all(self, error: Exception) -> None:
        for ticket in list(self._tickets.values()):
            ticket.fail(error)


def _on_workers(policy: _Policy, function: Any, **arguments: Any) -> list[Any]:
    # vLLM pickles the function whole, with every tensor that is bound to it; of its arguments it
    # sends large CPU tensors beside the pickle.
    return policy.llm.collective_rpc(function, kwargs=arguments)
