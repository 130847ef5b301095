"""Which policies a team's agents are: what `--policies` and `--frozen` choose."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rllib_gigpo import GiGPOConfig

SHARED = "shared"


def add_team_choices(parser: argparse.ArgumentParser, agents: Sequence[str]) -> None:
    """Add what a team's example lets one choose."""
    parser.add_argument(
        "--policies",
        default="separate",
        choices=("shared", "adapters", "separate"),
        help="one policy of all agents, an adapter per agent on one base, or a model per agent",
    )
    parser.add_argument("--frozen", default=None, choices=tuple(agents), help="who does not learn")


def as_team(config: GiGPOConfig, args: argparse.Namespace, agents: Sequence[str]) -> GiGPOConfig:
    """Give the agents their policies; `base_config` and `train_as` know what adapters need.

    Raises:
        ValueError: An agent is to be frozen that shares the policy of another.
    """
    if args.policies == "shared":
        if args.frozen:
            raise ValueError(
                f"--frozen {args.frozen} with --policies shared: the other agent trains the same "
                "weights; use --policies adapters or separate"
            )
        return config.multi_agent(policies={SHARED}, policy_mapping_fn=_everyone)
    learning = [agent for agent in agents if agent != args.frozen]
    return config.multi_agent(
        policies=set(agents), policy_mapping_fn=_itself, policies_to_train=learning
    )


def _everyone(agent_id: Any, *args: Any, **kwargs: Any) -> str:
    return SHARED


def _itself(agent_id: Any, *args: Any, **kwargs: Any) -> str:
    return agent_id
