"""Arrays that are copied to a device in one transfer arrive apart, with their shapes."""

import numpy as np
import torch

from moefold.comm.host_copy import copy_together_to_device, pack, unpack

ARRAYS = (
    np.arange(5, dtype=np.int64) - 2**40,
    np.arange(6, dtype=np.int32).reshape(2, 3).T,
    np.zeros((0, 4), np.int32),
    np.array([1.5]),
)


def test_arrays_that_travel_together_arrive_apart():
    for found, array in zip(unpack(pack(ARRAYS), ARRAYS), ARRAYS, strict=True):
        assert found.shape == array.shape
        assert np.array_equal(found.numpy(), array)
        assert found.numpy().dtype == array.dtype


def test_copies_have_the_device_and_shapes():
    device = torch.device("meta")
    found = copy_together_to_device(ARRAYS, device)
    assert [(one.device, one.shape) for one in found] == [(device, array.shape) for array in ARRAYS]
    same = copy_together_to_device(ARRAYS, torch.device("cpu"))
    assert same[0].data_ptr() == ARRAYS[0].ctypes.data, "no copy on the host"
