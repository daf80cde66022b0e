"""Garbage collection at fixed steps, the same on every rank."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEPS_BETWEEN_COLLECTIONS = 50
"""As in torchtitan (`gc_freq`). No tensor of a step is in a reference cycle, so only small objects wait for it."""


@contextmanager
def collect_at_fixed_steps() -> Iterator[Callable[[int], None]]:
    """Disable the automatic garbage collection inside this context, and restore it at the end.

    Python's collector starts at some allocation, on each rank in another step: the ranks of a collective then wait for
    one after another. What exists at the start is frozen, so a collection does not visit it; not where the caller has
    frozen objects, as Python can only unfreeze all of them.

    Yields:
        A function to call after each step with its number, which collects where it is due.
    """
    was_enabled = gc.isenabled()
    freezes = gc.get_freeze_count() == 0
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield _collect_if_due
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _collect_if_due(step: int) -> None:
    if step % STEPS_BETWEEN_COLLECTIONS == 0:
        gc.collect()
