"""A computation that can be left for a while: it pauses wherever an exchange is under way that another could hide.

A forward pass is written once, as a generator. Who has nothing to do beside it takes all its steps one after another
(`run_to_end`); who has, takes them one by one.

The forward pass of one micro-batch beside the backward pass of another, so that each hides the other's exchanges.

The backward pass is one call of autograd, as ever. At each exchange of an MoE layer it begins the exchange, lets the
forward pass go on up to its own next exchange, which begins too, and only then waits. One thread does all of it, so the
order of what a rank begins follows from the two passes alone, which are the same on all ranks of the stage.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

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


class BackwardOverlap:
    """What a rank has to do while an exchange of a backward pass is under way; one for all its groups."""

    def __init__(self) -> None:
        self._forward_task: ResumableTask[Any] | None = None

    @contextmanager
    def backward(self, forward_task: ResumableTask[Any]) -> Iterator[None]:
        """Inside, a backward pass runs, beside which `forward_task` goes on; steps may be left over."""
        assert self._forward_task is None, "one forward pass at a time"
        self._forward_task = forward_task
        try:
            # With threads of its own, autograd would run the exchanges of CUDA tensors there, and forward passes with
            # them: nodes made in different threads have no common age, by which autograd orders those that are ready.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._forward_task = None

    def resume(self) -> None:
        """Take the next step of what is beside; nothing where there is none."""
        if self._forward_task is not None:
            with torch.enable_grad():
                self._forward_task.resume()
