"""Graphs of a CPU: a replay runs the function again, and writes to the memory of the capture, as a CUDA graph does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.parallel.cuda_graphs import TensorFunction


class RecordedPasses:
    """`CapturedPasses` that overwrite their output, their gradients and what they save with each run."""

    def __init__(self, function: TensorFunction, inputs: Sequence[Tensor]) -> None:
        self._function = function
        self._inputs = inputs
        self._output = self._run().detach().clone()
        self._gradients = [torch.empty_like(tensor) for tensor in inputs]

    def forward(self) -> Tensor:
        """See `CapturedPasses`."""
        # Autograd sees no change, as with a replay: an output that is read too late is wrong, without an error.
        self._output.data.copy_(self._run().detach())
        return self._output

    def backward(self, grad: Tensor) -> Sequence[Tensor]:
        """See `CapturedPasses`."""
        for static, gradient in zip(self._gradients, torch.autograd.grad(self._last, self._inputs, grad), strict=True):
            static.data.copy_(gradient)
        return self._gradients

    def _run(self) -> Tensor:
        """Run the forward pass; what it saves replaces what the last run saved."""
        with torch.enable_grad():
            self._last = self._function(*self._inputs)
        return self._last


class RecordingCapture:
    """`Capture` on a CPU; counts its captures."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, function: TensorFunction, inputs: Sequence[Tensor]) -> RecordedPasses:
        """Capture a function."""
        self.count += 1
        return RecordedPasses(function, inputs)
