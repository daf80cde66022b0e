"""Weights of a model in training for rollouts by vLLM: written again and again to one Hugging Face folder."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from moefold.checkpoint.streaming_io import split_into_chunks
from moefold.comm.groups import World, current_world, raise_on_all_ranks
from moefold.convert.families.hf_config import QUANTIZATION_KEY
from moefold.convert.families.known_keys import ALL_KEYS
from moefold.convert.families.mtp import INDEX_FILE
from moefold.convert.families.tensor_mapping import StateDictMapping
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.hf_shards import TensorSpecs, write_index
from moefold.convert.safetensors_file import DTYPES, FileWriter, TensorLocation, bytes_of, create_file, plan_file_layout
from moefold.convert.weight_sources import HfSource, assemble_rows, group_by_parameters
from moefold.errors import ConfigError
from moefold.message_text import Problem, format_list
from moefold.parallel.gathered_weights import GatheredWeights
from moefold.parallel.parallel_model import ParallelModel

WEIGHTS_DIR = "rollout_weights"
"""Folder of the written weights, inside the Hugging Face folder with their layout."""


@dataclass(frozen=True)
class _Layout:
    """Tensors to write: names, dtypes and files are as in the original folder."""

    mapping: StateDictMapping
    files: Mapping[str, TensorSpecs]


class RolloutWeightWriter:
    """Writer of a model's weights to `folder`/rollout_weights. Rank 0 writes some rows of a tensor at a time.

    The tensors have the names, dtypes and files of the original folder, so a program that has loaded it can load them.
    Constructor and `write` are collective over all ranks. Only rank 0 reads and writes files. Both raise ConfigError on
    all ranks if rank 0 cannot write. The constructor also refuses a folder of another model, quantised or in float16.
    """

    def __init__(self, model: ParallelModel, folder: Path) -> None:
        self._source = GatheredWeights(model)
        self._world: World = current_world()
        self.out = folder / WEIGHTS_DIR
        layout = None
        reason = ""
        self._locations: dict[str, TensorLocation] = {}
        if self._world.is_rank0:
            try:
                layout = _read_layout(folder, self._source)
                self._create_files(folder, layout)
            except ConfigError as error:
                reason = str(error)
            except OSError as error:
                reason = f"{str(self.out)!r} cannot be written: {error.strerror or error}"
        raise_on_all_ranks(self._world, reason)
        first_layout = self._world.all_gather_object(layout)[0]
        assert isinstance(first_layout, _Layout)
        self._mapping = first_layout.mapping
        self._dtypes = {name: dtype for specs in first_layout.files.values() for name, (dtype, _) in specs.items()}

    @torch.no_grad()
    def write(self) -> None:
        """Write the current weights, between two training steps."""
        self._source.refresh()
        reason = ""
        with FileWriter() as writer:
            for group in group_by_parameters(self._mapping):
                for name in group:
                    # The other ranks continue to send after a failure of rank 0, so rank 0 continues to receive.
                    failure = self._write_tensor(writer, name)
                    reason = reason or failure
        raise_on_all_ranks(self._world, reason)

    def _write_tensor(self, writer: FileWriter, name: str) -> str:
        """Write a tensor, and return the reason if rank 0 cannot. It is collective, even after a failure."""
        dtype = DTYPES[self._dtypes[name]]
        offset = 0
        reason = ""
        for chunk in split_into_chunks(name, self._mapping.hf_shapes[name], dtype):
            values = assemble_rows(self._source, self._mapping, chunk, dtype)
            if not self._world.is_rank0 or reason:
                continue
            data = bytes_of(values)
            try:
                writer.write(self._locations[name], data, offset)
            except OSError as error:
                reason = f"{str(self.out)!r} cannot be written: {error.strerror or error}"
            offset += len(data)
        return reason

    def _create_files(self, folder: Path, layout: _Layout) -> None:
        """Create the files at their full size. Files of an earlier run are replaced."""
        self.out.mkdir(exist_ok=True)
        for file in (*self.out.glob("*.safetensors"), self.out / INDEX_FILE):
            file.unlink(missing_ok=True)
        layouts = {name: plan_file_layout(self.out / name, tensors) for name, tensors in layout.files.items()}
        for name, file_layout in layouts.items():
            create_file(self.out / name, file_layout)
            self._locations |= file_layout.tensors
        write_index(self.out, layouts, None)
        shutil.copyfile(folder / "config.json", self.out / "config.json")


def _read_layout(folder: Path, source: GatheredWeights) -> _Layout:
    """Return the tensors of a folder with the model of `source`. Refuse other models, quantised weights and float16."""
    opened = open_hf_folder(folder, ALL_KEYS)
    if opened.hf_config.get(QUANTIZATION_KEY) is not None:
        raise ConfigError(Problem("rollout.folder", str(folder), "is quantised", "name one in bfloat16 or float32"))
    hf = HfSource(opened, leaves_out_mtp=True)
    names = hf.mapping.shapes.keys() | source.shapes.keys()
    if wrong := sorted(name for name in names if hf.mapping.shapes.get(name) != source.shapes.get(name)):
        rule = f"is of another model than the recipe, which differs in {format_list(wrong)}"
        raise ConfigError(Problem("rollout.folder", str(folder), rule, "name a folder of the model in training"))
    files: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name in (name for group in group_by_parameters(hf.mapping) for name in group):
        stored = hf.location(name)
        if stored.dtype == "F16":
            rule = "is in float16, which may not hold trained weights"
            way_out = "name one in bfloat16 or float32 (moefold export --dtype)"
            raise ConfigError(Problem("rollout.folder", str(folder), rule, way_out))
        files.setdefault(stored.file.name, {})[name] = (stored.dtype, hf.mapping.hf_shapes[name])
    return _Layout(hf.mapping, files)
