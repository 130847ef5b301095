"""Calls that must come back at the start of a run: results, errors and limits."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from rllib_gigpo.in_time import START_LIMIT_S, call_in_time
from tests.misbehaving_envs import Misbehaving, hangs, raises
from tests.tiny_runs import tiny_config

WAYS = pytest.mark.parametrize("in_thread", [False, True], ids=["alarm", "thread"])


@pytest.fixture(autouse=True)
def well_behaved_again():
    yield
    Misbehaving.behave()


@WAYS
@pytest.mark.parametrize(
    "error", [OSError("no"), SystemExit(3), StopIteration(), TimeoutError("x")]
)
def test_results_come_back_and_errors_are_raised(in_thread, error):
    def fail():
        raise error

    assert call_in_time(lambda: "made", 20, in_thread=in_thread) == "made"
    with pytest.raises(type(error)) as caught:
        call_in_time(fail, 20, in_thread=in_thread)
    assert caught.value is error


def stubborn():
    """Try again whatever happens, as simulators do that wait for their server."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            time.sleep(20)
        except Exception:
            continue


@WAYS
@pytest.mark.parametrize("work", [lambda: threading.Event().wait(20), stubborn])
def test_what_hangs_is_given_up(in_thread, work):
    start = time.monotonic()
    told = r"^it took over 0\.2 s; if it needs longer, raise stepping\(start_timeout_s=\.\.\.\)$"
    with pytest.raises(TimeoutError, match=told):
        call_in_time(work, 0.2, in_thread=in_thread)
    assert time.monotonic() - start < 10


def test_an_alarm_that_somebody_caught_rings_again():
    caught = []

    def swallow():
        try:
            time.sleep(20)
        except BaseException as error:
            caught.append(error)
        time.sleep(20)

    with pytest.raises(TimeoutError):
        call_in_time(swallow, 0.1, in_thread=False)
    assert len(caught) == 1


def test_only_a_thread_of_its_own_is_another_thread():
    # What an environment makes, such as a database's connection, may belong to its thread.
    here = threading.get_ident()
    assert call_in_time(threading.get_ident, 20, in_thread=False) == here
    assert call_in_time(threading.get_ident, 20, in_thread=True) != here


def test_the_alarm_of_somebody_else_is_put_back():
    handler = signal.getsignal(signal.SIGALRM)
    before = signal.getitimer(signal.ITIMER_REAL)
    rung = []
    signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        assert call_in_time(lambda: "made", 20, in_thread=False) == "made"
        with pytest.raises(TimeoutError):
            call_in_time(lambda: time.sleep(20), 0.1, in_thread=False)
        until = time.monotonic() + 10
        while not rung and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)
    assert rung == [signal.SIGALRM]


@pytest.fixture
def no_alarm():
    """Nobody's handler and no timer, before and after."""
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def own_handler(number, frame):
    """What an environment does when its own alarm rings."""


@pytest.mark.usefixtures("no_alarm")
@pytest.mark.parametrize("seconds", [0, 60])
def test_what_an_environment_sets_for_its_own_alarms_is_kept(seconds):
    def make():
        signal.signal(signal.SIGALRM, own_handler)
        if seconds:
            signal.alarm(seconds)
        return "made"

    assert call_in_time(make, 20, in_thread=False) == "made"
    assert signal.getsignal(signal.SIGALRM) is own_handler
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    assert interval == 0  # the limit's own timer rings no more
    assert seconds - 20 < left <= seconds if seconds else left == 0


@pytest.mark.usefixtures("no_alarm")
def test_an_environment_that_lends_itself_the_alarm_gives_it_back():
    def make():
        before = signal.signal(signal.SIGALRM, own_handler)
        signal.signal(signal.SIGALRM, before)
        return "made"

    assert call_in_time(make, 20, in_thread=False) == "made"
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@pytest.mark.usefixtures("no_alarm")
def test_the_alarm_of_c_code_is_left_alone(monkeypatch):
    # Python has no object for such a handler, and cannot put it back.
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    touched = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: touched.append(arguments))
    assert call_in_time(lambda: "made", 20, in_thread=False) == "made"
    assert touched == []


def test_another_thread_than_the_main_one_hears_no_alarm_and_is_not_interrupted():
    answers = []

    def run():
        answers.append(call_in_time(lambda: time.sleep(0.2) or "made", 0.05, in_thread=False))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert answers == ["made"]


# At the start of a run ---------------------------------------------------------------------------


def test_the_limit_is_generous_and_no_shorter_than_that_of_a_step():
    assert tiny_config().start_limit_s == START_LIMIT_S
    assert tiny_config().stepping(step_threads=1, step_timeout_s=5.0).start_limit_s == START_LIMIT_S
    longer = tiny_config().stepping(step_threads=1, step_timeout_s=START_LIMIT_S + 1)
    assert longer.start_limit_s == START_LIMIT_S + 1


@pytest.mark.parametrize("limit_s", [0.5, 2 * START_LIMIT_S])
def test_the_limit_can_be_set_alone(limit_s):
    config = tiny_config().stepping(start_timeout_s=limit_s)
    config.validate()
    assert config.start_limit_s == limit_s
    config.stepping(step_threads=1, step_timeout_s=3 * START_LIMIT_S)
    assert config.start_limit_s == limit_s


@pytest.mark.parametrize("bad", [0, -1.0, "1800", True, float("nan")])
def test_a_limit_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match=r"start_timeout_s=.*: expected"):
        tiny_config().stepping(start_timeout_s=bad).validate()


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("place", ["make", "reset", "step"])
def test_an_environment_that_hangs_while_its_words_are_collected_is_named(threads, place):
    config = tiny_config().stepping(step_threads=threads, start_timeout_s=0.2)
    config.environment("Misbehaving", env_config={"horizon": 7})
    Misbehaving.misbehave({place: hangs})
    message = "environment 'Misbehaving' could not be played for the tiny model's words: it took"
    with pytest.raises(RuntimeError, match=message):
        _ = config.model_spec


def test_what_an_environment_raises_while_its_words_are_collected_is_its_own():
    config = tiny_config().environment("Misbehaving", env_config={"horizon": 8})
    Misbehaving.misbehave({"make": raises(OSError("no licence left"))})
    with pytest.raises(OSError, match="no licence left"):
        _ = config.model_spec
