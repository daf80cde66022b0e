"""Exports and checks hold some rows of a tensor at a time, whatever the order of the dims on either side."""

import math

import pytest
import torch
from safetensors.torch import save_file

from moefold.checkpoint import streaming_io
from moefold.cli.main import main
from moefold.comm.groups import current_world
from moefold.convert import weight_sources
from moefold.convert.families.tensor_mapping import SliceMapping
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.safetensors_file import read_header
from moefold.convert.weight_sources import HfSource
from tests.convert.hf_folders import add_tokenizer, assert_same_folder
from tests.convert.hf_models import make_model, save_model


class Watched(streaming_io.CheckpointSource):
    """Remembers the bytes of the largest part that was asked for, and of the largest row."""

    most = 0
    row = 0

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        values = super().read(name, region)
        self.most, self.row = max(self.most, values.nbytes), max(self.row, values[0].nbytes)
        return values


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-v2"])
def test_rows_at_a_time_give_the_same_bytes(tmp_path, monkeypatch, name):
    """With chunks of a few rows. No part that is read is larger."""
    folder = add_tokenizer(save_model(make_model(name), tmp_path / "hf"))
    monkeypatch.setattr(streaming_io, "CHUNK_BYTES", 1000)
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert_same_folder(folder, tmp_path / "again")
    source = Watched(tmp_path / "ckpt")
    weight_sources.verify_against_folder(source, HfSource(open_hf_folder(folder)), current_world())
    assert 0 < source.most <= max(1000, source.row)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (None, 1, 0)])
def test_the_rows_of_a_piece_are_those_that_the_blocks_hold(dims, step):
    """Blocks of rows together hold every row of the piece once, at the place of ours that it has."""
    lengths = {0: 5, 1: 4}
    size = tuple(1 if dim is None else lengths[dim] for dim in dims)
    piece = SliceMapping("ours", tuple(2 for _ in dims), size, "theirs", (3, 1), (step, 1), dims)
    axis = dims.index(0)
    found = {}
    for start in range(0, 24, 4):
        part = piece.intersect_hf_rows(start, start + 4)
        if part is None:
            continue
        rows = part.hf_region()[0]
        assert start <= rows.start < rows.stop <= start + 4
        assert part.hf_region()[1] == piece.hf_region()[1]
        assert math.prod(part.size) == part.size[axis] * 4
        found |= dict(zip(range(rows.start, rows.stop, step), range(part.start[axis], 99), strict=False))
    assert found == {3 + i * step: 2 + i for i in range(5)}


def test_one_wrong_byte_in_any_block_is_found(tmp_path):
    stored, torch_values = _stored(tmp_path)
    chunks = [streaming_io.TensorChunk("x", 0, 3), streaming_io.TensorChunk("x", 3, 5)]
    assert all(weight_sources.rows_equal(stored, rows, torch_values[rows.start : rows.stop]) for rows in chunks)
    torch_values[4, 1] = -torch_values[4, 1]
    same = [weight_sources.rows_equal(stored, rows, torch_values[rows.start : rows.stop]) for rows in chunks]
    assert same == [True, False]
    assert not weight_sources.rows_equal(stored, chunks[0], torch_values[:3].double())


def _stored(tmp_path):
    values = torch.zeros(5, 4)
    save_file({"x": values}, tmp_path / "x.safetensors")
    return read_header(tmp_path / "x.safetensors")["x"], values.clone()
