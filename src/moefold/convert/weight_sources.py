"""Weight sources: any region of any parameter, from a checkpoint or a Hugging Face folder, and their comparison."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from moefold.checkpoint.adapter_settings import check_base
from moefold.checkpoint.entries import OPTIONAL_BUFFER_SUFFIX
from moefold.checkpoint.hashed_files import OrderedHashes
from moefold.checkpoint.integrity import check_integrity
from moefold.checkpoint.streaming_io import CheckpointSource, ReusedMemory, TensorChunk, split_into_chunks
from moefold.comm.groups import World, current_world, raise_on_all_ranks
from moefold.comm.sharded_tensor import local_slice, region_of
from moefold.config.model import ModelConfig
from moefold.convert.families.family import Family, TensorRules
from moefold.convert.families.hf_config import is_hf_folder, multimodal_folder
from moefold.convert.families.known_keys import ALL_KEYS
from moefold.convert.families.mtp import is_mtp_tensor, uncounted_tensors
from moefold.convert.families.tensor_mapping import Region, Shape, SliceMapping, StateDictMapping, build_mapping
from moefold.convert.hf_folder import HfFolder, open_hf_folder
from moefold.convert.hf_sidecar_files import DUPLICATE_REASONS, find_duplicate_tensors
from moefold.convert.preflight import resolve_weights_folder
from moefold.convert.safetensors_file import DTYPES, TensorLocation, bytes_equal, bytes_of
from moefold.cost.adapter_spec import adapter_names
from moefold.cost.layer_spec import model_weights
from moefold.errors import ConfigError
from moefold.message_text import first_line, format_list
from moefold.model.lora import product_region
from moefold.remote_path import to_path

Item = TypeVar("Item")
MTP_REASON = "multi-token prediction"
"""Reason to ignore a tensor of an omitted MTP layer."""


class WeightSource(Protocol):
    """Source of the weights of a whole model."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every parameter and buffer, by its name in the whole model."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        ...

    def read(self, name: str, region: Region) -> Tensor:
        """Return the values of a region of a tensor, in the stored dtype, on the CPU."""
        ...

    def clear_cache(self) -> None:
        """Free the cache of previous reads."""
        ...


class HfSource:
    """Weight source of a Hugging Face folder, by our names.

    Args:
        leaves_out_mtp: ignore the MTP layers after the other layers (DeepSeek-V3).

    Attributes:
        model: the model of the folder, without MTP layers if they are ignored.
        ignored: tensors of the folder that need no mapping, with the reason.
        hashes: receives the bytes of tensors while they are read, if set.
        memory: memory for the tensors that `read` returns, if set: each is valid until the next read.

    Raises:
        ConfigError: a tensor has no counterpart, or one with another shape. The message names it.
    """

    def __init__(self, folder: HfFolder, *, leaves_out_mtp: bool = False) -> None:
        self.folder = folder
        self.model = replace(folder.model, mtp_layers=0) if leaves_out_mtp else folder.model
        self.ignored = _find_ignored(folder, self.model, leaves_out_mtp)
        self.mapping, self.layout_index = _match_layout(folder, self.model, self.ignored.keys())
        self.shapes = self.mapping.shapes
        self.hashes: TensorHashes | None = None
        self.memory: ReusedMemory | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter in the folder."""
        return DTYPES[self.location(self.mapping.by_name[name][0].hf_name).dtype]

    def location(self, hf_name: str) -> TensorLocation:
        """Return the location of a tensor of the folder."""
        return self.folder.tensors[hf_name]

    def clear_cache(self) -> None:
        """Do nothing: this source has no cache."""

    def read(self, name: str, region: Region) -> Tensor:
        """Read exactly the rows of the files that the region needs."""
        shape = [span.stop - span.start for span in region]
        values = (self.memory or ReusedMemory()).empty(shape, self.dtype(name))
        for piece in self.mapping.by_name[name]:
            overlap = piece.intersect(region)
            if overlap is None:
                continue
            box = tuple(
                slice(a - r.start, a - r.start + n) for a, n, r in zip(overlap.start, overlap.size, region, strict=True)
            )
            on_rows = None if self.hashes is None else partial(self.hashes.add_rows, overlap.hf_name)
            hf_values = self.location(overlap.hf_name).read(overlap.hf_region(), on_rows)
            check_finite(hf_values, overlap.hf_name, self.folder.path)
            copy_permuted(values[box], hf_values.permute(overlap.permutation()))
        return values


def check_finite(
    values: Tensor, name: str, folder: Path, way_out: str = "download or convert the folder again"
) -> None:
    """Refuse NaN and infinity among values of a tensor of a folder or checkpoint."""
    # The sum costs less than a thirtieth of a test of each value. It is not finite either where finite values overflow.
    if not torch.isfinite(values.sum()) and (wrong := int((~torch.isfinite(values)).sum())):
        raise ConfigError(
            f"{str(folder)!r}: tensor {name} has NaN or infinite values ({wrong} of {values.numel()} that were read): "
            f"no output of this model can be right; {way_out}"
        )


def load_hf_weights(
    folder: Path, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
) -> None:
    """Fill this rank's shards of a model with the weights of a Hugging Face folder. It does not communicate.

    Each rank reads only its own shards. The model is for inference, not training: MTP layers are ignored.

    Args:
        folder: config.json and safetensors files, of the same model as the parameters.
        parameters: plain tensors, or DTensors under any mapping, by their names in the whole model.
    """
    load_shards(
        HfSource(open_hf_folder(folder, ALL_KEYS), leaves_out_mtp=True), {**parameters, **(buffers or {})}, str(folder)
    )


@torch.no_grad()
def load_shards(source: WeightSource, tensors: Mapping[str, Tensor], source_name: str) -> None:
    """Copy the weights of a source into this rank's shards, without communication. Refuse a source of another model."""
    reasons = [
        f"{name} of shape {list(tensor.shape)}, it has {list(source.shapes[name]) if name in source.shapes else 'none'}"
        for name, tensor in tensors.items()
        if source.shapes.get(name) != tuple(tensor.shape)
    ]
    if reasons:
        raise ConfigError(f"{source_name!r} is of another model: it lacks {format_list(reasons)}")
    for name, tensor in tensors.items():
        values, starts = local_slice(tensor)
        if values.numel():
            values.copy_(source.read(name, region_of(values, starts)))
            source.clear_cache()


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every parameter and expert bias of a model, by name."""
    shapes: dict[str, Shape] = {name: weight.shape for name, weight in model_weights(model).items()}
    if model.ffn.moe.router.expert_bias:
        shapes |= {f"layers.{i}.ffn.router.expert_bias": (model.num_router_choices,) for i in model.moe_layer_numbers}
    return shapes


def family_mapping(model: ModelConfig, rules: TensorRules, family: Family) -> StateDictMapping:
    """Return the mapping between a model's parameters and the tensors of a family's folder. Refuse other parameters."""
    shapes = parameter_shapes(model)
    pieces: list[SliceMapping] = []
    unmapped = []
    for name, shape in shapes.items():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        rule = rules.get(name.replace(f"layers.{layer}.", "layers.{l}.", 1) if layer else name)
        if rule is None:
            unmapped.append(name)
        else:
            pieces += rule.slices(name, shape, layer, model)
    if unmapped:
        raise ConfigError(f"family {family.name} has no place for {format_list(unmapped)}")
    return build_mapping(pieces, shapes)


def _find_ignored(folder: HfFolder, model: ModelConfig, leaves_out_mtp: bool) -> dict[str, str]:
    """Return the tensors of a folder that are ignored, with the reason."""
    ignored = {}
    duplicates = find_duplicate_tensors(model, folder.family)
    multimodal = multimodal_folder(folder.hf_config, folder.family)
    uncounted = uncounted_tensors(folder.tensors.keys(), model.num_layers)
    for name, stored in folder.tensors.items():
        original = folder.tensors.get(duplicates.get(name, ""))
        if folder.family.is_ignored(name):
            ignored[name] = "computed, not stored"
        elif folder.family.is_of_zero_expert(name, model):
            ignored[name] = "of an expert without computation"
        elif multimodal is not None and multimodal.is_other_tensor(name, model):
            ignored[name] = "not of the text model"
        elif leaves_out_mtp and name not in uncounted and is_mtp_tensor(name, model.num_layers):
            ignored[name] = MTP_REASON
        elif original is not None and bytes_equal(stored, original):
            ignored[name] = DUPLICATE_REASONS[duplicates[name]]
    return ignored


def _match_layout(folder: HfFolder, model: ModelConfig, ignored: Set[str]) -> tuple[StateDictMapping, int]:
    """Return the mapping of the folder's layout and its index. Refuse a folder that matches no layout."""
    tensors = {name: stored for name, stored in folder.tensors.items() if name not in ignored}
    _check_counts(folder, model)
    try:
        mappings = [family_mapping(model, table, folder.family) for table in folder.family.layouts]
    except RuntimeError as error:
        # torch refuses sizes whose product overflows.
        raise ConfigError(
            f"{str(folder.path)!r}: config.json means tensors that cannot be: {first_line(error)}"
        ) from None
    mapping = min(mappings, key=lambda mapping: _distance(mapping.hf_shapes, tensors))
    layout_index = mappings.index(mapping)
    reasons = [f"tensor {name} is missing" for name in sorted(mapping.hf_shapes.keys() - tensors.keys())]
    reasons += [_unmapped_reason(name, folder, model) for name in sorted(tensors.keys() - mapping.hf_shapes.keys())]
    for name, shape in mapping.hf_shapes.items():
        if name in tensors and tensors[name].shape != shape:
            reasons.append(f"tensor {name} has shape {list(tensors[name].shape)}, config.json means {list(shape)}")
    for name, pieces in mapping.by_name.items():
        kinds = {tensors[piece.hf_name].dtype for piece in pieces if piece.hf_name in tensors}
        if len(kinds) > 1:
            reasons.append(f"the parts of {name} have different types: {', '.join(sorted(kinds))}")
    if reasons:
        raise ConfigError(f"{str(folder.path)!r}: {format_list(reasons)}")
    return mapping, layout_index


def _distance(shapes: Mapping[str, Shape], tensors: Mapping[str, TensorLocation]) -> tuple[int, int]:
    """Return the number of different tensor names, and of different shapes under the same name."""
    shared = shapes.keys() & tensors.keys()
    return len(shapes.keys() ^ tensors.keys()), sum(shapes[name] != tensors[name].shape for name in shared)


def _unmapped_reason(name: str, folder: HfFolder, model: ModelConfig) -> str:
    """Describe the error of a tensor of a folder that is not part of the model."""
    if original := find_duplicate_tensors(model, folder.family).get(name):
        return f"tensor {name} must equal {original}, and differs"
    if name in uncounted_tensors(folder.tensors.keys(), model.num_layers):
        return f"tensor {name} is of a layer after the {model.num_layers} layers that config.json counts; correct it"
    if folder.family.has_mtp and is_mtp_tensor(name, model.num_layers + model.mtp_layers):
        return (
            f"tensor {name} is of multi-token prediction, of which config.json counts {folder.family.mtp_key}="
            f"{model.mtp_layers}; correct it, or import with --without-mtp to leave such layers out"
        )
    if is_mtp_tensor(name, model.num_layers):
        return (
            f"tensor {name} is of multi-token prediction, which moefold does not read from {folder.family.name} "
            "folders; import with --without-mtp to leave such layers out"
        )
    return f"tensor {name} has no place in this {folder.family.name} model"


def _check_counts(folder: HfFolder, model: ModelConfig) -> None:
    """Refuse layer and expert counts of config.json that contradict the tensors, before they exhaust the memory."""
    tensors = len(folder.tensors)
    max_experts = max((tensors, *(size for stored in folder.tensors.values() for size in stored.shape)))
    experts = model.ffn.moe.num_experts if model.has_moe_layers else 0
    for kind, count, limit in (
        ("layers", model.num_layers + model.mtp_layers, tensors),
        ("experts", experts, max_experts),
    ):
        if count > limit:
            raise ConfigError(f"{str(folder.path)!r}: config.json means {count} {kind}, too many for {tensors} tensors")


def assemble_rows(
    source: WeightSource,
    mapping: StateDictMapping,
    rows: TensorChunk,
    dtype: torch.dtype,
    memory: ReusedMemory | None = None,
) -> Tensor:
    """Assemble some rows of an HF tensor from the weights of a source, contiguous, in `dtype`.

    Only these rows and the source's cache of each parameter are in memory.
    """
    shape = (rows.stop - rows.start, *mapping.hf_shapes[rows.name][1:])
    values = (memory or ReusedMemory()).empty(shape, dtype)
    for whole_piece in mapping.by_hf_name[rows.name]:
        piece = whole_piece.intersect_hf_rows(rows.start, rows.stop)
        if piece is None:
            continue
        ours = source.read(piece.name, piece.region())
        first, *columns = piece.hf_region()
        box = (slice(first.start - rows.start, first.stop - rows.start, first.step), *columns)
        copy_permuted(values[box], ours.reshape(piece.permuted_size()).permute(piece.inverse_permutation()))
    return values


def rows_equal(location: TensorLocation, rows: TensorChunk, values: Tensor) -> bool:
    """Return whether some rows of a tensor in a file equal `values`, byte by byte."""
    stored = location.read_rows(rows.start, rows.stop)
    return stored.dtype == values.dtype and torch.equal(
        stored.flatten().view(torch.uint8), values.flatten().view(torch.uint8)
    )


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
    return share_of_rank(groups, [sum(math.prod(mapping.hf_shapes[name]) for name in group) for group in groups], world)


def share_of_rank(items: Sequence[Item], sizes: Sequence[int], world: World) -> list[Item]:
    """Return this rank's contiguous share of some items, balanced by their sizes."""
    total = max(1, sum(sizes))
    starts = accumulate(sizes, initial=0)
    return [
        item
        for item, start in zip(items, starts, strict=False)
        if min(world.size - 1, start * world.size // total) == world.rank
    ]


def verify_against_folder(source: WeightSource, folder: HfSource, world: World) -> None:
    """Compare a checkpoint with a folder, some rows at a time. Refuse differences. It is collective over `world`."""
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


def copy_permuted(target: Tensor, source: Tensor) -> None:
    """Copy values that may be transposed in memory, in blocks that fit the cache.

    `Tensor.copy_` only does this for two matrices of one dtype. Otherwise it reads one value of each cache line.

    Args:
        target: tensor with any strides.
        source: tensor of the same shape up to dims of size 1, contiguous or a permutation of a contiguous tensor.
    """
    target = target.squeeze()
    source = source.squeeze().to(target.dtype)
    if target.dim() > 2 and source.stride(-1) != 1 and source.stride(-2) == 1:
        for inner, source_rows in zip(target, source, strict=True):
            copy_permuted(inner, source_rows)
        return
    if source.dim() == 2 and source.stride(0) == 1 and not target.is_contiguous():
        source = source.contiguous()
    target.copy_(source)


class TensorHashes(OrderedHashes):
    """SHA-256 of tensors whose rows arrive in order.

    Repeated rows are ignored, such as of a matrix that fuses two of our parameters and is read twice. A tensor has no
    hash if this process reads only a part of it.
    """

    def add_rows(self, name: str, location: TensorLocation, offset: int, values: Tensor) -> None:
        """Add rows of a tensor, which must not change later, at a byte offset. `location` is of the whole tensor."""
        self.add(name, location.num_bytes, offset, bytes_of(values))


def open_weights(path: Path) -> WeightSource:
    """Open the weights of a folder that `resolve_weights_folder` returned, with adapters merged into their base."""
    return HfSource(open_hf_folder(path, ALL_KEYS)) if is_hf_folder(path) else open_checkpoint(path)


def open_checkpoint(path: Path, base: Path | None = None) -> "CheckpointWeights":
    """Open the weights of a checkpoint. Its adapters are merged into `base`, or the weights that its metadata names."""
    source = CheckpointSource(path)
    if not source.meta.lora:
        return source
    base = to_path(source.meta.lora["base"]) if base is None else resolve_weights_folder(base)
    check_base(source.meta.lora, base, str(path))
    return AdaptedSource(open_weights(base), source)


def load_merged_weights(path: Path, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards with the base weights of a checkpoint with adapters, and the adapters merged into them.

    It is collective over all ranks, which share the check of the checkpoint's files. Each rank then reads its own
    shards.
    """
    check_integrity(path, current_world())
    source = open_weights(path)
    stored = {n: b for n, b in buffers.items() if n in source.shapes or not n.endswith(OPTIONAL_BUFFER_SUFFIX)}
    load_shards(source, {**parameters, **stored}, str(path))


class AdaptedSource:
    """Weight source of a model with merged adapters. Sums are computed at least in float32."""

    def __init__(self, base: WeightSource, adapters: CheckpointSource) -> None:
        self._base = base
        self.adapters = adapters
        self.path = adapters.path
        self.meta = adapters.meta
        self._scale = self.meta.lora["alpha"] / self.meta.lora["rank"]
        self.shapes: Mapping[str, Shape] = base.shapes
        pairs = {weight: adapter_names(weight) for weight in base.shapes}
        self.adapted = frozenset(weight for weight, (a, _) in pairs.items() if a in adapters.shapes)
        used_adapters = {adapter for weight in self.adapted for adapter in pairs[weight]}
        unmatched = sorted(adapters.shapes.keys() ^ used_adapters)
        unmatched += [weight for weight in self.adapted if not _fits(base.shapes[weight], adapters, pairs[weight])]
        if unmatched:
            raise ConfigError(
                f"checkpoint {str(self.path)!r} has adapters of another model than its base weights, which differ in "
                f"{format_list(unmatched)}"
            )

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor: at least float32 if it is merged."""
        dtype = self._base.dtype(name)
        if name not in self.adapted:
            return dtype
        adapter_dtype = self.adapters.dtype(adapter_names(name)[0])
        return torch.promote_types(torch.promote_types(dtype, adapter_dtype), torch.float32)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor of the base weights."""
        return self._base.dtype(name)

    def read(self, name: str, region: Region) -> Tensor:
        """Return the values of a region. Only the needed rows of A and columns of B are read."""
        values = self._base.read(name, region)
        if name not in self.adapted:
            return values
        dtype = self.dtype(name)
        product = product_region(name, region, self._read_adapter).to(dtype)
        self.adapters.clear_cache()
        merged: Tensor = values.to(dtype) + self._scale * product
        return merged

    def clear_cache(self) -> None:
        """Free the caches of both sources."""
        self._base.clear_cache()
        self.adapters.clear_cache()

    def _read_adapter(self, name: str, region: Region) -> Tensor:
        """Read some rows of A or columns of B, at least in float32. The other slices may be open."""
        shape = self.adapters.shapes[name]
        closed = tuple(slice(*span.indices(size)[:2]) for span, size in zip(region, shape, strict=True))
        return self.adapters.read(name, closed).to(torch.promote_types(self.adapters.dtype(name), torch.float32))


CheckpointWeights = CheckpointSource | AdaptedSource
"""Weights of a checkpoint: as stored, or with its adapters merged."""


def _fits(shape: Shape, adapters: WeightSource, names: tuple[str, str]) -> bool:
    """Return whether the product of an adapter has the shape of its matrix."""
    a, b = (adapters.shapes.get(name, ()) for name in names)
    if len(shape) == 3 and len(a) == len(b) == 3:
        return (a[0], a[1], b[2]) == shape and b[0] == shape[0] and a[2] == b[1]
    return len(a) == len(b) == 2 and (b[0], a[1]) == shape and a[0] == b[1]
