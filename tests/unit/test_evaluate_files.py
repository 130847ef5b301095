"""An evaluation's file of episodes: full disks, two at once, Ctrl-C, what cannot be closed."""

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from rllib_gigpo.evaluate.endpoint import EndpointError
from rllib_gigpo.evaluate.panel import Panel, evaluate, read_episodes
from rllib_gigpo.evaluate.results import summarise
from rllib_gigpo.registry import LLMEnvSpec
from tests.chat_server import Echo, echo_profile
from tests.full_disk import FullDisk


class Odd(Echo):
    """Tells facts of types that JSON does not know, each task one of them."""

    FACTS: ClassVar = [
        {"ratio": math.nan},
        {"ratio": np.float32("inf"), "task_id": np.int64(7)},
        {"ratio": 0.5, "count": np.int64(3), "flag": np.bool_(True), "task_id": np.str_("x")},
        {"ratio": 10**400, "task_id": 2**70},
        {"ratio": np.float64(1.0), "task_type": np.str_("odd")},
    ]

    def _info(self, won):
        facts = self.FACTS[self._seed % len(self.FACTS)]
        return {"task": "Repeat.", "won": np.bool_(won), **facts}

    def reset(self, *, seed=None, options=None):
        self._seed = seed
        return super().reset(seed=seed, options=options)


def good_chat(messages, pictures, seed):
    return f"<action> {messages[-1]['content'].rsplit('say ', 1)[-1]} </action>"


def play_panel(folder: Path, seeds: tuple[int, ...], chat=good_chat, env=Echo, **options) -> list:
    spec = LLMEnvSpec("Odd", lambda env_config: env())
    return evaluate(Panel("m", "Odd", {}, seeds), chat, spec, echo_profile(), folder, **options)


def test_any_facts_of_an_environment_are_written_and_read_again(tmp_path: Path):
    seeds = (0, 1, 2, 3, 4)
    records = play_panel(tmp_path, seeds, env=Odd)
    assert read_episodes(tmp_path / "episodes.jsonl") != []
    assert play_panel(tmp_path, seeds, lambda *asked: pytest.fail("played again")) == records
    assert [record["numbers"].get("ratio") for record in records] == [None, None, 0.5, None, 1.0]
    assert records[2]["numbers"] == {"ratio": 0.5, "count": 3.0, "flag": 1.0}
    assert [r["task_id"] for r in records] == [None, 7, "x", 2**70, None]
    found = summarise(records)
    # Of five: not finite in three, which are left out; `count` is told by one.
    assert found["numbers"]["ratio"] == pytest.approx(0.75)
    assert found["numbers"]["count"] == pytest.approx(3 / 5)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_full_disk_ends_an_evaluation_and_spoils_no_line(tmp_path: Path, monkeypatch):
    """Half a line is taken back, so that the next one does not stand behind it."""

    def open_full(path, mode="r", **options):
        file = open(path, mode, **options)  # noqa: SIM115 - closed by whoever asked
        return FullDisk(file, room=300) if mode == "a+b" else file

    with monkeypatch.context() as patch:
        patch.setattr("rllib_gigpo.recording.folder.open", open_full, raising=False)
        with pytest.raises(OSError, match="No space left"):
            play_panel(tmp_path, (1, 2, 3), workers=1)
    kept = read_episodes(tmp_path / "episodes.jsonl")
    assert 0 < len(kept) < 3
    assert (tmp_path / "episodes.jsonl").read_bytes().endswith(b"\n")
    assert [record["task"] for record in play_panel(tmp_path, (1, 2, 3))] == [0, 1, 2]


def test_going_on_never_takes_a_whole_episode_away(tmp_path: Path, monkeypatch):
    """Not even where the process is killed at the worst moment, which is while it writes."""
    play_panel(tmp_path, (1, 2))
    file = tmp_path / "episodes.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"task": 2, "sa')
    before = file.stat().st_ino, file.read_bytes()
    assert len(read_episodes(file)) == 2
    assert (file.stat().st_ino, file.read_bytes()) == before

    def killed(*asked):
        assert file.read_bytes().startswith(whole)
        raise KeyboardInterrupt

    with pytest.raises(ValueError, match="seeds="):
        play_panel(tmp_path, (1, 2, 3), killed)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        play_panel(tmp_path, (1, 2, 3), killed)
    assert file.read_bytes().startswith(whole)
    assert len(play_panel(tmp_path, (1, 2, 3))) == 3
    assert file.read_bytes().startswith(whole)


def test_two_evaluations_at_once_are_refused(tmp_path: Path):
    def another(*asked):
        with pytest.raises(ValueError, match=r"another evaluation is at work in .*--output"):
            play_panel(tmp_path, (1,))
        return good_chat(*asked)

    assert len(play_panel(tmp_path, (1,), another)) == 1
    # The lock has ended with the evaluation.
    assert len(play_panel(tmp_path, (1,))) == 1


class Closed(Echo):
    """Counts how often one of it was closed, which it refuses."""

    closed: ClassVar[list[int]] = []

    def close(self):
        self.closed.append(id(self))
        raise OSError("the door is stuck")


def interrupt():
    """What Ctrl-C is to the main thread."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def listens_to_ctrl_c():
    """As a terminal's programs do; what a shell starts behind it does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_ctrl_c_ends_an_evaluation_soon_and_closes_its_environments(tmp_path: Path, caplog):
    Closed.closed.clear()
    asked = []
    # Both workers are at an episode, each in an environment of its own, before one plays on.
    meeting, own = threading.Barrier(2), threading.local()

    def chat(*arguments):
        asked.append(1)
        if not hasattr(own, "has_met"):
            own.has_met = True
            meeting.wait(60.0)
        if len(asked) == 5:
            interrupt()
        time.sleep(0.2 * (len(asked) >= 5))
        return good_chat(*arguments)

    with pytest.raises(KeyboardInterrupt):
        play_panel(tmp_path, tuple(range(200)), chat, Closed, workers=2)
    # Two requests an episode, of 200 episodes.
    assert len(asked) < 50
    assert len(set(Closed.closed)) == len(Closed.closed) == 2
    assert caplog.text.count("environment 'Odd' could not be closed (OSError: the door is") == 2
    kept = len(read_episodes(tmp_path / "episodes.jsonl"))
    assert kept < 25
    assert len(play_panel(tmp_path, tuple(range(200)))) == 200


def test_an_environment_that_cannot_be_closed_hides_no_error(tmp_path: Path):
    Closed.closed.clear()

    def chat(*arguments):
        raise EndpointError("no server")

    with pytest.raises(EndpointError, match="no server"):
        play_panel(tmp_path, (1, 2, 3), chat, Closed, workers=1)
    assert len(Closed.closed) == 1
    assert len(play_panel(tmp_path, (1, 2, 3), env=Closed, workers=1)) == 3
