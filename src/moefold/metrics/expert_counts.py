"""RUN_DIR/expert_counts.bin: how many copies each expert of each layer got, step by step. numpy alone.

An append-only file: one line of JSON that says which layers and how many experts, padded to a multiple of 64 bytes,
then records of equal length: the step as int64, then the counts as uint32 [layers, experts], all little-endian.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from moefold.bounded_read import open_regular, parse_json
from moefold.errors import ConfigError

COUNTS_FILE = "expert_counts.bin"
"""Name of the counts inside the run folder."""
FORMAT = "moefold-expert-counts-1"
ALIGNMENT = 64
MAX_HEADER_BYTES = 1 << 20
"""Of the first line: 100,000 layers have 700 KB."""
MAX_COUNTS = 1 << 24
"""Of a step: 1,000 layers with 16,384 experts."""
MAX_LOADS = 1 << 27
"""Steps times layers: 2 million steps of 61 layers; so many numbers of 8 bytes are in memory at once."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCounts:
    """The counts of a run, in the order they were written."""

    layers: tuple[int, ...]
    """Numbers of the MoE layers in the whole model, L of them."""
    steps: Array
    """int64 [N]."""
    counts: Array
    """Copies that chose each expert, before any was dropped, uint32 [N, L, E]."""


class ExpertCountsWriter:
    """Appends steps to RUN_DIR/expert_counts.bin. Made on one rank only.

    Opening it drops the steps past `resume_step` and a record that a kill has torn, as metrics.jsonl does; a file of
    other layers or experts, or one that cannot be read, is replaced.

    Args:
        run_dir: folder of the run.
        layers: numbers of the MoE layers.
        num_experts: E.
        resume_step: step of the checkpoint that the run continues from; 0 for a new run.
    """

    def __init__(self, run_dir: Path, layers: Sequence[int], num_experts: int, *, resume_step: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / COUNTS_FILE
        header = _encode_header(layers, num_experts)
        self._record_dtype = _make_record_dtype(len(layers), num_experts)
        truncate_expert_counts(run_dir, resume_step)
        if not path.exists() or not _starts_with(path, header):
            path.write_bytes(header)
        self._file = path.open("ab")

    def write(self, step: int, counts: Array) -> None:
        """Append the counts of a step, [L, E]; they are on their way to the disk when this returns."""
        record = np.zeros((), self._record_dtype)
        record["step"] = step
        record["counts"] = counts
        self._file.write(record.tobytes())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_expert_counts(run_dir: Path) -> ExpertCounts | None:
    """Read the counts of a run, a torn last record left out; None if the run wrote none. They stay on the disk.

    Raises:
        ConfigError: the file is not one of counts.
    """
    path = run_dir / COUNTS_FILE
    if not path.is_file():
        return None
    with open_regular(path) as file:
        header = _read_header(file.readline(MAX_HEADER_BYTES))
        if header is None:
            raise ConfigError(f"{path} is not a file of expert counts; remove it, or name another run")
        record = _make_record_dtype(len(header.layers), header.num_experts)
        start = file.tell()
        whole = (os.fstat(file.fileno()).st_size - start) // record.itemsize
    if whole * len(header.layers) > MAX_LOADS:
        raise ConfigError(
            f"{path} has {whole:,} steps of {len(header.layers)} layers, and at most {MAX_LOADS:,} loads are read; "
            "record fewer steps with metrics.expert_counts_every"
        )
    if not whole:
        empty = np.empty(0, record)
        return ExpertCounts(layers=header.layers, steps=empty["step"], counts=empty["counts"])
    records = np.memmap(path, record, mode="r", offset=start, shape=(whole,))
    steps = np.array(records["step"])
    if steps[0] < 0 or not (np.diff(steps) > 0).all():
        raise ConfigError(f"{path} is damaged: its steps do not ascend; remove it, or name another run")
    return ExpertCounts(layers=header.layers, steps=steps, counts=records["counts"])


def truncate_expert_counts(run_dir: Path, last_step: int) -> None:
    """Drop the records of a run past `last_step` and a torn one; a file that is not one of counts stays as it is."""
    path = run_dir / COUNTS_FILE
    if not path.is_file():
        return
    with path.open("r+b") as file:
        header = _read_header(file.readline(MAX_HEADER_BYTES))
        if header is None:
            return
        start = file.tell()
        record = _make_record_dtype(len(header.layers), header.num_experts)
        whole = (path.stat().st_size - start) // record.itemsize
        # Mapped: the counts of a long run take gigabytes, and its steps alone are read.
        steps = np.memmap(path, record, mode="r", offset=start, shape=(whole,))["step"] if whole else np.empty(0)
        past = np.flatnonzero(steps > last_step)
        kept = int(past[0]) if len(past) else whole
        file.truncate(start + kept * record.itemsize)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class _Header:
    layers: tuple[int, ...]
    num_experts: int


def _read_header(line: bytes) -> _Header | None:
    """What the first line of a file says; None if it is no file of counts."""
    try:
        header = parse_json(line)
        layers = header["layers"]
        num_experts = header["num_experts"]
        is_ours = header["format"] == FORMAT
    except (ValueError, KeyError, TypeError):
        return None
    if not is_ours or not isinstance(layers, list) or type(num_experts) is not int:
        return None
    are_layers = all(type(layer) is int and 0 <= layer < 2**31 for layer in layers)
    if not layers or not are_layers or not 0 < num_experts * len(layers) <= MAX_COUNTS:
        return None
    return _Header(tuple(layers), num_experts)


def _starts_with(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _encode_header(layers: Sequence[int], num_experts: int) -> bytes:
    text = json.dumps({"format": FORMAT, "layers": list(layers), "num_experts": num_experts})
    length = -(-(len(text) + 1) // ALIGNMENT) * ALIGNMENT
    return (text.ljust(length - 1) + "\n").encode("ascii")


def _make_record_dtype(num_layers: int, num_experts: int) -> np.dtype[Any]:
    return np.dtype([("step", "<i8"), ("counts", "<u4", (num_layers, num_experts))])
