"""What a policy is served with after a sync, and the proof that an engine has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rllib_gigpo.engines.base import Engine
from rllib_gigpo.engines.packing import Checksums, PackedTensors, unpack

_SHOWN = 3


@dataclass(frozen=True)
class Published:
    """One version of a policy.

    Attributes:
        kind: All weights of the policy, or an adapter on its base weights.
        packed: `PackedTensors`, or a reference to them in Ray's object store.
        version: Weight version.
        checksums: Of the tensors, as whoever published them computed them.
        adapter_config: Content of peft's adapter_config.json, for an adapter.
    """

    kind: Literal["weights", "adapter"]
    packed: Any
    version: int
    checksums: Checksums
    adapter_config: dict[str, Any] | None = None


def serve(engine: Engine, policy_id: str, published: Published, packed: PackedTensors) -> None:
    """Load what was published into an engine.

    Args:
        engine: The engine.
        policy_id: The policy.
        published: What `packed` is.
        packed: The tensors.
    """
    tensors = unpack(packed)
    if published.kind == "weights":
        engine.load_weights(policy_id, tensors, published.version)
    else:
        config = published.adapter_config or {}
        engine.load_adapter(policy_id, tensors, config, published.version)


def check_held(published: Published, held: Mapping[str, int]) -> None:
    """Compare the checksums of what an engine computes with to those of what it should.

    Args:
        published: What it should compute with.
        held: `Engine.checksums` of the policy.

    Raises:
        RuntimeError: A tensor is missing or another one.
    """
    sent = published.checksums
    wrong = [name for name in sent if held.get(name) != sent[name]]
    if wrong:
        more = ", ..." if len(wrong) > _SHOWN else ""
        raise RuntimeError(
            f"after the sync to version {published.version} an engine computes with other tensors "
            f"than the learner's: {len(wrong)} of {len(sent)} differ or are missing "
            f"({', '.join(wrong[:_SHOWN])}{more}); old weights would be sampled from, so the run "
            "stops; restore it from its last checkpoint"
        )
