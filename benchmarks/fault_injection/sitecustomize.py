"""Inject faults by signal into a Python process whose PYTHONPATH has this folder. Python imports the file at startup.

SIGUSR1: the main thread sleeps, as if it waited for a slow disk. SIGUSR2: it hangs inside the kernel for a minute.
"""

import signal
import time
from types import FrameType


def _sleep(number: int, frame: FrameType | None) -> None:
    time.sleep(3600)


def _block(number: int, frame: FrameType | None) -> None:
    from tests.launch.blocked import block

    block(60)


signal.signal(signal.SIGUSR1, _sleep)
signal.signal(signal.SIGUSR2, _block)
