"""Routing traces in RUN_DIR/routing: the expert choices of traced steps, independent of the mapping. numpy only.

`trace.json` holds the traced layers and the number of experts. `step-000001.npy` holds the choices of one step, [traced
layer, sample of the global batch, position, choice]. The best choice is first, and the dtype is the smallest of uint8,
int16 and int32 for an expert index:

    numpy.load("RUN_DIR/routing/step-000001.npy")[layer, sample, position]
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.bounded_read import read_json
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import TRACE_FOLDER
from moefold.config.sections.train import TrainConfig
from moefold.data.shard_reader import ShardReader, TokenArraySpec, map_npy
from moefold.errors import ConfigError

MANIFEST = "trace.json"
FORMAT = "moefold-routing-1"
MAX_MANIFEST_BYTES = 1 << 20
"""A manifest of 100,000 layers has 700 KB."""

ExpertIndices = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceShape:
    """Dimensions shared by all steps of a trace."""

    layers: tuple[int, ...]
    """Indices of the traced MoE layers in the whole model, ascending."""
    num_experts: int
    """Choices of the router: E, and the zero-computation experts."""
    top_k: int
    """K."""
    global_batch_size: int
    """Samples per step."""
    seq_len: int
    """S."""
    zero_experts: int = 0
    """Zero-computation experts, the last of the `num_experts` choices."""

    @property
    def num_routed_experts(self) -> int:
        """Experts with computation, E."""
        return self.num_experts - self.zero_experts

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of an expert index in the files."""
        return expert_index_dtype(self.num_experts)

    @property
    def file_shape(self) -> tuple[int, int, int, int]:
        """Shape of the array of a step."""
        return len(self.layers), self.global_batch_size, self.seq_len, self.top_k

    def check_expert_indices(self, indices: ExpertIndices, step: int, key: str = "moe.replay") -> ExpertIndices:
        """Return a contiguous copy of expert choices. Raises ConfigError if an index is out of range."""
        copy = np.ascontiguousarray(indices)
        if copy.size and not 0 <= copy.min() <= copy.max() < self.num_experts:
            expert = copy.max() if copy.max() >= self.num_experts else copy.min()
            raise ConfigError(
                f"{key} names expert {expert} in step {step}, and there are {self.num_experts}; "
                "its files are damaged: trace the run again"
            )
        return copy

    def count_experts(self, indices: ExpertIndices, step: int) -> np.ndarray:
        """Return the tokens of each expert, [E]. Zero-computation experts have no computation to balance."""
        counts = np.bincount(self.check_expert_indices(indices, step, "the trace").ravel(), minlength=self.num_experts)
        return counts[: self.num_routed_experts]


def trace_shape(model: ModelConfig, train: TrainConfig) -> TraceShape:
    """Return the shape of the trace that a run writes."""
    moe = model.routed
    return TraceShape(
        layers=model.moe_layer_numbers,
        num_experts=moe.num_choices if moe else 0,
        top_k=moe.top_k if moe else 0,
        global_batch_size=train.global_batch_size,
        seq_len=train.seq_len,
        zero_experts=moe.zero_experts if moe else 0,
    )


def expert_index_dtype(num_experts: int) -> np.dtype[Any]:
    """Return the smallest of uint8, int16 and int32 that can hold 0 to num_experts - 1."""
    for name in ("uint8", "int16"):
        if num_experts - 1 <= np.iinfo(name).max:
            return np.dtype(name)
    return np.dtype("int32")


class RoutingTraceWriter:
    """Writer of a trace into a run folder, one file per step. It exists on one rank only.

    The constructor deletes the steps after `resume_step`, which a resumed run repeats. It deletes all steps,
    `num_dropped` in number, if they have another shape, for example after a change of the batch size.
    """

    def __init__(self, run_dir: Path, shape: TraceShape, *, resume_step: int = 0) -> None:
        self._shape = shape
        self._folder = run_dir / TRACE_FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        truncate_trace(run_dir, resume_step)
        fits = _manifest_matches(self._folder / MANIFEST, shape)
        self.num_dropped = 0 if fits else len(traced_steps(self._folder))
        if not fits:
            truncate_trace(run_dir, 0)
        text = json.dumps({"format": FORMAT, **asdict(shape)}) + "\n"
        _write_atomically(self._folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    def write(self, step: int, layers: Iterable[ExpertIndices]) -> None:
        """Write a step (1-based) with one layer at a time in memory: [G, S, K] of the trace's dtype each, in order."""
        _write_atomically(step_file(self._folder, step), lambda path: self._write_layers(path, layers))

    def _write_layers(self, path: Path, layers: Iterable[ExpertIndices]) -> None:
        # Not memory-mapped: on a full disk a write raises an error, while a mapped page kills the process (SIGBUS).
        header = {"descr": self._shape.dtype.str, "fortran_order": False, "shape": self._shape.file_shape}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for choices in layers:
                file.write(np.ascontiguousarray(choices, self._shape.dtype).tobytes())


class TracedStep:
    """The choices of one step of a trace, read from its file on demand."""

    def __init__(self, path: Path, array: "np.memmap[Any, np.dtype[Any]]") -> None:
        self._shape = array.shape
        self._reader = ShardReader(TokenArraySpec(path, str(path), array.offset, array.dtype, array.size))

    def __iter__(self) -> Iterator[ExpertIndices]:
        """Iterate over the choices of the traced layers, [G, S, K], one layer in memory at a time."""
        num_layers, num_samples, *_ = self._shape
        return (self.samples(layer, 0, num_samples) for layer in range(num_layers))

    def samples(self, layer: int, first: int, count: int) -> ExpertIndices:
        """Return the choices of some samples in a traced layer (counted from 0), [count, S, K]."""
        _, num_samples, seq_len, top_k = self._shape
        size = seq_len * top_k
        start = (layer * num_samples + first) * size
        return self._reader.read(start, start + count * size).reshape(count, seq_len, top_k)


class RoutingTrace:
    """An existing trace, opened for reading. Raises ConfigError if there is none, or its manifest cannot be read.

    Args:
        folder: RUN_DIR/routing, or RUN_DIR.
        key: name of the folder in messages.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._key = f"{key}={str(folder)!r}"
        self.folder = folder / TRACE_FOLDER if (folder / TRACE_FOLDER / MANIFEST).is_file() else folder
        path = self.folder / MANIFEST
        if not path.is_file():
            fault = "holds no routing trace" if folder.is_dir() else "does not exist"
            raise ConfigError(
                f"{self._key} {fault}: {MANIFEST} is missing; name the folder RUN_DIR/{TRACE_FOLDER} of a run with "
                "moe.trace_every"
            )
        try:
            self.shape = _read_manifest(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._key} has a {MANIFEST} that is not a {FORMAT} manifest: {error}") from None
        self.steps = traced_steps(self.folder)

    def step(self, step: int) -> TracedStep:
        """Open the choices of a step. Raises ConfigError if its file is missing or differs from the manifest."""
        path = step_file(self.folder, step)
        if not path.is_file():
            raise ConfigError(f"{self._key} has no step {step}; {self._describe_steps()}")
        try:
            choices = map_npy(path)
        except ValueError as error:
            raise ConfigError(f"{self._key}: {path.name} cannot be read: {error}") from None
        if (choices.shape, choices.dtype) != (self.shape.file_shape, self.shape.dtype):
            raise ConfigError(
                f"{self._key}: {path.name} holds {choices.dtype} {choices.shape}, but its manifest requires "
                f"{self.shape.dtype} {self.shape.file_shape}; trace the run again"
            )
        if not isinstance(choices, np.memmap) or not choices.flags.c_contiguous:
            raise ConfigError(f"{self._key}: {path.name} is not a C-contiguous array; trace the run again")
        return TracedStep(path, choices)

    def check_replay(self, run: TraceShape, steps: int) -> None:
        """Check that a run of this shape can replay steps 1 to `steps`.

        Raises:
            ConfigError: one line per difference, or the steps that are missing or unreadable.
        """
        keys = {
            "layers": "the MoE layers",
            "num_routed_experts": "model.ffn.moe.num_experts",
            "zero_experts": "model.ffn.moe.zero_experts",
            "top_k": "model.ffn.moe.top_k",
            "global_batch_size": "train.global_batch_size",
            "seq_len": "train.seq_len",
        }
        faults = [
            f"{self._key} was traced with {key}={_abbreviate(recorded)}, and this run has {_abbreviate(current)}; "
            "replay needs the same model and batch"
            for name, key in keys.items()
            if (recorded := getattr(self.shape, name)) != (current := getattr(run, name))
        ]
        if faults:
            raise ConfigError("\n".join(faults))
        absent = sorted(set(range(1, steps + 1)) - set(self.steps))
        if absent:
            raise ConfigError(
                f"{self._key} must hold every step from 1 to run.steps={steps}, and step {absent[0]} is missing; "
                f"{self._describe_steps()}; choose run.steps={max(1, absent[0] - 1)} or less, or trace with "
                "moe.trace_every=1"
            )
        for step in range(1, steps + 1):
            self.step(step)

    def check_content(self, steps: int) -> None:
        """Read every choice of steps 1 to `steps` once, a layer at a time.

        Raises:
            ConfigError: an index is not an expert, or a token has an expert twice.
        """
        for step in range(1, steps + 1):
            for number, choices in zip(self.shape.layers, self.step(step), strict=True):
                ordered = self.shape.check_expert_indices(choices, step, self._key).copy()
                ordered.sort(axis=-1)
                repeats = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
                if repeats.any():
                    sample, position = np.argwhere(repeats)[0]
                    raise ConfigError(
                        f"{self._key} sends position {position} of sample {sample} twice to one expert in step {step}, "
                        f"layer {number}: the {self.shape.top_k} choices of a token must differ; trace the run again"
                    )

    def _describe_steps(self) -> str:
        if not self.steps:
            return "it holds no step"
        return f"it holds {len(self.steps)} steps, {self.steps[0]} to {self.steps[-1]}"


def truncate_trace(run_dir: Path, last_step: int) -> None:
    """Delete the traced steps of a run after `last_step`, and temporary files of killed runs."""
    folder = run_dir / TRACE_FOLDER
    for draft in folder.glob(".*.tmp"):
        draft.unlink()
    for step in traced_steps(folder):
        if step > last_step:
            step_file(folder, step).unlink()


def traced_steps(folder: Path) -> list[int]:
    """Return the steps of a trace folder, ascending."""
    names = (re.fullmatch(r"step-(\d{6,})\.npy", path.name) for path in folder.glob("step-*.npy"))
    return sorted(int(name[1]) for name in names if name)


def step_file(folder: Path, step: int) -> Path:
    """Return the file of a step in a trace folder."""
    return folder / f"step-{step:06d}.npy"


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file in the same folder and rename it: a kill leaves the old or the new file."""
    draft = path.with_name(f".{path.name}.tmp")
    write(draft)
    draft.replace(path)


def _read_manifest(path: Path) -> TraceShape:
    record = read_json(path, MAX_MANIFEST_BYTES)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError("its format is another one")
    sizes = {name: record[name] for name in ("num_experts", "top_k", "global_batch_size", "seq_len")}
    layers = record["layers"]
    if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer < 2**31 for layer in layers):
        raise ValueError("its layers are not a list of numbers")
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size < 2**31:
            raise ValueError(f"its {name} is not a number from 1 to {2**31 - 1}")
    zero_experts = record.get("zero_experts", 0)
    if type(zero_experts) is not int or not 0 <= zero_experts < sizes["num_experts"]:
        raise ValueError("its zero_experts is not a number below num_experts")
    return TraceShape(layers=tuple(layers), zero_experts=zero_experts, **sizes)


def _manifest_matches(manifest: Path, shape: TraceShape) -> bool:
    try:
        return _read_manifest(manifest) == shape
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _abbreviate(value: int | Sequence[int]) -> str:
    if isinstance(value, int):
        return str(value)
    return str(list(value)) if len(value) <= 8 else f"[{value[0]}, {value[1]}, ..., {value[-1]}] ({len(value)})"
