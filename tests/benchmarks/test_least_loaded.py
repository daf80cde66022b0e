"""The benchmark of the least-loaded dispatcher makes the skew that it names and reports the busiest rank."""

import pytest
import torch

from benchmarks.least_loaded import DispatchMeasurement, SkewedWorkload, measure_dispatchers, skewed_choices
from moefold.comm.groups import ParallelGroups
from moefold.topology.layout import fold

SKEWS = [0.0, 0.8]
WORKLOAD = SkewedWorkload(64, hidden_size=16, ffn_hidden_size=16, num_experts=8, min_tokens=8)


@pytest.mark.parametrize("skew", [0.0, 0.3, 1.0])
def test_the_named_part_of_the_tokens_is_hot(skew):
    ids = skewed_choices(1000, 8, skew, torch.Generator().manual_seed(1))
    counts = ids.flatten().bincount(minlength=8)
    assert counts[0] == round(1000 * skew)
    assert counts[1:].max() - counts[1:].min() <= 1
    assert ids.shape == (1000, 1)


def _measure() -> list[DispatchMeasurement]:
    return measure_dispatchers(WORKLOAD, SKEWS, 1, ParallelGroups.create(fold(world_size=4, ep=4), torch.device("cpu")))


@pytest.mark.parity
def test_measurements_are_from_the_busiest_rank(pool):
    ranks = pool.run(4, _measure)
    assert all(found == ranks[0] for found in ranks)
    found = {(m.skew, m.dispatcher): m for m in ranks[0]}
    assert len(found) == len(ranks[0]) == 4
    assert all(m.mean_rows == 64 for m in found.values())
    assert all(m.step_s > 0 and m.experts_cpu_s > 0 for m in found.values())
    plain, ours = found[0.8, "alltoall"], found[0.8, "leastloaded"]
    # 51 of each rank's 64 tokens are hot, and the 13 others meet rank 0 at expert 1: two times each.
    assert plain.rows == 4 * (51 + 2)
    assert ours.rows <= 71
    assert (plain.experts_moved, ours.experts_moved) == (0, 3)
    assert ours.peak_bytes < plain.peak_bytes
    even = found[0.0, "leastloaded"]
    assert (even.rows, even.experts_moved) == (found[0.0, "alltoall"].rows, 0)
    assert even.peak_bytes == pytest.approx(found[0.0, "alltoall"].peak_bytes, rel=0.25)
