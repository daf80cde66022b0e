"""The relay is tried on real processes: the signals that it passes on end them."""

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess

import pytest

from moefold.launch.local_job import SignalForwarder


def _wait(ignores_interrupts: bool, ready: object) -> None:
    if ignores_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(77))
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(78))
        signal.signal(signal.SIGHUP, lambda number, frame: os._exit(79))
    ready.set()
    time.sleep(60)


def _start(ignores_interrupts: bool = False) -> BaseProcess:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=_wait, args=(ignores_interrupts, ready), daemon=True)
    child.start()
    assert ready.wait(10)
    return child


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 77), (signal.SIGTERM, 78), (signal.SIGHUP, 79)])
def test_a_signal_reaches_the_children_and_not_the_parent(number, status):
    child = _start()
    with SignalForwarder() as relay:
        signal.raise_signal(number)
        child.join(10)
    assert child.exitcode == status
    assert relay.received == [number]
    assert relay.explains_exit_code(128 + number)
    assert relay.explains_exit_code(-number)
    assert not relay.explains_exit_code(1)
    assert not relay.explains_exit_code(-signal.SIGKILL)


def test_a_second_interrupt_kills():
    child = _start(ignores_interrupts=True)
    with SignalForwarder() as relay:
        signal.raise_signal(signal.SIGINT)
        child.join(0.2)
        assert child.is_alive()
        signal.raise_signal(signal.SIGINT)
        child.join(10)
    assert child.exitcode == -signal.SIGKILL
    assert relay.explains_exit_code(-signal.SIGKILL)


def test_without_children_an_interrupt_is_the_ordinary_one():
    with SignalForwarder(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with SignalForwarder(), pytest.raises(SystemExit) as leave:
        signal.raise_signal(signal.SIGTERM)
    assert leave.value.code == 143


def test_the_handlers_before_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with SignalForwarder():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_forked_child_without_handlers_of_its_own_ends():
    with SignalForwarder() as relay:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 143
    assert relay.received == []
