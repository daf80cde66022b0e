"""Calls into torch that may wait without end: this process gives them a limit and keeps obeying signals. Torch-free."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class CallTimeoutError(Exception):
    """The call had not returned when its time was up."""


def run_with_timeout(timeout_s: float, call: Callable[[], Result]) -> Result:
    """Return what `call` returns, or raise what it raises, within a limit.

    The call runs in a thread of its own. A client of torch's store that reaches a peer which never answers waits in
    C++ without any limit, and a thread that waits there runs no signal handler; the calling thread does. A call that
    is given up goes on waiting until the process ends, which it does not delay.

    Args:
        timeout_s: seconds to wait.
        call: releases the interpreter's lock while it waits.

    Raises:
        NoAnswerError: the time is up.
    """
    answers: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="bounded call", daemon=True)
    thread.start()
    # The longest time that a thread can be waited for is some 290 years.
    thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    if not answers:
        raise CallTimeoutError
    return answers[0]
