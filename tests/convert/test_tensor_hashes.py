"""Tensors that are read whole are hashed in the same pass over their bytes."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file

from moefold.convert.safetensors_file import bytes_of, read_header
from moefold.convert.weight_sources import TensorHashes

VALUES = {"fused": torch.randn(6, 4), "number": torch.tensor(3.0), "part": torch.randn(4, 2).bfloat16()}


@pytest.fixture
def locations(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors")
    return read_header(tmp_path / "model.safetensors")


def test_a_tensor_read_whole_is_hashed_once_and_a_part_not(locations):
    with TensorHashes() as hashes:

        def read(name, first, stop, step=1):
            def on_rows(location, offset, values):
                hashes.add_rows(name, location, offset, values)

            found = locations[name].read((slice(first, stop, step), slice(0, 4, 1)), on_rows)
            assert torch.equal(found, VALUES[name][first:stop:step])

        # Every other row of a matrix that holds two of our parameters; its rows come twice, and overlap.
        read("fused", 0, 5, 2)
        read("fused", 1, 4)
        read("fused", 3, 6)
        read("fused", 0, 6)
        locations["number"].read((), lambda *rows: hashes.add_rows("number", *rows))
        locations["part"].read((slice(1, 4, 1), slice(0, 2, 1)), lambda *rows: hashes.add_rows("part", *rows))
    expected = {name: hashlib.sha256(bytes_of(VALUES[name])).hexdigest() for name in ("fused", "number")}
    assert hashes.complete() == expected


def test_values_are_mapped_and_changes_stay_in_memory(locations):
    values = locations["fused"].read((slice(0, 6, 1), slice(0, 4, 1)))
    values.zero_()
    assert torch.equal(locations["fused"].read((slice(0, 6, 1), slice(0, 4, 1))), VALUES["fused"])
