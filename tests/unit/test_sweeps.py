"""Table and heat map of a sweep."""

from types import SimpleNamespace

import pytest

from rllib_gigpo.compare.sweeps import Trial, heat_map, sweep_rows, trials_of

_TRIALS = [
    Trial(0.0, 0.95, "std", 0, 0.2, 5),
    Trial(0.0, 0.95, "std", 1, 0.4, 5),
    Trial(1.0, 0.95, "std", 0, 0.6, 5),
    Trial(1.0, 0.95, "none", 0, 0.9, 3),
]


def test_rows_are_means_over_seeds_best_first():
    rows = sweep_rows(_TRIALS)
    assert [row[:5] for row in rows] == [
        ["none", 0.95, 1.0, 1, 0.9],
        ["std", 0.95, 1.0, 1, 0.6],
        # The mean of 0.2 and 0.4.
        ["std", 0.95, 0.0, 2, pytest.approx(0.3)],
    ]
    assert [row[7] for row in rows] == [3, 5, 5]
    # A single seed has no interval. Of 0.2 and 0.4 it is .3 +- 12.7 * .1, cut at 0 and 1.
    assert (rows[0][5], rows[2][5]) == ("–", "[0.00, 1.00]")


def test_trials_without_the_metric_are_left_out():
    config = {"omega": 1.0, "gamma": 0.9, "f_norm": "std", "seed": 3}
    told = {"training_iteration": 2, "env_runners": {"success_rate": 0.5}}
    results = [
        SimpleNamespace(config=config, metrics=told),
        SimpleNamespace(config=config, metrics={"training_iteration": 0}),
        SimpleNamespace(config=config, metrics=None),
    ]
    assert trials_of(results, "env_runners/success_rate") == [Trial(1.0, 0.9, "std", 3, 0.5, 2)]


def test_the_heat_map_is_a_picture_and_needs_a_trial(tmp_path):
    path = heat_map(_TRIALS, tmp_path / "map.png", "success")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no trial has reported anything"):
        heat_map([], tmp_path / "none.png", "success")
