"""Two recipes that must compute the same bits: losses, counts, gradients, and weights after steps."""

from collections.abc import Iterable
from dataclasses import fields

import numpy as np
import torch

from moefold.config.schema import Config
from moefold.verify.distributed_run import DistributedRecord, run_distributed

MEASURED = ("peak_memory_gib", "memory_by_part", "rank_times", "offload")


def assert_equal_bits(ranks: Iterable[tuple[DistributedRecord, DistributedRecord]]) -> None:
    """Assert that the two records of every rank are equal, except for measurements."""
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


def run_both(plain: Config, other: Config, steps: int) -> tuple[DistributedRecord, DistributedRecord]:
    """Run two recipes of one mapping one after the other on a rank."""
    return run_distributed(plain, steps), run_distributed(other, steps)
