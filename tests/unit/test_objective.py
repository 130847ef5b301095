"""The loss of an optimizer step, put together: hand-computed on a few tokens."""

import math

import pytest
import torch

from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.objective import Objective, StepTotals
from rllib_gigpo.sequences import ResponseLogps

# Two rows of 2 and 1 tokens. Ratios: row 0 has 2 and 1/2, row 1 has 4.
MASK = torch.tensor([[True, True], [True, False]])
LOG_RATIO = torch.tensor([[math.log(2.0), -math.log(2.0)], [math.log(4.0), 9.0]])
STEP = StepTotals(tokens=3.0, rows=2.0, kl_coeff=0.0)


def evaluate(objective: Objective, *, advantage=(1.0, -1.0), step=STEP, **columns):
    """The objective on the rows above; extra columns go to the batch, values to the module."""
    values = columns.pop("values", None)
    entropy = columns.pop("entropy", torch.zeros(2, 2))
    old = torch.full((2, 2), -1.0)
    batch = {"advantage": torch.tensor(advantage), "old_logps": old, **columns}
    out = ResponseLogps(old + LOG_RATIO, entropy, MASK, values)
    return objective.evaluate(batch, out, step)


def loss(objective: Objective, **columns) -> float:
    return float(evaluate(objective, **columns).loss)


# PPO, clip 0.2, A = 1 and -1. Row 0: -min(2, 1.2) = -1.2 and -min(.5, .8) = -.5. Row 1: A = -1 and
# ratio 4: max(4, 1.2) = 4.
class TestAggregation:
    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("token_mean", (-1.2 - 0.5 + 4) / 3),
            ("seq_mean_token_sum", ((-1.2 - 0.5) + 4) / 2),
            ("seq_mean_token_mean", ((-1.2 - 0.5) / 2 + 4) / 2),
            ("seq_mean_token_sum_norm", ((-1.2 - 0.5) + 4) / (2 * 8)),
        ],
    )
    def test_of_token_losses(self, mode, expected):
        objective = Objective(aggregation=mode, norm_tokens=8)
        assert loss(objective) == pytest.approx(expected)

    def test_totals_are_those_of_the_whole_step(self):
        # The same rows in a step of 30 tokens are a tenth of the loss above.
        step = STEP._replace(tokens=30.0)
        assert loss(Objective(), step=step) == pytest.approx((-1.2 - 0.5 + 4) / 30)


class TestRatio:
    def test_of_a_sequence_is_the_geometric_mean(self):
        # Row 0: exp((ln 2 - ln 2) / 2) = 1: -1 twice. Row 1: one token, ratio 4.
        found = evaluate(Objective(ratio_level="sequence"))
        assert float(found.loss) == pytest.approx((-1 - 1 + 4) / 3)
        assert found.totals.ratio == pytest.approx(1 + 1 + 4)

    def test_of_gspo_is_cut_just_above_one(self):
        # A = 1 everywhere, clip 3e-4 / 4e-4: ratio 1 is free, ratio 4 is cut at 1.0004.
        objective = Objective(
            ratio_level="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation="seq_mean_token_mean",
        )
        found = evaluate(objective, advantage=(1.0, 1.0))
        assert float(found.loss) == pytest.approx(-(1 + 1.0004) / 2)
        assert found.totals.clipped_high == 1

    def test_clips_higher_than_lower(self):
        # DAPO: the ratio 2 is cut at 1.28, 1/2 is free for A = 1, 4 is free for A = -1.
        objective = Objective(clip_low=0.2, clip_high=0.28)
        assert loss(objective) == pytest.approx((-1.28 - 0.5 + 4) / 3)

    def test_dual_clip_bounds_the_loss_of_negative_advantages(self):
        # 4 becomes 3.
        found = evaluate(Objective(dual_clip=3.0))
        assert float(found.loss) == pytest.approx((-1.2 - 0.5 + 3) / 3)
        assert found.totals.dual_clipped == 1

    def test_tokens_may_have_advantages_of_their_own(self):
        # A = 1, 2 on row 0 and 0 on row 1: -1.2 - 2 * .5.
        advantage = ((1.0, 2.0), (0.0, 0.0))
        assert loss(Objective(), advantage=advantage) == pytest.approx((-1.2 - 1.0) / 3)


class TestTerms:
    def test_kl_is_weighed_by_the_coefficient_in_force(self):
        # k2 = (log p - log ref)^2 / 2 with log ref = log p - 0.6: 0.18 on each of 3 tokens.
        objective = Objective(kl_estimator="k2")
        reference = torch.full((2, 2), -1.0) + LOG_RATIO - 0.6
        found = evaluate(objective, step=STEP._replace(kl_coeff=0.5), ref_logps=reference)
        assert float(found.loss) == pytest.approx((-1.2 - 0.5 + 4) / 3 + 0.5 * 0.18)
        assert found.totals.kl == pytest.approx(3 * 0.18)

    def test_no_kl_where_it_is_in_the_reward(self):
        found = evaluate(Objective(kl_estimator=None), step=STEP._replace(kl_coeff=0.5))
        assert found.totals.kl == 0.0
        assert float(found.loss) == pytest.approx((-1.2 - 0.5 + 4) / 3)

    def test_entropy_is_rewarded(self):
        entropy = torch.tensor([[0.3, 0.6], [0.9, 0.0]])
        found = loss(Objective(entropy_coeff=0.1), entropy=entropy)
        assert found == pytest.approx((-1.2 - 0.5 + 4) / 3 - 0.1 * 1.8 / 3)

    def test_correction_weighs_the_surrogate_alone(self):
        # Old over engine log-probabilities: e^(-1 + 1) = 1 and, row 1, e^(-1 + 3) = 7.4, cut at 2.
        objective = Objective(correction=RolloutCorrection(), entropy_coeff=0.1)
        engine = torch.tensor([[-1.0, -1.0], [-3.0, 0.0]])
        found = evaluate(objective, response_logps=engine, entropy=torch.full((2, 2), 0.3) * MASK)
        assert float(found.loss) == pytest.approx((-1.2 - 0.5 + 2 * 4) / 3 - 0.1 * 0.3)
        assert found.totals.corrected == 1
        assert found.largest["correction"] == pytest.approx(2.0)


class TestCritic:
    VALUES = torch.tensor([[1.0, 5.0], [2.0, 7.0]])
    COLUMNS = {  # noqa: RUF012 - a constant of the tests
        "old_values": torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        "value_target": torch.tensor([[3.0, 3.0], [3.0, 3.0]]),
    }

    def critic(self, **settings) -> float:
        found = evaluate(
            Objective(**settings), advantage=(0.0, 0.0), values=self.VALUES, **self.COLUMNS
        )
        return found.totals.value_loss

    def test_counts_the_value_of_the_prompt_at_the_level_of_steps(self):
        # 0.5 * ((1 - 3)^2 + (2 - 3)^2) / 2 rows.
        assert self.critic() == pytest.approx(0.5 * (4 + 1) / 2)

    def test_counts_every_token_at_the_level_of_tokens(self):
        # And (5 - 3)^2, over 3 tokens.
        assert self.critic(value_level="token") == pytest.approx(0.5 * (4 + 4 + 1) / 3)

    def test_takes_the_worse_of_the_clipped_and_the_free_value(self):
        # Values may move by 0.5: row 0 stays at 1; row 1 went from 0 to 2 and counts as 0.5:
        # (0.5 - 3)^2 = 6.25 is worse than 1.
        assert self.critic(vf_clip_param=0.5) == pytest.approx(0.5 * (4 + 6.25) / 2)

    def test_is_weighed_in_the_loss(self):
        found = evaluate(
            Objective(vf_loss_coeff=0.1),
            advantage=(0.0, 0.0),
            values=self.VALUES,
            **self.COLUMNS,
        )
        assert float(found.loss) == pytest.approx(0.1 * 1.25)
        assert found.totals.loss == pytest.approx(0.0)
