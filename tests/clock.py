"""A clock that counts the work of a test, not the work of other processes at the same time."""

import os


def processor_s() -> float:
    """Processor time of this process and of all its children that ended, s. Waiting costs none."""
    return sum(os.times()[:4])
