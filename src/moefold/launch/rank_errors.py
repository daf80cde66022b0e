"""Error handling of a rank in a multi-rank job: exit immediately, with one message for the whole job."""

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Self

from moefold.comm.collectives import is_collective_error
from moefold.errors import EXIT_FAILED, EXIT_USER_ERROR, SIGNAL_STATUS, ConfigError, RunError
from moefold.host.processes import handle_stop_signals
from moefold.host.rank_env import RankEnv
from moefold.launch.exit import SingleReporter, hard_exit, oom_message
from moefold.launch.hang_diagnosis import describe_activity
from moefold.launch.watchdog import Watchdog

NONZERO_RANK_DELAY_S = 0.7
"""Delay before ranks other than local rank 0 report an error, as most errors occur on all ranks at once."""

ROOT_CAUSE_WAIT_S = 5.0
"""Delay before a rank reports its failed collective, so that the rank that caused the failure is named first."""


class RankErrorHandler:
    """Context manager around everything that a rank runs.

    In a single-rank job it only turns `sys.exit` in code that the run calls into an error that names the line.

    A signal ends the rank immediately with 128 + its number: code that has state to save handles signals itself. An
    exception ends the rank with its message (ConfigError: exit 2, RunError: exit 1) or its traceback (exit 1). The
    process group is not destroyed, which could block on the other ranks. Launchers end the other ranks when one exits,
    so ranks that fail in the same way, or as a consequence, wait a moment and print nothing.

    In an embedded rank an exception is raised in the program instead, once the rank has deregistered from the watchdog.
    Signals are left to the program.

    Args:
        is_stop_requested: returns whether a signal was received and not handled yet.
    """

    def __init__(
        self, rank_env: RankEnv, is_stop_requested: Callable[[], bool], watchdog: Watchdog | None = None
    ) -> None:
        self._rank_env = rank_env
        self._is_stop_requested = is_stop_requested
        self._watchdog = watchdog
        self._reporter = SingleReporter(rank_env) if watchdog is None else watchdog.reporter
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if self._rank_env.world_size > 1 and not self._rank_env.is_embedded:
            self._previous_handlers = handle_stop_signals(self._on_signal)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._rank_env.world_size == 1:
            if isinstance(error, SystemExit):
                frames = traceback.extract_tb(error.__traceback__)
                place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
                text = f"the run was ended by sys.exit({error.code!r}){place}; raise an error with a message there"
                raise RunError(text) from error
            return
        if error is not None and self._rank_env.is_embedded:
            self._raise_in_program(error)
        elif error is not None:
            self._handle_exception(error)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._deregister(SIGNAL_STATUS + number)
        os._exit(SIGNAL_STATUS + number)

    def _raise_in_program(self, error: BaseException) -> None:
        """Deregister, and turn a failed collective into a RunError. Other exceptions stay as they are."""
        self._deregister(EXIT_FAILED)
        if self._watchdog is not None:
            self._watchdog.close()
        if is_collective_error(error) and _find_run_error(error) is None:
            raise RunError(
                f"rank {self._rank_env.rank} on {socket.gethostname()} lost its connection to another rank"
                f"{self._activity_text()}; that rank has failed, and its error says why"
            ) from error

    def _handle_exception(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._deregister_and_exit(SIGNAL_STATUS + signal.SIGINT)
        from moefold.config.base.part_failures import failure_of_part

        run_error = _find_run_error(error) or failure_of_part(error)
        if is_collective_error(run_error or error):
            self._exit_after_peer(error)
        if run_error is not None:
            self._exit_with_run_error(run_error)
        time.sleep(self._report_delay_s(error))
        if isinstance(error, ConfigError):
            self._deregister(EXIT_USER_ERROR)
            self._reporter.report_once(f"moefold: error: {error}")
            hard_exit(EXIT_USER_ERROR)
        self._deregister(EXIT_FAILED)
        if text := oom_message(error):
            place = f"rank {self._rank_env.rank} on {socket.gethostname()}"
            self._reporter.report_once(f"moefold: error: {place}{self._activity_text()}: {text}")
            self._exit_failed()
        text = "".join(traceback.format_exception(error)).rstrip("\n")
        self._reporter.report_once(
            f"moefold: rank {self._rank_env.rank} on {socket.gethostname()} failed{self._activity_text()}:\n{text}"
        )
        self._exit_failed()

    def _exit_with_run_error(self, error: RunError) -> NoReturn:
        """Exit with a RunError. Only the first rank with the error prints the message."""
        time.sleep(self._report_delay_s(error))
        self._deregister(EXIT_FAILED)
        self._reporter.report_once(
            f"moefold: error: {error}", lambda: self._watchdog is None or self._watchdog.claim_first("fault")
        )
        self._exit_failed()

    def _activity_text(self) -> str:
        """Return step, phase and last collective of this rank for a message, or "" without a flight recorder."""
        return "" if self._watchdog is None else f" in {describe_activity(self._watchdog.flight_recorder.snapshot())}"

    def _exit_failed(self) -> NoReturn:
        if self._watchdog is not None:
            self._watchdog.exit_failed()
        hard_exit(EXIT_FAILED)

    def _exit_after_peer(self, error: BaseException) -> None:
        """Exit after a collective failed, with a diagnosis of the lost rank, and return if there is no explanation."""
        # Our own launcher names the first rank that exited; torchrun does not, and has no step to report.
        if self._watchdog is not None and not self._rank_env.record_paths:
            self._watchdog.diagnose_lost_peer_and_exit(error)
        if self._is_stop_requested():
            time.sleep(NONZERO_RANK_DELAY_S)
            self._deregister_and_exit(SIGNAL_STATUS + signal.SIGTERM)

    def _deregister(self, status: int) -> None:
        if self._watchdog is not None:
            self._watchdog.deregister(status)

    def _deregister_and_exit(self, status: int) -> NoReturn:
        self._deregister(status)
        hard_exit(status)

    def _report_delay_s(self, error: BaseException) -> float:
        if is_collective_error(error):
            # At most half of the hang timeout: the watchdog must not report this wait as a hang.
            return (
                ROOT_CAUSE_WAIT_S
                if self._watchdog is None
                else min(ROOT_CAUSE_WAIT_S, self._watchdog.flight_recorder.hang_timeout_s / 2)
            )
        return 0.0 if self._rank_env.local_rank == 0 else NONZERO_RANK_DELAY_S


def _find_run_error(error: BaseException | None) -> RunError | None:
    """Return the RunError in the `__cause__` chain, if any."""
    while error is not None and not isinstance(error, RunError):
        error = error.__cause__
    return error
