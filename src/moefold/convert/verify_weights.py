"""Whether a checkpoint and a Hugging Face folder hold the same, tensor by tensor, byte by byte."""

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
    """Some rows of a tensor of theirs from the weights of a source, contiguous, in a type.

    In memory are these rows and what the source keeps of its last read of each parameter.
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
    """Whether some rows of a tensor in a file are these values, byte by byte."""
    found = read_rows(location, rows)
    return found.dtype == values.dtype and torch.equal(_as_bytes(found), _as_bytes(values))


def read_rows(location: TensorLocation, rows: TensorChunk) -> Tensor:
    """Some rows of a tensor in a file."""
    return read_part(location, (slice(rows.start, rows.stop, 1), *(slice(0, size, 1) for size in location.shape[1:])))


def _as_bytes(values: Tensor) -> Tensor:
    return values.flatten().view(torch.uint8)


def group_by_parameters(mapping: StateDictMapping) -> list[tuple[str, ...]]:
    """The tensors of theirs in groups that are made of the same parameters of ours, in the order of the model."""
    groups: dict[tuple[str, ...], list[str]] = {}
    rank = {name: i for i, name in enumerate(mapping.shapes)}
    for theirs, pieces in mapping.by_hf_name.items():
        ours = tuple(sorted({piece.name for piece in pieces}, key=rank.__getitem__))
        groups.setdefault(ours, []).append(theirs)
    return [tuple(groups[ours]) for ours in sorted(groups, key=lambda ours: rank[ours[0]])]


def assign_groups(mapping: StateDictMapping, world: World) -> list[tuple[str, ...]]:
    """My part of `group_by_parameters`: neighbours, of about as many values as the others'."""
    groups = group_by_parameters(mapping)
    sizes = [sum(_numel(mapping.hf_shapes[name]) for name in group) for group in groups]
    total, done, mine = sum(sizes), 0, []
    for group, size in zip(groups, sizes, strict=True):
        if min(world.size - 1, done * world.size // max(1, total)) == world.rank:
            mine.append(group)
        done += size
    return mine


def verify_against_folder(source: CheckpointSource, folder: HfSource, world: World) -> None:
    """Read both sides and compare, some rows at a time; collective over the crew.

    Args:
        source: the checkpoint.
        folder: the folder.
        world: shares the tensors.

    Raises:
        ConfigError: a tensor differs; the message names it.
    """
    wrong = []
    for group in assign_groups(folder.mapping, world):
        for theirs in group:
            stored = folder.location(theirs)
            kind = DTYPES[stored.dtype]
            chunks = split_into_chunks(theirs, stored.shape, kind)
            if not all(rows_equal(stored, rows, assemble_rows(source, folder.mapping, rows, kind)) for rows in chunks):
                wrong.append(theirs)
        source.clear_cache()
    raise_on_all_ranks(world, f"read again, these tensors differ: {format_list(wrong)}" if wrong else "")


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
