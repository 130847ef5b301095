"""What follows from the settings: the parts that the algorithm builds from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Self

from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.annotations import override

from rllib_gigpo.advantages import Estimator, find_estimator
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.engines.roads import Road, choose_road
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.grouping import AnchorRule
from rllib_gigpo.in_time import START_LIMIT_S, call_in_time
from rllib_gigpo.models import FROM_SCRATCH, ModelSpec
from rllib_gigpo.objective import Objective
from rllib_gigpo.registry import LLMEnvSpec, get_env_spec
from rllib_gigpo.rows import MinibatchPlan
from rllib_gigpo.settings.faults import FaultSettings
from rllib_gigpo.settings.learning import LearnerSettings
from rllib_gigpo.settings.recording import RecordingSettings
from rllib_gigpo.settings.serving import ServingSettings
from rllib_gigpo.settings.training import TrainingSettings
from rllib_gigpo.settings.watching import WatchdogSettings
from rllib_gigpo.stepping import StepSettings
from rllib_gigpo.value_checks import NUMBER_TYPES
from rllib_gigpo.vocabulary import collect_words


class DerivedSettings(
    TrainingSettings,
    LearnerSettings,
    ServingSettings,
    RecordingSettings,
    FaultSettings,
    WatchdogSettings,
):
    """Properties that read the settings; nothing here can be set."""

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
        if isinstance(self.clip_param, NUMBER_TYPES):
            return (float(self.clip_param), float(self.clip_param))
        low, high = self.clip_param
        return (float(low), float(high))

    @property
    def model_spec(self) -> ModelSpec:
        """Which model is loaded; a tiny one gets the words of the environment."""
        if self.llm_model not in FROM_SCRATCH:
            return ModelSpec(self.llm_model, options=self.llm_options)
        key = cloudpickle.dumps((self.env_spec.name, dict(self.env_config), self.agent_profile))
        words = _words(key, self.start_limit_s, self.step_threads > 0)
        return ModelSpec(self.llm_model, words=words, seed=self.root_seed, options=self.llm_options)

    @property
    def anchor_rule(self) -> AnchorRule:
        """Which steps of a group count as taken from the same state."""
        return AnchorRule(
            self.anchor, self.similarity_threshold, self.similarity_measure, self.anchor_encoder
        )

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
    def start_limit_s(self) -> float:
        """Seconds that the first environment may take to be made, and to be played for its words.

        What `stepping(start_timeout_s=...)` set; else half an hour, or what every other call of an
        environment may take, if that is more.
        """
        if self.start_timeout_s is not None:
            return self.start_timeout_s
        return max(START_LIMIT_S, self.step_timeout_s or 0.0)

    @property
    def runner_start_limit_s(self) -> float | None:
        """Seconds that an EnvRunner may take to be made, at the start or again; None: any number.

        Its first environment has `start_limit_s`; its process and its model have half an hour, as
        learners have, or `heartbeat_timeout_s` if that is more.
        """
        if self.heartbeat_timeout_s is None:
            return None
        return self.start_limit_s + max(START_LIMIT_S, self.heartbeat_timeout_s)

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
            "weight_transfer": None if self.weight_road == "ray" else self.weight_road,
            "seed": self.root_seed,
        }
        loras = [self.get_config_for_module(module_id).lora for module_id in self.module_ids]
        ranks = [lora.rank for lora in loras if lora is not None]
        if ranks:
            settings |= {"enable_lora": True, "max_lora_rank": max(ranks)}
        return VLLMSettings(**settings | self.engine_options)

    @property
    def weight_road(self) -> Road:
        """How weights get into the engines."""
        return choose_road(self)

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
        return tuple(sorted(self.policies)) if self.policies else (DEFAULT_MODULE_ID,)

    @override(AlgorithmConfig)
    def get_config_for_module(self, module_id: str) -> Self:
        """Return the settings of one policy: its `algorithm_config_overrides_per_module` first."""
        own = self.algorithm_config_overrides_per_module.get(module_id)
        if not own:
            return self
        config = self.copy(copy_frozen=False)
        config.algorithm_config_overrides_per_module = {}
        for name, value in own.items():
            setattr(config, name, value)
        return config

    @property
    def module_of(self) -> Callable[[Any], str]:
        """From agent id to module id."""
        if not self.is_multi_agent:
            return _default_module
        mapping: Any = self.policy_mapping_fn
        return lambda agent_id: mapping(agent_id, None)

    @property
    def advantage_estimator(self) -> Estimator:
        """From rows to advantages."""
        return find_estimator(self.estimator)

    @property
    def has_token_advantages(self) -> bool:
        """Whether the tokens of a response have advantages of their own."""
        return self.critic is not None and self.gae_level == "token"

    @property
    def keeps_last_prompts(self) -> bool:
        """Whether a critic is asked about the state after a truncated episode."""
        return self.critic is not None and self.gae_level == "step"

    @property
    def objective(self) -> Objective:
        """What the loss of an optimizer step is made of."""
        low, high = self.clip_range
        return Objective(
            ratio_level=self.ratio_level,
            clip_low=low,
            clip_high=high,
            dual_clip=self.dual_clip,
            aggregation=self.aggregation,
            norm_tokens=self.max_response_tokens,
            kl_estimator=self.kl_estimator if self.kl_in == "loss" else None,
            entropy_coeff=self.entropy_coeff,
            correction=self.correction,
            vf_clip_param=self.vf_clip_param,
            vf_loss_coeff=self.vf_loss_coeff,
            value_level=self.gae_level,
        )


def _default_module(agent_id: Any) -> str:
    return DEFAULT_MODULE_ID


@lru_cache(maxsize=32)
def _words(pickled: bytes, limit_s: float, in_thread: bool) -> tuple[str, ...]:
    """Collect the words of (env, env_config, profile); pickled, because dicts have no hash.

    Raises:
        RuntimeError: The environment took too long.
    """
    env, env_config, profile = cloudpickle.loads(pickled)
    spec = get_env_spec(env)
    try:
        return call_in_time(
            lambda: collect_words(spec.make(env_config), profile), limit_s, in_thread=in_thread
        )
    except TimeoutError as error:
        raise RuntimeError(
            f"environment {env!r} could not be played for the tiny model's words: {error}"
        ) from error
