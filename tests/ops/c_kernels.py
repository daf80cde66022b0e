"""Common code of the tests of kernels in C: their builds, their rounding, and runs with and without them."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.launch.rank_pool import WorkerPool
from moefold.ops.cpu.build import COMPILERS
from moefold.verify.distributed_run import run_distributed
from tests.verify.recipes import tiny

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="needs a C compiler")
CPU = torch.device("cpu")
VECTORS = {"native": (), "avx2": ("-mno-avx512f", "-O2"), "sse2": ("-march=x86-64", "-O2")}
"""Further flags of the compiler: vectors of 16, 8 and 4 numbers, where the processor has them.

Runs get `native`. The others are optimised less: that takes two thirds of the time.
"""
WIDEST_AND_NARROWEST = ["native", "sse2", pytest.param("avx2", marks=pytest.mark.slow)]
"""Names of the vectors, of which those between the two are slow: a compiler runs for each."""
PROCESSORS = VECTORS | {"avx512": ("-mno-avx512bf16", "-O2")}
"""The same, and vectors of 16 numbers without products of pairs of bfloat16, for kernels that have these products."""
WITH_AND_WITHOUT_PAIRS = [*WIDEST_AND_NARROWEST, pytest.param("avx512", marks=pytest.mark.slow)]
"""Names of the processors, as in `WIDEST_AND_NARROWEST`."""
HALF_STEPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Largest relative error of a value by its rounding to the type."""
in_each_type = pytest.mark.parametrize("dtype", HALF_STEPS)


def recipe(dtype: str, kernels: str, **words: Any) -> Config:
    """Return a tiny recipe, computed in a type by some kernels; `words` are passed to `tiny`."""
    train = {"global_batch_size": 2} if words.get("world_size", 1) == 1 else {}
    cfg = tiny(**words | {"train": train | words.get("train", {})})
    return replace(cfg, run=replace(cfg.run, dtype=dtype, kernels=kernels))


def same_bits_on_threads(compute: Callable[[], Iterable[Tensor]], counts: Sequence[int] = (1, 2, 3)) -> list[Tensor]:
    """Compute with each number of threads, check that all results have the same bits, and return them."""
    before = torch.get_num_threads()
    try:
        results = []
        for threads in counts:
            torch.set_num_threads(threads)
            results.append(list(compute()))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
    return results[0]


def steps_of(pool: WorkerPool, cfg: Config, run: Callable[..., Any] = run_distributed) -> Any:
    """Losses and norms of two steps."""
    return pool.run(cfg.parallel.world_size, run, cfg, 2, timeout_s=280)[0].steps


def assert_same_losses(
    pool: WorkerPool,
    words: dict[str, Any],
    dtype: str = "float32",
    tolerance: float = 1e-5,
    run_in_c: Callable[..., Any] = run_distributed,
) -> None:
    """Kernels in C, on and off, give the same losses and norms of gradients."""
    plain, in_c = (
        steps_of(pool, recipe(dtype, kernels, **words), run)
        for kernels, run in (("plain", run_distributed), ("c", run_in_c))
    )
    for a, b in zip(plain, in_c, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=tolerance)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=tolerance)
