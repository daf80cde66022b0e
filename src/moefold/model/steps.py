"""A computation that can be left for a while: it pauses wherever an exchange is under way that another could hide.

A forward pass is written once, as a generator. Who has nothing to do beside it takes all its steps one after another
(`run_to_end`); who has, takes them one by one.
"""

from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")
Resumable = Generator[None, None, T]
"""Yields at each pause, and returns what was computed. Where it pauses must not depend on data."""


def run_to_end(resumable: Resumable[T]) -> T:
    """Take all steps; what they compute."""
    while True:
        try:
            next(resumable)
        except StopIteration as end:
            value: T = end.value
            return value


class ResumableTask(Generic[T]):
    """Steps that somebody has begun to take, and others may go on with."""

    def __init__(self, resumable: Resumable[T]) -> None:
        self._resumable = resumable
        self._value: tuple[T] | None = None

    @property
    def is_done(self) -> bool:
        """Whether no step is left."""
        return self._value is not None

    def resume(self) -> None:
        """Take the next step, if one is left."""
        if self._value is None:
            try:
                next(self._resumable)
            except StopIteration as end:
                self._value = (end.value,)

    def run_to_end(self) -> T:
        """Take all steps that are left; what was computed."""
        return run_to_end(self.remaining())

    def remaining(self) -> Resumable[T]:
        """The steps that are left, as steps of somebody else; begins with the pause at which these stand."""
        while self._value is None:
            yield
            self.resume()
        return self._value[0]
