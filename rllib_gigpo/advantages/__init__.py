"""Credit assignment for LLM agents: GiGPO, its relatives and their parts, in NumPy only."""

from rllib_gigpo.advantages.estimators import (
    Advantages,
    GroupMeanOver,
    PenaltyScope,
    gigpo,
    grpo,
    rloo,
)
from rllib_gigpo.advantages.parts import (
    FNorm,
    Gae,
    dense_ids,
    discounted_returns,
    gae,
    group_normalize,
    leave_one_out,
    whiten,
)
from rllib_gigpo.advantages.table import StepTable

__all__ = [
    "Advantages",
    "FNorm",
    "Gae",
    "GroupMeanOver",
    "PenaltyScope",
    "StepTable",
    "dense_ids",
    "discounted_returns",
    "gae",
    "gigpo",
    "group_normalize",
    "grpo",
    "leave_one_out",
    "rloo",
    "whiten",
]
