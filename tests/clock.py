"""A clock that counts what a test makes the processor do, not what others do beside it."""

import os


def processor_s() -> float:
    """Processor time of this process and of all its children that ended, s; waiting costs none."""
    return sum(os.times()[:4])
