"""One command that starts a run, and goes on with it after whatever ended it."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rllib_gigpo.checkpoints import CheckpointError, Place, check_whole, find_whole
from rllib_gigpo.recording.folder import RunFolder
from rllib_gigpo.watched_actors import LearnerError

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.gigpo import GiGPO

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_CHECKPOINT = re.compile(r"checkpoint_(\d{6,})(\.previous)?")


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

    Where a learner fails, the run goes on from its newest whole checkpoint in this very call.

    Args:
        config: The settings; those that decide what is learned must be the same in every call.
        folder: Where checkpoints (`checkpoint_000012`, ...) and the run folder's files go. Without
            a checkpoint in it the run begins anew, and files of a run that came to none are
            removed.
        iterations: Training iterations in all.
        then: What to do with the trained algorithm before it is stopped.
        on_result: Called with every iteration's result.
        checkpoint_every: Iterations between two checkpoints. What was trained after the last one
            is trained again, from its weights: tasks are a function of the iteration.
        keep: Newest checkpoints that stay.
        max_failures: Failures of learners after which the run ends with the error.

    Returns:
        What `then` returned.

    Raises:
        LearnerError: Learners failed more often than `max_failures`, or could not be built.
        CheckpointError: A checkpoint could not be written; the ones before are untouched.
        ValueError: `checkpoint_every` or `keep` is below 1.
    """
    for name, value in (("checkpoint_every", checkpoint_every), ("keep", keep)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    folder = Path(folder).absolute()
    failures = 0
    while True:
        algorithm = _start(config, folder)
        try:
            while algorithm.num_updates < iterations:
                result = algorithm.train()
                if on_result is not None:
                    on_result(result)
                done = algorithm.num_updates
                if done % checkpoint_every == 0 or done >= iterations:
                    algorithm.save_to_path(_checkpoint(folder, done))
                    _forget_others(folder, done, keep)
            return then(algorithm)
        except LearnerError as error:
            failures += 1
            if failures > max_failures:
                raise
            _LOG.error("%s (failure %d of at most %d)", error, failures, max_failures)
        finally:
            algorithm.stop()


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest whole checkpoint that `train_to` has left in a folder, or None.

    One that is damaged is passed over, with a warning that names the file.
    """
    for path in reversed(_checkpoints(Path(folder))):
        try:
            place = find_whole(Place.of(path))
            check_whole(place)
        except CheckpointError as error:
            _LOG.warning("passed over: %s", error)
            continue
        return Path(place.path)
    return None


def _start(config: GiGPOConfig, folder: Path) -> GiGPO:
    algorithm: Any = config.copy(copy_frozen=False).recording(folder=str(folder)).build_algo()
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        RunFolder(folder).clear()
    else:
        try:
            algorithm.restore_from_path(checkpoint)
        except BaseException:
            algorithm.stop()
            raise
    return algorithm


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
            for each in (path, path.with_name(f"{path.name}.previous")):
                shutil.rmtree(each, ignore_errors=True)


def _checkpoint(folder: Path, done: int) -> Path:
    return folder / f"checkpoint_{done:06d}"
