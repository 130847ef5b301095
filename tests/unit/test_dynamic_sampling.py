"""Dynamic sampling: which groups are left out, what is played in their place, and how it counts."""

from typing import Any

import pytest

from rllib_gigpo.collect import Collected, collect, pools, token_counts
from rllib_gigpo.env_runner import Played
from rllib_gigpo.rollout_types import Rollout
from rllib_gigpo.sampler import Sampler, training_tasks
from tests.episodes import Step, solo, team
from tests.tiny_runs import tiny_config


def group(number: int, *returns: float) -> list:
    return [solo(number, member, Step("s", value)) for member, value in enumerate(returns)]


def collected(*groups: list, dropped: tuple[int, ...] = ()) -> Collected:
    episodes = [episode for members in groups for episode in members]
    numbers = tuple({e.custom_data["group"] for e in episodes})
    failures = ("broken",) * len(dropped)
    return collect([Played(numbers, Rollout(episodes, dropped, failures=failures))])


class TestUniformGroups:
    def test_have_equal_returns(self):
        found = collected(group(0, 1, 0), group(1, 1, 1), group(2, 0, 0), group(3, 0, 0.5))
        assert found.uniform_groups() == [1, 2]

    def test_compare_returns_not_rewards(self):
        one = solo(0, 0, Step("s", 1.0), Step("t", 2.0))
        other = solo(0, 1, Step("s", 3.0))
        assert collected([one, other]).uniform_groups() == [0]

    def test_are_equal_up_to_rounding(self):
        # .1 + .2 + .3 is 0.6000000000000001, .3 + .2 + .1 is 0.6: one return, and no advantage.
        one = solo(0, 0, Step("s", 0.1), Step("t", 0.2), Step("u", 0.3))
        other = solo(0, 1, Step("s", 0.3), Step("t", 0.2), Step("u", 0.1))
        assert one.get_return() != other.get_return()
        assert collected([one, other]).uniform_groups() == [0]
        assert collected(group(0, 1.0, 1.0 + 1e-12)).uniform_groups() == []

    def test_of_a_team_are_equal_for_every_agent(self):
        def played(member: int, first: float, second: float):
            steps = [Step("s", first, agent="a"), Step("s", second, agent="b")]
            return team(0, member, *steps)

        assert collected([played(0, 1, 0), played(1, 1, 0)]).uniform_groups() == [0]
        # The sums are equal, and what each agent earned is not.
        assert collected([played(0, 1, 0), played(1, 0, 1)]).uniform_groups() == []

    def test_of_a_team_are_those_of_who_learns(self):
        config = tiny_config().environment("ArithmeticTeam")
        config.multi_agent(
            policies={"solver", "verifier"},
            policy_mapping_fn=lambda agent, *_, **__: "solver" if agent == "a" else "verifier",
        )
        rounds = [
            [Step("s", first, agent="a"), Step("s", second, agent="b")]
            for first, second in ((1, 0), (1, 1))
        ]
        found = collected([team(0, member, *steps) for member, steps in enumerate(rounds)])
        assert found.uniform_groups(pools(config)) == []
        # Only the verifier's returns differ.
        config.multi_agent(policies_to_train=["solver"])
        assert found.uniform_groups(pools(config)) == [0]
        config.multi_agent(policies_to_train=["verifier"])
        assert found.uniform_groups(pools(config)) == []

    def test_of_agents_that_are_compared_with_each_other(self):
        # One agent always earns 1 and the other 0: alike among their own, not among both.
        members = [
            team(0, member, Step("s", 1.0, agent="a"), Step("s", 0.0, agent="b"))
            for member in range(2)
        ]
        config = tiny_config(normalize_over="agent").environment("ArithmeticTeam")
        config.multi_agent(policies={"both"}, policy_mapping_fn=lambda agent, *_, **__: "both")
        assert collected(members).uniform_groups(pools(config)) == [0]
        config.training(normalize_over="policy")
        assert collected(members).uniform_groups(pools(config)) == []


class TestChoice:
    ALL = (group(0, 1, 0), group(1, 1, 1), group(2, 0, 0), group(3, 0, 1))

    def trained(self, num_groups: int) -> list[int]:
        chosen = collected(*self.ALL).choose(num_groups)
        return sorted({e.custom_data["group"] for e in chosen.training_episodes})

    def test_leaves_uniform_groups_out(self):
        assert self.trained(2) == [0, 3]

    def test_fills_up_with_the_first_of_them(self):
        assert self.trained(3) == [0, 1, 3]
        assert self.trained(4) == [0, 1, 2, 3]

    def test_counts_what_it_left_out_and_keeps_it_for_the_metrics(self):
        chosen = collected(*self.ALL).choose(2)
        assert chosen.counts()["num_groups_left_out"] == 2
        assert len(chosen.episodes) == 8

    def test_rounds_add_up(self):
        joined = collected(self.ALL[0]).joined(collected(self.ALL[1], dropped=(7,)))
        assert joined.counts()["num_sampling_rounds"] == 2
        assert joined.dropped == (7,)
        assert len(joined.episodes) == 4


def test_tokens_are_counted_over_all_episodes():
    episodes = [
        solo(0, 0, Step("s", prompt=(1, 2, 3), response=(4,)), Step("t", prompt=(1,), response=())),
        solo(0, 1, Step("s", prompt=(1, 2), response=(4, 5))),
    ]
    assert token_counts(episodes) == {"prompt": 6, "response": 3}


class Scripted:
    """Plays nothing: group g has the returns that `results` says, by default unequal ones."""

    def __init__(self, results: dict[int, Any]):
        self.results = results
        self.asked: list[list[int]] = []

    def play(self, tasks):
        self.asked.append([task.group for task in tasks])
        played, dropped = [], []
        for task in tasks:
            returns = self.results.get(task.group, (1.0, 0.0))
            if returns is None:
                dropped.append(task.group)
            else:
                played.append(group(task.group, *returns))
        return collected(*played, dropped=tuple(dropped))


def sample(results: dict[int, Any], **training) -> tuple[Collected, list[list[int]]]:
    config = tiny_config(**{"num_groups": 4, "dynamic_sampling": True, **training})
    scripted = Scripted(results)
    return Sampler(config, scripted.play).sample(3), scripted.asked


SAME = (1.0, 1.0)


class TestRefill:
    def test_plays_further_tasks_for_those_that_teach_nothing(self):
        found, asked = sample({1: SAME, 2: SAME, 4: SAME})
        assert asked == [[0, 1, 2, 3], [4, 5], [6]]
        trained = sorted({e.custom_data["group"] for e in found.training_episodes})
        assert trained == [0, 3, 5, 6]
        assert found.counts()["num_groups_left_out"] == 3
        assert found.counts()["num_sampling_rounds"] == 3

    def test_stops_where_every_group_teaches(self):
        _, asked = sample({})
        assert asked == [[0, 1, 2, 3]]

    def test_ends_at_the_limit_and_fills_up(self):
        found, asked = sample(
            dict.fromkeys(range(100), SAME) | {2: (1.0, 0.0)}, max_sampling_rounds=3
        )
        assert asked == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
        trained = sorted({e.custom_data["group"] for e in found.training_episodes})
        assert trained == [0, 1, 2, 3]

    def test_is_off_by_default(self):
        found, asked = sample({1: SAME}, dynamic_sampling=False)
        assert asked == [[0, 1, 2, 3]]
        assert len(found.training_episodes) == 8

    def test_replaces_groups_that_failed_too(self):
        found, asked = sample({1: None})
        assert asked == [[0, 1, 2, 3], [4]]
        assert found.dropped == (1,)

    def test_a_share_of_failures_is_of_all_that_was_played(self):
        # One group of one failed in the second round, 1 of 6 over all rounds.
        found, asked = sample({1: SAME, 4: None})
        assert asked == [[0, 1, 2, 3], [4], [5]]
        assert len(found.training_episodes) == 8

    def test_too_many_failures_still_stop_the_run(self):
        with pytest.raises(RuntimeError, match="groups were dropped because"):
            sample(dict.fromkeys(range(100), None) | {0: (1.0, 0.0)}, max_sampling_rounds=2)


def test_further_tasks_are_a_function_of_their_number():
    config = tiny_config(num_groups=4)
    whole = training_tasks(config, 3, count=9)
    parts = training_tasks(config, 3) + training_tasks(config, 3, first=4, count=5)
    assert parts == whole
    assert len({task.env_seed for task in whole}) == 9
