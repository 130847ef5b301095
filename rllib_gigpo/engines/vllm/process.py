"""The one thread of a process that touches vLLM, and vLLM's traces in the process.

vLLM's single-process engine keeps state in module globals (the forward context, the process
group), so everything it does runs on one thread: closures from a queue, and between them one
engine step after the other.

The engine stays in this process on GPUs too: weights then reach the model without a copy through
another process, and tensor parallel workers are still processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch

from rllib_gigpo.engines.base import EngineError

Result = TypeVar("Result")

_CURE = (
    "pip install -e '.[vllm]' in rllib-gigpo's folder on a machine with GPUs; docs/engines.md says "
    "how without any"
)


class EngineDiedError(RuntimeError):
    """The engine can serve nothing any more; its process must be replaced."""


def import_vllm() -> None:
    """Import vLLM with the environment that a single-process engine needs.

    Raises:
        ImportError: vLLM is not installed, or does not fit what is.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Tensor parallel CPU workers would otherwise each claim fixed cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ImportError(f"the vLLM engine needs the package vllm: {_CURE}") from error
    let_modules_be_scanned()


def let_modules_be_scanned() -> None:
    """Keep vLLM's start from failing on llvmlite, which numba and bm25s load.

    vLLM looks at the `__dict__` of every object in every loaded module; llvmlite's library object
    answers every attribute, `__dict__` too, with a function of that name.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None or not hasattr(ffi.lib, "__dict__"):
        return
    library = type(ffi.lib)
    resolve = library.__getattr__

    def getattr_(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return resolve(self, name)

    library.__getattr__ = getattr_


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Undo what starting vLLM changes in its process beside itself.

    It seeds the global random generators, disables `torch.set_num_threads`, and preloads libraries
    into every later child process.
    """
    preload = os.environ.get("LD_PRELOAD")
    set_num_threads = torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        if preload is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preload


class EngineThread:
    """Runs closures in order, and steps engines while they have requests.

    Args:
        on_death: Called once, on this thread, with the error that ended the engines.

    Attributes:
        engines: vLLM's engines by policy, empty at first; only this thread may touch them.
        error: What ended the engines, None while they live.

    Raises:
        EngineError: The process runs such a thread already.
    """

    _open: EngineThread | None = None

    def __init__(self, on_death: Callable[[EngineDiedError], None]):
        if EngineThread._open is not None:
            raise EngineError(
                "this process already runs a vLLM engine: give one engine all policies, close the "
                "other first, or use RemoteVLLMEngine, whose engines have their own processes"
            )
        EngineThread._open = self
        self.engines: dict[str, Any] = {}
        self._on_death = on_death
        self.error: EngineDiedError | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    def post(self, task: Callable[[], None]) -> None:
        """Run `task` soon; an exception that leaves it ends the engines."""
        self._tasks.put(task)

    def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` and return its result or raise its exception here.

        Raises:
            EngineDiedError: The engines are dead, or `function` found them to be.
        """
        future: Future[Result] = Future()

        def task() -> None:
            try:
                if self.error is not None:
                    raise self.error
                result = function()
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, EngineDiedError):
                    raise
            else:
                future.set_result(result)

        self.post(task)
        return future.result()

    def close(self) -> None:
        """Stop the thread and shut its engines down; a second call does nothing."""
        if EngineThread._open is self:
            self._tasks.put(None)
            self._thread.join()
            EngineThread._open = None

    def _run(self) -> None:
        while True:
            busy = [engine for engine in self.engines.values() if engine.has_unfinished_requests()]
            try:
                if not self._run_tasks(wait=not busy):
                    break
                for engine in busy:
                    engine.step()
            except Exception as error:
                self._die(error)
        self._shut_down()

    def _run_tasks(self, *, wait: bool) -> bool:
        """Run what is queued; False once the thread shall end."""
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._tasks.get(block=wait)
                if task is None:
                    return False
                task()
                wait = False
        return True

    def _die(self, error: Exception) -> None:
        if self.error is not None:
            return
        if isinstance(error, EngineDiedError):
            self.error = error
        else:
            self.error = EngineDiedError(f"vLLM died of {type(error).__name__}: {error}")
            self.error.__cause__ = error
        self._on_death(self.error)
        self._shut_down()

    def _shut_down(self) -> None:
        for engine in self.engines.values():
            engine.engine_core.shutdown()
        self.engines.clear()
