"""The probe runs every measurement on real ranks, and its measurements can be fitted."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from moefold.bench.device_fit import DeviceMeasurements, fit_device, predictions
from moefold.bench.device_probe import DeviceProbe
from moefold.cost.hardware import load_device
from tests.bench.small_sizes import SMALLEST_SIZES


def _measure(dtype: str, local_ranks: int) -> DeviceMeasurements:
    size = dist.get_world_size()
    return DeviceProbe(torch.device("cpu"), dtype, size, local_ranks, rounds=1, sizes=SMALLEST_SIZES).measure()


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_all_ranks_report_the_same_measurements(pool, dtype):
    first, *others = pool.run(4, partial(_measure, dtype), 2)
    # Memory, copies and host times are of a rank's own machine; rank 0's are written.
    for other in others:
        assert other.gemms == first.gemms
        assert other.attention == first.attention
        assert other.collectives == first.collectives
    assert first.dtype == dtype
    # Two ranks of one machine, and one rank of each of two machines, by two sizes and two kinds.
    assert [(one.size, one.stride) for one in first.collectives] == [(2, 1)] * 4 + [(2, 2)] * 4
    assert {one.kind for one in first.collectives} == {"all-gather", "all-to-all"}
    device = fit_device(load_device("cpu"), first, "found")
    assert device.links[0].gpus == 2
    assert all(one.predicted_s > 0 for one in predictions(device, first))


@pytest.mark.parity
def test_one_rank_measures_no_collectives(pool):
    (measured,) = pool.run(1, partial(_measure, "float32"), 1)
    assert measured.collectives == ()
    assert fit_device(load_device("cpu"), measured, "found").links == load_device("cpu").links
