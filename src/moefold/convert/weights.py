"""Weights by our names, wherever they are: a source gives any part of any parameter of a model."""

from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moefold.config.schema import Config, ModelConfig
from moefold.convert.families import Family, TensorRules
from moefold.convert.hf_folder import DUPLICATE_REASONS, HfFolder, find_duplicate_tensors, open_hf_folder
from moefold.convert.mtp import is_mtp_tensor
from moefold.convert.safetensors_file import DTYPES, TensorLocation, bytes_equal, read_part
from moefold.convert.tensor_mapping import Region, Shape, SliceMapping, StateDictMapping, build_mapping
from moefold.errors import ConfigError, format_list
from moefold.model.init import local_slice
from moefold.model.transformer import build_model

MTP_REASON = "multi-token prediction"
"""Why a tensor is passed over whose layer is not wanted."""


class WeightSource(Protocol):
    """Somewhere that holds the weights of a whole model."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Every parameter and buffer by its name in the whole model."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """How a tensor is stored."""
        ...

    def read(self, name: str, region: Region) -> Tensor:
        """The values of a region of a tensor, as they are stored, on the CPU."""
        ...

    def clear_cache(self) -> None:
        """Free what was kept for the next read."""
        ...


class HfSource:
    """The tensors of a Hugging Face folder as our parameters.

    Args:
        folder: the folder.
        leaves_out_mtp: pass over the layers of multi-token prediction behind the others (DeepSeek-V3).

    Attributes:
        model: that of the folder, without those layers if they are left out.
        ignored: the tensors of the folder that have no place here and need none, with the reason.

    Raises:
        ConfigError: a tensor of either side has no counterpart, or another shape; the message names it.
    """

    def __init__(self, folder: HfFolder, *, leaves_out_mtp: bool = False) -> None:
        self.folder = folder
        self.model = replace(folder.model, mtp_layers=0) if leaves_out_mtp else folder.model
        self.ignored = _find_ignored(folder, self.model, leaves_out_mtp)
        self.mapping, self.layout = _match_layout(folder, self.model, self.ignored.keys())
        self.shapes = self.mapping.shapes

    def dtype(self, name: str) -> torch.dtype:
        """The type in which the folder stores it."""
        return DTYPES[self.location(self.mapping.by_name[name][0].hf_name).dtype]

    def location(self, hf_name: str) -> TensorLocation:
        """Where a tensor of the folder is."""
        return self.folder.tensors[hf_name]

    def clear_cache(self) -> None:
        """Nothing is kept."""

    def read(self, name: str, region: Region) -> Tensor:
        """Read exactly the rows of the files that the region needs."""
        values = torch.empty([part.stop - part.start for part in region], dtype=self.dtype(name))
        for piece in self.mapping.by_name[name]:
            part = piece.intersect(region)
            if part is None:
                continue
            box = tuple(
                slice(a - r.start, a - r.start + n) for a, n, r in zip(part.start, part.size, region, strict=True)
            )
            theirs = read_part(self.location(part.hf_name), part.hf_region())
            values[box] = theirs.permute(part.permutation()).reshape(part.size)
        return values


def load_hf_weights(
    folder: Path, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
) -> None:
    """Fill this rank's shards of a model with the weights of a Hugging Face folder; no communication.

    Each rank reads the parts that it holds, and no others. For a model that is used, not trained: layers of
    multi-token prediction are passed over.

    Args:
        folder: config.json and safetensors files; its model must be the one that the parameters are of.
        parameters: by their names in the whole model: plain tensors, or DTensors under any mapping.
        buffers: the same, for what has no gradient.

    Raises:
        ConfigError: the folder cannot be read, or holds another model.
    """
    load_shards(HfSource(open_hf_folder(folder), leaves_out_mtp=True), {**parameters, **(buffers or {})}, str(folder))


@torch.no_grad()
def load_shards(source: WeightSource, tensors: Mapping[str, Tensor], source_name: str) -> None:
    """Copy into this rank's shards what a source holds of them; no communication.

    Raises:
        ConfigError: the source lacks a tensor, or has another shape of it.
    """
    faults = [
        f"{name} of shape {list(tensor.shape)}, it has {list(source.shapes[name]) if name in source.shapes else 'none'}"
        for name, tensor in tensors.items()
        if source.shapes.get(name) != tuple(tensor.shape)
    ]
    if faults:
        raise ConfigError(f"{source_name!r} is of another model: it lacks {format_list(faults)}")
    for name, tensor in tensors.items():
        values, starts = local_slice(tensor)
        if values.numel():
            region = tuple(slice(a, a + n) for a, n in zip(starts, values.shape, strict=True))
            values.copy_(source.read(name, region))
            source.clear_cache()


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every parameter and buffer of a model, by name."""
    with torch.device("meta"):
        whole_model = build_model(Config(model=model))
    tensors = {**dict(whole_model.named_parameters()), **dict(whole_model.named_buffers())}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def family_mapping(model: ModelConfig, rules: TensorRules, family: Family) -> StateDictMapping:
    """Where each parameter of a model is in a folder of a family.

    Raises:
        ConfigError: the family has no place for a parameter.
    """
    shapes = parameter_shapes(model)
    pieces: list[SliceMapping] = []
    homeless = []
    for name, shape in shapes.items():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        row = rules.get(name.replace(f"layers.{layer}.", "layers.{l}.", 1) if layer else name)
        if row is None:
            homeless.append(name)
        else:
            pieces += row.slices(name, shape, layer, model)
    if homeless:
        raise ConfigError(f"family {family.name} has no place for {format_list(homeless)}")
    return build_mapping(pieces, shapes)


def _find_ignored(folder: HfFolder, model: ModelConfig, leaves_out_mtp: bool) -> dict[str, str]:
    """The tensors of a folder that need no place, with the reason."""
    passed, echoes = {}, find_duplicate_tensors(model)
    for name, stored in folder.tensors.items():
        original = folder.tensors.get(echoes.get(name, ""))
        if folder.family.is_ignored(name):
            passed[name] = "computed, not stored"
        elif leaves_out_mtp and folder.family.has_mtp and is_mtp_tensor(name, model.num_layers):
            passed[name] = MTP_REASON
        elif original is not None and bytes_equal(stored, original):
            passed[name] = DUPLICATE_REASONS[echoes[name]]
    return passed


def _match_layout(folder: HfFolder, model: ModelConfig, ignored: Set[str]) -> tuple[StateDictMapping, int]:
    """The plan of the layout that the folder has, and its number; refuses a folder that differs from all."""
    found = {name: stored for name, stored in folder.tensors.items() if name not in ignored}
    _check_counts(folder, model)
    try:
        plans = [family_mapping(model, table, folder.family) for table in folder.family.layouts]
    except RuntimeError as error:
        # What torch says of sizes whose product is no size.
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{str(folder.path)!r}: config.json means tensors that cannot be: {reason}") from None
    plan = min(plans, key=lambda plan: len(plan.hf_shapes.keys() ^ found.keys()))
    layout = plans.index(plan)
    faults = [f"tensor {name} is missing" for name in sorted(plan.hf_shapes.keys() - found.keys())]
    faults += [_unmapped_reason(name, folder, model) for name in sorted(found.keys() - plan.hf_shapes.keys())]
    for name, shape in plan.hf_shapes.items():
        if name in found and found[name].shape != shape:
            faults.append(f"tensor {name} has shape {list(found[name].shape)}, config.json means {list(shape)}")
    for name, parts in plan.by_name.items():
        kinds = {found[piece.hf_name].dtype for piece in parts if piece.hf_name in found}
        if len(kinds) > 1:
            faults.append(f"the parts of {name} have different types: {', '.join(sorted(kinds))}")
    if faults:
        raise ConfigError(f"{str(folder.path)!r}: {format_list(faults)}")
    return plan, layout


def _unmapped_reason(name: str, folder: HfFolder, model: ModelConfig) -> str:
    """What is wrong with a tensor of a folder that has no place in the model."""
    if original := find_duplicate_tensors(model).get(name):
        return f"tensor {name} should be {original} again, and differs"
    if folder.family.has_mtp and is_mtp_tensor(name, model.num_layers + model.mtp_layers):
        return (
            f"tensor {name} is of multi-token prediction, of which config.json counts num_nextn_predict_layers="
            f"{model.mtp_layers}; mend that, or import with --without-mtp to leave such layers out"
        )
    return f"tensor {name} has no place in this {folder.family.name} model"


def _check_counts(folder: HfFolder, model: ModelConfig) -> None:
    """Refuse numbers of config.json that the tensors cannot come to, before a list of them fills the memory."""
    tensors = len(folder.tensors)
    most_experts = max((tensors, *(size for stored in folder.tensors.values() for size in stored.shape)))
    experts = model.num_experts if "M" in model.layer_kinds else 0
    for what, count, most in (("layers", len(model.all_layer_kinds), tensors), ("experts", experts, most_experts)):
        if count > most:
            raise ConfigError(f"{str(folder.path)!r}: config.json means {count} {what}, too many for {tensors} tensors")
