"""Episodes to rows, rows to minibatches, rows to learners."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_gigpo.grouping import exact_anchors
from rllib_gigpo.rows import (
    TOKEN_COLUMNS,
    MinibatchPlan,
    RowData,
    agent_episodes,
    assign_learners,
    complete_batch,
    episodes_to_batch,
    modules_of,
    object_array,
    step_table,
)
from tests.episodes import Step, solo, team


def anchors(texts, group, agent):
    return exact_anchors(texts)


def batch_of(*episodes, module_of=lambda agent: "default_policy") -> MultiAgentBatch:
    return episodes_to_batch(episodes, anchors, module_of)


def rows_of(*episodes) -> dict[str, np.ndarray]:
    ((module, rows),) = modules_of(batch_of(*episodes))
    assert module == "default_policy"
    return rows


EPISODES = (
    solo(
        1,
        0,
        Step("kitchen", -0.5, (1, 2, 3), (7, 8), [-0.25, -0.5], version=4),
        Step("hall", 10.0, (1,), (9,), [-2.0], well_formed=False, version=5),
    ),
    solo(0, 1, Step("hall", 0.0, (4, 4), (5, 6, 7), accepted=False), truncated=True),
    solo(
        0,
        0,
        Step("kitchen", 1.0, accepted=True),
        Step("hall", 2.0, accepted=False),
        Step("kitchen", 3.0, accepted=True, well_formed=False),
    ),
)


def test_every_column_of_every_row():
    rows = rows_of(*EPISODES)
    # Sorted by (group, member): episode 0 is (0, 0), 1 is (0, 1), 2 is (1, 0).
    expected = {
        "group": [0, 0, 0, 0, 1, 1],
        "episode": [0, 0, 0, 1, 2, 2],
        "agent": [0, 0, 0, 0, 0, 0],
        "agent_id": ["agent"] * 6,
        "module_id": ["default_policy"] * 6,
        "step": [0, 1, 2, 0, 0, 1],
        # kitchen, hall, kitchen, hall, kitchen, hall
        "anchor": [0, 1, 0, 1, 0, 1],
        "reward": [1.0, 2.0, 3.0, 0.0, -0.5, 10.0],
        # Both verdicts count, and each belongs to the action before it.
        "valid": [True, False, False, False, True, False],
        # Only the last step of the cut episode.
        "truncated": [False, False, False, True, False, False],
        "weight_version": [0, 0, 0, 0, 4, 5],
        "num_prompt_tokens": [2, 2, 2, 2, 3, 1],
        "num_response_tokens": [1, 1, 1, 3, 2, 1],
        # Sums over the response: -1 per token where nothing else is said, -0.25 - 0.5, -2.
        "engine_logp": [-1.0, -1.0, -1.0, -3.0, -0.75, -2.0],
        "learner": [0, 0, 0, 0, 0, 0],
    }
    for name, column in expected.items():
        assert rows[name].tolist() == column, name
    tokens = {name: [list(row) for row in rows[name]] for name in TOKEN_COLUMNS}
    assert tokens == {
        "prompt_ids": [[1, 2], [1, 2], [1, 2], [4, 4], [1, 2, 3], [1]],
        "response_ids": [[3], [3], [3], [5, 6, 7], [7, 8], [9]],
        "response_logps": [[-1.0], [-1.0], [-1.0], [-1.0] * 3, [-0.25, -0.5], [-2.0]],
    }
    assert set(rows) == {*expected, *TOKEN_COLUMNS}


def test_the_columns_have_the_types_that_the_learner_expects():
    rows = rows_of(*EPISODES)
    kinds = {name: rows[name].dtype for name in rows}
    assert {kinds[name] for name in ("reward", "engine_logp")} == {np.dtype(np.float64)}
    assert {kinds[name] for name in ("valid", "truncated")} == {np.dtype(bool)}
    assert {kinds[name] for name in TOKEN_COLUMNS} == {np.dtype(object)}
    assert {kinds[name] for name in ("group", "episode", "anchor", "learner", "step")} == {
        np.dtype(np.int64)
    }


@given(order=st.permutations(range(3)))
def test_rows_do_not_depend_on_who_played_what(order):
    rows, again = rows_of(*EPISODES), rows_of(*(EPISODES[number] for number in order))
    for name, column in rows.items():
        if name in TOKEN_COLUMNS:
            assert [list(row) for row in column] == [list(row) for row in again[name]]
        else:
            assert column.tolist() == again[name].tolist()


def test_the_number_of_environment_steps_is_kept():
    assert batch_of(*EPISODES).env_steps() == 6
    # Three moves by two agents: three environment steps, three rows.
    assert batch_of(TEAM).env_steps() == 3


def test_equal_token_lists_stay_one_row_each():
    # np.array would make a matrix of them.
    rows = rows_of(solo(0, 0, Step("a", prompt=(1, 2)), Step("b", prompt=(1, 2))))
    assert rows["prompt_ids"].shape == (2,)


def test_anchor_ids_come_from_the_texts_groups_and_agents_of_the_rows():
    given_to = []

    def numbers(texts, group, agent):
        given_to.append((list(texts), group.tolist(), agent.tolist()))
        return np.arange(len(texts)) * 10

    batch = episodes_to_batch(EPISODES, numbers)
    assert given_to == [
        (["kitchen", "hall", "kitchen", "hall", "kitchen", "hall"], [0, 0, 0, 0, 1, 1], [0] * 6)
    ]
    assert batch.policy_batches["default_policy"]["anchor"].tolist() == [0, 10, 20, 30, 40, 50]


TEAM = team(
    0,
    0,
    Step("one", 0.0, (1,), (2,), agent="b", accepted=False),
    Step("two", 0.0, (3,), (4,), agent="a", accepted=True),
    Step("three", 5.0, (5,), (6,), agent="b", accepted=True),
)


def test_agents_have_their_own_rows_steps_and_codes():
    rows = rows_of(TEAM, solo(1, 0, Step("four")))
    # Agents in the order of their names: a is 0, the agent of single-agent episodes "agent" 1,
    # b 2.
    assert rows["agent"].tolist() == [0, 2, 2, 1]
    assert rows["agent_id"].tolist() == ["a", "b", "b", "agent"]
    assert rows["step"].tolist() == [0, 0, 1, 0]
    assert rows["episode"].tolist() == [0, 0, 0, 1]
    assert [list(ids) for ids in rows["prompt_ids"]] == [[3], [1], [5], [1, 2]]
    assert rows["reward"].tolist() == [0.0, 0.0, 5.0, 0.0]
    # b's first action was refused, its second was not, and neither says anything about a's.
    assert rows["valid"].tolist() == [True, False, True, True]


def test_agents_are_dealt_to_modules():
    batch = batch_of(TEAM, module_of=lambda agent: f"policy of {agent}")
    assert set(batch.policy_batches) == {"policy of a", "policy of b"}
    assert batch.policy_batches["policy of b"]["reward"].tolist() == [0.0, 5.0]
    assert batch.policy_batches["policy of a"]["reward"].tolist() == [0.0]
    assert batch.policy_batches["policy of b"]["agent"].tolist() == [1, 1]
    assert batch.policy_batches["policy of b"]["module_id"].tolist() == ["policy of b"] * 2


def test_a_team_member_that_never_acted_has_no_row():
    lonely = team(0, 0, Step("one", agent="a"), Step("two", agent="a"), truncated=True)
    rows = rows_of(lonely)
    assert rows["step"].tolist() == [0, 1]
    assert rows["truncated"].tolist() == [False, True]


def test_agents_that_never_acted_are_no_agents_of_an_episode():
    assert agent_episodes(team(0, 0, truncated=True)) == []
    assert [agent for agent, _ in agent_episodes(TEAM)] == ["a", "b"]


def test_episodes_without_any_step_are_refused_with_the_cure():
    with pytest.raises(ValueError, match=r"none of the 2 episodes .*max_prompt_tokens"):
        batch_of(solo(0, 0), solo(0, 1))


def test_a_hand_made_batch_is_completed():
    batch = complete_batch(
        SampleBatch(
            {
                "group": np.array([0, 0]),
                "prompt_ids": object_array([[1, 2, 3], [1]]),
                "response_ids": object_array([[4], [5, 6]]),
                "response_logps": object_array([[-0.5], [-0.25, -1.0]]),
            }
        )
    )
    assert batch["num_prompt_tokens"].tolist() == [3, 1]
    assert batch["num_response_tokens"].tolist() == [1, 2]
    assert batch["engine_logp"].tolist() == [-0.5, -1.25]
    assert batch["valid"].tolist() == [True, True]
    assert batch["truncated"].tolist() == [False, False]
    for name in ("agent", "weight_version", "learner"):
        assert batch[name].tolist() == [0, 0]


def test_completing_changes_no_column_that_is_there():
    rows = rows_of(*EPISODES)
    before = {name: column.tolist() for name, column in rows.items() if name not in TOKEN_COLUMNS}
    complete_batch(SampleBatch(rows))
    for name, column in before.items():
        assert rows[name].tolist() == column


def test_the_step_table_takes_the_columns_of_the_advantages():
    rows = rows_of(*EPISODES)
    table = step_table(rows)
    for name in ("group", "episode", "agent", "step", "anchor", "reward", "valid"):
        assert getattr(table, name) is rows[name]


# Minibatches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "number", "rows", "expected"),
    [
        (None, None, 7, [7]),
        (3, None, 7, [3, 2, 2]),  # ceil(7 / 3) = 3 steps of nearly equal size
        (7, None, 7, [7]),
        (8, None, 7, [7]),
        (1, None, 3, [1, 1, 1]),
        (None, 4, 10, [3, 3, 2, 2]),
        (None, 4, 3, [1, 1, 1]),  # never more steps than rows
        (None, 1, 5, [5]),
    ],
)
def test_the_number_and_sizes_of_the_optimizer_steps(size, number, rows, expected):
    drawn = MinibatchPlan(size, number, seed=0).draw(rows, iteration=0, epoch=0)
    assert [len(minibatch) for minibatch in drawn] == expected


@given(
    rows=st.integers(1, 60),
    size=st.none() | st.integers(1, 70),
    number=st.integers(1, 20),
    seed=st.integers(0, 5),
    iteration=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_every_row_is_drawn_exactly_once(rows, size, number, seed, iteration, epoch):
    plan = MinibatchPlan(size, None if size else number, seed)
    drawn = plan.draw(rows, iteration, epoch)
    assert sorted(np.concatenate(drawn).tolist()) == list(range(rows))
    sizes = [len(minibatch) for minibatch in drawn]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert size is None or max(sizes) <= size
    # Every learner draws the same.
    again = MinibatchPlan(size, None if size else number, seed).draw(rows, iteration, epoch)
    assert [a.tolist() for a in drawn] == [a.tolist() for a in again]


def test_draws_are_shuffled_and_differ_by_seed_iteration_and_epoch():
    draws = {
        (seed, iteration, epoch): tuple(
            MinibatchPlan(None, 1, seed).draw(50, iteration, epoch)[0].tolist()
        )
        for seed in (0, 1)
        for iteration in (0, 1)
        for epoch in (0, 1)
    }
    assert len({*draws.values(), tuple(range(50))}) == 9


# Learners ----------------------------------------------------------------------------------------


def test_the_longest_rows_are_dealt_first():
    # 9 -> learner 0, 7 -> 1 (0 < 9), 5 -> 1 (7 < 9), 4 -> 0 (9 < 12), 1 -> 1 (12 < 13).
    tokens = np.array([4, 9, 1, 7, 5])
    owner = assign_learners(tokens, [np.arange(5)], 2)
    assert owner.tolist() == [0, 0, 1, 1, 1]


@given(
    tokens=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    learners=st.integers(1, 5),
    number=st.integers(1, 8),
)
def test_every_row_has_one_owner_and_loads_differ_by_at_most_one_row(tokens, learners, number):
    tokens = np.array(tokens)
    minibatches = MinibatchPlan(None, number, 0).draw(len(tokens), 0, 0)
    owner = assign_learners(tokens, minibatches, learners)
    assert owner.shape == tokens.shape
    assert set(owner.tolist()) <= set(range(learners))
    for rows in minibatches:
        loads = np.bincount(owner[rows], weights=tokens[rows], minlength=learners)
        assert loads.max() - loads.min() <= tokens[rows].max()


def two_modules() -> MultiAgentBatch:
    return batch_of(
        *(
            team(
                0,
                member,
                Step("one", 1.0, range(1, 2 + member), (2,), agent="a"),
                Step("two", 2.0, (3,), range(4, 6 + member), agent="b"),
                Step("three", 3.0, (5,), (6,), agent="a"),
            )
            for member in range(4)
        ),
        module_of=lambda agent: f"policy of {agent}",
    )


@pytest.mark.parametrize("learners", [1, 2, 3])
def test_every_learner_gets_all_scalars_and_its_own_tokens(learners):
    whole = two_modules()
    kept = copy.deepcopy(whole)
    shards = RowData(whole, MinibatchPlan(None, 2, 0)).shard(num_shards=learners)
    assert len(shards) == learners
    for module, rows in modules_of(kept):
        held = np.zeros(len(rows["group"]), dtype=int)
        for number, (data, arguments) in enumerate(shards):
            assert isinstance(data, TrainingData)
            assert arguments == {}
            share = data.batch.policy_batches[module]
            for name in rows:
                if name not in (*TOKEN_COLUMNS, "learner"):
                    assert share[name].tolist() == rows[name].tolist()
            mine = share["learner"] == number
            held += mine
            for name in TOKEN_COLUMNS:
                assert [row is None for row in share[name]] == (~mine).tolist()
                for got, row in zip(share[name][mine], rows[name][mine], strict=True):
                    assert list(got) == list(row)
        assert held.tolist() == [1] * len(held)
    assert all(data.batch.env_steps() == kept.env_steps() for data, _ in shards)
    # The batch that was sharded stays whole.
    for module, rows in modules_of(whole):
        assert all(row is not None for name in TOKEN_COLUMNS for row in rows[name]), module


def test_the_shards_follow_the_minibatches_of_their_iteration():
    tokens = np.random.default_rng(0).integers(1, 90, 40)
    steps = (Step("s", prompt=[1] * (count + 1)) for count in tokens)
    whole = batch_of(solo(0, 0, *steps))
    plan = MinibatchPlan(None, 5, seed=3)
    for iteration in (0, 7):
        shards = RowData(whole, plan).shard(2, iteration=iteration)
        rows = shards[0][0].batch.policy_batches["default_policy"]
        lengths = rows["num_prompt_tokens"] + rows["num_response_tokens"]
        for minibatch in plan.draw(40, iteration, epoch=0):
            loads = np.bincount(rows["learner"][minibatch], weights=lengths[minibatch])
            assert abs(loads[0] - loads[1]) <= lengths[minibatch].max()
