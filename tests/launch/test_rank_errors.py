"""A failing rank ends its process, so each case runs in a process of its own."""

import re
import signal
import socket
import sys

import pytest

from moefold.comm.collectives import is_collective_error
from moefold.errors import RunError
from moefold.host.rank_env import RankEnv
from moefold.launch.rank_errors import RankErrorHandler
from tests.e2e.forked import run_program

RANK = """
import signal, sys, time
import moefold.launch.rank_errors as rank_errors
from moefold.errors import ConfigError, RunError
from moefold.host.rank_env import RankEnv

rank_errors.NONZERO_RANK_DELAY_S = rank_errors.ROOT_CAUSE_WAIT_S = 0.3
started = time.monotonic()
rank, told = int(sys.argv[1]), bool(int(sys.argv[2]))
import os
end = os._exit
def timed(status):
    print(f"waited={time.monotonic() - started > 0.3}", flush=True)
    end(status)
os._exit = timed
with rank_errors.RankErrorHandler(RankEnv(rank, rank, 8, "127.0.0.1", 1), lambda: told):
    exec(sys.argv[3])
os._exit = end
print("went on")
"""


def fail(code: str, rank: int = 0, told: bool = False) -> tuple[int, str, str]:
    """Run code as a rank of eight and return the status, its output, and its stderr."""
    done = run_program(RANK, str(rank), str(int(told)), code)
    return done.returncode, done.stdout.strip(), done.stderr


def test_rank_without_error_continues():
    assert fail("pass") == (0, "went on", "")


def test_a_user_error_is_one_message_at_once_from_the_first_rank():
    error = "raise ConfigError('a.b=1 is wrong')"
    assert fail(error) == (2, "waited=False", "moefold: error: a.b=1 is wrong\n")
    assert fail(error, rank=3) == (2, "waited=True", "moefold: error: a.b=1 is wrong\n")


def test_a_fault_of_the_run_is_one_message_of_the_first_rank():
    error = "raise RunError('step 3: the loss is nan')"
    assert fail(error) == (1, "waited=False", "moefold: error: step 3: the loss is nan\n")
    assert fail(error, rank=1)[1] == "waited=True"


def test_a_bug_is_a_traceback_with_the_rank():
    status, out, err = fail("1 / 0", rank=3)
    assert (status, out) == (1, "waited=True")
    assert err.startswith(f"moefold: rank 3 on {socket.gethostname()} failed:\nTraceback")
    assert err.endswith("ZeroDivisionError: division by zero\n")


def test_the_loss_of_another_rank_waits_for_the_cause():
    lost = "raise RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer')"
    status, out, err = fail(lost)
    assert (status, out) == (1, "waited=True")
    assert "Connection closed by peer" in err
    assert fail(lost, told=True) == (143, "waited=True", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_with_nothing_to_save_ends_the_rank_silently(number):
    assert fail(f"signal.raise_signal({int(number)}); time.sleep(5)") == (128 + number, "waited=False", "")


def test_an_abandoned_step_ends_as_on_ctrl_c():
    assert fail("raise KeyboardInterrupt") == (130, "waited=False", "")


def test_a_job_of_one_rank_is_not_changed():
    before = signal.getsignal(signal.SIGTERM)
    failing = RankErrorHandler(RankEnv(0, 0, 1, "127.0.0.1", 1), lambda: False)
    with failing:
        assert signal.getsignal(signal.SIGTERM) is before
    error = ZeroDivisionError()
    failing.__exit__(type(error), error, None)


def test_sys_exit_of_code_that_a_single_rank_calls_is_named_with_its_line():
    with (
        pytest.raises(RunError, match=rf"ended by sys.exit\(3\) at {re.escape(__file__)}:\d+; raise an error"),
        RankErrorHandler(RankEnv(0, 0, 1, "127.0.0.1", 1), lambda: False),
    ):
        sys.exit(3)


def test_a_consequence_is_known_by_its_cause():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    wrapped = RuntimeError("stage 0 failed")
    wrapped.__cause__ = lost
    assert is_collective_error(wrapped)
    assert not is_collective_error(RuntimeError("shape mismatch"))
