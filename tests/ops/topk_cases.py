"""Rows of scores and guesses that an exact top-k may get wrong, and its definition in plain Python."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

INFINITY = float("inf")


class Case(NamedTuple):
    """Arguments of one call of `exact_topk`. Each row is a case of its own."""

    scores: Tensor
    k: int
    starts: Tensor | None
    stops: Tensor | None
    guess: Tensor | None


def row_kinds(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Return float64 rows [rows, width] of all kinds in turn, which keep their order in bfloat16 and float32."""
    noise = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    few = torch.randint(-2, 3, (rows, width), generator=generator).double()
    ramp = torch.linspace(-1, 1, width, dtype=torch.float64).expand(rows, -1)
    infinite = torch.where(few.abs() == 2, few * INFINITY, noise)
    tiny = few * 2.0**-126
    kinds = [
        noise,
        few,
        ramp,
        ramp.flip(1),
        infinite,
        torch.where(noise < 1.5, -INFINITY, noise),
        torch.where(few == 0, torch.where(noise < 0, -0.0, 0.0), few),
        torch.full_like(noise, 3.0),
        torch.full_like(noise, -INFINITY),
        torch.full_like(noise, INFINITY),
        tiny,
        noise * 1e30,
        (torch.arange(width) % 17).double().expand(rows, -1),
        torch.where(noise > 2, noise + 100, -1.0),
    ]
    kind_R = torch.arange(rows) % len(kinds)
    return torch.stack(kinds)[kind_R, torch.arange(rows)]


def guess_kinds(truth: Tensor, scores: Tensor, generator: torch.Generator) -> Tensor:
    """Return guesses int32 [R, k] of all kinds in turn: right, of another row, doubled, wrong, and not positions."""
    rows, k = truth.shape
    width = scores.shape[1]
    worst = scores.argsort(dim=1)[:, :k].int()
    worst = torch.nn.functional.pad(worst, (0, k - worst.shape[1]), value=width)
    best = scores.argmax(dim=1, keepdim=True).int()
    number = torch.randint(-5, width + 5, (rows, k), generator=generator, dtype=torch.int32)
    kinds = [
        truth,
        truth.roll(1, 0),
        worst,
        best.expand(-1, k),
        number,
        torch.full_like(truth, -1),
        torch.where(number % 2 == 0, truth, number),
        torch.where(torch.arange(k) < k // 2, truth, 2**31 - 1),
        torch.where(torch.arange(k) < k // 2, truth, -(2**31)),
    ]
    return torch.stack(kinds)[torch.arange(rows) // 2 % len(kinds), torch.arange(rows)].contiguous()


def cases(count: int, rows: int, dtype: torch.dtype, seed: int = 0) -> Iterator[Case]:
    """Yield calls of `rows` cases each, with all combinations of kinds of rows, sizes, limits and guesses."""
    from moefold.ops.exact_topk import sorted_topk

    generator = torch.Generator().manual_seed(seed)
    sizes = [(1, 1), (40, 40), (7, 30), (700, 1), (700, 16), (513, 50), (129, 128), (64, 3), (300, 299), (1000, 33)]
    for number in range(count):
        width, k = sizes[number % len(sizes)]
        scores = row_kinds(rows, width, generator).to(dtype)
        starts, stops = None, None
        if number // len(sizes) % 3 == 1:
            stops = torch.randint(0, width + 3, (rows,), generator=generator, dtype=torch.int32)
        elif number // len(sizes) % 3 == 2:
            starts, stops = torch.randint(-3, width + 3, (2, rows), generator=generator, dtype=torch.int32)
        guess = None
        if number % 7:
            guess = guess_kinds(sorted_topk(scores, k, starts=starts, stops=stops), scores, generator)
            guess = guess[torch.randperm(rows, generator=generator)] if number % 7 == 1 else guess
        if number % 5 == 0 and starts is not None:
            # Values outside of a row's positions are not read.
            position = torch.arange(width)
            outside = (position < starts[:, None]) | (position >= stops[:, None])
            scores = scores.masked_fill(outside, float("nan"))
        yield Case(scores, k, starts, stops, guess)


def by_definition(case: Case) -> Tensor:
    """Sort the positions of each row by score and position, with Python's numbers."""
    out = torch.full((len(case.scores), case.k), -1, dtype=torch.int32)
    for row, values in enumerate(case.scores.double().tolist()):
        first = 0 if case.starts is None else max(int(case.starts[row]), 0)
        last = len(values) if case.stops is None else min(int(case.stops[row]), len(values))
        chosen = sorted(sorted(range(first, last), key=lambda n, values=values: (-values[n], n))[: case.k])
        out[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return out
