"""Exact top-k of scores on a CPU in C. Its definition is `ops.exact_topk.sorted_topk`."""

import torch
from torch import Tensor

from moefold.ops.cpu.build import NUMBER, POINTER, SIZE, CompilerError, address_of, declare, load_library

SCORE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
"""Number of each dtype in `exact_topk.c`."""
KEY_BYTES = {torch.float32: 4, torch.bfloat16: 4, torch.float64: 8}
BLOCK = 64
"""Scores that are compared with the threshold at a time, as in `exact_topk.c`."""
ROOM_FACTOR = 4
"""Survivors of a row, divided by k, before they are reduced to k: 2, 4 and 8 differ by less than 10 %."""
ALIGNMENT_BYTES = 64


class CExactTopk:
    """Top-k of float32, bfloat16 or float64 rows, with torch's number of threads, a row on one thread."""

    def __init__(self) -> None:
        bounds = (POINTER, POINTER, POINTER, SIZE)
        ends = (*[SIZE] * 3, NUMBER, POINTER, SIZE, SIZE, NUMBER)
        function = load_library("exact_topk").exact_topk
        self._exact_topk = declare(function, POINTER, SIZE, *bounds, POINTER, *ends, result=SIZE)
        self._self_test()

    def __call__(
        self, scores: Tensor, k: int, starts: Tensor | None, stops: Tensor | None, guess: Tensor | None
    ) -> tuple[Tensor, int]:
        """Return the positions, int32 [R, k], and the number of rows with a NaN. For arguments see `exact_topk`."""
        rows, width = scores.shape
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        starts, stops, guess = (None if t is None else t.contiguous() for t in (starts, stops, guess))
        out = torch.empty(rows, k, dtype=torch.int32)
        room = min(width, ROOM_FACTOR * k) + BLOCK
        # Keys, their scratch copy, and positions; whole vectors are written, also at the last survivor.
        num_bytes = (2 * KEY_BYTES[scores.dtype] + 4) * (room + BLOCK)
        workspace_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        threads = min(torch.get_num_threads(), max(rows, 1))
        workspace = torch.empty(threads * workspace_bytes, dtype=torch.uint8)
        rows_with_nan = self._exact_topk(
            scores.data_ptr(),
            scores.stride(0),
            address_of(starts),
            address_of(stops),
            address_of(guess),
            0 if guess is None else guess.shape[1],
            out.data_ptr(),
            rows,
            k,
            width,
            SCORE_TYPES[scores.dtype],
            workspace.data_ptr(),
            workspace_bytes,
            room,
            threads,
        )
        return out, int(rows_with_nan)

    def _self_test(self) -> None:
        """Select from a row with ties, with a wrong guess. Raise CompilerError if the result differs from a sort."""
        scores = (torch.arange(2000) * 7 % 101).view(1, -1)
        expected = scores.argsort(dim=1, descending=True, stable=True)[:, :300].sort(dim=1).values
        for dtype in SCORE_TYPES:
            indices, _ = self(scores.to(dtype), 300, None, None, torch.arange(300, dtype=torch.int32).view(1, -1))
            if not torch.equal(indices.long(), expected):
                raise CompilerError(f"the compiled top-k kernel is wrong in {dtype}")
