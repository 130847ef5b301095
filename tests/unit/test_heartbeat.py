"""Signs of life: what counts as silence, with a store and a clock of the test's own."""

import threading

import pytest

from rllib_gigpo import heartbeat
from rllib_gigpo.heartbeat import Beat, Listener, beating, call_beating


class Store(dict):
    """Ray's key-value store, in this process."""

    def get_(self, key, namespace):
        return self.get(key)

    def put_(self, key, value, namespace):
        self[key] = value.encode()

    def del_(self, key, namespace):
        self.pop(key, None)


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(heartbeat, "_internal_kv_get", store.get_)
    monkeypatch.setattr(heartbeat, "_internal_kv_put", store.put_)
    monkeypatch.setattr(heartbeat, "_internal_kv_del", store.del_)
    return store


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


def test_a_call_beats_ten_times_per_limit_but_not_too_slowly():
    assert Beat.new(20.0).every_s == 2.0
    assert Beat.new(3600.0).every_s == 5.0
    assert Beat.new(20.0).key != Beat.new(20.0).key


def test_silence_is_counted_from_the_last_change(store, clock):
    beat = Beat("call", 1.0)
    listener = Listener([beat])
    clock[0] += 7
    assert listener.silence_s(beat) == 7  # not begun yet
    store["call"] = b"0"
    assert listener.silence_s(beat) == 0
    clock[0] += 5
    assert listener.silence_s(beat) == 5
    # Whoever listens was itself stopped for an hour: the number has moved on meanwhile.
    store["call"] = b"3600"
    clock[0] += 3600
    assert listener.silence_s(beat) == 0
    clock[0] += 9
    listener.forgive(beat)
    assert listener.silence_s(beat) == 0
    listener.close()
    assert "call" not in store


def end_of_beats():
    for thread in threading.enumerate():
        if thread.name == "heartbeat":
            thread.join(10.0)


def test_a_call_beats_while_it_runs_and_not_afterwards(store):
    beat = Beat("call", 0.001)
    seen = set()

    def work(actor, factor):
        while len(seen) < 3:
            seen.add(store["call"])
        return actor * factor

    assert call_beating(work, beat, 6, factor=7) == 42
    assert len(seen) == 3
    end_of_beats()
    assert store == {}


def test_a_call_that_nobody_waits_for_leaves_nothing(store):
    for number in range(10):
        with beating(Beat(str(number), 60.0)):
            assert store == {str(number): b"0"}
        end_of_beats()
    assert store == {}


def test_a_beat_that_is_on_its_way_when_the_call_ends_leaves_nothing(store, monkeypatch):
    is_on_its_way, call_is_over = threading.Event(), threading.Event()

    def slow(key, value, namespace):
        if value != "0":
            is_on_its_way.set()
            call_is_over.wait(10.0)
        store.put_(key, value, namespace)

    monkeypatch.setattr(heartbeat, "_internal_kv_put", slow)
    with beating(Beat("call", 0.001)):
        assert is_on_its_way.wait(10.0)
    store.del_("call", None)  # as whoever waited for the call does
    call_is_over.set()
    end_of_beats()
    assert store == {}


def test_a_store_that_does_not_answer_does_not_end_the_call(store, monkeypatch):
    beat = Beat("call", 0.001)
    calls = []

    def refuse(*arguments, **options):
        calls.append(arguments)
        raise OSError("no answer")

    monkeypatch.setattr(heartbeat, "_internal_kv_put", refuse)
    monkeypatch.setattr(heartbeat, "_internal_kv_del", refuse)
    with beating(beat):
        while len(calls) < 4:
            pass
