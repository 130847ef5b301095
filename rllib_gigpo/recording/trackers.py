"""Experiment trackers that follow a run: Weights & Biases, MLflow, Trackio.

TensorBoard needs none of this: Tune and RLlib write its files by themselves.

A tracker gets the run's id when it starts, so a resumed run goes on under the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Run = dict[str, Any]

# MLflow refuses longer ones.
_LONGEST_PARAM = 500


class Tracker(Protocol):
    """The tracker contract; a class of one's own works like the three here."""

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Take in the metrics of one iteration, names joined by "/"."""
        ...

    def finish(self) -> None:
        """Close the run."""
        ...


class Wandb:
    """Weights & Biases; reads its usual settings (`WANDB_PROJECT`, `WANDB_MODE`, ...)."""

    def __init__(self, run: Run, folder: Path):
        wandb = _module("wandb")
        self._run = wandb.init(
            id=run["run_id"],
            name=_name(run),
            config=run["settings"],
            dir=str(folder),
            resume="allow",
            reinit="create_new",
        )

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log one iteration."""
        self._run.log(dict(numbers), step=iteration)

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()


class MLflow:
    """MLflow; reads `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`.

    MLflow chooses the ids of its runs: the first start keeps its id in `run.json`.
    """

    def __init__(self, run: Run, folder: Path):
        mlflow = _module("mlflow")
        self._client = mlflow.MlflowClient()
        known = run["trackers"].get("mlflow")
        if known is None:
            experiment = _experiment(self._client)
            tags = {"run_id": run["run_id"], "env": run["env"]}
            made = self._client.create_run(experiment, run_name=_name(run), tags=tags)
            known = run["trackers"]["mlflow"] = made.info.run_id
            for name, value in run["changed"].items():
                self._client.log_param(known, name, str(value)[:_LONGEST_PARAM])
        self._client.set_terminated(known, status="RUNNING")
        self._id = known

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log one iteration."""
        for name, value in numbers.items():
            self._client.log_metric(self._id, _mlflow_name(name), value, step=iteration)

    def finish(self) -> None:
        """Close the run."""
        self._client.set_terminated(self._id)


class Trackio:
    """Trackio; the run's id is its name."""

    def __init__(self, run: Run, folder: Path):
        trackio = _module("trackio")
        self._run = trackio.init(
            project=f"rllib-gigpo-{run['env']}",
            name=f"{_name(run)}-{run['run_id']}",
            config=run["changed"],
            resume="allow",
        )

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log one iteration."""
        self._run.log(dict(numbers), step=iteration)

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Run, Path], Tracker]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def start_trackers(
    chosen: Sequence[str | Callable[[Run, Path], Tracker]], run: Run, folder: Path
) -> list[Tracker]:
    """Start the trackers of a run.

    Args:
        chosen: Names out of `TRACKERS`, or callables from (content of run.json, run folder) to a
            tracker.
        run: Content of `run.json`; under "trackers" it keeps ids that a tracker has chosen.
        folder: The run folder.

    Raises:
        ImportError: The package of a tracker is missing; the way to install it is named.
    """
    return [(TRACKERS[make] if isinstance(make, str) else make)(run, folder) for make in chosen]


def _module(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"recording(trackers=[{name!r}]) needs the package {name}: "
            f"pip install -e '.[{name}]' in rllib-gigpo's folder"
        ) from error


def _name(run: Run) -> str:
    return f"{run['algorithm']}-{run['env']}"


def _experiment(client: Any) -> str:
    import os

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rllib-gigpo")
    found = client.get_experiment_by_name(name)
    return client.create_experiment(name) if found is None else found.experiment_id


def _mlflow_name(name: str) -> str:
    """Replace what MLflow forbids in the name of a metric."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
