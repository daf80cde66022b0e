"""How a rank of many ends when something goes wrong: at once, with one message for the job."""

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch.distributed as dist

from moefold.errors import ConfigError, RunError
from moefold.host.rank_env import RankEnv
from moefold.launch.exit import EXIT_FAILED, EXIT_USER_ERROR, SIGNAL_STATUS, hard_exit, oom_message
from moefold.launch.hang_diagnosis import describe_activity
from moefold.launch.signal_forwarder import FORWARDED_SIGNALS
from moefold.launch.single_reporter import SingleReporter
from moefold.launch.watchdog import Watchdog

NONZERO_RANK_DELAY_S = 0.7
"""What most often fails on one rank fails on all. The first of a machine speaks; the others give it this long to."""

ROOT_CAUSE_WAIT_S = 5.0
"""A rank that lost the others gives the one that left this long to be found and named."""

BACKEND_NAMES = ("gloo", "NCCL")
"""A collective that fails says whose it is: on the ranks around one that is gone, all of them do."""


class RankErrorHandler:
    """Context manager around everything that a rank does; a job of one rank is left alone.

    Inside, a signal ends the rank at once with 128 + its number: code that has something to save handles signals
    itself. An exception ends the rank with its message (ConfigError: exit 2; RunError: exit 1) or its traceback (1),
    without the farewell of the process group, which the others may never answer. Launchers end the other ranks when
    they see one go; so ranks that fail alike, or because of it, wait a moment and are not heard.

    Args:
        rank_env: of this rank.
        is_stop_requested: whether a signal came that was not obeyed yet.
        watchdog: knows the other ranks, and says which of them was lost.
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
        if self._rank_env.world_size > 1:
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in FORWARDED_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rank_env.world_size == 1:
            return
        if error is not None:
            self._handle_exception(error)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._deregister(SIGNAL_STATUS + number)
        os._exit(SIGNAL_STATUS + number)

    def _handle_exception(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._deregister_and_exit(SIGNAL_STATUS + signal.SIGINT)
        found = _find_run_error(error)
        if is_collective_error(found or error):
            self._exit_after_peer(error)
        if found is not None:
            self._exit_with_run_error(found)
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
        """Ranks that found the same fault leave the message to the first of them."""
        time.sleep(self._report_delay_s(error))
        self._deregister(EXIT_FAILED)
        self._reporter.report_once(
            f"moefold: error: {error}", lambda: self._watchdog is None or self._watchdog.claim_first("fault")
        )
        self._exit_failed()

    def _activity_text(self) -> str:
        """Where in the run this rank is, for a message; empty where nothing keeps it."""
        return "" if self._watchdog is None else f" in {describe_activity(self._watchdog.flight_recorder.snapshot())}"

    def _exit_failed(self) -> NoReturn:
        if self._watchdog is not None:
            self._watchdog.exit_failed()
        hard_exit(EXIT_FAILED)

    def _exit_after_peer(self, error: BaseException) -> None:
        """Leave quietly, or with the reason why another rank is gone; returns if there is none to be had."""
        # Our own launcher names the rank that went first. torchrun tells the others to stop, and knows no step.
        if self._watchdog is not None and not self._rank_env.record_paths:
            self._watchdog.explain_lost_peer(error)
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
            # Before the watchdog takes the rest of this rank for standing still.
            return (
                ROOT_CAUSE_WAIT_S
                if self._watchdog is None
                else min(ROOT_CAUSE_WAIT_S, self._watchdog.flight_recorder.hang_timeout_s / 2)
            )
        return 0.0 if self._rank_env.local_rank == 0 else NONZERO_RANK_DELAY_S


def _find_run_error(error: BaseException | None) -> RunError | None:
    """The fault that an error stands for: torch's pipeline wraps what a stage raises."""
    while error is not None and not isinstance(error, RunError):
        error = error.__cause__
    return error


def is_collective_error(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a collective's: that says little but that another rank is gone."""
    while error is not None:
        if isinstance(error, dist.DistError) or any(name in str(error) for name in BACKEND_NAMES):
            return True
        error = error.__cause__ or error.__context__
    return False
