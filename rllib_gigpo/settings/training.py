"""Settings of training: how groups are drawn, what advantages are, and what the loss is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.utils.annotations import override

from rllib_gigpo.advantages import Estimator, FNorm, GaeLevel, GroupMeanOver, PenaltyScope
from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.critic import CriticKind
from rllib_gigpo.grouping import AnchorKind, Measure
from rllib_gigpo.losses import Aggregation, KlEstimator, KlPlace, RatioLevel
from rllib_gigpo.settings.base import UNSET, SettingsBase

EstimatorName = Literal["gigpo", "rloo", "reinforce", "gae", "hgpo"]
Encoder = Callable[[Sequence[str]], np.ndarray]


class TrainingSettings(SettingsBase):
    """What is learned and how: `training`."""

    gamma: float
    lr: float
    num_epochs: int

    def _set_training_defaults(self) -> None:
        # Groups and their states.
        self.num_groups = 16
        self.group_size = 8
        self.anchor: AnchorKind = "exact"
        self.similarity_threshold = 0.9
        self.similarity_measure: Measure = "rapidfuzz"
        self.anchor_encoder: Encoder | None = None
        self.dynamic_sampling = False
        self.max_sampling_rounds = 10

        # Advantages.
        self.estimator: EstimatorName | Estimator = "gigpo"
        self.omega = 1.0
        self.episode_weight = 1.0
        self.gamma = 0.95
        self.lambda_ = 1.0
        self.f_norm: FNorm = "std"
        self.group_mean_over: GroupMeanOver = "episodes"
        self.normalize_over: Literal["agent", "policy"] = "agent"
        self.whiten_advantages = False
        self.history_length = 2
        self.history_alpha = 1.0
        self.history_base_group = False
        self.invalid_action_penalty = 0.1
        self.penalty_scope: PenaltyScope = "return"
        self.overlong_buffer = 0.0
        self.overlong_penalty = 1.0

        # Critic.
        self.critic: CriticKind | None = None
        self.gae_level: GaeLevel = "step"
        self.critic_lr = 1e-5
        self.vf_clip_param: float | None = 0.5
        self.vf_loss_coeff = 1.0

        # Loss.
        self.ratio_level: RatioLevel = "token"
        self.clip_param: float | tuple[float, float] = 0.2
        self.dual_clip: float | None = None
        self.aggregation: Aggregation = "token_mean"
        self.kl_coeff = 0.01
        self.kl_estimator: KlEstimator = "k3"
        self.kl_in: KlPlace = "loss"
        self.kl_target: float | None = None
        self.kl_horizon = 10_000
        self.entropy_coeff = 0.0
        self.old_logp = "recompute"
        self.max_staleness = 0
        self.rollout_correction: RolloutCorrection | str | None = "auto"

        # Optimizer steps.
        self.num_epochs = 1
        self.minibatch_size: int | None = 256
        self.num_minibatches: int | None = None
        self.micro_batch_tokens = 16384
        self.lr = 1e-6
        self.lr_warmup_steps = 0
        self.optimizer_name = "adamw"
        self.adam_betas = (0.9, 0.999)
        self.weight_decay = 0.01
        self.grad_clip = 1.0
        self.max_skipped_steps = 10

    @override(AlgorithmConfig)
    def training(
        self,
        *,
        num_groups: int = UNSET,
        group_size: int = UNSET,
        anchor: Literal["exact", "similarity", "embedding"] = UNSET,
        similarity_threshold: float = UNSET,
        similarity_measure: Literal["rapidfuzz", "difflib_reference"] = UNSET,
        anchor_encoder: Encoder | None = UNSET,
        dynamic_sampling: bool = UNSET,
        max_sampling_rounds: int = UNSET,
        estimator: EstimatorName | Estimator = UNSET,
        omega: float = UNSET,
        episode_weight: float = UNSET,
        lambda_: float = UNSET,
        f_norm: Literal["std", "none"] = UNSET,
        group_mean_over: Literal["episodes", "steps"] = UNSET,
        normalize_over: Literal["agent", "policy"] = UNSET,
        whiten_advantages: bool = UNSET,
        history_length: int = UNSET,
        history_alpha: float = UNSET,
        history_base_group: bool = UNSET,
        invalid_action_penalty: float = UNSET,
        penalty_scope: Literal["return", "step"] = UNSET,
        overlong_buffer: float = UNSET,
        overlong_penalty: float = UNSET,
        critic: Literal["head", "model"] | None = UNSET,
        gae_level: Literal["step", "token"] = UNSET,
        critic_lr: float = UNSET,
        vf_clip_param: float | None = UNSET,
        vf_loss_coeff: float = UNSET,
        ratio_level: Literal["token", "sequence"] = UNSET,
        clip_param: float | tuple[float, float] = UNSET,
        dual_clip: float | None = UNSET,
        aggregation: Aggregation = UNSET,
        kl_coeff: float = UNSET,
        kl_estimator: Literal["k1", "k2", "k3"] = UNSET,
        kl_in: Literal["loss", "reward"] = UNSET,
        kl_target: float | None = UNSET,
        kl_horizon: int = UNSET,
        entropy_coeff: float = UNSET,
        num_minibatches: int | None = UNSET,
        micro_batch_tokens: int = UNSET,
        lr_warmup_steps: int = UNSET,
        optimizer_name: Literal["adamw", "sgd"] = UNSET,
        adam_betas: tuple[float, float] = UNSET,
        weight_decay: float = UNSET,
        old_logp: Literal["recompute", "engine"] = UNSET,
        rollout_correction: RolloutCorrection | Literal["auto"] | None = UNSET,
        max_staleness: int = UNSET,
        max_skipped_steps: int = UNSET,
        **kwargs: Any,
    ) -> Self:
        """Set how groups are drawn and how the policy learns from them.

        Args:
            num_groups: Task groups per iteration (G).
            group_size: Episodes per group (N); all start from the same state.
            anchor: Which steps of a group count as taken from the same state (Eq. 6): "exact",
                those with equal anchors; "similarity", those whose anchor texts are alike;
                "embedding", those whose texts have vectors of `anchor_encoder` that point alike.
                What the anchor of a step is says `AgentProfile.anchor`, by default the
                environment: `info["anchor"]`, else the observation.
            similarity_threshold: Smallest similarity (of texts, or the cosine of vectors), above 0
                and at most 1.
            similarity_measure: "rapidfuzz", or "difflib_reference" to repeat runs of verl-agent;
                the two differ, see `rllib_gigpo.grouping.similar_anchors`.
            anchor_encoder: From a list of texts to one vector each, [n, d]; any sentence encoder.
            dynamic_sampling: Leave out groups whose episodes all have the same return, and play
                further tasks in their place (DAPO).
            max_sampling_rounds: Rounds of an iteration, the first one included, after which groups
                that were left out fill what is missing.
            estimator: From rows to advantages: "gigpo" (with `omega=0` GRPO), "rloo", "reinforce",
                "gae" (PPO), "hgpo", or a function (see `rllib_gigpo.advantages.registry`).
            omega: Weight of the step advantage (Eq. 8); 0 is GRPO.
            episode_weight: Weight of the episode advantage; 0 is the ablation without it.
            lambda_: GAE's trace decay.
            f_norm: "std" divides advantages by the group's standard deviation, "none" by 1.
            group_mean_over: Whether a group's mean and deviation of returns count each episode
                once ("episodes") or each of its steps ("steps", as verl-agent does).
            normalize_over: In a team, whose returns a group's mean and deviation are taken over:
                "agent", each agent's own (Dr.MAS, arXiv 2602.08847), or "policy", those of all
                agents that one policy plays. Anchor groups are always an agent's own.
            whiten_advantages: Scale the advantages of the whole batch to mean 0 and deviation 1,
                each response token counting once.
            history_length: Earlier states that HGPO's groups compare, see
                `rllib_gigpo.advantages.hgpo`.
            history_alpha: Exponent of HGPO's weights.
            history_base_group: Whether the episode advantage takes part in HGPO.
            invalid_action_penalty: Subtracted from the reward of a step whose action was invalid.
            penalty_scope: "return": before returns are computed. "step": from that step's own
                scores alone, undiscounted (as verl-agent does).
            overlong_buffer: Last share of `max_response_tokens` over which a cost rises to
                `overlong_penalty` (DAPO), 0 to 1; 0 charges nothing.
            overlong_penalty: Cost of a response at the limit, taken off its step's reward.
            critic: "head" on the policy's body, "model" of its own, or None.
            gae_level: "step": V at the last prompt token, credit across the steps of an episode,
                and V of the state after a truncated one. "token": inside each response alone, whose
                last token earns the episode's return (as verl-agent does).
            critic_lr: Learning rate of the critic's own parameters.
            vf_clip_param: How far a value may move from that of before the update; None: freely.
            vf_loss_coeff: Weight of the critic's loss.
            ratio_level: PPO's ratio of each "token", or of the "sequence" (GSPO). A sequence is
                one row: the response of one environment step.
            clip_param: PPO clip range of the ratio around 1; a pair is (low, high).
            dual_clip: Bound of the loss where the advantage is negative, above 1; None: none.
            aggregation: How token losses become one number, see
                `rllib_gigpo.losses.token_weights`. A sequence is again one row.
            kl_coeff: Weight of the KL to the frozen initial policy; 0 keeps no reference copy.
            kl_estimator: "k1", "k2" or "k3".
            kl_in: "loss" (Eq. 9), or "reward": each step's reward is lowered by its response's KL.
            kl_target: Mean KL per token that an adaptive coefficient holds; None leaves it fixed.
            kl_horizon: Rows over which the adaptive coefficient moves.
            entropy_coeff: Weight of the entropy bonus.
            num_minibatches: Optimizer steps per epoch, in place of `minibatch_size`.
            micro_batch_tokens: Padded tokens of one forward pass; memory, not mathematics.
            lr_warmup_steps: Optimizer steps over which the learning rates rise to their values.
            optimizer_name: "adamw" or "sgd".
            adam_betas: AdamW's betas.
            weight_decay: AdamW's decoupled weight decay.
            old_logp: Old log-probabilities of the ratio: "recompute" by the learner before the
                first optimizer step, or the "engine"'s own.
            rollout_correction: Importance weights for engines that differ from the learner's
                policy. "auto": the default `RolloutCorrection()` where the engine computes in bf16
                or `max_staleness` is above 0, else none.
            max_staleness: 0 learns on-policy. 1 plays the next iteration's groups with the present
                weights while the learner updates, so its rows are one version old; needs remote
                EnvRunners. Checkpoints hold what has been played ahead.
            max_skipped_steps: An optimizer step whose gradient is not finite is left out on every
                learner; the run ends when so many are left out one after the other.
            **kwargs: RLlib's `lr`, `gamma`, `num_epochs`, `minibatch_size` (rows per optimizer
                step over all learners), `grad_clip`, ...
        """
        values = dict(locals())
        super().training(**kwargs)
        if kwargs.get("minibatch_size") is not None and num_minibatches is UNSET:
            self.num_minibatches = None
        if num_minibatches not in (UNSET, None) and "minibatch_size" not in kwargs:
            self.minibatch_size = None
        return self._take(values)
