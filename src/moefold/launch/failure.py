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
from moefold.launch.departure import leave
from moefold.launch.out_of_memory import out_of_memory_text
from moefold.launch.place import Place
from moefold.launch.relay import RELAYED
from moefold.launch.status import EXIT_FAILED, EXIT_USER_ERROR, SIGNAL_STATUS
from moefold.launch.watchdog import Watchdog
from moefold.launch.who_is_late import activity
from moefold.launch.word import Word

OTHERS_FIRST_S = 0.7
"""What most often fails on one rank fails on all. The first of a machine speaks; the others give it this long to."""

CAUSE_FIRST_S = 5.0
"""A rank that lost the others gives the one that left this long to be found and named."""

BACKENDS = ("gloo", "NCCL")
"""A collective that fails says whose it is: on the ranks around one that is gone, all of them do."""


class FailingRank:
    """Context manager around everything that a rank does; a job of one rank is left alone.

    Inside, a signal ends the rank at once with 128 + its number: code that has something to save handles signals
    itself. An exception ends the rank with its message (ConfigError: exit 2; RunError: exit 1) or its traceback (1),
    without the farewell of the process group, which the others may never answer. Launchers end the other ranks when
    they see one go; so ranks that fail alike, or because of it, wait a moment and are not heard.

    Args:
        place: of this rank.
        was_told_to_stop: whether a signal came that was not obeyed yet.
        watchdog: knows the other ranks, and says which of them was lost.
    """

    def __init__(self, place: Place, was_told_to_stop: Callable[[], bool], watchdog: Watchdog | None = None) -> None:
        self._place = place
        self._was_told_to_stop = was_told_to_stop
        self._watchdog = watchdog
        self._word = Word(place) if watchdog is None else watchdog.word
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if self._place.world_size > 1:
            self._before = {number: signal.signal(number, self._obey) for number in RELAYED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._place.world_size == 1:
            return
        if error is not None:
            self._end(error)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _obey(self, number: int, frame: FrameType | None) -> None:
        self._part(SIGNAL_STATUS + number)
        os._exit(SIGNAL_STATUS + number)

    def _end(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._leave(SIGNAL_STATUS + signal.SIGINT)
        found = _found_at_run_time(error)
        if is_consequence(found or error):
            self._end_after_another(error)
        if found is not None:
            self._end_with(found)
        time.sleep(self._patience_s(error))
        if isinstance(error, ConfigError):
            self._part(EXIT_USER_ERROR)
            self._word.say(f"moefold: error: {error}")
            leave(EXIT_USER_ERROR)
        self._part(EXIT_FAILED)
        if text := out_of_memory_text(error):
            place = f"rank {self._place.rank} on {socket.gethostname()}"
            self._word.say(f"moefold: error: {place}{self._doing()}: {text}")
            self._end_failed()
        text = "".join(traceback.format_exception(error)).rstrip("\n")
        self._word.say(f"moefold: rank {self._place.rank} on {socket.gethostname()} failed{self._doing()}:\n{text}")
        self._end_failed()

    def _end_with(self, found: RunError) -> NoReturn:
        """Ranks that found the same fault leave the message to the first of them."""
        time.sleep(self._patience_s(found))
        self._part(EXIT_FAILED)
        self._word.say(f"moefold: error: {found}", lambda: self._watchdog is None or self._watchdog.is_first("fault"))
        self._end_failed()

    def _doing(self) -> str:
        """Where in the run this rank is, for a message; empty where nothing keeps it."""
        return "" if self._watchdog is None else f" in {activity(self._watchdog.record.look())}"

    def _end_failed(self) -> NoReturn:
        if self._watchdog is not None:
            self._watchdog.end()
        leave(EXIT_FAILED)

    def _end_after_another(self, error: BaseException) -> None:
        """Leave quietly, or with the reason why another rank is gone; returns if there is none to be had."""
        # Our own launcher names the rank that went first. torchrun tells the others to stop, and knows no step.
        if self._watchdog is not None and not self._place.records:
            self._watchdog.explain_loss(error)
        if self._was_told_to_stop():
            time.sleep(OTHERS_FIRST_S)
            self._leave(SIGNAL_STATUS + signal.SIGTERM)

    def _part(self, status: int) -> None:
        if self._watchdog is not None:
            self._watchdog.part(status)

    def _leave(self, status: int) -> NoReturn:
        self._part(status)
        leave(status)

    def _patience_s(self, error: BaseException) -> float:
        if is_consequence(error):
            # Before the watchdog takes the rest of this rank for standing still.
            return CAUSE_FIRST_S if self._watchdog is None else min(CAUSE_FIRST_S, self._watchdog.record.limit_s / 2)
        return 0.0 if self._place.local_rank == 0 else OTHERS_FIRST_S


def _found_at_run_time(error: BaseException | None) -> RunError | None:
    """The fault that an error stands for: torch's pipeline wraps what a stage raises."""
    while error is not None and not isinstance(error, RunError):
        error = error.__cause__
    return error


def is_consequence(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a collective's: that says little but that another rank is gone."""
    while error is not None:
        if isinstance(error, dist.DistError) or any(name in str(error) for name in BACKENDS):
            return True
        error = error.__cause__ or error.__context__
    return False
