"""One command that starts a run, and goes on with it after whatever ended it."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rllib_gigpo.checkpoints import CheckpointError, Place, check_whole
from rllib_gigpo.one_at_a_time import alone
from rllib_gigpo.recording.describe import now
from rllib_gigpo.recording.folder import RunFolder, read_json, read_lines, write_json
from rllib_gigpo.watched_actors import LearnerError

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.gigpo import GiGPO

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_CHECKPOINT = re.compile(r"checkpoint_(\d{6,})(\.previous)?")
# Says that a run was begun by `train_to`, which may begin it anew while it has no checkpoint.
_BEGUN = "train_to.json"
_LOCK = ".train_to.lock"


def train_to(
    config: GiGPOConfig,
    folder: str | Path,
    iterations: int,
    *,
    then: Callable[[GiGPO], T],
    on_result: Callable[[dict[str, Any]], Any] | None = None,
    checkpoint_every: int = 1,
    keep: int = 2,
    max_failures: int = 3,
) -> T:
    """Train until so many iterations are done; the same call goes on with what a killed one left.

    Where a learner fails, the run goes on from its newest whole checkpoint in this very call. While
    it trains, the folder is closed to other calls, unless its disk has no locks (`flock`).

    Args:
        config: The settings; those that decide what is learned must be the same in every call.
        folder: Where checkpoints (`checkpoint_000012`, ...) and the run folder's files go. A run
            that was killed before its first checkpoint begins anew; what it had written is laid
            aside in `superseded`.
        iterations: Training iterations in all.
        then: What to do with the trained algorithm before it is stopped.
        on_result: Called with every iteration's result.
        checkpoint_every: Iterations between two checkpoints; a rollback is saved at once. What was
            trained after the last one is trained again, from its weights: tasks are a function of
            the iteration.
        keep: Newest checkpoints that stay.
        max_failures: Failures of learners after which the run ends with the error.

    Returns:
        What `then` returned.

    Raises:
        LearnerError: Learners failed more often than `max_failures`.
        CheckpointError: A checkpoint could not be written, and the ones before are untouched; or
            none of those in the folder is whole.
        ValueError: `checkpoint_every` or `keep` is below 1, another call trains in the folder, or
            it holds a run without checkpoints that `train_to` did not begin.
    """
    for name, value in (("checkpoint_every", checkpoint_every), ("keep", keep)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    folder = Path(folder).absolute()

    def train() -> T:
        with _started(config, folder) as algorithm:
            while algorithm.num_updates < iterations:
                before = algorithm.num_updates
                result = algorithm.train()
                if on_result is not None:
                    on_result(result)
                done = algorithm.num_updates
                # A rollback has left the branch of later checkpoints: nobody is to go on from them.
                is_back = done <= before
                if is_back or done % checkpoint_every == 0 or done >= iterations:
                    algorithm.save_to_path(_checkpoint(folder, done))
                    _forget_others(folder, done, keep)
            return then(algorithm)

    busy = f"another train_to is at work in {folder}: wait for it, end it, or name another folder"
    with alone(folder / _LOCK, busy):
        for left_over in folder.glob(".checkpoint_*.partial-*"):  # of saves that were killed
            shutil.rmtree(left_over, ignore_errors=True)
        failures = 0
        while True:
            try:
                return train()
            except LearnerError as error:
                failures += 1
                if failures > max_failures:
                    raise
                _LOG.error("%s (failure %d of at most %d)", error, failures, max_failures)


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest whole checkpoint that `train_to` has left in a folder, or None.

    One that is damaged is passed over for the one that had its name before, then for an older one,
    with a warning that names the file.
    """
    for path in reversed(_checkpoints(Path(folder))):
        for place in (Place.of(path), Place.of(_previous(path))):
            if not place.exists():
                continue
            try:
                check_whole(place)
            except CheckpointError as error:
                _LOG.warning("passed over: %s", error)
                continue
            return Path(place.path)
    return None


@contextmanager
def _started(config: GiGPOConfig, folder: Path) -> Iterator[GiGPO]:
    """Build the algorithm, take over the newest checkpoint, and stop it in the end."""
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        _check_new(folder)
    algorithm: Any = config.copy(copy_frozen=False).recording(folder=str(folder)).build_algo()
    try:
        if checkpoint is None:
            RunFolder(folder).cut(0)
            write_json(folder / _BEGUN, {"time": now()})
        else:
            algorithm.restore_from_path(checkpoint)
        yield algorithm
    except BaseException:
        try:
            algorithm.stop()
        except Exception:
            # What ended the run says more, and decides whether it goes on.
            _LOG.exception("the run could not be stopped cleanly")
        raise
    algorithm.stop()


def _check_new(folder: Path) -> None:
    """Make sure that a run may begin in a folder without a whole checkpoint.

    Raises:
        CheckpointError: It holds checkpoints, which beginning anew would lose.
        ValueError: It holds a run that something else than `train_to` began.
    """
    damaged = len(_checkpoints(folder))
    if damaged:
        raise CheckpointError(
            f"none of the {damaged} checkpoints in {folder} is whole (the log says why): repair or "
            "remove them, or name another folder"
        )
    run = RunFolder(folder)
    done = len(read_lines(run.metrics)) if run.metrics.exists() else 0
    if done and not (folder / _BEGUN).exists():
        name = read_json(run.run).get("run_id") if run.run.exists() else None
        raise ValueError(
            f"{folder} holds {done} iterations of run {name!r}, which train_to did not begin, and "
            "no checkpoint_NUMBER to go on from: name another folder, or put a checkpoint of the "
            f"run there as {_checkpoint(folder, done).name}"
        )


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first, whole or not."""
    if not folder.is_dir():
        return []
    found = (_CHECKPOINT.fullmatch(path.name) for path in folder.iterdir())
    return [folder / f"checkpoint_{n}" for n in sorted({m.group(1) for m in found if m}, key=int)]


def _forget_others(folder: Path, done: int, keep: int) -> None:
    """Remove all but the newest checkpoints up to now.

    Later ones are damaged, or of a branch that a rollback has left: nobody is to go on from them.
    """
    newest = _checkpoint(folder, done)
    found = _checkpoints(folder)
    kept = found[: found.index(newest) + 1][-keep:]
    for path in found:
        if path not in kept:
            for each in (path, _previous(path)):
                shutil.rmtree(each, ignore_errors=True)


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _checkpoint(folder: Path, done: int) -> Path:
    return folder / f"checkpoint_{done:06d}"
