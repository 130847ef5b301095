"""RunRecorder: the RLlib callback that writes the run folder.

    iteration begins -> begin(k)             opens the folder; forgets what a lost process wrote
    rows were trained -> keep(episodes, batch)
    on_train_result -> metrics.jsonl, receipt; rollouts in a thread of their own

The thread writes while the next iteration is played. At most one iteration waits for it, so a slow
disk holds training up instead of filling the memory.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.policy.sample_batch import MultiAgentBatch

from rllib_gigpo.models import load_tokenizer, materialize
from rllib_gigpo.recording.describe import describe_run, now, start_of
from rllib_gigpo.recording.folder import (
    RunFolder,
    append_line,
    read_json,
    read_lines,
    write_bytes,
    write_json,
    write_lines,
)
from rllib_gigpo.recording.levels import level_sizes
from rllib_gigpo.recording.plain import jsonable
from rllib_gigpo.recording.receipt import Costs, receipt_of, receipt_text
from rllib_gigpo.recording.rollout_rows import (
    Episode,
    Iteration,
    Rollouts,
    parquet_of,
    rollouts_of,
    worst_episodes,
)
from rllib_gigpo.recording.trackers import start_trackers

if TYPE_CHECKING:
    from rllib_gigpo.advantages import Advantages
    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.gigpo import GiGPO

_LOG = logging.getLogger(__name__)
_RECEIPT_EVERY_S = 60.0


class RunRecorder(RLlibCallback):
    """Writes what a run does into its folder.

    A disk that refuses to write stops no training: the error is logged, counted in
    `failures`, and the next iteration is tried again.

    Args:
        algorithm: The algorithm that is recorded.

    Attributes:
        folder: The run folder.
        failures: How many writes the disk has refused.
    """

    def __init__(self, algorithm: GiGPO):
        self._algorithm = algorithm
        self.folder = RunFolder(run_path(algorithm))
        self.failures = 0
        self._run: dict[str, Any] | None = None
        self._costs = Costs()
        self._early_evaluations: list[dict[str, Any]] = []
        self._kept: tuple[Sequence[Episode], MultiAgentBatch] | None = None
        self._tokenizer: Any = None
        self._trackers: list[Any] = []
        self._thread = ThreadPoolExecutor(1, "run-recorder")
        self._writing: Future[None] | None = None
        self._receipt_time = 0.0
        # The iteration that a run went back to, while what came after it is still in the folder.
        self._uncut: int | None = None

    def begin(self, iteration: int) -> None:
        """Open the folder before an iteration, or turn back where the run has been restored.

        Args:
            iteration: Iterations that are done; a restored run has some.

        Raises:
            ValueError: A new run would write over another one.
        """
        if self._run is not None:
            if self._costs.iterations > iteration:
                self._turn_back(iteration)
            return
        config = self._algorithm.config
        run_id = _new_id(self._algorithm)
        if self.folder.run.exists():
            found = read_json(self.folder.run)
            self._check_same(found, iteration)
            self.folder.cut(iteration)
            # What the settings are now counts; what the run is called and when it began, stays.
            kept = ("run_id", "created", "command", "starts", "trackers")
            described = describe_run(config, run_id)
            run = {**described, **{name: found[name] for name in kept if name in found}}
        else:
            run = describe_run(config, run_id)
        run["starts"] = [*run["starts"], start_of(config, iteration)]
        self._run = run
        self._costs = Costs.of(self.lines())
        self._trackers = start_trackers(config.trackers, run, self.folder.path)
        write_json(self.folder.run, run)
        for line in self._early_evaluations:
            self._safely(append_line, self.folder.evaluations, line)

    def _turn_back(self, iteration: int) -> None:
        """Go on from an earlier iteration: a checkpoint was restored in place, as PBT does."""
        run = self._run or {}
        self.flush()
        self._uncut = iteration if self._uncut is None else min(self._uncut, iteration)
        kept = [line for line in self.lines() if line["iteration"] <= self._uncut]
        self._costs = Costs.of(kept)
        self._is_one_branch()
        run["starts"] = [*run["starts"], start_of(self._algorithm.config, iteration)]
        self._safely(write_json, self.folder.run, run)

    def _is_one_branch(self) -> bool:
        """Whether nothing is left of what a turn back gave up; a full disk may have kept it."""
        if self._uncut is not None:
            self._safely(self._cut, self._uncut)
        return self._uncut is None

    def _cut(self, iteration: int) -> None:
        self.folder.cut(iteration)
        self._uncut = None

    def _check_same(self, found: Mapping[str, Any], iteration: int) -> None:
        done = len(self.lines())
        if iteration == 0 and done and not _has_trial(self._algorithm):
            raise ValueError(
                f"{self.folder.path} holds {done} iterations of run {found.get('run_id')!r}: give "
                "the new run another recording(folder=...), or restore a checkpoint to go on with "
                "the old one"
            )

    def keep(self, episodes: Sequence[Episode], batch: MultiAgentBatch) -> None:
        """Hold what this iteration was trained on until its result is known."""
        self._kept = (episodes, batch)

    def lines(self) -> list[dict[str, Any]]:
        """Read the metrics of all iterations so far, of earlier processes of the run too."""
        return read_lines(self.folder.metrics) if self.folder.metrics.exists() else []

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Write an event of the run; the time is added."""
        self._safely(append_line, self.folder.events, {**event, "time": now()})

    def keep_worst(self, number: int, count: int) -> list[dict[str, Any]]:
        """Write the rows of the iteration's worst episodes, before its result is written.

        Args:
            number: The iteration.
            count: How many episodes.

        Returns:
            What each of them came to, the worst first.
        """
        if self._kept is None:
            return []
        self.flush()
        episodes, batch = self._kept
        advantages = self._algorithm.first_learner(_advantages)
        self._load_tokenizer()
        rollouts = self._describe(Iteration(number, episodes, batch, dict(advantages)), None)
        worst = worst_episodes(rollouts.rows, count)
        places = [(episode["group"], episode["member"]) for episode in worst]
        rows = [row for row in rollouts.rows if (row["group"], row["member"]) in places]
        rows.sort(key=lambda row: places.index((row["group"], row["member"])))
        self._safely(write_lines, self.folder.collapse / f"{number:06d}.jsonl", rows)
        return worst

    def on_train_result(
        self, *, algorithm: Any, metrics_logger: Any = None, result: dict, **kwargs: Any
    ) -> None:
        """Write the iteration."""
        if self._kept is None or self._run is None:
            return
        (episodes, batch), self._kept = self._kept, None
        advantages = algorithm.first_learner(_advantages)
        number = algorithm.num_updates
        line = _metrics_line(number, result, advantages, algorithm.config)
        self._costs.add(line)
        # Two branches in one file could not be told apart.
        is_writable = self._is_one_branch()
        if is_writable:
            self._safely(append_line, self.folder.metrics, line)
        for tracker in self._trackers:
            _told(tracker.log, number, flat_numbers(line))
        every = algorithm.config.record_every
        if is_writable and every and (number - 1) % every == 0:
            self._write_soon(Iteration(number, episodes, batch, dict(advantages)))
        if time.monotonic() - self._receipt_time > _RECEIPT_EVERY_S:
            self._write_receipt()

    def on_evaluate_end(
        self, *, algorithm: Any, metrics_logger: Any = None, evaluation_metrics: dict, **kwargs: Any
    ) -> None:
        """Write the evaluation."""
        line = {
            "iteration": algorithm.num_updates,
            "time": now(),
            "env_runners": jsonable(evaluation_metrics.get("env_runners", {})),
            "episodes": jsonable(algorithm.last_evaluation),
        }
        if self._run is None:
            # A checkpoint that is evaluated and not trained leaves the folder of its run alone.
            self._early_evaluations.append(line)
        elif self._is_one_branch():
            self._safely(append_line, self.folder.evaluations, line)

    def _write_soon(self, iteration: Iteration) -> None:
        self.flush()
        # Here, as it reads settings, which registers the environment: Ray's registry has no lock.
        self._load_tokenizer()
        self._writing = self._thread.submit(self._safely, self._write_rollouts, iteration)

    def flush(self) -> None:
        """Wait until the rollouts of the last iteration are written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def to_disk(self) -> None:
        """Wait until all that is written so far would survive the loss of the machine's power."""
        self.flush()
        self._safely(self.folder.sync)

    def _write_rollouts(self, iteration: Iteration) -> None:
        rollouts = self._describe(iteration, self._algorithm.config.record_groups)
        write_rollouts(self.folder, iteration.number, rollouts)

    def _load_tokenizer(self) -> None:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(materialize(self._algorithm.config.model_spec))

    def _describe(self, iteration: Iteration, max_groups: int | None) -> Rollouts:
        return rollouts_of(iteration, self._decode, max_groups)

    def _decode(self, ids: np.ndarray) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def _write_receipt(self) -> None:
        self._receipt_time = time.monotonic()
        receipt = receipt_of(self._run or {}, self._costs)
        self._safely(write_json, self.folder.receipt, receipt)
        self._safely(write_bytes, self.folder.receipt_text, receipt_text(receipt).encode())

    def _safely(self, write: Any, *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            self.failures += 1
            _LOG.error("the run folder %s could not be written: %s", self.folder.path, error)

    def close(self) -> None:
        """Finish what is being written, and the receipt."""
        self.flush()
        self._thread.shutdown()
        if self._run is not None:
            self._write_receipt()
        for tracker in self._trackers:
            _told(tracker.finish)
        self._trackers = []


def _told(tell: Callable[..., Any], *arguments: Any) -> None:
    """Tell a tracker something; one that fails, such as by a server that is down, stops no run."""
    try:
        tell(*arguments)
    except Exception as error:
        _LOG.error("a tracker failed in %s: %r", getattr(tell, "__qualname__", tell), error)


def write_rollouts(folder: RunFolder, iteration: int, rollouts: Rollouts) -> None:
    """Write the rows of an iteration, their pictures first."""
    for digest, content in rollouts.pictures.items():
        path = folder.pictures / f"{digest}.png"
        if not path.exists():
            write_bytes(path, content)
    write_bytes(folder.rollout_file(iteration, "parquet"), parquet_of(rollouts))
    write_lines(folder.rollout_file(iteration), rollouts.rows)


def run_path(algorithm: GiGPO) -> Path:
    """Return the folder of a run.

    That is `recording(folder=...)`; under Tune the trial's own folder in it, or the folder in which
    Tune keeps the trial's results; else RLlib's log folder.
    """
    storage = algorithm._storage  # RLlib has no public way to where Tune keeps a trial's results.
    folder = algorithm.config.record_folder
    if folder is not None:
        path = Path(folder).expanduser().absolute()
        return path / Path(storage.trial_fs_path).name if storage is not None else path
    if storage is not None and storage.storage_filesystem.type_name == "local":
        return Path(storage.trial_fs_path)
    return Path(str(algorithm.logdir))


def _new_id(algorithm: GiGPO) -> str:
    """Return a run's id: under Tune always the same for a trial, which may move between nodes."""
    if not _has_trial(algorithm):
        return uuid.uuid4().hex[:12]
    path = Path(algorithm._storage.trial_fs_path)  # pyright: ignore[reportOptionalMemberAccess]
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{path.parent.name}/{path.name}").hex[:12]


def _has_trial(algorithm: GiGPO) -> bool:
    return algorithm._storage is not None


def _advantages(learner: Any) -> dict[str, Any]:
    return learner.advantages


def _metrics_line(
    number: int,
    result: Mapping[str, Any],
    advantages: Mapping[str, Advantages],
    config: GiGPOConfig,
) -> dict[str, Any]:
    """Return the line of an iteration."""
    parts = ("env_runners", "learners", "timers", "watchdog")
    sizes = {
        module: level_sizes(config.get_config_for_module(module), found)
        for module, found in advantages.items()
        if len(found.total)
    }
    return {
        "iteration": number,
        "time": now(),
        "seconds": jsonable(float(result.get("time_this_iter_s", 0.0))),
        **{name: jsonable(result[name]) for name in parts if name in result},
        "advantages": jsonable(sizes),
    }


def flat_numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of nested metrics under names joined by "/"."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = float(value)
    return found
