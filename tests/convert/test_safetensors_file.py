"""Our reader and writer of the format against the library's."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.convert.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    FileWriter,
    bytes_of,
    create_file,
    plan_file_layout,
    read_header,
)

SHAPES = [(), (5,), (3, 4), (2, 3, 4), (0, 3)]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    kinds = DTYPES.items()
    return {f"{name}.{i}": torch.randn(shape).to(dtype) for name, dtype in kinds for i, shape in enumerate(SHAPES)}


def test_files_of_the_library_are_read(tmp_path):
    save_file(tensors(), tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.keys() == tensors().keys()
    for name, tensor in tensors().items():
        stored = header[name]
        assert stored.shape == tuple(tensor.shape)
        values = stored.read(tuple(slice(0, size, 1) for size in stored.shape))
        assert values.dtype == tensor.dtype
        assert torch.equal(values, tensor)


@pytest.mark.parametrize(
    "index",
    [(slice(1, 2, 1), slice(0, 3, 1), slice(0, 4, 1)), (slice(0, 2, 1), slice(2, 3, 1), slice(1, 4, 2))],
)
def test_parts_equal_the_whole(tmp_path, index):
    save_file(tensors(), tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")["F32.3"]
    assert torch.equal(stored.read(index), tensors()["F32.3"][index])


def test_a_file_written_in_pieces_is_the_librarys_file_to_the_byte(tmp_path):
    save_file(tensors(), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "theirs.safetensors")
    in_order = load_order(tmp_path / "theirs.safetensors")
    layout = plan_file_layout(
        tmp_path / "ours.safetensors", {name: (header[name].dtype, header[name].shape) for name in in_order}
    )
    create_file(tmp_path / "ours.safetensors", layout)
    with FileWriter() as writer:
        for name in reversed(in_order):
            writer.write(layout.tensors[name], bytes_of(tensors()[name]))
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert load_file(tmp_path / "ours.safetensors").keys() == tensors().keys()


def load_order(file: Path) -> list[str]:
    """The names as the header lists them."""
    data = file.read_bytes()
    return [name for name in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]) if name != "__metadata__"]


def test_types_have_one_name_each():
    assert {DTYPE_NAMES[dtype] for dtype in DTYPES.values()} == set(DTYPES)
