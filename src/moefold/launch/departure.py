"""The way out of a rank."""

import os
import sys
from typing import NoReturn


def hard_exit(status: int) -> NoReturn:
    """End this process at once, with no more than what it printed brought out.

    An interpreter that ends in the ordinary way kills the threads that come for its lock. One of gloo's, which still
    has the tensors of the last collective to give back, would abort the process then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
