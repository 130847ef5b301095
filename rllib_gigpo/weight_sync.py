"""Weights on their way from the learners to every engine, and the proof that they arrived.

One learner puts its weights into Ray's object store once; every engine reads them there. Engines
are either inside the EnvRunners (transformers) or actors of their own, shared by all EnvRunners and
by evaluation (vLLM). After each sync every engine answers a short probe, whose log-probabilities
must be the learner's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.engines.base import Completion, Engine, Request, Sampling
from rllib_gigpo.env_runner import LLMEnvRunner

_PROBE_TOKENS = 4
# Mean difference per token. Two fp32 implementations differ by 1e-5. In bf16 SmolLM2 differs by
# 0.1 to 0.32 on this prompt, which is like no text, so there the probe notices unrelated weights
# only; that weights are new, their version tells.
_TOLERANCE = {"float32": 2e-3, "bfloat16": 1.0}


class Sent(NamedTuple):
    """The last weights that went out, kept for runners that come back.

    Attributes:
        weights: Per module, packed tensors or a reference to them; empty where engine actors serve.
        version: Their version.
    """

    weights: dict[str, Any]
    version: int


class WeightSync:
    """Serves the learner's weights on all engines of one algorithm.

    Args:
        config: The algorithm's settings.
        runner_groups: The EnvRunner groups that play.
        first_learner: Calls a function on one learner.
        learner_is_local: Whether that learner lives in this process.
    """

    def __init__(
        self,
        config: GiGPOConfig,
        runner_groups: Sequence[EnvRunnerGroup],
        first_learner: Callable[[Callable[[Any], Any]], Any],
        learner_is_local: bool,
    ):
        self.config = config
        self._groups = list(runner_groups)
        self._first_learner = first_learner
        self._crosses = not learner_is_local or any(g.num_remote_workers() for g in self._groups)
        self._sent: Sent | None = None
        self.fleet: Any = self._start_fleet()

    def _start_fleet(self) -> Any:
        """Start the engine actors, or return None where engines live in the runners."""
        if self.config.engine != "vllm":
            return None
        from rllib_gigpo.engines.vllm.remote import RemoteVLLMEngine
        from rllib_gigpo.models import materialize

        folder = materialize(self.config.model_spec)
        return RemoteVLLMEngine.start(
            dict.fromkeys(self.config.module_ids, folder),
            self.config.vllm_settings,
            num_engines=self.config.num_engines,
        )

    @property
    def faults(self) -> dict[str, int]:
        """Engine deaths and retried requests that this process has seen."""
        if self.fleet is None:
            return {}
        return {
            "engine_restarts": self.fleet.faults.engine_restarts,
            "retried_requests": self.fleet.faults.retried_requests,
        }

    @property
    def version(self) -> int:
        """The version that engines serve."""
        return -1 if self._sent is None else self._sent.version

    def push(self, version: int) -> None:
        """Give every engine the learner's weights as a version, and probe them.

        Raises:
            RuntimeError: An engine serves something else afterwards.
        """
        if self.fleet is not None:
            self._publish(version)
            self._sent = Sent({}, version)
        else:
            packed = partial(_packed, by_object_store=self._crosses)
            self._sent = Sent(self._first_learner(packed), version)
        self.repeat()
        self._probe(version)

    def repeat(self) -> None:
        """Give all runners what was sent last, without asking the learner."""
        if self._sent is None:
            return
        weights, version = self._sent
        for runners in self._groups:
            if self.fleet is not None:
                _everywhere(runners, "attach", self.fleet.fleet, version)
                continue
            served = _everywhere(runners, "load_weights", weights, version)
            stale = [found for found in served if set(found.values()) != {version}]
            if stale:
                raise RuntimeError(f"an EnvRunner serves weights {stale[0]}, expected {version}")

    def _publish(self, version: int) -> None:
        from rllib_gigpo.engines.vllm.actor import Published

        trains_adapter = self.config.lora is not None
        call = _adapter_references if trains_adapter else _weight_references
        for module_id, (reference, adapter_config) in self._first_learner(call).items():
            kind = "adapter" if trains_adapter else "weights"
            self.fleet.publish(module_id, Published(kind, reference, version, adapter_config))

    def _probe(self, version: int) -> None:
        tolerance = self.config.probe_tolerance
        if tolerance == 0:
            return
        tolerance = tolerance or _TOLERANCE[self.config.dtype]
        for module_id in self.config.module_ids:
            for completion in self._answers(module_id):
                check_probe(
                    completion,
                    self._first_learner(
                        partial(_learner_logps, module_id=module_id, completion=completion)
                    ),
                    version,
                    tolerance,
                )

    def _answers(self, module_id: str) -> list[Completion]:
        if self.fleet is not None:
            requests = [
                probe_request(module_id, group, self.config.temperature)
                for group in range(self.config.num_engines)
            ]
            return asyncio.run(_generate(self.fleet, requests))
        request = probe_request(module_id, 0, self.config.temperature)
        answers = []
        for runners in self._groups:
            answers += _everywhere(runners, "probe", request)
        return [answer for answer in answers if answer is not None]

    def sleep(self) -> None:
        """Free the engines' device memory while the learner works, where they share a GPU."""
        if self.fleet is not None and self.config.engine_sleep:
            self.fleet.sleep()

    def wake(self) -> None:
        """Take the memory back."""
        if self.fleet is not None and self.config.engine_sleep:
            self.fleet.wake()

    def close(self) -> None:
        """End the engine actors."""
        if self.fleet is not None:
            self.fleet.close()
            self.fleet = None


def probe_request(module_id: str, group: int, temperature: float) -> Request:
    """Return the probe: a fixed prompt of token ids that every vocabulary has."""
    return Request(
        prompt_ids=np.arange(1, 9, dtype=np.int32),
        sampling=Sampling(temperature=temperature, max_tokens=_PROBE_TOKENS),
        seed=505,
        request_id=f"probe:{module_id}:{group}",
        policy_id=module_id,
        group_id=group,
    )


def check_probe(
    completion: Completion, learner_logps: np.ndarray, version: int, tolerance: float
) -> None:
    """Compare an engine's log-probabilities with the learner's.

    Raises:
        RuntimeError: They differ by more than the tolerance per token, or the version is another.
    """
    if completion.weight_version != version:
        raise RuntimeError(
            f"after the sync an engine serves weight version {completion.weight_version}, expected "
            f"{version}"
        )
    gap = float(np.mean(np.abs(completion.logps - learner_logps)))
    if not gap <= tolerance:
        raise RuntimeError(
            f"after the sync to version {version} an engine's log-probabilities differ from the "
            f"learner's by {gap:.4g} per token (allowed: {tolerance:g}): it does not serve the "
            "learner's weights; if the difference is the engine's arithmetic, raise "
            "engines(probe_tolerance=...)"
        )


async def _generate(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


def _everywhere(runners: EnvRunnerGroup, method: str, *args: Any) -> list[Any]:
    """Call a method on the runners that play: the remote ones, or the local one without any."""
    if runners.num_remote_workers() == 0:
        runner = runners.local_env_runner
        if not isinstance(runner, LLMEnvRunner):
            raise TypeError(
                f"the local EnvRunner is a {type(runner).__name__}: GiGPO needs LLMEnvRunner and "
                "create_local_env_runner=True where there are no remote ones"
            )
        return [getattr(runner, method)(*args)]
    return runners.foreach_env_runner(
        lambda runner: getattr(runner, method)(*args), local_env_runner=False
    )


def _packed(learner: Any, by_object_store: bool) -> dict[str, Any]:
    """Return a learner's weights per module, or references to them in Ray's object store."""
    packed = learner.packed_weights()
    return {m: ray.put(tensors) for m, tensors in packed.items()} if by_object_store else packed


def _weight_references(learner: Any) -> dict[str, tuple[ray.ObjectRef, None]]:
    return {m: (ray.put(tensors), None) for m, tensors in learner.packed_weights().items()}


def _adapter_references(learner: Any) -> dict[str, tuple[ray.ObjectRef, dict[str, Any]]]:
    adapters = learner.packed_adapters().items()
    return {m: (ray.put(tensors), config) for m, (tensors, config) in adapters}


def _learner_logps(learner: Any, module_id: str, completion: Completion) -> np.ndarray:
    prompt = probe_request(module_id, 0, 1.0).prompt_ids
    return learner.response_logps(module_id, prompt, completion.token_ids)
