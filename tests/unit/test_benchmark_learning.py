"""The learning benchmark's statistics by hand, its plan, and what it makes of finished runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.learning import planned_runs, read_results, tabulate
from benchmarks.learning_plot import plot_task
from benchmarks.learning_runs import CORE, FAMILY, TASKS, Run, config_of, twin_of
from rllib_gigpo.compare.statistics import (
    area_under_curve,
    interquartile_mean,
    mean_interval,
    paired_difference,
    probability_of_improvement,
    share_interval,
)
from rllib_gigpo.compare.tables import interval_text


def curve(*points: tuple[int, float]) -> list[dict[str, float]]:
    return [{"env_steps": steps, "success": success} for steps, success in points]


class TestStatistics:
    def test_the_area_weighs_each_iteration_by_its_steps_up_to_the_budget(self):
        # 100 steps at 0.2, 100 at 0.4 and 50 of the last 100 at 1: (20 + 40 + 50) / 250.
        points = curve((100, 0.2), (200, 0.4), (300, 1.0))
        assert area_under_curve(points, 250) == pytest.approx(110 / 250)

    def test_a_curve_that_ends_early_has_no_area(self):
        with pytest.raises(ValueError, match="ends at 100 environment steps, expected 250"):
            area_under_curve(curve((100, 0.2)), 250)

    def test_the_interquartile_mean_is_that_of_the_middle_half(self):
        assert interquartile_mean([100.0, 2.0, 4.0, -50.0]) == pytest.approx(3.0)
        # Of five, the middle 2.5: 0.75 of the second and the fourth, and the third.
        assert interquartile_mean([9, 1, 2, 3, 0]) == pytest.approx((0.75 * (1 + 3) + 2) / 2.5)
        assert interquartile_mean([5.0]) == 5.0

    def test_the_interval_of_a_mean_is_students(self):
        # Mean .3, deviations -.2, -.1, .3, 0: s = sqrt(.14 / 3) = .2160247, and t of three degrees
        # is 3.1824463: .3 +- 3.1824463 * .2160247 / 2 = .3 +- .3437435.
        values = [0.1, 0.2, 0.6, 0.3]
        assert mean_interval(values) == pytest.approx((-0.0437435, 0.6437435), abs=1e-6)
        assert mean_interval(values, within=(0.0, 0.5)) == (0.0, 0.5)
        assert mean_interval([0.4, 0.4]) == pytest.approx((0.4, 0.4))
        assert all(map(math.isnan, mean_interval([0.7])))
        assert interval_text(*mean_interval([0.7])) == "–"
        assert interval_text(*mean_interval(values, within=(0, 1))) == "[0.00, 0.64]"

    @pytest.mark.parametrize("seeds", [2, 3, 5])
    def test_the_interval_of_a_mean_holds_it_as_often_as_it_says(self, seeds):
        # 4,000 draws: the share that holds it has a standard error of .0034.
        draws = np.random.default_rng(0).normal(0.5, 0.1, (4000, seeds))
        bounds = [mean_interval(drawn) for drawn in draws]
        assert np.mean([low <= 0.5 <= high for low, high in bounds]) == pytest.approx(
            0.95, abs=0.012
        )

    def test_the_interval_of_a_share_is_wilsons(self):
        # z^2 is 3.8414588. All of 20: from 1 / (1 + z^2 / 20) = .8388750 to 1, and none mirrors it.
        assert share_interval([1.0] * 20) == pytest.approx((0.838875, 1.0), abs=1e-6)
        assert share_interval([0.0] * 20) == pytest.approx((0.0, 0.161125), abs=1e-6)
        # Share .5 of 3: 1.9599640 / 2.2804863 * sqrt(.25 / 3 + 3.8414588 / 36) = .374665 around it.
        assert share_interval([0.5, 1.0, 0.0]) == pytest.approx((0.125335, 0.874665), abs=1e-5)

    def test_the_probability_of_improvement_counts_pairs(self):
        # 3 beats 1 and 2, 2 beats 1 and ties with 2: (2 + 1 + 0.5) / 4.
        assert probability_of_improvement([3, 2], [1, 2]) == pytest.approx(3.5 / 4)

    def test_differences_are_paired(self):
        # Seeds differ widely, the algorithms by 0.1 on each of them.
        assert paired_difference([0.2, 0.9], [0.1, 0.8]) == pytest.approx((0.1, 0.1, 0.1))


class TestPlan:
    def test_every_preset_plays_key_door_and_the_core_all_tasks(self):
        assert TASKS["KeyDoor"].presets == FAMILY
        assert {task.presets for name, task in TASKS.items() if name != "KeyDoor"} == {CORE}
        assert {"gigpo", "gigpo_no_std", "gigpo_no_episode", "gigpo_no_step", "grpo", "rloo"} == {
            *CORE
        }

    def test_a_finished_run_of_other_settings_is_not_taken_for_this_one(self, monkeypatch):
        run = Run("KeyDoor", "grpo", 0, 50_000)
        names = {
            run.file,
            Run("KeyDoor", "grpo", 0, 60_000).file,
            Run("KeyDoor", "rloo", 0, 1).file,
        }
        changed = replace(TASKS["KeyDoor"], training={"lr": 0.5})
        monkeypatch.setitem(TASKS, "KeyDoor", changed)
        assert len({*names, run.file}) == 4
        monkeypatch.undo()
        assert run.file in names

    def test_goes_seed_by_seed_and_plays_twins_once(self):
        assert twin_of("grpo") == twin_of("gigpo_no_step") == "gigpo_no_step"
        runs = planned_runs(["KeyDoor", "Sokoban"], ["gigpo", "grpo", "gigpo_no_step"], 2)
        assert [(run.task, run.preset, run.seed) for run in runs] == [
            ("KeyDoor", "gigpo", 0),
            ("KeyDoor", "gigpo_no_step", 0),
            ("Sokoban", "gigpo", 0),
            ("Sokoban", "gigpo_no_step", 0),
            ("KeyDoor", "gigpo", 1),
            ("KeyDoor", "gigpo_no_step", 1),
            ("Sokoban", "gigpo", 1),
            ("Sokoban", "gigpo_no_step", 1),
        ]

    def test_runs_differ_by_their_preset_alone(self, tmp_path):
        (tmp_path / "config.json").touch()
        (tmp_path / "model.safetensors").touch()
        configs = {
            preset: config_of(Run("KeyDoor", preset, 0, 100), TASKS["KeyDoor"], tmp_path)
            for preset in FAMILY
        }
        for config in configs.values():
            config.validate()
            assert config.num_groups * config.group_size == 128
            assert config.kl_coeff == 0.0
        assert configs["ppo"].group_size == 1
        assert configs["gspo"].clip_param == (3e-4, 4e-4)


def finished(folder, preset: str, seed: int, success: float) -> Run:
    run = Run("KeyDoor", preset, seed, 200)
    points = curve((100, 0.0), (200, success))
    result = {
        **vars(run),
        "before": 0.1,
        "success": success,
        "length": 9.0,
        "curve": points,
    }
    (folder / run.file).write_text(json.dumps(result))
    return run


def test_finished_runs_make_the_table_and_the_last_line(tmp_path):
    runs = [
        finished(tmp_path, preset, seed, success)
        for preset, successes in (("gigpo", (0.8, 1.0)), ("gigpo_no_step", (0.4, 0.2)))
        for seed, success in enumerate(successes)
    ]
    results = read_results(runs, tmp_path)
    assert list(results["KeyDoor"]) == ["gigpo", "gigpo_no_step", "grpo"]
    rows, figures = tabulate(results)
    # Half of the steps at 0, half at the success: areas 0.4, 0.5 and 0.2, 0.1.
    found = figures["KeyDoor"]
    assert found["gigpo"] == pytest.approx({"success": 0.9, "auc": 0.45})
    assert found["grpo"] == found["gigpo_no_step"] == pytest.approx({"success": 0.3, "auc": 0.15})
    # 0.2 and 0.4, paired by seed: s = .1 sqrt(2), and t of one degree is 12.7062: .3 +- 1.27062.
    assert found["gigpo_minus_grpo"] == pytest.approx([-0.97062, 0.3, 1.57062], abs=1e-5)
    assert [row[1] for row in rows] == ["GiGPO", "GiGPO-NoStep", "GRPO"]
    assert [row[-1] for row in rows] == ["", "1.00", "1.00"]
    picture = plot_task("KeyDoor", results["KeyDoor"], 200, tmp_path / "plot.png")
    assert picture.stat().st_size > 10_000
