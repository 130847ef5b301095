"""GiGPOConfig: every setting of the algorithm, checked before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override
from ray.util.debug import log_once

from rllib_gigpo.callbacks import check_callbacks
from rllib_gigpo.presets import get_preset
from rllib_gigpo.rllib_checks import as_sentence
from rllib_gigpo.settings.derived import DerivedSettings
from rllib_gigpo.validation import check_settings

if TYPE_CHECKING:
    from ray.rllib.core.learner.learner_group import LearnerGroup
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec


class GiGPOConfig(DerivedSettings):
    """Settings of GiGPO, grouped as RLlib groups them.

    Example:
        >>> config = (
        ...     GiGPOConfig()
        ...     .environment("KeyDoor")
        ...     .llm(model="tiny", max_prompt_tokens=64, max_response_tokens=8)
        ...     .training(num_groups=16, group_size=8, omega=1.0, gamma=0.95, f_norm="std", lr=5e-4)
        ... )
        >>> algorithm = config.build_algo()
        >>> algorithm.train()["env_runners"]["success_rate"]

    Defaults are the paper's (arXiv 2505.10978, App. E.1) where it states one.
    """

    # The preset whose settings a new object has.
    _preset = "gigpo"

    def __init__(self, algo_class: type | None = None):
        self._settings_are_open = True
        if algo_class is None:
            from rllib_gigpo.gigpo import GiGPO

            algo_class = GiGPO
        super().__init__(algo_class=algo_class)
        self._set_rllib_defaults()
        self._set_training_defaults()
        self._set_learner_defaults()
        self._set_serving_defaults()
        self._set_recording_defaults()
        self._set_fault_defaults()
        self._set_watchdog_defaults()
        self.algorithm_name = self._preset
        for name, value in get_preset(self._preset).settings.items():
            setattr(self, name, value)
        self._settings_are_open = False

    @classmethod
    def preset(cls, name: str) -> GiGPOConfig:
        """Return a new config with the settings of an algorithm of the family.

        Args:
            name: A key of `rllib_gigpo.presets.PRESETS`, such as "grpo", in any spelling
                ("Dr.GRPO", "dr-grpo" and "dr_grpo" are one).

        Returns:
            The config; every setting can be changed afterwards.

        Raises:
            ValueError: There is no such preset.
        """
        from rllib_gigpo.family import CONFIGS

        return CONFIGS[get_preset(name).name]()

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
    def validate(self) -> None:
        """Check every setting and pair of settings.

        Raises:
            ValueError: One sentence that names the setting, its value and the cure.
        """
        check_settings(self)
        check_callbacks(self)
        # RLlib would warn once per algorithm that the new API stack is new; it is the only one.
        log_once(f"{getattr(self.algo_class, '__name__', '')}_on_new_api_stack")
        try:
            super().validate()
        except Exception as error:
            raise ValueError(as_sentence(self, error)) from error
        if self.env is not None and self.profile is None and not self._is_frozen:
            self.profile = self.env_spec.profile()

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
                "critic": self.critic,
                "activation_checkpointing": self.activation_checkpointing,
                "use_liger_kernel": self.use_liger_kernel,
                "temperature": self.temperature,
                "lora": self.lora,
                "base_dtype": self.base_dtype,
                "freeze_vision_tower": self.freeze_vision_tower,
                "seed": self.root_seed,
            },
        )

    @override(AlgorithmConfig)
    def get_multi_rl_module_spec(self, **kwargs: Any) -> MultiRLModuleSpec:
        """Build the module of each policy with that policy's settings."""
        spec = super().get_multi_rl_module_spec(**kwargs)
        modules: Any = spec.rl_module_specs
        for module_id, one in modules.items():
            if self.algorithm_config_overrides_per_module.get(module_id):
                own = self.get_config_for_module(module_id).get_default_rl_module_spec()
                one.model_config = own.model_config
        return spec

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        """Build the GiGPO learner."""
        from rllib_gigpo.learner import GiGPOTorchLearner

        return GiGPOTorchLearner

    @override(AlgorithmConfig)
    def build_learner_group(self, **kwargs: Any) -> LearnerGroup:
        """Build the learners."""
        from rllib_gigpo.learner_group import LLMLearnerGroup, ShardedLearnerGroup

        group = ShardedLearnerGroup if self.sharding == "fsdp" else LLMLearnerGroup
        placement_group = kwargs.pop("placement_group", None)
        spec = kwargs.pop("rl_module_spec", None) or self.get_multi_rl_module_spec(**kwargs)
        return group(config=self.copy(), module_spec=spec, placement_group=placement_group)
