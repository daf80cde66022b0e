"""Two recipes that must compute the same bits: losses, counts, gradients, and weights after steps."""

from collections.abc import Iterable
from dataclasses import fields

import numpy as np
import torch

from moefold.config.schema import Config
from moefold.testing.pool import WorkerPool
from moefold.verify.distributed_run import DistributedRecord, run_distributed

MEASURED = ("peak_memory_gib", "memory_by_part", "rank_times", "offload")


def assert_same_bits(pool: WorkerPool, plain: Config, other: Config, steps: int = 2, timeout_s: float = 120.0) -> None:
    """Run both under their mapping, of equally many ranks, one after the other."""
    assert_equal_bits(pool.run(plain.parallel.world_size, _run_both, plain, other, steps, timeout_s=timeout_s))


def assert_equal_bits(ranks: Iterable[tuple[DistributedRecord, DistributedRecord]]) -> None:
    """The two records of every rank say the same, but for what was measured."""
    for theirs, mine in ranks:
        for which in ("gradients", "weights"):
            assert set(getattr(mine, which)) == set(getattr(theirs, which))
            for name, tensor in getattr(theirs, which).items():
                assert torch.equal(getattr(mine, which)[name], tensor), (which, name)
        assert mine.eval_loss == theirs.eval_loss
        for step, (a, b) in enumerate(zip(mine.steps, theirs.steps, strict=True)):
            for field in fields(b):
                if field.name not in MEASURED:
                    same = np.array_equal(np.asarray(getattr(a, field.name)), np.asarray(getattr(b, field.name)))
                    assert same, (step + 1, field.name)


def _run_both(plain: Config, other: Config, steps: int) -> tuple[DistributedRecord, DistributedRecord]:
    return run_distributed(plain, steps), run_distributed(other, steps)
