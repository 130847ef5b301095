"""Which anchor rule a configuration builds, and the ids it gives rows in any order."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.agent.profile import default_profile
from rllib_gigpo.group_player import spread
from rllib_gigpo.grouping import AnchorRule, exact_anchors, similar_anchors
from rllib_gigpo.rows import episodes_to_batch, modules_of
from tests.episodes import Step, solo, team

# 20 characters each. Indel similarity is 1 - (edits / 40) with a replaced letter as two edits:
# A-B 1 - 2/40 = 0.95, B-C 0.95, A-C 1 - 4/40 = 0.9.
A, B, C = "a" * 20, "a" * 19 + "b", "a" * 18 + "bb"
FAR = "z" * 20


def episodes():
    """Eight episodes in two groups whose clusters at 0.95 depend on which text comes first."""
    walks = ([A, B, C], [B, C, A], [C, FAR, B], [B, A, C])
    return [
        solo(group, member, *map(Step, walks[(member + group) % 4]))
        for group in range(2)
        for member in range(4)
    ]


def anchors(rule, played):
    ((_, rows),) = modules_of(episodes_to_batch(played, rule))
    return list(
        zip(rows["group"].tolist(), rows["episode"].tolist(), rows["anchor"].tolist(), strict=True)
    )


def test_the_default_is_exact():
    assert GiGPOConfig().anchor_rule == AnchorRule("exact", 0.9, "rapidfuzz")


def test_settings_make_the_rule():
    config = GiGPOConfig().training(
        anchor="similarity", similarity_threshold=0.8, similarity_measure="difflib_reference"
    )
    config.validate()
    assert config.anchor_rule == AnchorRule("similarity", 0.8, "difflib_reference")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchor": "fuzzy"}, "anchor='fuzzy': expected one of 'exact', 'similarity'"),
        ({"similarity_measure": "x"}, "similarity_measure='x': expected one of 'rapidfuzz'"),
        ({"similarity_threshold": 0.0}, "similarity_threshold=0.0: expected a finite number from"),
        ({"similarity_threshold": 1.1}, "similarity_threshold=1.1: expected a finite number from"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GiGPOConfig().training(**settings).validate()


def test_similarity_merges_what_exact_keeps_apart():
    # Member 0 of group 0 walks A, B, C, FAR never. At 0.9 A represents all but FAR.
    exact = anchors(AnchorRule(), episodes())
    similar = anchors(AnchorRule("similarity", 0.9), episodes())
    assert [anchor for group, _, anchor in exact if group == 0][:3] == [0, 1, 2]
    assert [anchor for group, _, anchor in similar if group == 0][:3] == [0, 0, 0]
    # Per group: one cluster of A, B, C and one of FAR; clusters of two groups have different ids.
    assert {anchor for group, _, anchor in similar if group == 0} == {0, 1}
    assert {anchor for group, _, anchor in similar if group == 1} == {2, 3}


def test_the_order_of_the_rows_matters_to_similarity():
    """So the next test would fail if rows came in the order in which episodes end."""
    nobody = np.zeros(3, dtype=np.int64)
    first = similar_anchors([A, B, C], nobody, nobody, threshold=0.95)
    assert first.tolist() == [0, 0, 1]
    assert similar_anchors([B, A, C], nobody, nobody, threshold=0.95).tolist() == [0, 0, 0]


@pytest.mark.parametrize("rule", [AnchorRule(), AnchorRule("similarity", 0.95)], ids=str)
@pytest.mark.parametrize("runners", [1, 2, 3, 5])
def test_any_order_and_any_number_of_runners_give_the_same_anchors(rule, runners):
    expected = anchors(rule, episodes())
    for seed in range(10):
        rng = random.Random(seed)
        shares = spread(episodes(), runners)
        rng.shuffle(shares)
        for share in shares:
            rng.shuffle(share)
        assert anchors(rule, [episode for share in shares for episode in share]) == expected


def test_agents_of_a_team_never_share_a_cluster():
    episode = team(0, 0, Step(A, agent="one"), Step(B, agent="two"), Step(C, agent="one"))
    ((_, rows),) = modules_of(episodes_to_batch([episode], AnchorRule("similarity", 0.9)))
    by_agent = dict(zip(rows["agent_id"].tolist(), rows["anchor"].tolist(), strict=True))
    assert rows["anchor"].tolist() == [0, 0, 1]
    assert by_agent == {"one": 0, "two": 1}


def test_a_users_key_groups_the_rows():
    profile = replace(default_profile(), anchor=lambda seen, info: (seen.split()[0], 1))
    keys = [profile.anchor_of(seen, {"anchor": "no"}) for seen in ("hall 1", "attic 2", "hall 3")]
    assert keys == [("hall", 1), ("attic", 1), ("hall", 1)]
    nobody = np.zeros(3, dtype=np.int64)
    assert AnchorRule()(keys, nobody, nobody).tolist() == [0, 1, 0]
    assert exact_anchors(keys).tolist() == [0, 1, 0]
    with pytest.raises(TypeError, match=r"an anchor is a tuple, expected str.*anchor='exact'"):
        AnchorRule("similarity")(keys, nobody, nobody)
