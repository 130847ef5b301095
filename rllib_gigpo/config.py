"""GiGPOConfig: every setting of the algorithm, checked before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Self

from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override
from ray.util.debug import log_once

from rllib_gigpo.advantages import FNorm, GroupMeanOver, PenaltyScope
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.callbacks import check_callbacks
from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.grouping import AnchorKind, AnchorRule, Measure
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.losses import KlEstimator
from rllib_gigpo.models import ModelSpec
from rllib_gigpo.registry import LLMEnvSpec, get_env_spec
from rllib_gigpo.rows import MinibatchPlan
from rllib_gigpo.stepping import FailureRule, StepSettings
from rllib_gigpo.validation import check_settings
from rllib_gigpo.vocabulary import collect_words

# RLlib's marker of an argument that was left out; typed so that signatures can name real types.
_UNSET: Any = NotProvided


class GiGPOConfig(AlgorithmConfig):
    """Settings of GiGPO, grouped as RLlib groups them.

    Example:
        >>> config = (
        ...     GiGPOConfig()
        ...     .environment("KeyDoor")
        ...     .llm(model="tiny", max_prompt_tokens=64, max_response_tokens=8)
        ...     .training(num_groups=16, group_size=8, omega=1.0, gamma=0.95, f_norm="std", lr=1e-3)
        ... )
        >>> algorithm = config.build_algo()
        >>> algorithm.train()["env_runners"]["success_rate"]

    Defaults are the paper's (arXiv 2505.10978, App. E.1) where it states one.
    """

    gamma: float
    lr: float
    num_epochs: int

    def __init__(self, algo_class: type | None = None):
        self._settings_are_open = True
        if algo_class is None:
            from rllib_gigpo.gigpo import GiGPO

            algo_class = GiGPO
        super().__init__(algo_class=algo_class)
        self._set_rllib_defaults()

        # Set by training(...).
        self.num_groups = 16
        self.group_size = 8
        self.omega = 1.0
        self.gamma = 0.95
        self.f_norm: FNorm = "std"
        self.group_mean_over: GroupMeanOver = "episodes"
        self.anchor: AnchorKind = "exact"
        self.similarity_threshold = 0.9
        self.similarity_measure: Measure = "rapidfuzz"
        self.clip_param: float | tuple[float, float] = 0.2
        self.kl_coeff = 0.01
        self.kl_estimator: KlEstimator = "k3"
        self.entropy_coeff = 0.0
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
        self.invalid_action_penalty = 0.1
        self.penalty_scope: PenaltyScope = "return"
        self.old_logp = "recompute"
        self.max_staleness = 0
        self.rollout_correction: RolloutCorrection | str | None = "auto"

        # Set by llm(...).
        self.llm_model = "Qwen/Qwen2.5-1.5B-Instruct"
        self.llm_options: dict[str, Any] = {}
        self.dtype = "float32"
        self.lora: LoRASettings | None = None
        self.base_dtype = "float32"
        self.max_prompt_tokens = 2048
        self.max_response_tokens = 512
        self.temperature = 1.0
        self.eval_temperature = 0.4
        self.top_p = 1.0
        self.top_k = 0
        self.max_num_seqs = 256

        # Set by agent(...).
        self.profile: AgentProfile | None = None
        self.on_long_prompt = "error"
        self.max_episode_steps: int | None = None

        # Set by engines(...).
        self.engine = "transformers"
        self.num_engines = 1
        self.engine_num_gpus = 0.0
        self.engine_num_cpus = 1.0
        self.engine_sleep = False
        self.engine_options: dict[str, Any] = {}
        self.probe_tolerance: float | None = None

        # Set by stepping(...).
        self.step_threads = 0
        self.step_timeout_s: float | None = None
        self.episode_timeout_s: float | None = None
        self.on_env_failure: FailureRule = "raise"
        self.max_replays = 1
        self.max_dropped_share = 0.5
        self.max_abandoned_threads = 8
        self.lockstep = False

        # Set by evaluation(...).
        self.evaluation_task_seeds: Sequence[int] | None = None
        self.evaluation_samples_per_task = 1
        self._settings_are_open = False

    def _set_rllib_defaults(self) -> None:
        from rllib_gigpo.env_runner import LLMEnvRunner
        from rllib_gigpo.evaluation import evaluate_panel

        self.env_runner_cls = LLMEnvRunner
        self.num_env_runners = 0
        self.batch_mode = "complete_episodes"
        self.episodes_to_numpy = False
        # A time limit would silently drop the data of slower runners.
        self.sample_timeout_s = None
        self.delay_between_env_runner_restarts_s = 1.0
        self.custom_evaluation_function = evaluate_panel
        self.evaluation_duration = 64
        self.log_level = "ERROR"
        self.seed = 0

    @override(AlgorithmConfig)
    def training(
        self,
        *,
        num_groups: int = _UNSET,
        group_size: int = _UNSET,
        omega: float = _UNSET,
        f_norm: Literal["std", "none"] = _UNSET,
        group_mean_over: Literal["episodes", "steps"] = _UNSET,
        anchor: Literal["exact", "similarity"] = _UNSET,
        similarity_threshold: float = _UNSET,
        similarity_measure: Literal["rapidfuzz", "difflib_reference"] = _UNSET,
        clip_param: float | tuple[float, float] = _UNSET,
        kl_coeff: float = _UNSET,
        kl_estimator: Literal["k1", "k2", "k3"] = _UNSET,
        entropy_coeff: float = _UNSET,
        num_minibatches: int | None = _UNSET,
        micro_batch_tokens: int = _UNSET,
        lr_warmup_steps: int = _UNSET,
        optimizer_name: Literal["adamw", "sgd"] = _UNSET,
        adam_betas: tuple[float, float] = _UNSET,
        weight_decay: float = _UNSET,
        invalid_action_penalty: float = _UNSET,
        penalty_scope: Literal["return", "step"] = _UNSET,
        old_logp: Literal["recompute", "engine"] = _UNSET,
        rollout_correction: RolloutCorrection | Literal["auto"] | None = _UNSET,
        max_staleness: int = _UNSET,
        **kwargs: Any,
    ) -> Self:
        """Set how groups are drawn and how the policy learns from them.

        Args:
            num_groups: Task groups per iteration (G).
            group_size: Episodes per group (N); all start from the same state.
            omega: Weight of the step advantage (Eq. 8); 0 is GRPO.
            f_norm: "std" divides advantages by the group's standard deviation, "none" by 1.
            group_mean_over: Whether a group's mean and deviation of returns count each episode
                once ("episodes") or each of its steps ("steps", as verl-agent does).
            anchor: Which steps of a group count as taken from the same state (Eq. 6): "exact",
                those with equal anchors, or "similarity", those whose anchor texts are alike.
                What the anchor of a step is says `AgentProfile.anchor`, by default the
                environment: `info["anchor"]`, else the observation.
            similarity_threshold: Smallest similarity, above 0 and at most 1, for
                `anchor="similarity"`.
            similarity_measure: "rapidfuzz", or "difflib_reference" to repeat runs of verl-agent;
                the two differ, see `rllib_gigpo.grouping.similar_anchors`.
            clip_param: PPO clip range of the ratio around 1; a pair is (low, high).
            kl_coeff: Weight of the KL to the frozen initial policy in the loss; 0 keeps no
                reference copy.
            kl_estimator: "k1", "k2" or "k3".
            entropy_coeff: Weight of the entropy bonus.
            num_minibatches: Optimizer steps per epoch, in place of `minibatch_size`.
            micro_batch_tokens: Padded tokens of one forward pass; memory, not mathematics.
            lr_warmup_steps: Optimizer steps over which the learning rate rises to `lr`.
            optimizer_name: "adamw" or "sgd".
            adam_betas: AdamW's betas.
            weight_decay: AdamW's decoupled weight decay.
            invalid_action_penalty: Subtracted from the reward of a step whose action was invalid.
            penalty_scope: "return": before returns are computed. "step": from that step's own
                scores alone, undiscounted (as verl-agent does).
            old_logp: Old log-probabilities of the ratio: "recompute" by the learner before the
                first optimizer step, or the "engine"'s own.
            rollout_correction: Importance weights for engines that differ from the learner's
                policy. "auto": the default `RolloutCorrection()` where the engine computes in bf16
                or `max_staleness` is above 0, else none.
            max_staleness: 0 learns on-policy. 1 plays the next iteration's groups with the present
                weights while the learner updates, so its rows are one version old; needs remote
                EnvRunners. Such a run does not resume bit for bit.
            **kwargs: RLlib's `lr`, `gamma`, `num_epochs`, `minibatch_size` (rows per optimizer
                step over all learners), `grad_clip`, ...
        """
        values = dict(locals())
        super().training(**kwargs)
        if kwargs.get("minibatch_size") is not None and num_minibatches is _UNSET:
            self.num_minibatches = None
        if num_minibatches not in (_UNSET, None) and "minibatch_size" not in kwargs:
            self.minibatch_size = None
        return self._take(values)

    def llm(
        self,
        *,
        model: str = _UNSET,
        options: Mapping[str, Any] = _UNSET,
        dtype: Literal["float32", "bfloat16"] = _UNSET,
        lora: LoRASettings | None = _UNSET,
        base_dtype: Literal["float32", "bfloat16"] = _UNSET,
        max_prompt_tokens: int = _UNSET,
        max_response_tokens: int = _UNSET,
        temperature: float = _UNSET,
        eval_temperature: float = _UNSET,
        top_p: float = _UNSET,
        top_k: int = _UNSET,
        max_num_seqs: int = _UNSET,
    ) -> Self:
        """Set the language model and how it speaks.

        Args:
            model: "tiny" (from scratch, words of the environment), "smollm2-135m" (packaged
                weights), a Hugging Face id, or a local folder with safetensors.
            options: Shape of the tiny model, such as `{"hidden_size": 64}`.
            dtype: What matrix products run in; trained parameters and optimizer state stay fp32.
            lora: Train low-rank matrices beside frozen weights, which are then also the KL's
                reference; None trains all weights. LoRA wants a learning rate about ten times
                that of a full fine-tune.
            base_dtype: Type of the frozen weights, with LoRA; "bfloat16" halves their memory.
            max_prompt_tokens: Limit of a prompt.
            max_response_tokens: Limit of a response.
            temperature: Of the training rollouts.
            eval_temperature: Of evaluation; 0 is greedy.
            top_p: Nucleus mass of the training rollouts.
            top_k: Tokens kept in the training rollouts; 0 keeps all.
            max_num_seqs: Sequences that an engine decodes at once.
        """
        values = dict(locals())
        values["llm_model"] = values.pop("model")
        values["llm_options"] = values.pop("options")
        return self._take(values)

    def agent(
        self,
        *,
        profile: AgentProfile = _UNSET,
        on_long_prompt: Literal["error", "end_episode", "shorten_observation"] = _UNSET,
        max_episode_steps: int | None = _UNSET,
    ) -> Self:
        """Set how the agent sees the environment.

        Args:
            profile: Prompt, memory and parser; by default those registered with the environment.
            on_long_prompt: What happens to a prompt over the limit once no history is left to
                drop.
            max_episode_steps: Steps of an agent after which its episode is truncated, besides the
                environment's own limit.
        """
        return self._take(dict(locals()))

    def engines(
        self,
        *,
        engine: Literal["transformers", "vllm"] = _UNSET,
        num_engines: int = _UNSET,
        engine_num_gpus: float = _UNSET,
        engine_num_cpus: float = _UNSET,
        engine_sleep: bool = _UNSET,
        engine_options: Mapping[str, Any] = _UNSET,
        probe_tolerance: float | None = _UNSET,
    ) -> Self:
        """Set what generates.

        Args:
            engine: "transformers": inside every EnvRunner. "vllm": actors of their own, shared by
                all EnvRunners and by evaluation; all episodes of a group go to one of them.
            num_engines: vLLM engines per policy.
            engine_num_gpus: GPUs of one engine; a fraction shares a GPU, n > 1 with
                `engine_options={"tensor_parallel_size": n}`.
            engine_num_cpus: CPUs of one engine; on a CPU also its threads.
            engine_sleep: Free the engines' GPU memory while the learner works (one shared GPU).
            engine_options: Other fields of `VLLMSettings`, such as `gpu_memory_utilization`.
            probe_tolerance: Largest mean difference between an engine's and the learner's
                log-probabilities after a sync; None: 2e-3 in fp32, 1 in bf16; 0: no probe.
        """
        return self._take(dict(locals()))

    def stepping(
        self,
        *,
        step_threads: int = _UNSET,
        step_timeout_s: float | None = _UNSET,
        episode_timeout_s: float | None = _UNSET,
        on_env_failure: FailureRule = _UNSET,
        max_replays: int = _UNSET,
        max_dropped_share: float = _UNSET,
        max_abandoned_threads: int = _UNSET,
        lockstep: bool = _UNSET,
    ) -> Self:
        """Set how environments are stepped, and what follows when one fails.

        Args:
            step_threads: Environment calls that run beside generation; 0 steps in the event loop
                itself, which is fastest for environments that answer in microseconds.
            step_timeout_s: Seconds that one call may take; needs threads. A hung call is left to
                its thread, and its environment is never used again.
            episode_timeout_s: Seconds that one episode may take, checked at every step.
            on_env_failure: "raise" ends the run with the environment's message; "replay" plays the
                episode again in a new environment, and drops its group when that fails too; "drop"
                drops its group. A failure is never trained on as a reward.
            max_replays: Replays of one episode.
            max_dropped_share: The run ends when more than this share of an iteration's groups was
                dropped.
            max_abandoned_threads: A remote EnvRunner with more hung threads is replaced.
            lockstep: All episodes take their turns together: slower, but batches, and with them
                every bit of a run, do not depend on timing.
        """
        return self._take(dict(locals()))

    @override(AlgorithmConfig)
    def evaluation(
        self,
        *,
        evaluation_task_seeds: Sequence[int] | None = _UNSET,
        evaluation_samples_per_task: int = _UNSET,
        **kwargs: Any,
    ) -> Self:
        """Set the evaluation panel.

        Args:
            evaluation_task_seeds: Reset seeds of the panel; None draws `evaluation_duration` odd
                seeds (training draws even ones), the same in every run and on every machine.
            evaluation_samples_per_task: Episodes per task (k).
            **kwargs: RLlib's evaluation settings; `evaluation_duration` counts tasks.
        """
        values = dict(locals())
        super().evaluation(**kwargs)
        return self._take(values)

    def _take(self, values: dict[str, Any]) -> Self:
        for name, value in values.items():
            if name not in ("self", "kwargs", "__class__") and value is not _UNSET:
                setattr(self, name, value)
        return self

    @override(AlgorithmConfig)
    def __setattr__(self, key: str, value: Any) -> None:
        """Refuse names that are no setting, so that a typo cannot pass for one."""
        is_known = key.startswith("_") or hasattr(self, key) or key in _RLLIB_LATE_SETTINGS
        if not is_known and not getattr(self, "_settings_are_open", True):
            settings = [name for name in vars(self) if not name.startswith("_")]
            close = difflib.get_close_matches(key, settings, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see GiGPOConfig for what there is"
            raise ValueError(f"{type(self).__name__} has no setting {key!r}: {hint}")
        super().__setattr__(key, value)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        """Check every setting and pair of settings.

        Raises:
            ValueError: One sentence that names the setting, its value and the cure.
        """
        check_settings(self)
        check_callbacks(self)
        # RLlib would warn once per algorithm that the new API stack is new; it is the only one.
        log_once(f"{getattr(self.algo_class, '__name__', '')}_on_new_api_stack")
        super().validate()
        if self.env is not None and self.profile is None and not self._is_frozen:
            self.profile = self.env_spec.profile()

    @property
    def root_seed(self) -> int:
        """The seed that every draw derives from."""
        return self.seed if self.seed is not None else 0

    @property
    def env_spec(self) -> LLMEnvSpec:
        """How to make the environment.

        Raises:
            ValueError: There is none of its name, or none is set.
        """
        if self.env is None:
            raise ValueError("no environment is set: call environment(name), such as 'KeyDoor'")
        return get_env_spec(str(self.env))

    @property
    def agent_profile(self) -> AgentProfile:
        """The agent: what `agent(profile=...)` set, else the environment's own."""
        return self.profile or self.env_spec.profile()

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distance of the ratio's clip bounds below and above 1."""
        if isinstance(self.clip_param, int | float):
            return (float(self.clip_param), float(self.clip_param))
        low, high = self.clip_param
        return (float(low), float(high))

    @property
    def model_spec(self) -> ModelSpec:
        """Which model is loaded; the tiny one gets the words of the environment."""
        if self.llm_model != "tiny":
            return ModelSpec(self.llm_model, options=self.llm_options)
        key = cloudpickle.dumps((self.env_spec.name, dict(self.env_config), self.agent_profile))
        words = _words(key)
        return ModelSpec("tiny", words=words, seed=self.root_seed, options=self.llm_options)

    @property
    def anchor_rule(self) -> AnchorRule:
        """Which steps of a group count as taken from the same state."""
        return AnchorRule(self.anchor, self.similarity_threshold, self.similarity_measure)

    @property
    def step_settings(self) -> StepSettings:
        """How environments are stepped."""
        return StepSettings(
            threads=self.step_threads,
            step_timeout_s=self.step_timeout_s,
            episode_timeout_s=self.episode_timeout_s,
            on_failure=self.on_env_failure,
            max_replays=self.max_replays,
        )

    @property
    def vllm_settings(self) -> VLLMSettings:
        """How each vLLM engine runs."""
        settings: dict[str, Any] = {
            "dtype": self.dtype,
            "max_model_len": self.max_prompt_tokens + self.max_response_tokens,
            "max_num_seqs": self.max_num_seqs,
            "num_gpus": self.engine_num_gpus,
            "num_cpus": self.engine_num_cpus,
            "enable_sleep_mode": self.engine_sleep,
            "seed": self.root_seed,
        }
        if self.lora is not None:
            settings |= {"enable_lora": True, "max_lora_rank": self.lora.rank}
        return VLLMSettings(**settings | self.engine_options)

    @property
    def correction(self) -> RolloutCorrection | None:
        """The rollout correction that is in force."""
        if isinstance(self.rollout_correction, RolloutCorrection):
            return self.rollout_correction
        is_off_policy = self.dtype == "bfloat16" or self.max_staleness > 0
        is_needed = self.rollout_correction == "auto" and is_off_policy
        return RolloutCorrection() if is_needed else None

    @property
    def minibatch_plan(self) -> MinibatchPlan:
        """How rows are drawn into optimizer steps."""
        return MinibatchPlan(self.minibatch_size, self.num_minibatches, self.root_seed)

    @property
    def module_ids(self) -> tuple[str, ...]:
        """Policies (RLlib modules) of this algorithm."""
        return tuple(self.policies) if self.policies else (DEFAULT_MODULE_ID,)

    @property
    def module_of(self) -> Callable[[Any], str]:
        """From agent id to module id."""
        if not self.is_multi_agent:
            return _default_module
        mapping: Any = self.policy_mapping_fn
        return lambda agent_id: mapping(agent_id, None)

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Build the language-model module."""
        from rllib_gigpo.module import CausalLMModule

        return RLModuleSpec(
            module_class=CausalLMModule,
            model_config={
                "spec": self.model_spec,
                "autocast_dtype": self.dtype,
                "with_reference": self.kl_coeff > 0,
                "temperature": self.temperature,
                "lora": self.lora,
                "base_dtype": self.base_dtype,
                "seed": self.root_seed,
            },
        )

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        """Build the GiGPO learner."""
        from rllib_gigpo.learner import GiGPOTorchLearner

        return GiGPOTorchLearner


# What RLlib itself sets on a config after construction.
_RLLIB_LATE_SETTINGS = frozenset(
    {"worker_index", "simple_optimizer", "rl_module_spec", "in_evaluation", "env_task_fn"}
)


def _default_module(agent_id: Any) -> str:
    return DEFAULT_MODULE_ID


@lru_cache(maxsize=32)
def _words(pickled: bytes) -> tuple[str, ...]:
    """Collect the words of (env, env_config, profile); pickled, because dicts have no hash."""
    env, env_config, profile = cloudpickle.loads(pickled)
    return collect_words(get_env_spec(env).make(env_config), profile)
