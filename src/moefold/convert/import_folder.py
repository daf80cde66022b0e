"""Import of a Hugging Face folder as a checkpoint, tensor by tensor, on any number of processes."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, counted, model_sizes, write_meta
from moefold.checkpoint.manifest import FileDigest
from moefold.checkpoint.streaming_io import (
    CheckpointSource,
    ReusedMemory,
    TensorChunk,
    split_into_chunks,
    write_chunks,
    write_manifest_in_parallel,
)
from moefold.comm.groups import World, raise_on_all_ranks
from moefold.config.base.limits import FORMAT
from moefold.config.base.part import keys_of
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.tables.toml_text import toml_value
from moefold.convert.atomic_dir import atomic_directory
from moefold.convert.families.hf_config import parse_model_config
from moefold.convert.families.known_keys import ALL_KEYS
from moefold.convert.hf_folder import HfFolder, open_hf_folder
from moefold.convert.hf_shards import (
    Manifest,
    ManifestEntry,
    changed_tensors,
    copy_index,
    copy_sidecar_files,
    hash_tensor,
    read_manifest,
    write_manifest,
)
from moefold.convert.hf_sidecar_files import RECIPE_FILE, SIDECAR_DIR, tokenizer_unsupported_reason
from moefold.convert.preflight import NO_TOKENIZER_HINT
from moefold.convert.quantized_tensors import DequantizedTensor
from moefold.convert.safetensors_file import DEFAULT_METADATA, TensorLocation, read_metadata
from moefold.convert.weight_sources import HfSource, TensorHashes, WeightSource, share_of_rank, verify_against_folder
from moefold.data.hf_tokenizer.tokenizer_folder import tokenizer_file
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.remote_path import is_remote
from moefold.validate.moe import validate_router_gradient
from moefold.validate.unused import without_idle_keys

OnBytes = Callable[[int], None]
"""Callback that receives the bytes processed since its last call."""


@dataclass(frozen=True)
class ImportOptions:
    """User options of an import."""

    check: bool = False
    """If True, read the result back and compare every byte."""
    needs_tokenizer: bool = True
    """If True, refuse a folder without a tokenizer that moefold can read."""
    leaves_out_mtp: bool = False
    """If True, leave out the multi-token prediction (MTP) layers."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of the folder's JSON files that may have any value."""


@dataclass(frozen=True)
class Conversion:
    """Counts and notes of a finished conversion, for its last message and the manifest."""

    tensors: int
    """Number of tensors of the Hugging Face folder."""
    num_bytes: int
    sidecar_files: tuple[str, ...]
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the source that are not in the result, each with the reason."""
    messages: tuple[str, ...] = ()
    """Notes for the user about the result, each with a way out."""


def import_folder(
    folder: Path, out: Path, world: World, options: ImportOptions | None = None, *, on_bytes: OnBytes
) -> Conversion:
    """Convert a Hugging Face folder to a checkpoint. It is collective over `world`.

    `out` receives the weights in the dtype of the folder (bfloat16 stays bfloat16), `recipe.toml` to train from them,
    and, in `hf`, the sidecar files and the manifest.

    Args:
        out: the checkpoint. It must not exist.

    Raises:
        ConfigError: the folder or `out` cannot be used. Nothing remains written.
    """
    options = options or ImportOptions()
    source = HfSource(open_hf_folder(folder, options.ignored_keys), leaves_out_mtp=options.leaves_out_mtp)
    if options.needs_tokenizer and (reason := tokenizer_unsupported_reason(folder, NO_TOKENIZER_HINT)):
        raise ConfigError(reason)
    with atomic_directory(out, world) as tmp_dir:
        with TensorHashes() as hashes:
            source.hashes = hashes
            source.memory = ReusedMemory()
            digests = write_weights(source, tmp_dir, world, on_bytes)
            source.hashes = source.memory = None
        manifest = _manifest(source, hashes.complete(), world)
        sidecar_files: tuple[str, ...] = ()
        if world.is_rank0:
            sidecar_files = tuple(copy_sidecar_files(folder, tmp_dir / SIDECAR_DIR))
            copy_index(folder, tmp_dir / SIDECAR_DIR)
            write_manifest(tmp_dir / SIDECAR_DIR, manifest)
            aux_loss = imported_aux_loss(source.folder.hf_config, source.model)
            finish_checkpoint(tmp_dir, out, source.model, import_origin(folder), aux_loss=aux_loss)
        raise_on_all_ranks(world, "")
        write_manifest_in_parallel(tmp_dir, world, digests)
        if options.check:
            verify_against_folder(CheckpointSource(tmp_dir), source, world)
    converted = [source.location(name) for name in source.mapping.hf_shapes]
    size = sum(stored.num_bytes for stored in converted)
    return Conversion(len(converted), size, sidecar_files, source.ignored, _messages(source))


def _messages(source: HfSource) -> tuple[str, ...]:
    notes = [
        f"moefold train rejects this model: {reason}" for reason in validate_router_gradient(source.model, MoEConfig())
    ]
    counted = parse_model_config(source.folder.hf_config, source.folder.path, ALL_KEYS).mtp_layers
    if not counted or source.folder.model.mtp_layers:
        return tuple(notes)
    return (
        *notes,
        f"config.json has num_nextn_predict_layers={counted}, but the folder holds none of their tensors: the model "
        "has no multi-token prediction (MTP) layers",
    )


def write_weights(source: WeightSource, tmp_dir: Path, world: World, on_bytes: OnBytes) -> dict[str, FileDigest]:
    """Write all tensors of a source as a checkpoint, one chunk at a time. Return the digests of this process's files.

    It is collective.
    """
    dtypes = {name: source.dtype(name) for name in source.shapes}
    memory = ReusedMemory()
    last = ""

    def read(chunk: TensorChunk) -> torch.Tensor:
        nonlocal last
        if chunk.name != last:
            source.clear_cache()
        last = chunk.name
        region = (slice(chunk.start, chunk.stop), *(slice(0, size) for size in source.shapes[chunk.name][1:]))
        values = source.read(chunk.name, region)
        on_bytes(values.nbytes)
        if values.is_contiguous() and values.untyped_storage().nbytes() == values.nbytes:
            return values
        # A view of a cached read, which DCP would copy to fresh memory.
        return memory.empty(values.shape, values.dtype).copy_(values)

    pieces = [chunk for name, shape in source.shapes.items() for chunk in split_into_chunks(name, shape, dtypes[name])]
    row_bytes = {name: source.dtype(name).itemsize * math.prod(shape[1:]) for name, shape in source.shapes.items()}
    sizes = [row_bytes[chunk.name] * (chunk.stop - chunk.start) for chunk in pieces]
    return write_chunks(tmp_dir, source.shapes, dtypes, share_of_rank(pieces, sizes, world), read)


def write_checkpoint(
    source: WeightSource,
    out: Path,
    world: World,
    finish: Callable[[Path], None],
    sidecar_dir: Path | None,
    excluded: Collection[str] = (),
    *,
    on_bytes: OnBytes,
) -> Conversion:
    """Write the weights of a source as a checkpoint, and copy sidecar files, listed on rank 0. It is collective.

    Args:
        out: the checkpoint. It must not exist.
        finish: called on rank 0 with the folder, to add metadata and recipe.
        excluded: sidecar files that are not copied.
    """
    copied: tuple[str, ...] = ()
    with atomic_directory(out, world) as tmp_dir:
        digests = write_weights(source, tmp_dir, world, on_bytes)
        if world.is_rank0:
            if sidecar_dir is not None:
                copied = tuple(copy_sidecar_files(sidecar_dir, tmp_dir / SIDECAR_DIR, excluded=excluded))
            finish(tmp_dir)
        raise_on_all_ranks(world, "")
        write_manifest_in_parallel(tmp_dir, world, digests)
    return Conversion(len(source.shapes), sum(path.stat().st_size for path in out.glob("*.distcp")), copied)


def finish_checkpoint(
    tmp_dir: Path,
    out: Path,
    model: ModelConfig,
    origin: str,
    tokenizer: str = "",
    dtype: str = "",
    lora: Mapping[str, Any] | None = None,
    aux_loss: float | None = None,
) -> None:
    """Add checkpoint metadata and a recipe to a folder of weights.

    Args:
        tmp_dir: the folder that holds the weights. `out` is its final path.
        origin: description of the source of the weights.
        tokenizer: data.tokenizer of the recipe if the folder holds no tokenizer, or empty if unknown.
        dtype: run.dtype of the runs that trained the weights, or empty if no run did.
        lora: settings of the adapters (`adapter_settings`) if the folder only has adapters, or None for all weights.
        aux_loss: moe.aux_loss of the recipe. None means the default.
    """
    meta = CheckpointMeta(
        format=FORMAT,
        states=counted() | ({"lora": dict(lora)} if lora else {}),
        order={},
        model=model_sizes(model),
        parallel={},
        dtype=dtype,
        origin=origin,
    )
    write_meta(tmp_dir, meta)
    if (file := tokenizer_file(tmp_dir / SIDECAR_DIR)).is_file():
        tokenizer = str(out.absolute() / SIDECAR_DIR / file.name)
    (tmp_dir / RECIPE_FILE).write_text(recipe_text(model, out.absolute(), tokenizer, lora, aux_loss), encoding="utf-8")


def recipe_text(
    model: ModelConfig,
    checkpoint: Path,
    tokenizer: str,
    lora: Mapping[str, Any] | None = None,
    aux_loss: float | None = None,
) -> str:
    """Return a recipe for training from a checkpoint, with only the settings that follow from its weights."""
    read, default = without_idle_keys(model), ModelConfig()
    sizes = [
        f"{key} = {toml_value(getattr(read, key))}"
        for key in keys_of(read)
        if getattr(read, key) != getattr(default, key)
    ]
    lines = [
        "# Trains on from these weights; all other settings are free:",
        "#   moefold train recipe.toml data.kind=text data.path=TEXT run.steps=1000",
        "",
        *(f"format = {FORMAT}", "", "[run]", f"dir = {toml_value(f'runs/{checkpoint.name}')}", ""),
        *("[model]", *sizes, ""),
        *(() if aux_loss is None else ("[moe]", f"aux_loss = {toml_value(aux_loss)}", "")),
        *("[checkpoint]", f"init_from = {toml_value(lora['base'] if lora else str(checkpoint))}"),
    ]
    if lora:
        settings = {key: lora[key] for key in ("rank", "alpha", "targets")} | {"init_from": str(checkpoint)}
        lines += ["", "[lora]", *(f"{key} = {toml_value(value)}" for key, value in settings.items())]
    if tokenizer:
        lines += ["", "[data]", f"tokenizer = {toml_value(tokenizer)}"]
    return "\n".join(lines) + "\n"


def import_origin(folder: Path) -> str:
    """Return the description of imported weights, with the absolute path of their folder."""
    return f"import of {folder if is_remote(folder) else folder.absolute()}"


def imported_aux_loss(hf_config: Mapping[str, Any], model: ModelConfig) -> float | None:
    """Return the value of moe.aux_loss for `router_aux_loss_coef` of a config.json, or None if that is absent.

    transformers adds c * E * sum_e F_e P_e, which is c * K if the load is even. F_e counts all K choices of a token,
    and F and P are means over the L layers with experts. moefold adds a * E * sum_e f_e P_e for each layer, where f_e
    is a share of the choices: a * L in all if the load is even. So a = c * K / L. The gradients have the same ratio if
    all layers have equal loads.
    """
    text = hf_config.get("text_config")
    coefficient = (text if isinstance(text, Mapping) else hf_config).get("router_aux_loss_coef")
    layers = sum(layer.ffn.is_routed for layer in model.decoder_layers)
    if not layers or isinstance(coefficient, bool) or not isinstance(coefficient, int | float):
        return None
    if not 0 <= coefficient < math.inf:
        raise ConfigError(f"config.json has router_aux_loss_coef={coefficient!r}, which should be 0 or more")
    return float(coefficient) * model.ffn.moe.top_k / layers


def _manifest(source: HfSource, digests: Mapping[str, str], world: World) -> Manifest:
    """Hash the tensors without a digest, each in one process. Refuse those that differ from the folder's manifest."""
    folder: HfFolder = source.folder
    hashes = world.merge(digests)
    hashes |= _hash_together({name: folder.tensors[name] for name in folder.tensors.keys() - hashes.keys()}, world)
    written = read_manifest(folder.path)
    quantized = ((name, stored) for name, stored in folder.tensors.items() if isinstance(stored, DequantizedTensor))
    parts = {key: location for name, stored in quantized for key, location in stored.parts(name).items()}
    if written is not None and (changed := changed_tensors(written, hashes | _hash_together(parts, world))):
        raise ConfigError(
            f"{str(folder.path)!r}: changed since its manifest was written: {format_list(sorted(changed))}"
        )
    in_order = sorted(hashes, key=lambda name: (folder.tensors[name].file.name, folder.tensors[name].start))
    entries = {
        name: ManifestEntry(stored.file.name, stored.dtype, stored.shape, hashes[name], source.ignored.get(name, ""))
        for name, stored in ((name, folder.tensors[name]) for name in in_order)
    }
    files = sorted({stored.file for stored in folder.tensors.values()})
    metadata = {file.name: meta for file in files if (meta := read_metadata(file)) != DEFAULT_METADATA}
    return Manifest(folder.family.name, source.layout_index, entries, metadata)


def _hash_together(locations: Mapping[str, TensorLocation], world: World) -> dict[str, str]:
    """Hash tensors, each in one process."""
    return world.merge({name: hash_tensor(locations[name]) for name in sorted(locations)[world.rank :: world.size]})
