"""The table of environment steps that estimators read, and its canonical order.

Shapes: N rows.
"""

from typing import NamedTuple

import numpy as np

from rllib_gigpo.advantages.parts import BoolArray, FloatArray, IntArray, dense_ids


class StepTable(NamedTuple):
    """The scalar columns of a batch of environment steps, each of shape [N].

    A trajectory is the rows of one (episode, agent) pair, ordered by `step`.

    Attributes:
        group: Task group; its episodes start from the same initial state.
        episode: Episode id, unique over the batch.
        agent: Agent id.
        step: Position of the row in its trajectory; gaps are allowed, repeats are not.
        anchor: Anchor-state id (see `rllib_gigpo.grouping`).
        reward: The environment's reward for this step, before any penalty.
        valid: Whether the agent's action was valid.
    """

    group: IntArray
    episode: IntArray
    agent: IntArray
    step: IntArray
    anchor: IntArray
    reward: FloatArray
    valid: BoolArray


def pool_agents(table: StepTable) -> StepTable:
    """Let the trajectories of all agents of a group be compared with each other.

    Args:
        table: The rows [N].

    Returns:
        The rows in their order, as if every trajectory were an episode of one agent; anchor groups
        stay an agent's own.
    """
    return table._replace(
        episode=dense_ids(table.episode, table.agent),
        anchor=dense_ids(table.anchor, table.agent),
        agent=np.zeros_like(table.agent),
    )


def canonical(table: StepTable) -> tuple[IntArray, StepTable]:
    """Check a table and sort it by episode, agent and step.

    Args:
        table: The rows [N], in any order; array-likes of any number type.

    Returns:
        The row of the table at each place of the order [N], and the sorted table.

    Raises:
        ValueError: A column has another shape, a reward is not finite, a trajectory has a step
            twice or lies in two groups.
    """
    given = StepTable(
        *(np.asarray(column, dtype=np.int64) for column in table[:5]),
        reward=np.asarray(table.reward, dtype=np.float64),
        valid=np.asarray(table.valid, dtype=bool),
    )
    _check_shapes(given)
    order = np.lexsort((given.step, given.agent, given.episode))
    rows = StepTable._make(column[order] for column in given)
    _check_rows(rows)
    return order, rows


def _check_shapes(table: StepTable) -> None:
    expected = [table.reward.size]
    for name, column in table._asdict().items():
        if list(column.shape) != expected:
            raise ValueError(
                f"column {name} of the step table has shape {list(column.shape)}, expected "
                f"{expected} like reward: give one entry per environment step."
            )


def _check_rows(rows: StepTable) -> None:
    """Raise for the first row of the sorted table that breaks a rule."""
    same = (rows.episode[1:] == rows.episode[:-1]) & (rows.agent[1:] == rows.agent[:-1])
    twice = same & (rows.step[1:] == rows.step[:-1])
    moved = same & (rows.group[1:] != rows.group[:-1])
    for row in np.flatnonzero(~np.isfinite(rows.reward)):
        raise ValueError(
            f"{_name(rows, row)} has reward {rows.reward[row]}, expected a finite number: drop or "
            "replay the episode, or mend the environment."
        )
    for row in np.flatnonzero(twice):
        raise ValueError(
            f"{_name(rows, row)} is in the table twice, expected once: do not copy rows into a "
            "batch before the advantages, and number its episodes uniquely."
        )
    for row in np.flatnonzero(moved) + 1:
        raise ValueError(
            f"{_name(rows, row)} is in group {rows.group[row]} and its step before in group "
            f"{rows.group[row - 1]}, expected one group per episode: number the episodes of a "
            "batch uniquely."
        )


def _name(rows: StepTable, row: np.intp) -> str:
    return f"episode {rows.episode[row]}, agent {rows.agent[row]}, step {rows.step[row]}"
