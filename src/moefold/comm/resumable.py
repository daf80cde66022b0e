"""Resumable computations: generators that yield while a collective is in flight, to overlap two micro-batches.

`BackwardOverlap` runs a forward pass that is written as a generator during the backward pass of another micro-batch, so
that each pass hides the collectives of the other. Without overlap, blocks and stages run a plain forward pass of the
same parts. `run_to_end` runs the generator of an MoE layer.

The backward pass is one ordinary autograd call. At each collective of an MoE layer it launches the collective, resumes
the forward pass up to the launch of its next collective, and only then waits. One thread does all of this. So the order
in which a rank launches collectives depends only on the two passes, which are the same on all ranks of the stage.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Resumable = Generator[None, None, T]
"""Generator that yields while a collective is in flight, and returns the result. Yields must not depend on data."""


def run_to_end(resumable: Resumable[T]) -> T:
    """Run a resumable computation to its end, and return its result."""
    while True:
        try:
            next(resumable)
        except StopIteration as end:
            return end.value


class ResumableTask(Generic[T]):
    """A partially executed resumable computation that another caller may resume."""

    def __init__(self, resumable: Resumable[T]) -> None:
        self._resumable = resumable
        self._value: tuple[T] | None = None

    @property
    def is_done(self) -> bool:
        """True once the result is computed."""
        return self._value is not None

    def resume(self) -> None:
        """Run to the next yield, if the computation has not ended."""
        if self._value is None:
            try:
                next(self._resumable)
            except StopIteration as end:
                self._value = (end.value,)

    def run_to_end(self) -> T:
        """Run the rest, and return the result."""
        return run_to_end(self.remaining())

    def remaining(self) -> Resumable[T]:
        """Return the rest as a resumable computation. It starts with the current yield of this task."""
        while self._value is None:
            yield
            self.resume()
        return self._value[0]


class BackwardOverlap:
    """The forward pass to resume while a collective of a backward pass is in flight. All groups of a rank share it."""

    def __init__(self) -> None:
        self._forward_task: ResumableTask[Any] | None = None

    @contextmanager
    def backward(self, forward_task: ResumableTask[Any]) -> Iterator[None]:
        """Resume `forward_task` during the backward pass inside this context. The task need not finish there."""
        assert self._forward_task is None, "one forward pass at a time"
        self._forward_task = forward_task
        try:
            # With its own threads, autograd would run the collectives of CUDA tensors, and with them the forward pass,
            # in those threads. Nodes created in different threads have no common sequence number to order ready nodes
            # by.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._forward_task = None

    def resume(self) -> None:
        """Resume the forward pass up to its next yield. It does nothing without one."""
        if self._forward_task is not None:
            with torch.enable_grad():
                self._forward_task.resume()
