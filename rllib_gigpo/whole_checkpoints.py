"""An RLlib Algorithm whose checkpoints are whole or not there; see `rllib_gigpo.checkpoints`."""

from __future__ import annotations

import tempfile
import uuid
from functools import partial
from pathlib import Path
from typing import Any, Self

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.annotations import override
from ray.tune import Checkpoint

from rllib_gigpo.checkpoints import Place, check_part, check_whole, find_whole, save_whole


class WholeCheckpoints(Algorithm):
    """How checkpoints are written and read.

    Attributes:
        num_updates: Iterations that are done.
    """

    num_updates: int

    @override(Algorithm)
    def save_to_path(
        self, path: str | Path | None = None, *, filesystem: Any = None, **kwargs: Any
    ) -> str:
        """Write a checkpoint whole or not at all; a local one of that name is kept beside it.

        Args:
            path: Folder or URI; what lies there becomes NAME.previous. None: a temporary folder.
            filesystem: The pyarrow file system that `path` is on; by default what it names.
            **kwargs: RLlib's `state` and `use_msgpack`.

        Returns:
            The folder.

        Raises:
            CheckpointError: The disk or a learner refused; what lay there is untouched.
        """
        place = Place.of(path or Path(tempfile.gettempdir(), uuid.uuid4().hex), filesystem)
        save = partial(super().save_to_path, **kwargs)
        save_whole(place, save, {"num_updates": self.num_updates})
        return place.path if path is None or place.is_local else str(path)

    @classmethod
    @override(Algorithm)
    def from_checkpoint(cls, path: Any, filesystem: Any = None, **kwargs: Any) -> Self:
        """Build the algorithm of a checkpoint, once all its files are what was written.

        Raises:
            CheckpointError: It is not whole; the sentence names the file and the cure.
        """
        if isinstance(path, Checkpoint):
            path, filesystem = path.path, path.filesystem
        place = find_whole(Place.of(path, filesystem))
        check_whole(place)
        built: Any = super().from_checkpoint(
            place.path, filesystem=place.filesystem, is_checked=True, **kwargs
        )
        return built

    @override(Algorithm)
    def restore_from_path(
        self, path: Any, *, filesystem: Any = None, is_checked: bool = False, **kwargs: Any
    ) -> None:
        """Take over a checkpoint, or one component of it.

        Raises:
            CheckpointError: It is not whole; nothing has been taken over.
        """
        place = Place.of(path, filesystem)
        if kwargs.get("component") is not None:
            check_part(place)
        elif not is_checked:
            place = find_whole(place)
            check_whole(place)
        super().restore_from_path(place.path, filesystem=place.filesystem, **kwargs)
