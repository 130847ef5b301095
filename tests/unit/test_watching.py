"""What follows from an alarm: the best weights are kept and gone back to, over restarts too."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rllib_gigpo import GiGPO, GiGPOConfig
from rllib_gigpo.checkpoints import CheckpointError
from rllib_gigpo.recording.folder import read_json, write_json
from rllib_gigpo.watching import BestWeights, CollapseError, Watchdog
from rllib_gigpo.whole_checkpoints import WholeCheckpoints


def test_a_new_run_forgets_the_best_weights_of_another_one_in_its_folder(tmp_path):
    best = tmp_path / "watchdog" / "best.json"
    write_json(best, {"iteration": 0, "return": 9.0, "rollbacks": 1})
    saved: list[str] = []
    config = GiGPOConfig().watchdog(on_collapse="rollback", best_every=1)
    algorithm: Any = SimpleNamespace(
        config=config.recording(folder=str(tmp_path)),
        recorder=None,
        _storage=None,
        save_to_path=saved.append,
    )
    watchdog = Watchdog(algorithm)
    watchdog.begin(0)
    assert saved == [str(tmp_path / "watchdog" / "after_000000")]
    assert read_json(best) == {}
    # After a rollback to the beginning the same run knows its own.
    write_json(best, {"iteration": 0, "return": 1.0, "rollbacks": 1})
    watchdog = Watchdog(algorithm)
    watchdog.begin(1)
    watchdog.begin(0)
    assert watchdog.rollbacks == 1


def test_a_full_disk_costs_the_weights_of_an_iteration_and_not_the_run(tmp_path, caplog):
    saved: list[str] = []

    def save(path: str) -> None:
        saved.append(path)
        if len(saved) == 1:
            raise CheckpointError("the checkpoint could not be written: No space left on device")

    config = GiGPOConfig().watchdog(on_collapse="rollback", best_every=1)
    algorithm: Any = SimpleNamespace(
        config=config.recording(folder=str(tmp_path)),
        recorder=None,
        _storage=None,
        save_to_path=save,
    )
    watchdog = Watchdog(algorithm)
    watchdog.begin(0)
    assert "No space left on device" in caplog.text
    # It is tried again, although iteration 0 was never judged.
    watchdog.begin(1)
    assert saved == [str(tmp_path / "watchdog" / f"after_00000{number}") for number in (0, 1)]


def test_weights_that_the_file_names_stay_while_the_disk_is_full(tmp_path, monkeypatch, caplog):
    algorithm: Any = SimpleNamespace(save_to_path=lambda path: Path(path).mkdir(parents=True))
    best = BestWeights(tmp_path)

    def is_judged(iteration: int, episode_return: float) -> set[str]:
        best.save(algorithm, iteration)
        best.judge(iteration, episode_return)
        return {path.name for path in tmp_path.glob("after_*")}

    def refuse(*arguments: Any) -> None:
        raise OSError("No space left on device")

    assert is_judged(1, 0.5) == {"after_000001"}
    with monkeypatch.context() as full:
        full.setattr("rllib_gigpo.watching.write_json", refuse)
        # After a kill now, best.json would bring the run back to 1.
        assert is_judged(2, 0.6) == {"after_000001", "after_000002"}
        assert "No space left on device" in caplog.text
        assert best.iteration == 2
        assert BestWeights(tmp_path).iteration == 1
    assert is_judged(3, 0.7) == {"after_000003"}
    assert BestWeights(tmp_path).iteration == 3


@pytest.mark.parametrize(("on_collapse", "fresh"), [("warn", 0), ("stop", 1)])
def test_a_run_that_goes_on_counts_on_and_warns_once(tmp_path, on_collapse, fresh):
    config = GiGPOConfig().watchdog(on_collapse=on_collapse, patience=2)
    lines = [
        {
            "iteration": number,
            "env_runners": {"repeated_response_rate": 0.9 if number > 5 else 0.0},
            "watchdog": {"num_alarms": 4},
        }
        for number in range(1, 9)
    ]
    events: list[dict[str, Any]] = []
    recorder = SimpleNamespace(
        lines=lambda: lines, keep_worst=lambda *_: [], add_event=events.append
    )
    algorithm: Any = SimpleNamespace(
        config=config.recording(folder=str(tmp_path)),
        recorder=recorder,
        _storage=None,
        num_updates=8,
    )
    watchdog = Watchdog(algorithm)
    watchdog.begin(7)  # the eighth iteration was not in the checkpoint
    result = {key: lines[7][key] for key in ("iteration", "env_runners")}
    watchdog.on_train_result(algorithm=algorithm, result=result)
    assert [alarm.signal for alarm in watchdog.alarms] == ["repetition"]
    assert watchdog.num_alarms == 4 + fresh
    assert [event["signal"] for event in events] == ["repetition"] * fresh


class Run:
    """What the watchdog sees of an algorithm, and the state that its checkpoints hold."""

    def __init__(self, folder: Path, monkeypatch, **how: Any):
        monkeypatch.setattr(WholeCheckpoints, "get_state", lambda self: {}, raising=False)
        monkeypatch.setattr(WholeCheckpoints, "set_state", lambda self, state: None, raising=False)
        self.algorithm: Any = object.__new__(GiGPO)
        self.algorithm.config = GiGPOConfig().watchdog(**how).recording(folder=str(folder))
        self.algorithm.num_updates = 0
        self.algorithm.recorder = None
        self.algorithm._storage = None
        self.algorithm.sampler = SimpleNamespace(
            dump_ahead=lambda: None, load_ahead=lambda played: None
        )
        self.algorithm.weights = SimpleNamespace(push=lambda version: None)
        self.algorithm.learner_group = SimpleNamespace(foreach_learner=lambda call: [])
        self.algorithm.save_to_path = self._save
        self.algorithm.restore_from_path = self._restore
        self.watchdog = self.algorithm.watchdog = Watchdog(self.algorithm)

    def _save(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        Path(path, "state").write_bytes(self.checkpoint())

    def _restore(self, path: str) -> None:
        self.restore(Path(path, "state").read_bytes())

    def checkpoint(self) -> bytes:
        return pickle.dumps(self.algorithm.get_state())

    def restore(self, checkpoint: bytes) -> None:
        self.algorithm.set_state(pickle.loads(checkpoint))

    def train(self, *repeated: float) -> dict[str, Any]:
        """Iterations in which that share of the responses was loops."""
        told: dict[str, Any] = {}
        for share in repeated:
            self.watchdog.begin(self.algorithm.num_updates)
            self.algorithm.num_updates += 1
            played = {"repeated_response_rate": share, "episode_return_mean": 1.0 - share}
            told = {"env_runners": played}
            self.watchdog.on_train_result(algorithm=self.algorithm, result=told)
            self.watchdog.act()
        return told["watchdog"]


@pytest.mark.parametrize("on_collapse", ["warn", "stop"])
def test_a_collapse_is_seen_over_a_checkpoint_without_its_run_folder(
    tmp_path, monkeypatch, on_collapse
):
    how = {"on_collapse": on_collapse, "patience": 2}
    first = Run(tmp_path / "first", monkeypatch, **how)
    first.train(0.0, 0.0, 0.0, 0.9)
    second = Run(tmp_path / "second", monkeypatch, **how)
    second.restore(first.checkpoint())
    for run in (first, second):
        if on_collapse == "stop":
            with pytest.raises(CollapseError, match="since iteration 4; at its best before that"):
                run.train(0.9)
        else:
            assert run.train(0.9)["num_alarms"] == 1
    # It is told once, also by whoever goes on after that.
    third = Run(tmp_path / "third", monkeypatch, on_collapse="warn")
    third.restore(first.checkpoint())
    assert [alarm.since for alarm in third.watchdog.alarms] == [4]
    assert third.train(0.9)["num_alarms"] == 1


def test_rollbacks_are_counted_over_checkpoints_and_by_none_of_them_anew(tmp_path, monkeypatch):
    how = {"on_collapse": "rollback", "best_every": 1, "max_rollbacks": 2, "patience": 1}
    first = Run(tmp_path / "first", monkeypatch, **how)
    first.train(0.0, 0.9)
    assert (first.algorithm.num_updates, first.watchdog.rollbacks) == (0, 1)
    # The weights that it went back to were saved before there was a rollback.
    told = first.train(0.0)
    assert (told["num_rollbacks"], told["num_alarms"]) == (1, 1)
    for number, folder in enumerate(("first", "second")):
        run = Run(tmp_path / folder, monkeypatch, **how)
        run.restore(first.checkpoint())
        assert run.watchdog.rollbacks == 1, number
        assert run.train(0.0)["num_rollbacks"] == 1
        run.train(0.9)
        assert run.watchdog.rollbacks == 2
        with pytest.raises(CollapseError, match=r"rolled back 2 times \(max_rollbacks=2\)"):
            run.train(0.0, 0.9)


def test_a_checkpoint_at_the_beginning_keeps_the_rollbacks(tmp_path, monkeypatch):
    how = {"on_collapse": "rollback", "best_every": 1, "patience": 1}
    first = Run(tmp_path, monkeypatch, **how)
    first.train(0.0, 0.9)
    checkpoint = first.checkpoint()
    assert first.algorithm.num_updates == 0
    second = Run(tmp_path, monkeypatch, **how)
    second.restore(checkpoint)
    assert second.train(0.0)["num_rollbacks"] == 1


def test_weights_that_were_to_be_judged_are_after_a_restart(tmp_path, monkeypatch):
    how = {"on_collapse": "rollback", "best_every": 1}
    first = Run(tmp_path / "first", monkeypatch, **how)
    first.algorithm.config.max_staleness = 1
    first.train(0.1)  # of no weights: what it was played with is older than the run
    checkpoint = first.checkpoint()
    first.train(0.1)
    best = tmp_path / "first" / "watchdog" / "best.json"
    assert read_json(best) == {"iteration": 0, "return": 0.9}
    best.unlink()
    for folder, judged in (("first", 0), ("second", None)):
        run = Run(tmp_path / folder, monkeypatch, **how)
        run.algorithm.config.max_staleness = 1
        run.restore(checkpoint)
        run.train(0.1)
        assert run.watchdog._best.iteration == judged
    assert read_json(best) == {"iteration": 0, "return": 0.9, "rollbacks": 0}


def test_a_checkpoint_of_before_is_taken_and_writes_nothing(tmp_path, monkeypatch):
    best = tmp_path / "watchdog" / "best.json"
    write_json(best, {"iteration": 3, "return": 9.0, "rollbacks": 1})
    run = Run(tmp_path, monkeypatch, on_collapse="rollback")
    # Not begun, it knows of the folder's run what nobody has asked yet.
    assert "watchdog" not in run.algorithm.get_state()
    run.algorithm.set_state({"num_updates": 3})
    assert run.watchdog.rollbacks == 1
    run.train(0.0)
    newer = Run(tmp_path, monkeypatch, on_collapse="rollback")
    before = best.read_bytes()
    state = run.algorithm.get_state()
    newer.algorithm.set_state({**state, "watchdog": {**state["watchdog"], "rollbacks": 0}})
    assert newer.watchdog.rollbacks == 0
    assert best.read_bytes() == before


def test_what_a_killed_save_of_the_best_weights_has_left_goes(tmp_path, monkeypatch):
    left_over = tmp_path / "watchdog" / ".after_000004.partial-0123abcd"
    left_over.mkdir(parents=True)
    Run(tmp_path, monkeypatch, on_collapse="rollback", best_every=1).train(0.0)
    assert {path.name for path in left_over.parent.iterdir()} == {"after_000000", "best.json"}
