"""GiGPO as an RLlib Algorithm (Group-in-Group Policy Optimization, arXiv 2505.10978).

One iteration:

    task seeds -> EnvRunners play groups -> rows -> learners (advantages, loss, step) -> weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import ALL_MODULES
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.policy.sample_batch import MultiAgentBatch
from ray.rllib.utils import force_list
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    TIMERS,
)
from ray.tune.execution.placement_groups import PlacementGroupFactory

from rllib_gigpo.collect import Collected, pools, token_counts
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.env_runner import LLMEnvRunner
from rllib_gigpo.group_player import GroupPlayer, local_runner
from rllib_gigpo.learner import PHASES
from rllib_gigpo.learner_report import check_skipped
from rllib_gigpo.metrics import episode_metrics, step_group_metrics
from rllib_gigpo.out_of_memory import naming_memory
from rllib_gigpo.recording.recorder import RunRecorder
from rllib_gigpo.rollout_types import Episode, GroupTask
from rllib_gigpo.rows import RowData, episodes_to_batch, modules_of
from rllib_gigpo.sampler import Sampler
from rllib_gigpo.starting import made_in_time
from rllib_gigpo.vocabularies import check_vocabularies
from rllib_gigpo.watched_actors import WatchedActors
from rllib_gigpo.watching import Watchdog
from rllib_gigpo.weight_sync import WeightSync
from rllib_gigpo.whole_checkpoints import WholeCheckpoints

T = TypeVar("T")


class GiGPO(WholeCheckpoints):
    """Group-in-Group Policy Optimization.

    Attributes:
        last_evaluation: Per episode of the last evaluation: seed, task id, member, won, return.
        player: Plays groups of episodes on EnvRunners.
        sampler: Samples the groups of every iteration.
        recorder: Writes the run folder; None where `recording(enabled=False)`.
        watchdog: Looks for collapse; None where `watchdog(enabled=False)`.
    """

    config: GiGPOConfig
    env_runner_group: EnvRunnerGroup
    learner_group: LearnerGroup

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> GiGPOConfig:
        """Return the default settings."""
        return GiGPOConfig(algo_class=cls)

    @override(Algorithm)
    def setup(self, config: GiGPOConfig) -> None:
        """Build EnvRunners and learners; a local evaluation runner shares the local engine."""
        self.num_updates = 0
        self.last_evaluation: list[dict[str, Any]] = []
        self.recorder: RunRecorder | None = None
        self.watchdog: Watchdog | None = None
        check_name(self.get_default_config(), config)
        with naming_memory("setup", config), made_in_time(_limit_of_runners(config)):
            super().setup(config)
        try:
            self._connect()
        except BaseException:
            # Whoever tries again would find their CPUs and GPUs taken.
            with suppress(Exception):
                self.cleanup()
            raise

    def _connect(self) -> None:
        """Watch the EnvRunners, start the engines, and bring them the learner's weights."""
        trains_locally = self.env_runner_group.num_remote_workers() == 0
        if trains_locally and isinstance(self.eval_env_runner, LLMEnvRunner):
            self.eval_env_runner.share_engine(local_runner(self.env_runner_group))
        groups = [g for g in (self.env_runner_group, self.eval_env_runner_group) if g is not None]
        for error in (e for g in groups for e in g.foreach_env_runner(_env_error)):
            if error is not None:
                raise RuntimeError(error)
        check_vocabularies(self.config)
        for group in groups:
            group._worker_manager = WatchedActors.take_over(
                group._worker_manager,
                self.config.heartbeat_timeout_s,
                start_limit_s=self.config.runner_start_limit_s,
            )
        with naming_memory("engines", self.config):
            self.weights = WeightSync(
                self.config, groups, self.first_learner, self.learner_group.is_local
            )
        self.player = GroupPlayer(self.config, self.weights, self.restore_env_runners)
        self.sampler = Sampler(self.config, partial(self.player.play, self.env_runner_group))
        with naming_memory("sync", self.config):
            self._sync_weights()
        if self.config.record:
            self.recorder = RunRecorder(self)
        if self.config.watch:
            self.watchdog = Watchdog(self)
        # The recorder last: it writes what the others have added to the result.
        own = [each for each in (self.watchdog, self.recorder) if each is not None]
        self.callbacks = [*force_list(self.callbacks), *own]

    @override(Algorithm)
    def cleanup(self) -> None:
        """Stop learners, EnvRunners and engines, each of them whatever the others do."""
        with ExitStack() as last_first:
            if hasattr(self, "weights"):
                last_first.callback(self.weights.close)
            last_first.callback(super().cleanup)
            # Building it may have failed before these were there.
            playing = [getattr(self, name, None) for name in ("sampler", "player")]
            for part in (self.recorder, *playing):
                if part is not None:
                    last_first.callback(part.close)

    @classmethod
    @override(Algorithm)
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """Reserve the engine actors' CPUs and GPUs beside RLlib's own bundles."""
        request: Any = super().default_resource_request(config)
        settings = cls.get_default_config().update_from_dict(config)
        bundles = engine_bundles(settings)
        if not bundles:
            return request
        return PlacementGroupFactory([*request.bundles, *bundles], strategy=request.strategy)

    @override(Algorithm)
    def training_step(self) -> None:
        """Run one iteration."""
        if self.recorder is not None:
            self.recorder.begin(self.num_updates)
        if self.watchdog is not None:
            self.watchdog.begin(self.num_updates)
        with self._timed("rollout"):
            collected = self.sampler.collect(self.num_updates)
        with self._timed("grouping"):
            batch = self._to_rows(collected.training_episodes)
        self._log_rollout(collected, batch)
        self.weights.sleep()
        if self.config.max_staleness > 0:
            self.sampler.play_ahead(self.num_updates + 1)
        self._update(batch)
        if self.recorder is not None:
            self.recorder.keep(collected.training_episodes, batch)
        if self.sampler.is_ahead:
            # Weights change only while no request runs.
            with self._timed("wait_for_rollout"):
                self.sampler.wait()
        with self._timed("sync"):
            self._sync_weights()

    @override(Algorithm)
    def log_result(self, result: dict[str, Any]) -> None:
        """Let callbacks see and log the result; then act where it tells a collapse.

        Raises:
            CollapseError: It does, and the settings say that this ends the run.
        """
        super().log_result(result)
        if self.watchdog is not None:
            self.watchdog.act()

    def play(self, runners: EnvRunnerGroup, tasks: Sequence[GroupTask]) -> Collected:
        """Play groups on the runners of a group.

        Raises:
            RuntimeError: A rollout failed, no runner came back, or environments failed in more
                groups than `max_dropped_share` allows.
        """
        collected = self.player.play(runners, tasks)
        collected.check(len(tasks), self.config.max_dropped_share)
        return collected

    @override(Algorithm)
    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Bring dead runners back, with the weights that the others have."""
        restored = env_runner_group.probe_unhealthy_env_runners()
        if restored:
            self.weights.repeat()
        return restored

    def _to_rows(self, episodes: Sequence[Episode]) -> MultiAgentBatch:
        return episodes_to_batch(episodes, self.config.anchor_rule, self.config.module_of)

    def _update(self, batch: MultiAgentBatch) -> None:
        steps = self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        with self._timed("learn"):
            results = self.learner_group.update(
                training_data=RowData(batch, self.config.minibatch_plan),
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: steps},
                iteration=self.num_updates,
            )
        if not results:
            raise RuntimeError(
                "no learner answered the update: a learner died in an earlier one; restore the "
                "run from its last checkpoint"
            )
        self.num_updates += 1
        for phase in PHASES:
            seconds = [r[ALL_MODULES][f"seconds_{phase}"].peek() for r in results]
            self.metrics.log_value((TIMERS, phase), float(np.max(seconds)), window=1)
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        # All learners leave out the same steps.
        skipped = {
            module_id: found["skipped_steps_in_a_row"].peek()
            for module_id, found in results[0].items()
            if "skipped_steps_in_a_row" in found
        }
        check_skipped(skipped, self.config.max_skipped_steps)

    def _log_rollout(self, collected: Collected, batch: MultiAgentBatch) -> None:
        found = episode_metrics(collected.episodes)
        self.metrics.aggregate(collected.metrics, key=ENV_RUNNER_RESULTS)
        self.metrics.log_dict(found, key=ENV_RUNNER_RESULTS, window=1)
        self.metrics.log_dict(collected.counts(), key=ENV_RUNNER_RESULTS, window=1)
        self.metrics.log_value(
            (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME),
            found["num_env_steps_sampled"],
            reduce="lifetime_sum",
        )
        uniform_share = collected.uniform_share(pools(self.config))
        if uniform_share is not None:
            place = (ENV_RUNNER_RESULTS, "uniform_group_share")
            self.metrics.log_value(place, uniform_share, window=1)
        for kind, tokens in token_counts(collected.episodes).items():
            self.metrics.log_value((ENV_RUNNER_RESULTS, f"num_{kind}_tokens"), tokens, window=1)
        self.metrics.log_dict(step_group_metrics(batch), key=ENV_RUNNER_RESULTS, window=1)
        versions = [
            rows["weight_version"]
            for module_id, rows in modules_of(batch)
            if module_id not in self.weights.frozen
        ]
        if versions:
            staleness = float(self.num_updates - np.concatenate(versions).mean())
            self.metrics.log_value((ENV_RUNNER_RESULTS, "staleness"), staleness, window=1)
        for name, count in self.weights.faults.items():
            self.metrics.log_value((ENV_RUNNER_RESULTS, name), count, window=1)

    def _sync_weights(self) -> None:
        """Give every engine the learner's weights, as version `num_updates`."""
        self.weights.push(self.num_updates)

    def first_learner(self, call: Callable[[Any], T]) -> T:
        """Return the first learner's answer; all hold the same weights.

        Where each holds a part of them only, all are called, for the first one needs their parts.
        """
        group: Any = self.learner_group
        called = None if self.config.sharding == "fsdp" else [0]
        for answer in group.foreach_learner(call, remote_actor_ids=called):
            if not answer.ok:
                raise answer.get()
            return answer.get()
        raise RuntimeError(
            "the first learner does not answer: it died; restore the run from its last checkpoint"
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        with (
            self.metrics.log_time((TIMERS, phase), reduce="mean", window=1),
            naming_memory(phase, self.config),
        ):
            yield

    @override(Algorithm)
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate the learner's weights, whoever set them.

        Returns:
            RLlib's evaluation results and, as `episodes`, `last_evaluation` (a tuple, because
            Tune's TensorBoard logger takes a list for a histogram).
        """
        self._sync_weights()
        results = super().evaluate(*args, **kwargs)
        return {**results, "episodes": tuple(self.last_evaluation)}

    @override(WholeCheckpoints)
    def save_to_path(self, *args: Any, **kwargs: Any) -> str:
        """Write a checkpoint; see `WholeCheckpoints`."""
        if self.recorder is not None:
            # Nobody plays an iteration again that a checkpoint counts as done: its rows come first.
            self.recorder.to_disk()
        return super().save_to_path(*args, **kwargs)

    @override(WholeCheckpoints)
    def restore_from_path(self, *args: Any, **kwargs: Any) -> None:
        """Take over a checkpoint, or one component of it; see `WholeCheckpoints`."""
        super().restore_from_path(*args, **kwargs)
        if kwargs.get("component") is not None:
            self._sync_weights()  # a whole checkpoint was synced by `set_state`, its last step

    @override(Algorithm)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the algorithm's state; the task stream is a function of `num_updates`.

        What has been played ahead belongs to it: its tasks were played with weights that are gone.
        """
        state = {**super().get_state(*args, **kwargs), "num_updates": self.num_updates}
        played_ahead = self.sampler.dump_ahead()
        if played_ahead is not None:
            state["played_ahead"] = played_ahead
        watched = None if self.watchdog is None else self.watchdog.get_state()
        if watched is not None:
            state["watchdog"] = watched
        return state

    @override(Algorithm)
    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.num_updates = state.get("num_updates", self.num_updates)
        self.sampler.load_ahead(state.get("played_ahead"))
        if self.watchdog is not None and "watchdog" in state:
            self.watchdog.set_state(state["watchdog"])
        super().set_state(state)
        self._sync_weights()


def check_name(default: GiGPOConfig, config: GiGPOConfig) -> None:
    """Make sure that a trainable of a preset's name does not train another preset's settings.

    Raises:
        ValueError: It would.
    """
    if default.algorithm_name not in ("gigpo", config.algorithm_name):
        raise ValueError(
            f"the trainable of {default.algorithm_name!r} was given the settings of "
            f"{config.algorithm_name!r}: start from GiGPOConfig.preset("
            f"{default.algorithm_name!r}), or use the trainable 'GiGPO', which takes any of them"
        )


def _env_error(runner: Any) -> str | None:
    return runner.env_error


def _limit_of_runners(config: GiGPOConfig) -> float | None:
    has_actors = config.num_env_runners or config.evaluation_num_env_runners
    return config.runner_start_limit_s if has_actors else None


def engine_bundles(config: GiGPOConfig) -> list[dict[str, float]]:
    """Return what Ray must reserve for the engine actors: one bundle each."""
    if config.engine != "vllm":
        return []
    settings = config.vllm_settings
    bundle = {"CPU": settings.num_cpus, "GPU": settings.num_gpus}
    bundle = {name: amount for name, amount in bundle.items() if amount > 0}
    return [dict(bundle) for _ in range(config.num_engines * len(config.module_ids))]
