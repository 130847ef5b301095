"""Credit assignment for LLM agents: GiGPO, its relatives and their parts, in NumPy only."""

from rllib_gigpo.advantages.estimators import gigpo, grpo, rloo
from rllib_gigpo.advantages.history import hgpo
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
from rllib_gigpo.advantages.registry import (
    ESTIMATORS,
    Estimator,
    estimate,
    find_estimator,
    needs_critic,
    settings_of,
)
from rllib_gigpo.advantages.returns import (
    GaeLevel,
    TokenGae,
    episode_scores,
    gae_over_steps,
    gae_over_tokens,
    reinforce,
)
from rllib_gigpo.advantages.scores import (
    Advantages,
    GroupMeanOver,
    PenaltyScope,
    rounding_of_returns,
)
from rllib_gigpo.advantages.shaping import adapted_kl_coeff, overlong_cost
from rllib_gigpo.advantages.table import StepTable, pool_agents

__all__ = [
    "ESTIMATORS",
    "Advantages",
    "Estimator",
    "FNorm",
    "Gae",
    "GaeLevel",
    "GroupMeanOver",
    "PenaltyScope",
    "StepTable",
    "TokenGae",
    "adapted_kl_coeff",
    "dense_ids",
    "discounted_returns",
    "episode_scores",
    "estimate",
    "find_estimator",
    "gae",
    "gae_over_steps",
    "gae_over_tokens",
    "gigpo",
    "group_normalize",
    "grpo",
    "hgpo",
    "leave_one_out",
    "needs_critic",
    "overlong_cost",
    "pool_agents",
    "reinforce",
    "rloo",
    "rounding_of_returns",
    "settings_of",
    "whiten",
]
