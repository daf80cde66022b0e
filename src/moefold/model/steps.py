"""A computation that can be left for a while: it pauses wherever an exchange is under way that another could hide.

A forward pass is written once, as a generator. Who has nothing to do beside it takes all its steps one after another
(`finish`); who has, takes them one by one.
"""

from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields at each pause, and returns what was computed. Where it pauses must not depend on data."""


def finish(steps: Steps[T]) -> T:
    """Take all steps; what they compute."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value


class Begun(Generic[T]):
    """Steps that somebody has begun to take, and others may go on with."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self._value: tuple[T] | None = None

    @property
    def is_done(self) -> bool:
        """Whether no step is left."""
        return self._value is not None

    def go_on(self) -> None:
        """Take the next step, if one is left."""
        if self._value is None:
            try:
                next(self._steps)
            except StopIteration as end:
                self._value = (end.value,)

    def finish(self) -> T:
        """Take all steps that are left; what was computed."""
        return finish(self.rest())

    def rest(self) -> Steps[T]:
        """The steps that are left, as steps of somebody else; begins with the pause at which these stand."""
        while self._value is None:
            yield
            self.go_on()
        return self._value[0]
