"""A learner that fails on demand, for tests of what its group does then."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

from rllib_gigpo.learner import GiGPOTorchLearner


class FaultyLearner(GiGPOTorchLearner):
    """Learner 1 does what a file says, once; learner 0 is well.

    The file is that of `tests.ray_runs.Fragile`, with ".learner" behind its name:

    - "start": send itself SIGSTOP before anything is built.
    - "build": raise while the module is built.
    - "raise", "kill", "stop": raise, or send itself SIGKILL or SIGSTOP, in the middle of an update,
      while the other waits for its gradients.
    - "full": learner 0 has a disk without room at the next save.
    """

    def _set_learner_index_and_placement_group(self, **arguments: Any) -> None:
        super()._set_learner_index_and_placement_group(**arguments)
        self._fail("start")

    def build(self) -> None:
        if not self._waits_for_group:
            self._fail("build")
        super().build()

    def compute_loss_for_module(self, **arguments: Any) -> Any:
        self._fail("raise", "kill", "stop")
        return super().compute_loss_for_module(**arguments)

    def get_metadata(self) -> dict:
        self._fail("full", learner=0)
        return super().get_metadata()

    def _fail(self, *kinds: str, learner: int = 1) -> None:
        flag = Path(f"{self.config.env_config['flag']}.learner")
        if self._learner_index != learner or not flag.is_file():
            return
        kind = flag.read_text()
        if kind not in kinds:
            return
        flag.unlink()
        if kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind in ("build", "raise"):
            raise ZeroDivisionError(f"learner {learner} broke")
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
