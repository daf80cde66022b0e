"""File of expert counts of a run, RUN_DIR/expert_counts.bin.

It is append-only: one line of JSON with layers and number of experts, padded to a multiple of 64 bytes, then records of
equal length. A record has the step as int64 and the counts as uint32 [layers, experts] (little-endian).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from moefold.bounded_read import open_regular, parse_json
from moefold.errors import ConfigError

COUNTS_FILE = "expert_counts.bin"
"""Name of the counts file in the run folder."""
FORMAT = "moefold-expert-counts-1"
ALIGNMENT = 64
MAX_HEADER_BYTES = 1 << 20
"""Size limit of the first line: 100,000 layers take 700 KB."""
MAX_COUNTS = 1 << 24
"""Limit of the counts of one step: 1,000 layers with 16,384 experts."""
MAX_LOADS = 1 << 27
"""Limit of steps * layers: 2 million steps of 61 layers. The loads take 8 bytes each in memory."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCounts:
    """Expert counts of a run, in the order of writing."""

    layers: tuple[int, ...]
    """Indices of the L MoE layers in the whole model."""
    steps: Array
    """Step numbers, int64 [N]."""
    counts: Array
    """Tokens routed to each expert, before drops, uint32 [N, L, E]."""


class ExpertCountsWriter:
    """Writer that appends the counts of each step to RUN_DIR/expert_counts.bin, used on one rank only.

    Opening removes the steps after `resume_step` and a truncated last record, as for metrics.jsonl. A file that is
    invalid, or has other layers or experts, is replaced.

    Args:
        layers: indices of the MoE layers.
        num_experts: E.
        resume_step: step of the checkpoint that the run continues from, or 0 for a new run.
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
        """Append the counts of a step, [L, E], and flush to the operating system."""
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

    def __exit__(self, *error: object) -> None:
        self.close()


def read_expert_counts(run_dir: Path) -> ExpertCounts | None:
    """Memory-map the counts of a run without a truncated last record, or None if there are none."""
    path = run_dir / COUNTS_FILE
    if not path.is_file():
        return None
    with open_regular(path) as file:
        header = read_counts_header(file)
        if header is None:
            raise ConfigError(f"{path} is not a file of expert counts; remove it, or name another run")
        record = header.record_dtype
        start = file.tell()
        num_records = (os.fstat(file.fileno()).st_size - start) // record.itemsize
    if num_records * len(header.layers) > MAX_LOADS:
        raise ConfigError(
            f"{path} has {num_records:,} steps of {len(header.layers)} layers, and at most {MAX_LOADS:,} loads are "
            "read; record fewer steps with metrics.expert_counts_every"
        )
    if not num_records:
        empty = np.empty(0, record)
        return ExpertCounts(layers=header.layers, steps=empty["step"], counts=empty["counts"])
    records = np.memmap(path, record, mode="r", offset=start, shape=(num_records,))
    steps = np.array(records["step"])
    if steps[0] < 0 or not (np.diff(steps) > 0).all():
        raise ConfigError(f"{path} is damaged: its steps do not ascend; remove it, or name another run")
    return ExpertCounts(layers=header.layers, steps=steps, counts=records["counts"])


def truncate_expert_counts(run_dir: Path, last_step: int) -> None:
    """Remove the records after `last_step` and a truncated record. An invalid file is unchanged."""
    path = run_dir / COUNTS_FILE
    if not path.is_file():
        return
    with path.open("r+b") as file:
        header = read_counts_header(file)
        if header is None:
            return
        start = file.tell()
        record = header.record_dtype
        num_records = (path.stat().st_size - start) // record.itemsize
        # Memory-mapped: the counts of a long run take gigabytes, and only the steps are read.
        steps = (
            np.memmap(path, record, mode="r", offset=start, shape=(num_records,))["step"]
            if num_records
            else np.empty(0)
        )
        past = np.flatnonzero(steps > last_step)
        num_kept = int(past[0]) if len(past) else num_records
        file.truncate(start + num_kept * record.itemsize)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class CountsHeader:
    """First line of a file of expert counts."""

    layers: tuple[int, ...]
    """Indices of the L MoE layers in the whole model."""
    num_experts: int
    """E."""

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """Dtype of a record: fields `step` and `counts` [L, E]."""
        return _make_record_dtype(len(self.layers), self.num_experts)


def read_counts_header(file: BinaryIO) -> CountsHeader | None:
    """Read the first line of an open file, up to its first record, or None if it is not an expert-counts file."""
    line = file.readline(MAX_HEADER_BYTES)
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
    return CountsHeader(tuple(layers), num_experts)


def _starts_with(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _encode_header(layers: Sequence[int], num_experts: int) -> bytes:
    text = json.dumps({"format": FORMAT, "layers": list(layers), "num_experts": num_experts})
    length = -(-(len(text) + 1) // ALIGNMENT) * ALIGNMENT
    return (text.ljust(length - 1) + "\n").encode("ascii")


def _make_record_dtype(num_layers: int, num_experts: int) -> np.dtype[Any]:
    return np.dtype([("step", "<i8"), ("counts", "<u4", (num_layers, num_experts))])
