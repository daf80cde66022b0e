"""Time the exact top-k of ops/exact_topk.py against torch.topk on one thread of a CPU, and check that both agree.

`python benchmarks/exact_topk.py` prints a line for each kind of rows: CPU time of a row, and the median of the ratios
of runs that alternate. Consecutive rows are correlated as scores of consecutive queries are: x' = rho x + sqrt(1 -
rho^2) noise; the guess is the result of the row before.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefold.ops.exact_topk import exact_topk

RHO = 0.99
SHORT_LENGTHS = (2_049, 4_096, 8_192, 16_384)


def main() -> None:
    """Time long rows with and without a guess, then short ones without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131_072, help="scores of a long row")
    parser.add_argument("--k", type=int, default=2_048, help="positions to select")
    parser.add_argument("--rows", type=int, default=40, help="rows of each length")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("length      rows                     torch.topk  exact_topk  ratio")
    for length in (args.length, *SHORT_LENGTHS):
        rows = _correlated_rows(args.rows, length, getattr(torch, args.dtype))
        guesses: list[Tensor | None] = [None]
        guesses += [exact_topk(row, args.k) for row in rows[:-1]]
        _report(f"{length:<11} guess of the row before  ", rows, args.k, guesses)
        _report(f"{length:<11} no guess                 ", rows, args.k, [None] * len(rows))
    wrong = [row.argsort(dim=1)[:, : args.k].int() for row in _correlated_rows(args.rows, args.length, torch.float32)]
    rows = _correlated_rows(args.rows, args.length, getattr(torch, args.dtype))
    _report(f"{args.length:<11} unrelated guess          ", rows, args.k, wrong)
    ascending = [torch.arange(args.length, dtype=torch.float32)[None]] * args.rows
    _report(f"{args.length:<11} ascending, no guess      ", ascending, args.k, [None] * args.rows)


def _correlated_rows(count: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    row = torch.randn(1, length)
    rows = []
    for _ in range(count):
        rows.append(row.to(dtype))
        row = RHO * row + (1 - RHO**2) ** 0.5 * torch.randn(1, length)
    return rows


def _report(name: str, rows: list[Tensor], k: int, guesses: list[Tensor | None]) -> None:
    """Time both functions on each row, alternating."""
    theirs_us, ours_us = [], []
    for row, guess in zip(rows, guesses, strict=True):
        theirs, seconds = _timed(lambda row=row: torch.topk(row, k, sorted=False))
        theirs_us.append(1e6 * seconds)
        ours, seconds = _timed(lambda row=row, guess=guess: exact_topk(row, k, guess=guess))
        ours_us.append(1e6 * seconds)
        assert torch.equal(theirs.values.sort().values, row.gather(1, ours.long()).sort().values)
    ratio = statistics.median(a / b for a, b in zip(theirs_us, ours_us, strict=True))
    print(f"{name}{statistics.median(theirs_us):7.0f} us {statistics.median(ours_us):8.0f} us  {ratio:5.1f}")


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


if __name__ == "__main__":
    main()
