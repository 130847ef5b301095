"""Weights on their way from the learners to every engine, and the proof that they arrived.

One learner puts its weights, or its adapter where LoRA trains, into Ray's object store once; every
engine reads them there. Engines are either inside the EnvRunners (transformers) or actors of their
own, shared by all EnvRunners and by evaluation (vLLM). Between GPUs the weights take vLLM's own
road (`engines.roads`), and the copy in the store is for engines that restart.

The proof has two parts. Checksums: what every engine computes with is, to the bit, what the learner
sent, whatever the type. A probe: every engine answers a short prompt, with a picture where the
model sees, and the log-probabilities are the learner's up to rounding, so that the right tensors
also stand in the right places.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.encoding import Encoded
from rllib_gigpo.engines import model_folders
from rllib_gigpo.engines.base import Completion, Engine, Request
from rllib_gigpo.engines.packing import Checksums
from rllib_gigpo.engines.published import Published, check_held
from rllib_gigpo.engines.roads import share_one_gpu
from rllib_gigpo.env_runner import LLMEnvRunner
from rllib_gigpo.probe import TOLERANCE, check_probe, probe_prompt, probe_request


class WeightSync:
    """Serves the learner's weights on all engines of one algorithm.

    Args:
        config: The algorithm's settings.
        runner_groups: The EnvRunner groups that play.
        first_learner: Calls a function on one learner.
        learner_is_local: Whether that learner lives in this process.

    Policies that are never trained are sent once, and again only after their weights have changed
    all the same, as when a checkpoint is restored.

    Attributes:
        fleet: The engine actors, or None where engines live in the runners.
        frozen: Policies that are never trained.
        seconds: Wall-clock of the last push by part: "publish" by the learner, "load" by the
            engines, and the two parts of the proof, "checksums" and "probe".
    """

    def __init__(
        self,
        config: GiGPOConfig,
        runner_groups: Sequence[EnvRunnerGroup],
        first_learner: Callable[[Callable[[Any], Any]], Any],
        learner_is_local: bool,
    ):
        self.config = config
        self.frozen = never_trained(config)
        self._groups = list(runner_groups)
        self._first_learner = first_learner
        self._learner_is_local = learner_is_local
        self.seconds: dict[str, float] = {}
        self._published: dict[str, Published] = {}
        self._version = -1
        self._probe_prompts = {
            module_id: probe_prompt(config.get_config_for_module(module_id))
            for module_id in config.module_ids
        }
        self.fleet: Any = self._start_fleet()
        self._crosses = (
            self.fleet is not None
            or not learner_is_local
            or any(group.num_remote_workers() for group in self._groups)
        )

    def _start_fleet(self) -> Any:
        """Start the engine actors, or return None where engines live in the runners."""
        if self.config.engine != "vllm":
            return None
        if self._learner_is_local and ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
            check_learner_of_driver(self.config)
        from rllib_gigpo.engines.vllm.remote import RemoteVLLMEngine

        return RemoteVLLMEngine.start(
            model_folders(self.config),
            self.config.vllm_settings,
            num_engines=self.config.num_engines,
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
        )

    @property
    def faults(self) -> dict[str, int]:
        """Engine deaths and retried requests that this process has seen."""
        if self.fleet is None:
            return {}
        return {
            "engine_restarts": self.fleet.faults.engine_restarts,
            "retried_requests": self.fleet.faults.retried_requests,
            "failed_transfers": self.fleet.faults.failed_transfers,
        }

    @property
    def version(self) -> int:
        """The version that engines serve."""
        return self._version

    def push(self, version: int) -> None:
        """Give every engine the learner's weights as a version, and prove that it has them.

        Raises:
            RuntimeError: An engine serves something else afterwards.
        """
        call = partial(
            _published,
            version=version,
            known={m: p.checksums for m, p in self._published.items() if m in self.frozen},
            by_object_store=self._crosses,
        )
        with self._timed("publish"):
            new = self._first_learner(call)
            self._published |= new
            self._version = version
        with self._timed("load"):
            if self.fleet is not None:
                for module_id, published in new.items():
                    self.fleet.publish(module_id, published, self._sender(module_id))
                self._wake()
            self._repeat(new)
        with self._timed("checksums"):
            self._check_checksums()
        with self._timed("probe"):
            self._probe()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start

    def _sender(self, module_id: str) -> Any:
        """Return what brings weights to a policy's engines directly, or None for the store."""
        road = self.config.weight_road
        if road == "ray":
            return None
        from rllib_gigpo.engines.vllm.native import send_weights

        def send(engines: Sequence[Any], incarnations: Sequence[str]) -> str | None:
            call = partial(
                send_weights,
                road=road,
                module_id=module_id,
                engines=list(engines),
                incarnations=list(incarnations),
                version=self._version,
            )
            return self._first_learner(call)

        return send

    def repeat(self) -> None:
        """Give all runners what was sent last, without asking the learner."""
        if self._published:
            self._repeat(self._published)

    def _repeat(self, parcels: Mapping[str, Published]) -> None:
        version = self._version
        expected = {module_id: published.version for module_id, published in parcels.items()}
        for runners in self._groups:
            if self.fleet is not None:
                _everywhere(runners, "attach", self.fleet.fleet, version)
                continue
            served = _everywhere(runners, "load_weights", parcels, version)
            stale = [found for found in served if found != expected]
            if stale:
                raise RuntimeError(f"an EnvRunner serves weights {stale[0]}, expected {expected}")

    def _check_checksums(self) -> None:
        """Compare what every engine computes with, bit by bit, to what the learner sent."""
        for module_id, published in self._published.items():
            for held in self._held(module_id):
                check_held(published, held)

    def _held(self, module_id: str) -> list[Checksums]:
        if self.fleet is not None:
            return self.fleet.all_checksums(module_id)
        reports = [report for group in self._groups for report in _everywhere(group, "checksums")]
        # A runner checks for itself what its engine loads when it is built later.
        return [report[module_id] for report in reports if report]

    def _probe(self) -> None:
        tolerance = self.config.probe_tolerance
        if tolerance == 0:
            return
        tolerance = tolerance or TOLERANCE[self.config.dtype]
        for module_id, published in self._published.items():
            for completion in self._answers(module_id):
                logps = partial(
                    _learner_logps,
                    module_id=module_id,
                    prompt=self._probe_prompts[module_id],
                    completion=completion,
                )
                check_probe(completion, self._first_learner(logps), published.version, tolerance)

    def _answers(self, module_id: str) -> list[Completion]:
        request = partial(
            probe_request,
            self.config.get_config_for_module(module_id),
            module_id,
            self._probe_prompts[module_id],
        )
        if self.fleet is not None:
            requests = [request(group) for group in range(self.config.num_engines)]
            return asyncio.run(_generate(self.fleet, requests))
        answers = []
        for runners in self._groups:
            answers += _everywhere(runners, "probe", request(0))
        return [answer for answer in answers if answer is not None]

    def sleep(self) -> None:
        """Free the engines' device memory until the next `push`, where they share a GPU."""
        if self.fleet is not None and self.config.engine_sleep:
            self.fleet.sleep()

    def _wake(self) -> None:
        # After the weights have arrived: they take back their memory by themselves, and the cache
        # of keys and values must not be in the way of the copies that they arrive in.
        if self.fleet is not None and self.config.engine_sleep:
            # A shared GPU has one learner; it sent from copies on that GPU.
            self._first_learner(_release_memory)
            self.fleet.wake()

    def close(self) -> None:
        """End the engine actors."""
        if self.fleet is not None:
            self.fleet.close()
            self.fleet = None


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


def check_learner_of_driver(config: GiGPOConfig) -> None:
    """Refuse a learner in the main process whose GPU Ray would give to an engine as well.

    A process that Ray did not start has reserved nothing: its learner takes the first GPU, which
    for Ray is free.

    Raises:
        ValueError: Learner and engines ask for GPUs that they do not share.
    """
    learner, engine = config.num_gpus_per_learner or 0, config.engine_num_gpus
    if learner > 0 and engine > 0 and not share_one_gpu(config):
        raise ValueError(
            f"num_gpus_per_learner={learner} and engine_num_gpus={engine} with num_learners=0 "
            "outside Tune: Ray reserves no GPU for a learner in the main process, and gives an "
            "engine the same one; set learners(num_learners=1)"
        )


def never_trained(config: GiGPOConfig) -> frozenset[str]:
    """Return the policies outside a list of `policies_to_train`; a function may name any."""
    to_train: Any = config.policies_to_train
    if not isinstance(to_train, list | tuple | set):
        return frozenset()
    return frozenset(config.module_ids) - set(to_train)


def _published(
    learner: Any, version: int, known: Mapping[str, Checksums], by_object_store: bool
) -> dict[str, Published]:
    """Return what a learner publishes, with references to Ray's object store where asked."""
    published = learner.published(version, known)
    if not by_object_store:
        return published
    return {m: replace(p, packed=ray.put(p.packed)) for m, p in published.items()}


def _release_memory(learner: Any) -> None:
    learner.release_memory()


def _learner_logps(
    learner: Any, module_id: str, prompt: Encoded, completion: Completion
) -> np.ndarray:
    return learner.response_logps(module_id, prompt, completion.token_ids)
