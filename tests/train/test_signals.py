"""Signals stop a run after its step, a second Ctrl-C at once, and one rank reports it."""

import signal

import pytest

from moefold.host.processes import STOP_SIGNALS
from moefold.train import signals as module
from moefold.train.signals import NOTICE, SIGNALS, StopSignals


def test_stop_flags_are_unset_without_a_signal():
    with StopSignals() as stop:
        assert not any(stop.flags)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_raises_its_flag_and_nothing_else(number):
    with StopSignals() as stop:
        signal.raise_signal(number)
        assert stop.flags == tuple(other == number for other in SIGNALS)
    assert any(stop.flags)


def test_the_same_press_may_come_twice():
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.flags == (True, False, False, False)


def test_a_second_press_abandons_the_step(monkeypatch):
    monkeypatch.setattr(module, "DUPLICATE_SIGNAL_S", 0.0)
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_changes_nothing(monkeypatch):
    monkeypatch.setattr(module, "DUPLICATE_SIGNAL_S", 0.0)
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.flags == (False, True, False, False)


def test_one_rank_tells_that_ctrl_c_was_heard_once(capfd):
    with StopSignals(announces=True):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == NOTICE.decode()
    with StopSignals(announces=True):
        signal.raise_signal(signal.SIGTERM)
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_the_handlers_before_come_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_closed_pipe_stops_as_a_signal_does():
    with StopSignals() as stop:
        stop.request(signal.SIGPIPE)
    assert [number for number, raised in zip(SIGNALS, stop.flags, strict=True) if raised] == [signal.SIGPIPE]


def test_an_ignored_hangup_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not any(stop.flags)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
