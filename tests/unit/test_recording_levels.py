"""How the advantages of an iteration split into levels: sizes and weights."""

import numpy as np
import pytest

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.advantages import (
    Advantages,
    StepTable,
    estimate,
    gigpo,
    settings_of,
    whiten,
)
from rllib_gigpo.presets import PRESETS
from rllib_gigpo.recording.levels import level_sizes, level_weights
from rllib_gigpo.recording.recorder import _metrics_line


def advantages_of(config: GiGPOConfig, rows: int = 60) -> Advantages:
    """What a learner makes of random rows: groups of four episodes, states that come back."""
    rng = np.random.default_rng(1)
    episode = np.arange(rows) // 3
    table = StepTable(
        group=episode // 4,
        episode=episode,
        agent=np.zeros(rows, np.int64),
        step=np.arange(rows) % 3,
        anchor=rng.integers(0, 3, rows),
        reward=rng.normal(size=rows),
        valid=np.ones(rows, bool),
    )
    estimator = config.advantage_estimator
    settings = {name: getattr(config, name) for name in settings_of(estimator)}
    columns = {"value": rng.normal(size=rows), "bootstrap": np.zeros(rows)}
    found = estimate(estimator, table, settings=settings, columns=columns)
    if not config.whiten_advantages:
        return found
    return found._replace(total=whiten(found.total, weights=rng.integers(1, 9, rows)))


def half_and_half(table: StepTable, *, f_norm: str) -> Advantages:
    """An estimator of one's own, which weighs the levels in its own way."""
    found = gigpo(table, f_norm="none")
    return found._replace(total=0.5 * found.episode - 0.5 * found.step)


class TestLevels:
    """How large the levels are in the loss, not before it."""

    # HGPO's shares differ from row to row where the episode takes part.
    @pytest.mark.parametrize("name", PRESETS)
    def test_the_levels_of_every_preset_add_up_to_its_total(self, name):
        config = GiGPOConfig.preset(name)
        found = advantages_of(config)
        has_levels = found.episode.any() or found.step.any()
        rest = found.total - level_weights(config, found) @ np.stack([found.episode, found.step])
        # Whitening takes a mean off.
        assert np.std(rest) == pytest.approx(0.0 if has_levels else np.std(found.total), abs=1e-9)

    @pytest.mark.parametrize(
        ("name", "levels"),
        [
            ("gigpo", {"episode", "step"}),
            ("gigpo_no_episode", {"step"}),
            ("gigpo_no_step", {"episode"}),
            ("grpo", {"episode"}),
            ("rloo", {"episode"}),
            ("reinforce_pp_baseline", {"episode"}),
            ("hgpo", {"step"}),
            ("ppo", set()),
        ],
    )
    def test_a_level_without_a_part_in_the_loss_is_0(self, name, levels):
        config = GiGPOConfig.preset(name)
        found = advantages_of(config)
        sizes = level_sizes(config, found)
        assert {level for level in ("episode", "step") if sizes[f"{level}_mean_abs"] > 0} == levels
        if len(levels) == 1 and not config.whiten_advantages:
            (level,) = levels
            assert sizes[f"{level}_mean_abs"] == pytest.approx(np.mean(np.abs(found.total)))

    def test_weights_and_whitening_count(self):
        config = GiGPOConfig.preset("gigpo").training(omega=0.5, episode_weight=2.0)
        found = advantages_of(config)
        usual = {
            "episode_mean_abs": 2.0 * np.mean(np.abs(found.episode)),
            "step_mean_abs": 0.5 * np.mean(np.abs(found.step)),
        }
        assert level_sizes(config, found) == pytest.approx(usual)
        spread = np.std(found.total)
        config.training(whiten_advantages=True)
        white = advantages_of(config)
        scale = np.std(white.total) / spread
        assert level_sizes(config, white) == pytest.approx(
            {name: scale * size for name, size in usual.items()}
        )

    def test_an_estimator_of_ones_own_is_measured(self):
        config = GiGPOConfig().training(estimator=half_and_half)
        found = advantages_of(config)
        np.testing.assert_allclose(level_weights(config, found), [0.5, -0.5])
        assert level_sizes(config, found)["step_mean_abs"] == pytest.approx(
            0.5 * np.mean(np.abs(found.step))
        )

    def test_hgpo_with_its_base_group_has_two_levels(self):
        config = GiGPOConfig.preset("hgpo").training(history_base_group=True)
        found = advantages_of(config)
        sizes = level_sizes(config, found)
        assert 0 < sizes["episode_mean_abs"] < np.mean(np.abs(found.episode))
        assert 0 < sizes["step_mean_abs"] < np.mean(np.abs(found.step))

    def test_a_policy_is_measured_with_its_own_settings(self):
        config = GiGPOConfig().training(omega=1.0)
        config.rl_module(algorithm_config_overrides_per_module={"b": {"omega": 0.25}})
        found = advantages_of(config)
        line = _metrics_line(1, {}, {"a": found, "b": found}, config)["advantages"]
        size = np.mean(np.abs(found.step))
        assert line["a"]["step_mean_abs"] == pytest.approx(size)
        assert line["b"]["step_mean_abs"] == pytest.approx(0.25 * size)
        assert line["a"]["episode_mean_abs"] == line["b"]["episode_mean_abs"] > 0

    @pytest.mark.parametrize("name", PRESETS)
    def test_rows_without_differences_have_levels_of_0(self, name):
        config = GiGPOConfig.preset(name)
        none = np.zeros(2)
        found = Advantages(none, none, none, none, np.ones(2, np.int64))
        assert level_sizes(config, found) == {"episode_mean_abs": 0.0, "step_mean_abs": 0.0}
