"""The forward pass of one micro-batch beside the backward pass of another, so that each hides the other's exchanges.

The backward pass is one call of autograd, as ever. At each exchange of an MoE layer it begins the exchange, lets the
forward pass go on up to its own next exchange, which begins too, and only then waits. One thread does all of it, so the
order of what a rank begins follows from the two passes alone, which are the same on all ranks of the stage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moefold.model.steps import ResumableTask


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
