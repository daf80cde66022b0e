"""Draws of tokens from logits on a CPU in C. The reference is `inference/engine/draw.py`."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moefold.ops.cpu.build import POINTER, SIZE, CompilerError, declare, load_library

SUM_BITS = 62
"""Bits of the sum of the weights of a row."""
NO_TOKEN = -1
"""Token id of a row whose logits are NaN or infinite."""

SELF_TEST_WIDTH = 1500
"""Tokens of the self-test: more than a block of `draw.c`."""


def weight_unit(num_tokens: int) -> float:
    """Return the largest weight of a row, a power of two: the sum of the row is below 2^SUM_BITS."""
    return 2.0 ** (SUM_BITS - num_tokens.bit_length())


class CDraw:
    """Draws from whole distributions, without top-k, top-p and min-p, of float32 logits."""

    def __init__(self) -> None:
        library = load_library("draw")
        self._max_tokens: int = declare(library.draw_max_tokens, result=SIZE)()
        numbers = (ctypes.c_double, ctypes.c_double)
        self._draw = declare(library.draw_tokens, POINTER, SIZE, SIZE, SIZE, *numbers, POINTER, POINTER)
        self._self_test()

    def supports(self, logits_NV: Tensor) -> bool:
        """Return whether the kernel supports these logits. It depends on their layout only."""
        width = logits_NV.shape[1]
        is_known = logits_NV.is_cpu and logits_NV.dtype == torch.float32 and logits_NV.stride(1) == 1
        return is_known and 0 < width <= self._max_tokens

    def __call__(self, logits_NV: Tensor, temperature: float, uniforms: Sequence[float]) -> Tensor:
        """Draw a token for each row: int64 [N], `NO_TOKEN` for a row with NaN or infinity.

        Args:
            logits_NV: logits over the whole vocabulary.
            temperature: divisor of the logits. 0: the first of the largest logits.
            uniforms: number in [0, 1) for each row, not read at temperature 0.
        """
        num_rows, width = logits_NV.shape
        # The C code has no bounds checks.
        assert len(uniforms) == num_rows, (len(uniforms), logits_NV.shape)
        # It has no range checks either; `SamplingParams` allows no smaller temperature.
        assert temperature == 0 or temperature >= 1e-3, temperature
        places = np.array(uniforms, np.float64)
        tokens_N = torch.empty(num_rows, dtype=torch.int64)
        self._draw(
            logits_NV.data_ptr(),
            logits_NV.stride(0),
            num_rows,
            width,
            temperature,
            weight_unit(width),
            places.ctypes.data,
            tokens_N.data_ptr(),
        )
        return tokens_N

    def _self_test(self) -> None:
        """Compare with float64. Raise CompilerError if draws differ."""
        logits_V = torch.linspace(-3, 9, SELF_TEST_WIDTH).sin().mul_(4)
        places = np.linspace(0, 0.999, 9)
        cumulative = np.cumsum(np.exp(logits_V.double().numpy() / 0.7))
        expected = np.searchsorted(cumulative, places * cumulative[-1], side="right")
        tokens = self(logits_V.expand(9, -1), 0.7, places.tolist()).numpy()
        most_likely = int(self(logits_V.unsqueeze(0), 0, [0.0]))
        is_undefined = int(self(logits_V.log().unsqueeze(0), 1, [0.0])) == NO_TOKEN
        if (tokens != expected).any() or most_likely != int(logits_V.argmax()) or not is_undefined:
            raise CompilerError("the compiled draws of tokens are wrong")
