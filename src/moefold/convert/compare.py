"""Whether a checkpoint and a Hugging Face folder hold the same, tensor by tensor, byte by byte."""

import torch
from torch import Tensor

from moefold.checkpoint.stream import CheckpointSource, Chunk, chunks_of
from moefold.convert.draft import agree
from moefold.convert.piece import Plan
from moefold.convert.safetensors_file import DTYPES, Stored, read_part
from moefold.convert.weights import HfSource, WeightSource
from moefold.errors import some
from moefold.launch.crew import Crew


def assemble(source: WeightSource, plan: Plan, rows: Chunk, dtype: torch.dtype) -> Tensor:
    """Some rows of a tensor of theirs from the weights of a source, contiguous, in a type.

    In memory are these rows and what the source keeps of its last read of each parameter.
    """
    values = torch.empty((rows.stop - rows.start, *plan.their_shapes[rows.name][1:]), dtype=dtype)
    for whole_piece in plan.by_theirs[rows.name]:
        piece = whole_piece.in_their_rows(rows.start, rows.stop)
        if piece is None:
            continue
        ours = source.read(piece.ours, piece.our_region())
        sizes = [size for size, dim in zip(piece.size, piece.dims, strict=True) if dim is not None]
        first, *others = piece.their_region()
        box = (slice(first.start - rows.start, first.stop - rows.start, first.step), *others)
        values[box] = ours.reshape(sizes).permute(piece.reverse_order())
    return values


def same_rows(stored: Stored, rows: Chunk, values: Tensor) -> bool:
    """Whether some rows of a tensor in a file are these values, byte by byte."""
    found = read_rows(stored, rows)
    return found.dtype == values.dtype and torch.equal(_as_bytes(found), _as_bytes(values))


def read_rows(stored: Stored, rows: Chunk) -> Tensor:
    """Some rows of a tensor in a file."""
    return read_part(stored, (slice(rows.start, rows.stop, 1), *(slice(0, size, 1) for size in stored.shape[1:])))


def _as_bytes(values: Tensor) -> Tensor:
    return values.flatten().view(torch.uint8)


def work_order(plan: Plan) -> list[tuple[str, ...]]:
    """The tensors of theirs in groups that are made of the same parameters of ours, in the order of the model."""
    groups: dict[tuple[str, ...], list[str]] = {}
    rank = {name: i for i, name in enumerate(plan.our_shapes)}
    for theirs, pieces in plan.by_theirs.items():
        ours = tuple(sorted({piece.ours for piece in pieces}, key=rank.__getitem__))
        groups.setdefault(ours, []).append(theirs)
    return [tuple(groups[ours]) for ours in sorted(groups, key=lambda ours: rank[ours[0]])]


def share_groups(plan: Plan, crew: Crew) -> list[tuple[str, ...]]:
    """My part of `work_order`: neighbours, of about as many values as the others'."""
    groups = work_order(plan)
    sizes = [sum(_count(plan.their_shapes[name]) for name in group) for group in groups]
    total, done, mine = sum(sizes), 0, []
    for group, size in zip(groups, sizes, strict=True):
        if min(crew.size - 1, done * crew.size // max(1, total)) == crew.rank:
            mine.append(group)
        done += size
    return mine


def compare_with_folder(source: CheckpointSource, folder: HfSource, crew: Crew) -> None:
    """Read both sides and compare, some rows at a time; collective over the crew.

    Args:
        source: the checkpoint.
        folder: the folder.
        crew: shares the tensors.

    Raises:
        ConfigError: a tensor differs; the message names it.
    """
    wrong = []
    for group in share_groups(folder.plan, crew):
        for theirs in group:
            stored = folder.stored(theirs)
            kind = DTYPES[stored.dtype]
            chunks = chunks_of(theirs, stored.shape, kind)
            if not all(same_rows(stored, rows, assemble(source, folder.plan, rows, kind)) for rows in chunks):
                wrong.append(theirs)
        source.forget()
    agree(crew, f"read again, these tensors differ: {some(wrong)}" if wrong else "")


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
