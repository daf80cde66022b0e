"""Export of a checkpoint as a Hugging Face folder, by any number of processes: `moefold export` and `moefold push`."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold import __version__
from moefold.checkpoint.checkpoint_meta import CheckpointMeta, model_sizes, read_meta
from moefold.checkpoint.find_checkpoint import locate_checkpoint
from moefold.checkpoint.hashed_files import HashingThread
from moefold.checkpoint.integrity import check_integrity
from moefold.checkpoint.model_differences import model_differences
from moefold.checkpoint.run_tokenizer import find_run_tokenizer
from moefold.checkpoint.streaming_io import (
    CHUNK_BYTES,
    ReusedMemory,
    TensorChunk,
    check_descriptions,
    hash_checked_reads,
    split_into_chunks,
)
from moefold.comm.groups import World, raise_on_all_ranks
from moefold.config.model import ModelConfig
from moefold.convert.atomic_dir import atomic_directory
from moefold.convert.families.families import FAMILIES, MODEL_TYPES
from moefold.convert.families.family import Family
from moefold.convert.families.hf_config import (
    QUANTIZATION_KEY,
    families_for,
    family_unsupported_reason,
    foreign_parts_reason,
    multimodal_folder,
    parse_model_config,
    read_hf_config,
    text_config,
)
from moefold.convert.families.known_keys import ALL_KEYS
from moefold.convert.families.mtp import count_mtp_layers, mtp_layer_numbers
from moefold.convert.families.tensor_mapping import StateDictMapping
from moefold.convert.generation_config import write_generation_config, write_turn_end
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.hf_shards import (
    MAX_SHARD_BYTES,
    Manifest,
    ManifestEntry,
    TensorSpecs,
    assign_shards,
    copy_sidecar_files,
    hash_tensor,
    is_mtp_file,
    needs_mtp_file,
    read_manifest,
    write_index,
    write_manifest,
)
from moefold.convert.hf_sidecar_files import DUPLICATE_REASONS, HEAD_NAME, find_duplicate_tensors, find_sidecar_dir
from moefold.convert.import_folder import Conversion, OnBytes
from moefold.convert.model_card import read_training_run, write_model_card
from moefold.convert.preflight import read_model
from moefold.convert.quantized_tensors import Quantization, QuantizationKind, expand_files, plan_quantization
from moefold.convert.safetensors_file import (
    DEFAULT_METADATA,
    DTYPE_NAMES,
    DTYPES,
    FileLayout,
    FileWriter,
    TensorLocation,
    bytes_of,
    create_file,
    plan_file_layout,
)
from moefold.convert.tokenizer_export import TokenizerChoice, choose_tokenizer, write_tokenizer
from moefold.convert.weight_sources import (
    MTP_REASON,
    AdaptedSource,
    CheckpointWeights,
    HfSource,
    assemble_rows,
    assign_groups,
    check_finite,
    family_mapping,
    open_checkpoint,
    verify_against_folder,
)
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.remote_path import RemotePath

COPIED_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "use_cache")
"""Keys of a config.json that stay valid after a change of its model."""
TRAINED_WAY_OUT = "name an earlier checkpoint of the run"
"""The way out where the weights of a run are not finite."""
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class WeightsOrigin:
    """Files and manifest of the weights' original Hugging Face folder."""

    sidecar_dir: Path | None
    """Folder of the sidecar files, or None if there are no sidecar files."""
    manifest: Manifest | None
    """Manifest of the imported folder, if it has the same family."""

    def read_config(self) -> dict[str, Any]:
        """Return the keys of the original config.json, or empty if there is none."""
        if self.sidecar_dir is None or not (self.sidecar_dir / "config.json").is_file():
            return {}
        return read_hf_config(self.sidecar_dir)

    def has_dtypes(self, dtypes: Mapping[str, str]) -> bool:
        """Return whether the original tensors had these dtypes, whatever config.json says."""
        original = {} if self.manifest is None else self.manifest.tensors
        return all(name in original and original[name].dtype == dtype for name, dtype in dtypes.items())

    def model(self, hf_config: Mapping[str, Any]) -> ModelConfig | None:
        """Return the model of the original folder, with its MTP layers, or None if it cannot be parsed."""
        try:
            model = parse_model_config(hf_config, self.sidecar_dir or Path(), ALL_KEYS)
        except ConfigError:
            return None
        return count_mtp_layers(model, None if self.manifest is None else self.manifest.tensors.keys())


def write_config(
    tmp_dir: Path,
    family: Family,
    model: ModelConfig,
    meta: CheckpointMeta,
    dtypes: Mapping[str, str],
    origin: WeightsOrigin,
    more_keys: Mapping[str, Any],
) -> None:
    """Write config.json: the original file if it still describes the model, else a new file with its token ids.

    `more_keys`, token ids and the quantisation, override the original's keys.
    """
    original = origin.read_config()
    # The dtype of most tensors.
    kinds = list(dtypes.values())
    dtype = str(DTYPES[max(sorted(set(kinds)), key=kinds.count)]).removeprefix("torch.")
    before = origin.model(original) if original.get("model_type") == family.name else None
    # Adding or removing MTP layers changes only their count.
    if before is not None and not model_differences(model_sizes(replace(before, mtp_layers=model.mtp_layers)), model):
        keys = {key: value for key, value in original.items() if key != QUANTIZATION_KEY}
        if before.mtp_layers != model.mtp_layers:
            keys = {key: value for key, value in keys.items() if key not in MTP_KEYS}
            keys[family.mtp_key] = model.mtp_layers
        keys |= more_keys
        if keys == original and (
            origin.has_dtypes(dtypes) or original.get("dtype", original.get("torch_dtype", dtype)) == dtype
        ):
            return
    else:
        keys = family.write(model)
        keys |= {"max_position_embeddings": max_positions(model, meta), "moefold_version": __version__}
        before_family = MODEL_TYPES.get(original.get("model_type", ""))
        text = original if before_family is None else {**original, **text_config(original, before_family)}
        keys |= {key: text[key] for key in COPIED_KEYS if key in text} | {**more_keys}
    keys.pop("torch_dtype", None)
    keys["dtype"] = dtype
    (tmp_dir / "config.json").write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def max_positions(model: ModelConfig, meta: CheckpointMeta) -> int:
    """Return max_position_embeddings: the trained sequence length, or the scaled RoPE context length if larger."""
    return max(int(meta.order.get("seq_len", 0)), model.rope.scaling.context) or 2048


EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ExportOptions:
    """User options of an export."""

    dtype: str = "auto"
    """auto: imported weights keep their dtype. Weights of a run get its run.dtype."""
    family: str = "auto"
    """auto: the family of the imported weights, else the first family that can express the model."""
    shard_bytes: int | None = None
    """Size limit of a file. 0: a single file. None means as in the imported folder, else `MAX_SHARD_BYTES`."""
    check: bool = False
    """If True, read the result back and compare every byte."""
    leaves_out_mtp: bool = False
    """If True, leave out the multi-token prediction (MTP) layers."""
    mtp_inside: bool = False
    """If True, write MTP layers among the other layers even if transformers reports them as unexpected."""
    quantize: QuantizationKind = "none"
    """Quantisation. fp8: matrices in blocks of 128 x 128. mxfp4: the experts of gpt-oss."""
    base: Path | None = None
    """Base weights for merging the adapters of a checkpoint. None means the folder in its metadata."""
    verify: bool = True
    """If True, compare the checkpoint's files with their hashes first. False: only their sizes."""


def export_folder(
    checkpoint: Path, out: Path, world: World, options: ExportOptions, *, on_bytes: OnBytes
) -> Conversion:
    """Convert a checkpoint to a Hugging Face folder. It is collective over `world`.

    Args:
        checkpoint: a checkpoint of a run or an import. A run or a folder of checkpoints stands for its newest one.
        out: the folder. It must not exist.

    Raises:
        ConfigError: the checkpoint or `out` cannot be used, or no family can express the model. Nothing remains
            written.
    """
    # Rank 0 chooses the checkpoint for all ranks, because a run may save another checkpoint in the meantime.
    checkpoint = world.all_gather_object(locate_checkpoint(checkpoint))[0]
    is_one_pass = _check_files(checkpoint, world, verify=options.verify)
    source = open_checkpoint(checkpoint, options.base)
    plan = _plan_export(checkpoint, source, options)
    with atomic_directory(out, world) as tmp_dir:
        layouts = {
            name: plan_file_layout(tmp_dir / name, tensors, plan.metadata.get(name, DEFAULT_METADATA))
            for name, tensors in plan.files.items()
        }
        if world.is_rank0:
            for name, layout in layouts.items():
                create_file(tmp_dir / name, layout)
        raise_on_all_ranks(world, "")
        locations = {name: stored for layout in layouts.values() for name, stored in layout.tensors.items()}
        target = _Target(locations, plan.dtypes, plan.quantization, ReusedMemory(2))
        own = source.adapters if isinstance(source, AdaptedSource) else source
        with hash_checked_reads(own) if is_one_pass else nullcontext():
            hashes = _write_tensors(source, plan.mapping, target, world, on_bytes)
        tokenizer = TokenizerChoice()
        if world.is_rank0:
            tokenizer = _write_other_files(tmp_dir, plan, checkpoint, source.meta)
            write_index(tmp_dir, layouts, plan.origin.sidecar_dir)
            write_manifest(tmp_dir, plan.manifest(layouts, hashes))
        raise_on_all_ranks(world, "")
        if options.check and options.quantize != "none":
            # Quantised files are read again, and compared with the written tensors.
            own_names = sorted(locations)[world.rank :: world.size]
            damaged = [name for name in own_names if hash_tensor(locations[name]) != hashes[name]]
            raise_on_all_ranks(world, f"read again, these tensors differ: {format_list(damaged)}" if damaged else "")
        elif options.check:
            verify_against_folder(source, HfSource(open_hf_folder(tmp_dir, ALL_KEYS)), world)
    size = sum(stored.num_bytes for layout in layouts.values() for stored in layout.tensors.values())
    written = tuple(sorted(path.name for path in out.iterdir() if path.is_file() and path.name not in layouts))
    left_out = dict.fromkeys(plan.left_out, MTP_REASON)
    return Conversion(len(plan.dtypes), size, written, left_out, (*_messages(plan.files), *tokenizer.messages))


@dataclass(frozen=True, kw_only=True)
class _ExportPlan:
    """Model, tensors and files of an export, known before anything is written."""

    model: ModelConfig
    left_out: list[str]
    """Tensors of the checkpoint that are not exported."""
    family: Family
    origin: WeightsOrigin
    layout_index: int
    """Layout of the family's tensors: of the imported folder, else the first."""
    mapping: StateDictMapping
    duplicates: dict[str, str]
    dtypes: dict[str, str]
    quantization: Quantization
    files: Mapping[str, TensorSpecs]

    @property
    def metadata(self) -> Mapping[str, dict[str, str]]:
        """Metadata of the imported files, by name."""
        return {} if self.origin.manifest is None else self.origin.manifest.metadata

    def manifest(self, layouts: Mapping[str, FileLayout], hashes: Mapping[str, str]) -> Manifest:
        """Return the manifest of the folder."""
        entries = {
            name: ManifestEntry(
                stored.file.name,
                stored.dtype,
                stored.shape,
                hashes[name],
                DUPLICATE_REASONS[self.duplicates[name]] if name in self.duplicates else "",
            )
            for layout in layouts.values()
            for name, stored in layout.tensors.items()
        }
        metadata = {name: self.metadata[name] for name in self.files if name in self.metadata}
        return Manifest(self.family.name, self.layout_index, entries, metadata)


def _plan_export(checkpoint: Path, source: CheckpointWeights, options: ExportOptions) -> _ExportPlan:
    """Choose the family, and plan the tensors and files of an export. Refuse a model that no family can express."""
    model, left_out = _exported_model(read_model(checkpoint), source, options)
    sidecar_dir = find_sidecar_dir(checkpoint)
    family = _choose_family(model, options, WeightsOrigin(sidecar_dir, None))
    origin = _find_origin(sidecar_dir, family)
    duplicates = _duplicate_tensors(model, family, origin.manifest)
    layout_index = 0 if origin.manifest is None else origin.manifest.layout
    mapping = _add_duplicates(family_mapping(model, family.layouts[layout_index], family), duplicates)
    _check_tensors(mapping, source, checkpoint, left_out)
    dtypes = _hf_dtypes(mapping, source, options)
    quantization = plan_quantization(options.quantize, mapping, model, family)
    files = _plan_shards(mapping, dtypes, (model, family), origin.manifest, options)
    return _ExportPlan(
        model=model,
        left_out=left_out,
        family=family,
        origin=origin,
        layout_index=layout_index,
        mapping=mapping,
        duplicates=duplicates,
        dtypes=dtypes,
        quantization=quantization,
        files=expand_files(files, quantization),
    )


def _write_other_files(tmp_dir: Path, plan: _ExportPlan, checkpoint: Path, meta: CheckpointMeta) -> TokenizerChoice:
    """Write the configuration, the tokenizer and the model card, and return the chosen tokenizer with its messages."""
    sidecar_dir = plan.origin.sidecar_dir
    tokenizer = choose_tokenizer(meta, sidecar_dir, find_run_tokenizer(checkpoint))
    if sidecar_dir is not None:
        copy_sidecar_files(sidecar_dir, tmp_dir, excluded=tokenizer.excluded)
    write_tokenizer(tmp_dir, tokenizer)
    more = {**tokenizer.token_ids, **plan.quantization.config_keys()}
    write_config(tmp_dir, plan.family, plan.model, meta, plan.dtypes, plan.origin, more)
    # Imported weights that no run has changed are exported with their original files.
    if meta.origin:
        return tokenizer
    run = read_training_run(checkpoint, plan.model, meta)
    write_generation_config(tmp_dir, run.temperature)
    messages = tokenizer.messages + write_turn_end(tmp_dir, meta)
    write_model_card(tmp_dir, plan.family.name, plan.model, run)
    return replace(tokenizer, messages=messages)


def _check_files(checkpoint: Path, world: World, *, verify: bool) -> bool:
    """Check the files of a checkpoint, and return whether `hash_checked_reads` has to check the hashes of its tensors.

    This is so if only this process reads the files, and they are local and have no moments.
    """
    check_integrity(checkpoint, world, checks_hashes=False)
    reads_all = world.size == 1 and not isinstance(checkpoint, RemotePath) and bool(read_meta(checkpoint).origin)
    if verify and reads_all:
        check_descriptions(checkpoint)
    elif verify:
        check_integrity(checkpoint, world)
    return verify and reads_all


def _find_origin(sidecar_dir: Path | None, family: Family) -> WeightsOrigin:
    """Return the origin of the weights, with its manifest only if the folder has this family and is not multimodal."""
    origin = WeightsOrigin(sidecar_dir, None)
    manifest = None if sidecar_dir is None else read_manifest(sidecar_dir)
    if manifest is None or manifest.family != family.name or multimodal_folder(origin.read_config(), family):
        return origin
    return replace(origin, manifest=manifest)


def _exported_model(
    model: ModelConfig, source: CheckpointWeights, options: ExportOptions
) -> tuple[ModelConfig, list[str]]:
    """Return the model to export, and the tensors of the checkpoint to leave out."""
    if options.mtp_inside and not model.mtp_layers:
        raise ConfigError("--mtp-inside has no effect: the model has no layers of multi-token prediction; leave it out")
    if not options.leaves_out_mtp:
        return model, []
    prefixes = tuple(f"layers.{number}." for number in mtp_layer_numbers(model))
    return replace(model, mtp_layers=0), [name for name in source.shapes if name.startswith(prefixes)]


def _duplicate_tensors(model: ModelConfig, family: Family, imported: Manifest | None) -> dict[str, str]:
    """Return the duplicate tensors to write, as in the imported folder, else as in released folders."""
    duplicates = find_duplicate_tensors(model, family)
    if imported is None:
        return {name: original for name, original in duplicates.items() if name != HEAD_NAME}
    imported_names = {
        name for name, entry in imported.tensors.items() if entry.passed_over in DUPLICATE_REASONS.values()
    }
    return {name: original for name, original in duplicates.items() if name in imported_names}


def _add_duplicates(mapping: StateDictMapping, duplicates: Mapping[str, str]) -> StateDictMapping:
    """Return the mapping with some tensors duplicated under other names."""
    by_hf_name = dict(mapping.by_hf_name)
    hf_shapes = dict(mapping.hf_shapes)
    for name, original in duplicates.items():
        by_hf_name[name] = tuple(replace(piece, hf_name=name) for piece in mapping.by_hf_name[original])
        hf_shapes[name] = mapping.hf_shapes[original]
    return replace(mapping, by_hf_name=by_hf_name, hf_shapes=hf_shapes)


def _choose_family(model: ModelConfig, options: ExportOptions, origin: WeightsOrigin) -> Family:
    plain = replace(model, mtp_layers=0)
    if options.family != "auto":
        if reason := family_unsupported_reason(FAMILIES[options.family], model):
            fits = model.mtp_layers and not family_unsupported_reason(FAMILIES[options.family], plain)
            way_out = "; --without-mtp leaves those layers out" if fits else ""
            raise ConfigError(f"--family {options.family}: it cannot express this model: {reason}{way_out}")
        return FAMILIES[options.family]
    if reason := foreign_parts_reason(model):
        raise ConfigError(reason)
    original_family = MODEL_TYPES.get(origin.read_config().get("model_type", ""))
    name = "" if original_family is None else original_family.exported_as or original_family.name
    if supported := next(families_for(model, name), None):
        return supported
    if model.mtp_layers and next(families_for(plain), None):
        raise ConfigError(
            f"no family of Hugging Face models has layers of multi-token prediction (model.mtp_layers="
            f"{model.mtp_layers}) after the layers of this model; --without-mtp leaves them out"
        )
    reasons = [f"family {family.name}: {family_unsupported_reason(family, model)}" for family in FAMILIES.values()]
    raise ConfigError(
        "no family of Hugging Face models computes what this model does; the nearest are\n  "
        + "\n  ".join(sorted(reasons, key=len)[:3])
    )


def _plan_shards(
    mapping: StateDictMapping,
    dtypes: Mapping[str, str],
    exported: tuple[ModelConfig, Family],
    imported: Manifest | None,
    options: ExportOptions,
) -> dict[str, TensorSpecs]:
    """Assign tensors to files: as in the imported folder, unless the user specifies other files."""
    entries = {} if imported is None else imported.tensors
    is_other = options.shard_bytes is not None or (
        options.mtp_inside and any(is_mtp_file(entry.file) for entry in entries.values())
    )
    shard_bytes = MAX_SHARD_BYTES if options.shard_bytes is None else options.shard_bytes
    separates_mtp = needs_mtp_file(*exported) and not options.mtp_inside
    return assign_shards(mapping, dtypes, exported[0], None if is_other else imported, shard_bytes, separates_mtp)


def _messages(files: Collection[str]) -> tuple[str, ...]:
    mtp_files = [name for name in files if is_mtp_file(name)]
    if not mtp_files:
        return ()
    return (
        f"the layers of multi-token prediction are in {format_list(mtp_files)}, which no index lists: transformers "
        "would report them as unexpected. moefold import reads them; --mtp-inside writes them among the others, as "
        "released folders do",
    )


def _check_tensors(
    mapping: StateDictMapping, source: CheckpointWeights, checkpoint: Path, left_out: Collection[str]
) -> None:
    reasons = [f"tensor {name} is missing" for name in mapping.shapes.keys() - source.shapes.keys()]
    reasons += [
        f"tensor {name} has no place in its model"
        for name in source.shapes.keys() - mapping.shapes.keys() - {*left_out}
    ]
    reasons += [
        f"tensor {name} has shape {list(source.shapes[name])}, its model means {list(shape)}"
        for name, shape in mapping.shapes.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    if reasons:
        raise ConfigError(f"checkpoint {str(checkpoint)!r}: {format_list(sorted(reasons))}")


def _hf_dtypes(mapping: StateDictMapping, source: CheckpointWeights, options: ExportOptions) -> dict[str, str]:
    """Return the dtype name of each exported tensor. The expert bias of the router is never rounded."""
    if options.dtype == "auto" and source.meta.origin:
        stored_dtype = source.stored_dtype if isinstance(source, AdaptedSource) else source.dtype
        return {hf_name: DTYPE_NAMES[stored_dtype(pieces[0].name)] for hf_name, pieces in mapping.by_hf_name.items()}
    run_dtype = {"float32": "F32", "float64": "F64"}.get(source.meta.dtype, "BF16")
    dtype = run_dtype if options.dtype == "auto" else DTYPE_NAMES[EXPORT_DTYPES[options.dtype]]
    return {
        hf_name: DTYPE_NAMES[source.dtype(pieces[0].name)] if pieces[0].name.endswith(".expert_bias") else dtype
        for hf_name, pieces in mapping.by_hf_name.items()
    }


@dataclass(frozen=True)
class _Target:
    """Tensors and files that an export writes, with their dtypes and quantisation."""

    locations: Mapping[str, TensorLocation]
    """Locations of all written tensors."""
    dtypes: Mapping[str, str]
    """Dtype names of all tensors of the mapping, before quantisation."""
    quantization: Quantization
    memory: ReusedMemory
    """Memory for the rows of two chunks: one is hashed while the next is assembled."""

    def chunks(self, source: CheckpointWeights, mapping: StateDictMapping, name: str) -> Iterator[dict[str, Tensor]]:
        """Yield some rows of a tensor at a time, as rows of the tensors that are written for it.

        Rows are valid until the second yield after theirs.
        """
        shape = mapping.hf_shapes[name]
        if name in self.quantization.names:
            for rows in self.quantization.row_chunks(shape, CHUNK_BYTES):
                block = TensorChunk(name, rows.start, rows.stop)
                values = assemble_rows(source, mapping, block, torch.float32)
                check_finite(values, name, source.path, TRAINED_WAY_OUT)
                yield self.quantization.quantize(name, values)
            return
        dtype = DTYPES[self.dtypes[name]]
        for chunk in split_into_chunks(name, shape, dtype):
            values = assemble_rows(source, mapping, chunk, dtype, self.memory)
            if dtype == torch.float16 and torch.isinf(values).any():
                trained = assemble_rows(source, mapping, chunk, source.dtype(mapping.by_hf_name[name][0].name))
                check_finite(trained, name, source.path, TRAINED_WAY_OUT)
                raise ConfigError(
                    f"tensor {name} has values that float16 cannot hold (above 65504); choose --dtype bfloat16"
                )
            check_finite(values, name, source.path, TRAINED_WAY_OUT)
            yield {name: values}


def _write_tensors(
    source: CheckpointWeights, mapping: StateDictMapping, target: _Target, world: World, on_bytes: OnBytes
) -> dict[str, str]:
    """Write this rank's tensors into the files, and return the hashes of all tensors. It is collective."""
    digests: dict[str, Any] = {}
    with FileWriter() as writer, HashingThread() as thread:
        for group in assign_groups(mapping, world):
            for hf_name in group:
                chunks = target.chunks(source, mapping, hf_name)
                digests |= _write_chunks(writer, chunks, target.locations, thread, on_bytes)
            source.clear_cache()
    return world.merge({name: digest.hexdigest() for name, digest in digests.items()})


def _write_chunks(
    writer: FileWriter,
    chunks: Iterable[Mapping[str, Tensor]],
    locations: Mapping[str, TensorLocation],
    thread: HashingThread,
    on_bytes: OnBytes,
) -> dict[str, Any]:
    """Write the rows of some tensors chunk by chunk, and return the SHA-256 of each tensor, computed by a thread."""
    digests: dict[str, Any] = {}
    done_bytes: Counter[str] = Counter()
    for tensors in chunks:
        for name, values in tensors.items():
            data = bytes_of(values)
            writer.write(locations[name], data, done_bytes[name])
            thread.drain()
            thread.update(digests.setdefault(name, hashlib.sha256()), data)
            done_bytes[name] += len(data)
            on_bytes(len(data))
    return digests
