"""The engine actors that clients share, and what has gone wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rllib_gigpo.engines.vllm.settings import VLLMSettings


@dataclass(frozen=True)
class Fleet:
    """The actors that clients share; pickles into any process of the cluster.

    Attributes:
        engines: Handles of each policy's engines.
        vault: Handle of the weight vault.
        settings: How every engine runs.
        heartbeat_timeout_s: Seconds after which an engine that does not answer is killed and
            started again; None waits for ever.
    """

    engines: Mapping[str, Sequence[Any]]
    vault: Any
    settings: VLLMSettings
    heartbeat_timeout_s: float | None = None

    def kill(self) -> None:
        """End all actors."""
        for engines in self.engines.values():
            for engine in engines:
                ray.kill(engine)
        ray.kill(self.vault)


@dataclass
class Faults:
    """What went wrong and was mended.

    Attributes:
        engine_restarts: Deaths of engines that this client noticed.
        retried_requests: Requests sent again after a death.
        failed_transfers: Weight updates that vLLM's own transfer did not bring to all engines.
    """

    engine_restarts: int = 0
    retried_requests: int = 0
    failed_transfers: int = 0
