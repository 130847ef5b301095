"""Tables of steps: by hand, and random ones for what must hold of every table."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from rllib_gigpo.advantages import StepTable

# Without a deadline: a loaded machine is no counterexample.
properties = settings(deadline=None, max_examples=60)
settings_of_gigpo = st.fixed_dictionaries(
    {
        "omega": st.sampled_from([0.0, 0.5, 1.0]),
        "gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
        "f_norm": st.sampled_from(["std", "none"]),
        "group_mean_over": st.sampled_from(["episodes", "steps"]),
        "invalid_action_penalty": st.sampled_from([0.0, 0.1]),
        "penalty_scope": st.sampled_from(["return", "step"]),
    }
)


def make_table(*episodes: dict) -> StepTable:
    """Build a table of whole episodes; rewards are given, the rest has defaults."""
    columns = defaultdict(list)
    fresh_anchor = 1000
    for number, episode in enumerate(episodes):
        length = len(episode["rewards"])
        columns["group"] += [episode.get("group", 0)] * length
        columns["episode"] += [episode.get("episode", number)] * length
        columns["agent"] += [episode.get("agent", 0)] * length
        columns["step"] += range(length)
        columns["anchor"] += episode.get("anchors", range(fresh_anchor, fresh_anchor + length))
        columns["reward"] += episode["rewards"]
        columns["valid"] += episode.get("valid", [True] * length)
        fresh_anchor += length
    return StepTable(**{name: np.array(column) for name, column in columns.items()})


def permuted(table: StepTable, order: np.ndarray) -> StepTable:
    return StepTable(*(column[order] for column in table))


@st.composite
def tables(draw, max_groups: int = 3, agents: int = 2) -> StepTable:
    """Random tables with uneven lengths, repeated anchors and rewards that often tie."""
    episodes = []
    for group in range(draw(st.integers(1, max_groups))):
        for _ in range(draw(st.integers(1, 4))):
            number = len(episodes)
            for agent in range(draw(st.integers(1, agents))):
                length = draw(st.integers(1, 5))
                columns = {
                    "rewards": st.sampled_from([0.0, 0.0, 1.0, -0.1, 10.0]),
                    "anchors": st.integers(0, 2),
                    "valid": st.booleans(),
                }
                episode = {"group": group, "episode": number, "agent": agent}
                for name, entry in columns.items():
                    episode[name] = draw(st.lists(entry, min_size=length, max_size=length))
                episodes.append(episode)
    return make_table(*episodes)
