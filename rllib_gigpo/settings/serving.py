"""Settings of the language model, the agent, the engines and the environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.utils.annotations import override

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.settings.base import UNSET, SettingsBase
from rllib_gigpo.stepping import FailureRule


class ServingSettings(SettingsBase):
    """What plays: `llm`, `agent`, `engines`, `stepping`, `evaluation`."""

    def _set_serving_defaults(self) -> None:
        # Set by llm(...).
        self.llm_model = "Qwen/Qwen2.5-1.5B-Instruct"
        self.llm_options: dict[str, Any] = {}
        self.dtype = "float32"
        self.lora: LoRASettings | None = None
        self.freeze_vision_tower = False
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
        self.weight_sync: Literal["auto", "ray", "nccl", "ipc"] = "auto"
        self.probe_tolerance: float | None = None

        # Set by stepping(...).
        self.step_threads = 0
        self.start_timeout_s: float | None = None
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

    def llm(
        self,
        *,
        model: str = UNSET,
        options: Mapping[str, Any] = UNSET,
        dtype: Literal["float32", "bfloat16"] = UNSET,
        lora: LoRASettings | None = UNSET,
        freeze_vision_tower: bool = UNSET,
        base_dtype: Literal["float32", "bfloat16"] = UNSET,
        max_prompt_tokens: int = UNSET,
        max_response_tokens: int = UNSET,
        temperature: float = UNSET,
        eval_temperature: float = UNSET,
        top_p: float = UNSET,
        top_k: int = UNSET,
        max_num_seqs: int = UNSET,
    ) -> Self:
        """Set the language model and how it speaks.

        Args:
            model: "tiny" (from scratch, words of the environment), "tiny-vision" (the same, and
                it sees pictures), "smollm2-135m" (packaged weights), a Hugging Face id, or a local
                folder with safetensors.
            options: Shape of a tiny model, such as `{"hidden_size": 64}`.
            dtype: What matrix products run in; trained parameters and optimizer state stay fp32.
            lora: Train low-rank matrices beside frozen weights, which are then also the KL's
                reference; None trains all weights. LoRA wants a learning rate about ten times
                that of a full fine-tune.
            freeze_vision_tower: Of an image-text model train the language model alone; LoRA does
                so anyway.
            base_dtype: Type of the frozen weights, with LoRA; "bfloat16" halves their memory.
            max_prompt_tokens: Limit of a prompt.
            max_response_tokens: Limit of a response.
            temperature: Of the training rollouts.
            eval_temperature: Of evaluation; 0 is greedy.
            top_p: Nucleus mass of the training rollouts; anything but 1 is refused, see `top_k`.
            top_k: Tokens kept in the training rollouts; 0 keeps all, and anything else is refused:
                the learner's log-probabilities are over the whole vocabulary.
            max_num_seqs: Sequences that an engine decodes at once.
        """
        values = dict(locals())
        values["llm_model"] = values.pop("model")
        values["llm_options"] = values.pop("options")
        return self._take(values)

    def agent(
        self,
        *,
        profile: AgentProfile = UNSET,
        on_long_prompt: Literal["error", "end_episode", "shorten_observation"] = UNSET,
        max_episode_steps: int | None = UNSET,
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
        engine: Literal["transformers", "vllm"] = UNSET,
        num_engines: int = UNSET,
        engine_num_gpus: float = UNSET,
        engine_num_cpus: float = UNSET,
        engine_sleep: bool = UNSET,
        engine_options: Mapping[str, Any] = UNSET,
        weight_sync: Literal["auto", "ray", "nccl", "ipc"] = UNSET,
        probe_tolerance: float | None = UNSET,
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
            weight_sync: How weights get into vLLM engines: by Ray's object store ("ray"), or from
                GPU to GPU by vLLM's own transfer, between GPUs ("nccl") or inside the one that
                learner and engine share ("ipc"). "auto" chooses.
            probe_tolerance: Largest mean difference between an engine's and the learner's
                log-probabilities after a sync; None: 2e-3 in fp32, 0.12 in bf16; 0: no probe.
        """
        return self._take(dict(locals()))

    def stepping(
        self,
        *,
        step_threads: int = UNSET,
        start_timeout_s: float | None = UNSET,
        step_timeout_s: float | None = UNSET,
        episode_timeout_s: float | None = UNSET,
        on_env_failure: FailureRule = UNSET,
        max_replays: int = UNSET,
        max_dropped_share: float = UNSET,
        max_abandoned_threads: int = UNSET,
        lockstep: bool = UNSET,
    ) -> Self:
        """Set how environments are stepped, and what follows when one fails.

        Args:
            step_threads: Environment calls that run beside generation; 0 steps in the event loop
                itself, which is fastest for environments that answer in microseconds.
            start_timeout_s: Seconds that the first environment of an EnvRunner, which may load
                what all later ones share, may take to be made, and the one that is played for a
                tiny model's words; needs no threads. None: half an hour, or `step_timeout_s` if
                that is more.
            step_timeout_s: Seconds that one call may take; needs threads. Making an environment
                counts as a call, as `reset` and `step` do. A hung call is left to its thread, and
                its environment is never used again.
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
        evaluation_task_seeds: Sequence[int] | None = UNSET,
        evaluation_samples_per_task: int = UNSET,
        **kwargs: Any,
    ) -> Self:
        """Set the evaluation panel.

        Args:
            evaluation_task_seeds: Reset seeds of the panel, which choose its tasks. None plays
                `evaluation_duration` tasks, the same in every run and on every machine: those that
                the environment lists, none twice before all were played; where it lists none,
                those of seeds that no training task has.
            evaluation_samples_per_task: Episodes per task (k).
            **kwargs: RLlib's evaluation settings; `evaluation_duration` counts tasks.
        """
        values = dict(locals())
        super().evaluation(**kwargs)
        return self._take(values)
