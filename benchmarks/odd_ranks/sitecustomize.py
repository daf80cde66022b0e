"""Python imports this at its start where PYTHONPATH names the folder: a process then does odd things by signal.

SIGUSR1: its main thread sleeps, as one that waits for a slow disk. SIGUSR2: it hangs inside the kernel for a minute.
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
