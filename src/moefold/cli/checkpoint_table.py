"""Checkpoints as tables in the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from moefold.checkpoint.folder import CheckpointMeta
from moefold.printable import printable

if TYPE_CHECKING:
    from moefold.checkpoint.content import StoredTensor

DEGREES = ("tp", "cp", "pp", "ep", "etp")


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint of a folder."""

    path: Path
    meta: CheckpointMeta | None
    """None where it cannot be read."""
    size_bytes: int
    faults: list[str]


def print_checkpoints(console: Console, folder: Path, rows: Sequence[CheckpointRow]) -> None:
    """Print the checkpoints of a folder, oldest first, and what is wrong with their files."""
    if not rows:
        text = (
            f"{folder} holds no checkpoint (a run saves with checkpoint.at_end=true, the default, or checkpoint.every)"
        )
        console.print(printable(text), soft_wrap=True)
        return
    table = Table("checkpoint", "tokens", "samples", "MiB", "written by", "files", box=None, pad_edge=False)
    for row in rows:
        state = "; ".join(row.faults) if row.faults else "there"
        size_mib = f"{row.size_bytes / 2**20:,.1f}"
        said = ("?", "?") if row.meta is None else (f"{row.meta.tokens:,}", f"{row.meta.samples:,}")
        writer = "?" if row.meta is None else describe_mapping(row.meta)
        table.add_row(*map(printable, (row.path.name, *said, size_mib, writer, state)))
    console.print(table)


def print_content(
    console: Console, path: Path, meta: CheckpointMeta, tensors: "Sequence[StoredTensor]", *, lists_tensors: bool
) -> None:
    """Print what a checkpoint holds."""
    console.print(
        printable(f"{path}: after step {meta.step:,}, {meta.samples:,} samples and {meta.tokens:,} tokens"),
        soft_wrap=True,
    )
    console.print(printable(f"written by {describe_mapping(meta)}"))
    model = {
        key: meta.model.get(key, "?") for key in ("num_layers", "hidden_size", "num_experts", "top_k", "vocab_size")
    }
    console.print(printable("model: " + ", ".join(f"{key} {value}" for key, value in model.items())))
    table = Table("tensors", "shape", "type", "MiB", "parts", box=None, pad_edge=False)
    for name, part in _group_by_part(tensors).items():
        size_mib = sum(tensor.size_bytes for tensor in part) / 2**20
        table.add_row(
            printable(f"{name}: {len(part)}"),
            "",
            "",
            f"{size_mib:,.1f}",
            str(sum(tensor.num_chunks for tensor in part)),
        )
        for tensor in part if lists_tensors else ():
            shape = "x".join(map(str, tensor.shape))
            table.add_row(
                printable(f"  {tensor.name}"),
                shape,
                tensor.dtype,
                f"{tensor.size_bytes / 2**20:,.2f}",
                str(tensor.num_chunks),
            )
    console.print(table)


def describe_mapping(meta: CheckpointMeta) -> str:
    """The mapping that wrote a checkpoint, in one line."""
    found = meta.parallel
    if not found:
        return "no training run"
    degrees = " ".join(f"{name}={found[name]}" for name in DEGREES if found.get(name, 1) != 1)
    return f"{found.get('world_size', 1)} rank{'s' if found.get('world_size', 1) != 1 else ''} {degrees}".rstrip()


def _group_by_part(tensors: "Sequence[StoredTensor]") -> "dict[str, list[StoredTensor]]":
    parts: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.name.split(".", 1)[0], []).append(tensor)
    return parts
