"""The RLlib EnvRunner around `rollout.py`: owns environments, agent and engine of one process."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import gymnasium
import ray
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable

from rllib_gigpo.callbacks import RunnerCallbacks
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.engines import build_engine
from rllib_gigpo.engines.base import Completion, Engine, Request, Sampling
from rllib_gigpo.engines.packing import Checksums
from rllib_gigpo.engines.published import Published, check_held, serve
from rllib_gigpo.evaluation import panel_order, with_task_ids
from rllib_gigpo.games import Game
from rllib_gigpo.in_time import call_in_time
from rllib_gigpo.metrics import episode_metrics
from rllib_gigpo.models import (
    load_generation_config,
    load_tokenizer,
    materialize,
    stop_token_ids,
)
from rllib_gigpo.out_of_memory import is_out_of_memory, sentence
from rllib_gigpo.rollout import play_groups
from rllib_gigpo.rollout_types import Episode, GroupTask, Rollout, RolloutSettings, Voice
from rllib_gigpo.seeding import derive_seed
from rllib_gigpo.stepping import Stepper
from rllib_gigpo.vision.sight import load_sight

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Played:
    """What a runner brings back from `LLMEnvRunner.play`.

    Attributes:
        groups: Numbers of the groups that were played; none where the runner lacks the weights.
        rollout: Their episodes, and what failed.
        new_counts: Environment errors, time-outs and abandoned threads of this rollout.
        counts: The same since the runner started.
        metrics: What callbacks have logged, reduced.
        worker_index: Which runner it was, 0 for the local one.
        seconds: Wall-clock of the rollout.
        error: Text of the error that stopped it, or None. Errors travel as values: raised inside
            an actor they would only make RLlib restart it and lose the message.
    """

    groups: tuple[int, ...]
    rollout: Rollout = field(default_factory=lambda: Rollout([]))
    new_counts: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    worker_index: int = 0
    seconds: float = 0.0
    error: str | None = None


class LLMEnvRunner(EnvRunner, Checkpointable):
    """Plays task groups with a language-model policy.

    The engine is built at first use, so an idle local runner costs nothing.
    """

    config: GiGPOConfig

    def __init__(self, *, config: GiGPOConfig, **kwargs: Any):
        super().__init__(config=config, **kwargs)
        self._loop = asyncio.new_event_loop()
        self._spec = self.config.env_spec
        self._idle: list[Game] = []
        self._spaces: tuple[Any, Any] | None = None
        self._panel_order: list[Any] = []
        self._engine: Engine | None = None
        self._voices: dict[str, tuple[PromptEncoder, tuple[int, ...]]] = {}
        self._owns_engine = True
        self._waiting_weights: dict[str, Published] = {}
        self._versions: dict[str, int] = {}
        self._version = -1
        self._stepper = Stepper(self.config.step_settings)
        self._sampled = 0
        self._unreported: list[Episode] = []
        self._call_back = RunnerCallbacks(self.config, self)
        self.env_error: str | None = None
        try:
            self.make_env()
        except Exception as error:
            if not self.worker_index:
                raise
            # Raised in an actor, it would reach nobody: `GiGPO.setup` asks for it. Where it
            # happened stands in the log.
            _LOG.exception("an environment could not be made")
            self.env_error = str(error)

    @property
    def engine(self) -> Engine:
        """The engine, built and given the last weights at first use."""
        if self._engine is None:
            self._engine = build_engine(self.config, device=self._engine_device)
            for policy_id, published in self._waiting_weights.items():
                serve(self._engine, policy_id, published, published.packed)
                check_held(published, self._engine.checksums(policy_id))
            self._waiting_weights.clear()
        return self._engine

    @property
    def _engine_device(self) -> str | None:
        """The CPU where Ray has reserved no GPU for this process: it hides none from it."""
        config = self.config
        here = config.num_gpus_per_learner if not config.num_learners else 0
        reserved = config.num_gpus_per_env_runner if self.worker_index else here
        return None if reserved else "cpu"

    def share_engine(self, other: LLMEnvRunner) -> None:
        """Serve requests from another runner's engine (evaluation beside local training)."""
        self._engine = other.engine
        self._loop = other._loop
        self._owns_engine = False

    @override(EnvRunner)
    def make_env(self) -> None:
        """Build one environment now, so that a broken one shows at start-up.

        Raises:
            RuntimeError: It cannot be made, or takes longer than `start_limit_s`.
        """
        try:
            game, self._spaces, self._panel_order = call_in_time(
                self._first_game,
                self.config.start_limit_s,
                in_thread=self.config.step_threads > 0,
            )
        except (Exception, SystemExit) as error:
            raise RuntimeError(
                f"environment {self._spec.name!r} could not be made: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._idle.append(game)

    @override(EnvRunner)
    def get_spaces(self) -> dict[str, tuple]:
        """Return the string spaces of the environment for every module."""
        if self._spaces is None:  # `GiGPO.setup` is about to raise `env_error`.
            space = gymnasium.spaces.Text(1)
            return dict.fromkeys((INPUT_ENV_SPACES, *self.config.module_ids), (space, space))
        modules = dict.fromkeys(self.config.module_ids, self._spaces)
        return {INPUT_ENV_SPACES: self._spaces, **modules}

    def play(self, tasks: Sequence[GroupTask], version: int | None = None) -> Played:
        """Play groups to the end; errors come back in the result.

        Args:
            tasks: The groups, all of one stream.
            version: The weights to play with, or None for those that are loaded. A runner that Ray
                has restarted behind RLlib's back has none: it plays nothing until it gets them.
        """
        if version is not None and self._version != version:
            return Played(())
        groups = tuple(task.group for task in tasks)
        start = time.perf_counter()
        before = Counter(self._stepper.counts)
        try:
            settings = self._settings(tasks[0].stream == "evaluation")
            common = settings.voices[self.config.module_ids[0]]
            # Ray runs every method of an actor class with a coroutine method inside an event loop,
            # where no other loop can run: this class must not have one.
            playing = play_groups(
                with_task_ids(tasks, self._panel_order),
                engine=self.engine,
                profile=common.profile,
                encoder=common.encoder,
                acquire=self._lend_game,
                release=self._idle.append,
                stepper=self._stepper,
                settings=settings,
            )
            rollout = self._loop.run_until_complete(playing)
            for index, episode in enumerate(rollout.episodes):
                self._call_back("on_episode_end", episode=episode, env_index=index)
            self._call_back("on_sample_end", samples=rollout.episodes)
        except Exception as error:
            if is_out_of_memory(error):
                return Played(groups, error=sentence("rollout", self.config, error))
            return Played(groups, error=_told(error))
        return Played(
            groups,
            rollout,
            new_counts=self._stepper.counts - before,
            counts=self._stepper.counts,
            metrics=self.metrics.reduce(),
            worker_index=self.worker_index or 0,
            seconds=time.perf_counter() - start,
        )

    def _voice(self, module_id: str, *, evaluating: bool) -> Voice:
        """Return how a policy is spoken to and speaks."""
        config = self.config.get_config_for_module(module_id)
        if module_id not in self._voices:
            path = materialize(config.model_spec)
            tokenizer = load_tokenizer(path)
            encoder = PromptEncoder(
                tokenizer,
                config.agent_profile,
                config.max_prompt_tokens,
                config.on_long_prompt,
                load_sight(path),
            )
            stop_ids = stop_token_ids(tokenizer, load_generation_config(path))
            if not stop_ids and not config.agent_profile.stop:
                _LOG.warning(
                    "model %r names no end token, and the agent no stop string: every response "
                    "runs to max_response_tokens=%d (see response_cut_rate); set eos_token in its "
                    "tokenizer_config.json, or AgentProfile(stop=...)",
                    config.llm_model,
                    config.max_response_tokens,
                )
            self._voices[module_id] = encoder, stop_ids
        encoder, stop_ids = self._voices[module_id]
        sampling = Sampling(
            temperature=config.eval_temperature if evaluating else config.temperature,
            top_p=1.0 if evaluating else config.top_p,
            top_k=0 if evaluating else config.top_k,
            max_tokens=config.max_response_tokens,
            stop=config.agent_profile.stop,
            stop_token_ids=stop_ids,
        )
        return Voice(config.agent_profile, encoder, sampling)

    def _settings(self, evaluating: bool) -> RolloutSettings:
        config = self.config
        voices = {m: self._voice(m, evaluating=evaluating) for m in config.module_ids}
        return RolloutSettings(
            sampling=voices[config.module_ids[0]].sampling,
            seed=config.root_seed,
            lockstep=config.lockstep,
            max_episode_steps=config.max_episode_steps,
            policy_of=config.module_of,
            keep_last_prompts=config.keeps_last_prompts and not evaluating,
            voices=voices,
            env_name=self._spec.name,
        )

    def _lend_game(self) -> Game:
        """Return an idle environment, or a new one; several threads may ask at once."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._new_game()

    def _first_game(self) -> tuple[Game, tuple[Any, Any], list[Any]]:
        game = self._new_game()
        return game, game.spaces(), panel_order(game.env)

    def _new_game(self) -> Game:
        game = Game(self._spec.make(self.config.env_config), self._spec.name)
        context = EnvContext(self.config.env_config, worker_index=self.worker_index or 0)
        self._call_back("on_environment_created", env=game.env, env_context=context)
        return game

    @override(EnvRunner)
    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        **kwargs: Any,
    ) -> list[Episode]:
        """Play episodes outside the training loop, RLlib's generic entry.

        Args:
            num_timesteps: At least this many environment steps.
            num_episodes: At least this many episodes (whole groups are played).
            **kwargs: Other arguments of RLlib's EnvRunners; unused.

        Raises:
            RuntimeError: What went wrong in the rollout.
        """
        episodes: list[Episode] = []
        steps = 0
        while True:
            task = GroupTask(
                group=self._sampled,
                env_seed=derive_seed(
                    self.config.root_seed, "evaluation", self.worker_index or 0, self._sampled
                ),
                size=self.config.group_size,
                stream="evaluation",
            )
            self._sampled += 1
            played = self.play([task])
            if played.error:
                raise RuntimeError(played.error)
            self.metrics.aggregate([played.metrics])
            episodes += played.rollout.episodes
            steps += sum(episode.env_steps() for episode in played.rollout.episodes)
            if len(episodes) >= (num_episodes or 1) and steps >= (num_timesteps or 1):
                self._unreported += episodes
                return episodes

    @override(EnvRunner)
    def get_metrics(self) -> Any:
        """Return the metrics of what `sample` has played since the last call."""
        if self._unreported:
            self.metrics.log_dict(episode_metrics(self._unreported), window=1)
            self._unreported = []
        return self.metrics.reduce()

    def load_weights(self, weights: Mapping[str, Published], version: int) -> dict[str, int]:
        """Give policies their new weights or adapters; the others keep what they have.

        Where another runner owns the engine, that runner loads them.

        Args:
            weights: Per module id, what was published; its tensors may be a reference to Ray's
                object store.
            version: Version of the sync, with which `play` can be called once every policy has
                weights.

        Returns:
            The version that now serves each policy.
        """
        for module_id, published in weights.items():
            if isinstance(published.packed, ray.ObjectRef):
                published = replace(published, packed=ray.get(published.packed))
            if self._engine is None:
                self._waiting_weights[module_id] = published
            elif self._owns_engine:
                serve(self._engine, module_id, published, published.packed)
            self._versions[module_id] = published.version
        self._version = version if set(self._versions) == set(self.config.module_ids) else -1
        if self._engine is None:
            return {module_id: published.version for module_id, published in weights.items()}
        return {module_id: self._engine.version(module_id) for module_id in weights}

    def checksums(self) -> dict[str, Checksums]:
        """Per module, what the engine computes with; empty where it is not built yet.

        It is empty too where another runner owns the engine.
        """
        if self._engine is None or not self._owns_engine:
            return {}
        return {module_id: self._engine.checksums(module_id) for module_id in self._versions}

    def attach(self, fleet: Any, version: int) -> None:
        """Use engine actors that serve a weight version."""
        from rllib_gigpo.engines.vllm.remote import RemoteVLLMEngine

        if self._engine is None:
            self._engine = RemoteVLLMEngine(fleet)
            self._owns_engine = False
        self._version = version

    def probe(self, request: Request) -> Completion | None:
        """Answer a probe; None where the engine is not built yet or is another runner's."""
        if self._engine is None or not self._owns_engine:
            return None
        return self._loop.run_until_complete(_answer(self._engine, request))

    @override(Checkpointable)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """Return what rebuilds this runner."""
        return (), {"config": self.config, "worker_index": self.worker_index}

    @override(Checkpointable)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return how many groups `sample` has played; weights belong to the learner."""
        return {"sampled_groups": self._sampled}

    @override(Checkpointable)
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over counters. Weights come by `load_weights` alone: what RLlib pushes is empty."""
        self._sampled = state.get("sampled_groups", self._sampled)

    @override(EnvRunner)
    def assert_healthy(self) -> None:
        """Check that construction came to its end."""
        assert self._idle is not None

    @override(EnvRunner)
    def stop(self) -> None:
        """Close environments and engine, whatever an environment raises at it."""
        # Games that were made too late, after the last `sample`, become idle in the loop's turn.
        self._loop.run_until_complete(asyncio.sleep(0))
        for game in self._idle:
            self._loop.run_until_complete(self._stepper.close(game))
        self._idle = []
        if self._engine is not None and self._owns_engine:
            self._engine.close()
        self._engine = None


async def _answer(engine: Engine, request: Request) -> Completion:
    return await engine.generate(request)


def _told(error: Exception) -> str:
    """Return an error's sentence and, where it has a cause, where that happened.

    The frames of a user's environment are gone once the error has left its process.
    """
    text = f"{type(error).__name__}: {error}"
    if error.__cause__ is None:
        return text
    return f"{text}\n\n{''.join(traceback.format_exception(error.__cause__))}"
