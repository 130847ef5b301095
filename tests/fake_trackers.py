"""Fakes of the trackers' packages with the parts of their interfaces that are used here.

Written after wandb 0.2x (`wandb.init`, `Run.log`, `Run.finish`), mlflow 3 (`MlflowClient`) and
trackio 0.x (`trackio.init`). They refuse what the real ones refuse.
"""

from __future__ import annotations

import re
import types
from collections import defaultdict
from typing import Any


class WandbRun:
    def __init__(self, **settings: Any):
        self.settings, self.rows, self.finished = settings, {}, False

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        assert not self.finished, "log after finish"
        self.rows[step] = data

    def finish(self) -> None:
        self.finished = True


def wandb() -> types.ModuleType:
    module: Any = types.ModuleType("wandb")
    module.runs = []

    def init(*, id, name, config, dir, resume, reinit):
        assert re.fullmatch(r"[^/\\#?%:]{1,128}", id), id
        assert resume in ("allow", "must", "never", "auto")
        assert reinit in ("create_new", "finish_previous", "return_previous", "default")
        module.runs.append(WandbRun(id=id, name=name, config=config, dir=dir, resume=resume))
        return module.runs[-1]

    module.init = init
    return module


def mlflow() -> types.ModuleType:
    """One server: all clients of the module see the same runs."""
    module: Any = types.ModuleType("mlflow")
    module.experiments, module.runs = {}, {}

    class MlflowClient:
        def get_experiment_by_name(self, name: str) -> Any:
            if name not in module.experiments:
                return None
            return types.SimpleNamespace(experiment_id=module.experiments[name])

        def create_experiment(self, name: str) -> str:
            assert name not in module.experiments
            module.experiments[name] = str(len(module.experiments))
            return module.experiments[name]

        def create_run(self, experiment_id: str, *, run_name: str, tags: dict) -> Any:
            run_id = f"run{len(module.runs)}"
            module.runs[run_id] = {
                "experiment": experiment_id,
                "name": run_name,
                "status": "RUNNING",
                "params": {},
                "metrics": defaultdict(dict),
            }
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

        def log_param(self, run_id: str, key: str, value: Any) -> None:
            assert len(str(value)) <= 6000
            assert module.runs[run_id]["params"].setdefault(key, str(value)) == str(value)

        def log_metric(self, run_id: str, key: str, value: float, *, step: int) -> None:
            assert re.fullmatch(r"[\w\-. /:]+", key), key
            module.runs[run_id]["metrics"][key][step] = value

        def set_terminated(self, run_id: str, status: str = "FINISHED") -> None:
            module.runs[run_id]["status"] = status

    module.MlflowClient = MlflowClient
    return module


def trackio() -> types.ModuleType:
    module: Any = types.ModuleType("trackio")
    module.runs = {}

    class Run:
        def __init__(self):
            self.rows, self.finished = {}, 0

        def log(self, metrics: dict, step: int | None = None) -> None:
            self.rows[step] = metrics

        def finish(self) -> None:
            self.finished += 1

    def init(project: str, *, name: str, config: dict, resume: str) -> Run:
        assert resume in ("must", "allow", "never")
        assert not any(key.startswith("_") for key in config)
        return module.runs.setdefault((project, name), Run())

    module.init = init
    return module
