"""Comparison of a checkpoint with a Hugging Face folder, tensor by tensor, byte by byte."""

import torch
from torch import Tensor

from moefold.checkpoint.streaming_io import CheckpointSource, TensorChunk, split_into_chunks
from moefold.comm.groups import World
from moefold.convert.atomic_dir import raise_on_all_ranks
from moefold.convert.safetensors_file import DTYPES, TensorLocation, read_part
from moefold.convert.tensor_mapping import StateDictMapping
from moefold.convert.weights import HfSource, WeightSource
from moefold.errors import format_list


def assemble_rows(source: WeightSource, mapping: StateDictMapping, rows: TensorChunk, dtype: torch.dtype) -> Tensor:
    """Assemble some rows of an HF tensor from the weights of a source, contiguous, in `dtype`.

    Only these rows and the source's cache of each parameter are in memory.
    """
    values = torch.empty((rows.stop - rows.start, *mapping.hf_shapes[rows.name][1:]), dtype=dtype)
    for whole_piece in mapping.by_hf_name[rows.name]:
        piece = whole_piece.intersect_hf_rows(rows.start, rows.stop)
        if piece is None:
            continue
        ours = source.read(piece.name, piece.region())
        sizes = [size for size, dim in zip(piece.size, piece.dims, strict=True) if dim is not None]
        first, *others = piece.hf_region()
        box = (slice(first.start - rows.start, first.stop - rows.start, first.step), *others)
        values[box] = ours.reshape(sizes).permute(piece.inverse_permutation())
    return values


def rows_equal(location: TensorLocation, rows: TensorChunk, values: Tensor) -> bool:
    """Return whether some rows of a tensor in a file equal `values`, byte by byte."""
    found = read_rows(location, rows)
    return found.dtype == values.dtype and torch.equal(_as_bytes(found), _as_bytes(values))


def read_rows(location: TensorLocation, rows: TensorChunk) -> Tensor:
    """Read some rows of a tensor in a file."""
    return read_part(location, (slice(rows.start, rows.stop, 1), *(slice(0, size, 1) for size in location.shape[1:])))


def _as_bytes(values: Tensor) -> Tensor:
    return values.flatten().view(torch.uint8)


def group_by_parameters(mapping: StateDictMapping) -> list[tuple[str, ...]]:
    """Group the HF tensors that consist of the same parameters, in the order of the model."""
    groups: dict[tuple[str, ...], list[str]] = {}
    rank = {name: i for i, name in enumerate(mapping.shapes)}
    for hf_name, pieces in mapping.by_hf_name.items():
        names = tuple(sorted({piece.name for piece in pieces}, key=rank.__getitem__))
        groups.setdefault(names, []).append(hf_name)
    return [tuple(groups[names]) for names in sorted(groups, key=lambda names: rank[names[0]])]


def assign_groups(mapping: StateDictMapping, world: World) -> list[tuple[str, ...]]:
    """Return this rank's contiguous share of `group_by_parameters`, balanced by the number of values."""
    groups = group_by_parameters(mapping)
    sizes = [sum(_numel(mapping.hf_shapes[name]) for name in group) for group in groups]
    total = sum(sizes)
    done = 0
    mine = []
    for group, size in zip(groups, sizes, strict=True):
        if min(world.size - 1, done * world.size // max(1, total)) == world.rank:
            mine.append(group)
        done += size
    return mine


def verify_against_folder(source: CheckpointSource, folder: HfSource, world: World) -> None:
    """Compare a checkpoint with a folder, some rows at a time. Collective over `world`.

    Args:
        source: the checkpoint.
        folder: the Hugging Face folder.
        world: the processes that share the tensors.

    Raises:
        ConfigError: a tensor differs; the message names it.
    """
    wrong = []
    for group in assign_groups(folder.mapping, world):
        for hf_name in group:
            stored = folder.location(hf_name)
            dtype = DTYPES[stored.dtype]
            chunks = split_into_chunks(hf_name, stored.shape, dtype)
            if not all(rows_equal(stored, rows, assemble_rows(source, folder.mapping, rows, dtype)) for rows in chunks):
                wrong.append(hf_name)
        source.clear_cache()
    raise_on_all_ranks(world, f"read again, these tensors differ: {format_list(wrong)}" if wrong else "")


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
