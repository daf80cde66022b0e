"""A checkpoint made a Hugging Face folder, tensor by tensor, by any number of processes.

The model card of an exported folder: what the Hub shows of it, from facts that the checkpoint records.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moefold.checkpoint.checkpoint_dir import CheckpointMeta, check_integrity, locate_checkpoint
from moefold.checkpoint.streaming_io import CheckpointSource, split_into_chunks
from moefold.comm.groups import World
from moefold.config.schema import ModelConfig
from moefold.convert.atomic_dir import atomic_directory, raise_on_all_ranks
from moefold.convert.export_config import WeightsOrigin, write_config
from moefold.convert.families import FAMILIES, Family
from moefold.convert.hf_config import families_for, family_unsupported_reason
from moefold.convert.hf_folder import (
    DUPLICATE_REASONS,
    HEAD_NAME,
    find_duplicate_tensors,
    find_sidecar_dir,
    open_hf_folder,
)
from moefold.convert.hf_shards import (
    MAX_SHARD_BYTES,
    Manifest,
    ManifestEntry,
    TensorSpecs,
    assign_shards,
    copy_sidecar_files,
    is_mtp_file,
    needs_mtp_file,
    read_manifest,
    write_index,
    write_manifest,
)
from moefold.convert.import_folder import Conversion, OnBytes
from moefold.convert.init_from_check import read_model
from moefold.convert.mtp import mtp_layer_numbers
from moefold.convert.safetensors_file import (
    DEFAULT_METADATA,
    DTYPE_NAMES,
    DTYPES,
    FileLayout,
    FileWriter,
    bytes_of,
    create_file,
    plan_file_layout,
)
from moefold.convert.tensor_mapping import StateDictMapping
from moefold.convert.tokenizer_export import TokenizerChoice, choose_tokenizer, write_tokenizer
from moefold.convert.verify_weights import assemble_rows, assign_groups, verify_against_folder
from moefold.convert.weights import MTP_REASON, HfSource, family_mapping
from moefold.cost.flops import count_parameters
from moefold.errors import ConfigError, format_list

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ExportOptions:
    """What the user may leave open."""

    dtype: str = "auto"
    """auto: imported weights as they were; a run's in its run.dtype."""
    family: str = "auto"
    """auto: the family that the weights came from, else the first that can say what the model computes."""
    shard_bytes: int | None = None
    """Largest file; 0 for a single one; None: as the imported folder had it, else SHARD_BYTES."""
    check: bool = False
    """Read the result again and compare each byte."""
    leaves_out_mtp: bool = False
    """Leave the layers of multi-token prediction out."""
    mtp_inside: bool = False
    """Write them among the other layers even where transformers reports them as unexpected."""
    verify: bool = True
    """Compare the checkpoint's files with their hashes first; else their sizes alone."""


def export_folder(
    checkpoint: Path, out: Path, world: World, options: ExportOptions, *, on_bytes: OnBytes
) -> Conversion:
    """Write the Hugging Face folder of a checkpoint; collective over the crew.

    Args:
        checkpoint: any checkpoint, of a run or of an import; a run or a folder of them stands for the newest.
        out: the folder; must not exist.
        world: the processes that share the work.
        options: type, family, size of files, check.
        on_bytes: told of the progress of this process.

    Raises:
        ConfigError: the checkpoint or `out` cannot be used, or no family can say what the model computes; nothing is
            left written.
    """
    # The first process decides: a run may save one more meanwhile.
    checkpoint = world.all_gather_object(locate_checkpoint(checkpoint))[0]
    check_integrity(checkpoint, world, checks_hashes=options.verify)
    source = CheckpointSource(checkpoint)
    model, left_out = _exported_model(read_model(checkpoint), source, options)
    companions = find_sidecar_dir(checkpoint)
    family = _choose_family(model, options, WeightsOrigin(companions, None))
    before = read_manifest(companions) if companions is not None else None
    origin = WeightsOrigin(companions, before if before is not None and before.family == family.name else None)
    number = 0 if origin.manifest is None else origin.manifest.layout
    echoes = _duplicate_tensors(model, origin.manifest)
    plan = _add_duplicates(family_mapping(model, family.layouts[number], family), echoes)
    _check_tensors(plan, source, checkpoint, left_out)
    dtypes = _hf_dtypes(plan, source, options)
    files = _plan_shards(plan, dtypes, model, origin.manifest, options)
    metadata = {} if origin.manifest is None else origin.manifest.metadata
    with atomic_directory(out, world) as draft:
        layouts = {
            name: plan_file_layout(draft / name, tensors, metadata.get(name, DEFAULT_METADATA))
            for name, tensors in files.items()
        }
        if world.is_rank0:
            for name, layout in layouts.items():
                create_file(draft / name, layout)
        raise_on_all_ranks(world, "")
        hashes = _write_tensors(source, plan, layouts, world, on_bytes)
        manifest = Manifest(
            family.name,
            number,
            _manifest_entries(layouts, hashes, echoes),
            {name: metadata[name] for name in files if name in metadata},
        )
        tokenizer = TokenizerChoice()
        if world.is_rank0:
            tokenizer = choose_tokenizer(source.meta, companions)
            if companions is not None:
                copy_sidecar_files(companions, draft, excluded=tokenizer.excluded)
            write_tokenizer(draft, tokenizer)
            write_config(draft, family, model, source.meta, dtypes, origin, tokenizer.token_ids)
            write_index(draft, layouts, companions)
            write_manifest(draft, manifest)
            if not source.meta.origin:
                write_model_card(draft, family.name, model, source.meta)
        raise_on_all_ranks(world, "")
        if options.check:
            verify_against_folder(source, HfSource(open_hf_folder(draft)), world)
    size = sum(stored.num_bytes for layout in layouts.values() for stored in layout.tensors.values())
    written = tuple(sorted(path.name for path in out.iterdir() if path.is_file() and path.name not in layouts))
    return Conversion(
        len(dtypes), size, written, dict.fromkeys(left_out, MTP_REASON), (*_messages(files), *tokenizer.messages)
    )


def _exported_model(
    model: ModelConfig, source: CheckpointSource, options: ExportOptions
) -> tuple[ModelConfig, list[str]]:
    """The model to write, and the tensors of the checkpoint that it does without."""
    if options.mtp_inside and not model.mtp_layers:
        raise ConfigError("--mtp-inside has no effect: the model has no layers of multi-token prediction; leave it out")
    if not options.leaves_out_mtp:
        return model, []
    prefixes = tuple(f"layers.{number}." for number in mtp_layer_numbers(model))
    return replace(model, mtp_layers=0), [name for name in source.shapes if name.startswith(prefixes)]


def _duplicate_tensors(model: ModelConfig, imported: Manifest | None) -> dict[str, str]:
    """The tensors to write that repeat others: those that came, else those that DeepSeek's folder has."""
    echoes = find_duplicate_tensors(model)
    if imported is None:
        return {name: original for name, original in echoes.items() if name != HEAD_NAME}
    came = {name for name, listed in imported.tensors.items() if listed.passed_over in DUPLICATE_REASONS.values()}
    return {name: original for name, original in echoes.items() if name in came}


def _add_duplicates(mapping: StateDictMapping, duplicates: Mapping[str, str]) -> StateDictMapping:
    """The plan of a folder that holds some tensors a second time, under other names."""
    by_theirs, their_shapes = dict(mapping.by_hf_name), dict(mapping.hf_shapes)
    for name, original in duplicates.items():
        by_theirs[name] = tuple(replace(piece, hf_name=name) for piece in mapping.by_hf_name[original])
        their_shapes[name] = mapping.hf_shapes[original]
    return replace(mapping, by_hf_name=by_theirs, hf_shapes=their_shapes)


def _choose_family(model: ModelConfig, options: ExportOptions, origin: WeightsOrigin) -> Family:
    plain = replace(model, mtp_layers=0)
    if options.family != "auto":
        if lacks := family_unsupported_reason(FAMILIES[options.family], model):
            fits = model.mtp_layers and not family_unsupported_reason(FAMILIES[options.family], plain)
            way_out = "; --without-mtp leaves those layers out" if fits else ""
            raise ConfigError(f"--family {options.family}: it cannot say what this model computes: {lacks}{way_out}")
        return FAMILIES[options.family]
    able = families_for(model)
    came_from = origin.read_config().get("model_type")
    able.sort(key=lambda family: family.name != came_from)
    if able:
        return able[0]
    if model.mtp_layers and families_for(plain):
        raise ConfigError(
            f"no family of Hugging Face models has layers of multi-token prediction (model.mtp_layers="
            f"{model.mtp_layers}) behind those of this one; --without-mtp leaves them out"
        )
    reasons = [f"{family.name}: {family_unsupported_reason(family, model)}" for family in FAMILIES.values()]
    raise ConfigError(
        "no family of Hugging Face models computes what this model does; the nearest are\n  "
        + "\n  ".join(sorted(reasons, key=len)[:3])
    )


def _plan_shards(
    mapping: StateDictMapping,
    dtypes: Mapping[str, str],
    model: ModelConfig,
    imported: Manifest | None,
    options: ExportOptions,
) -> dict[str, TensorSpecs]:
    """The tensors of each file: as the imported folder had them, unless the user wants other files."""
    listed = {} if imported is None else imported.tensors
    is_other = options.shard_bytes is not None or (
        options.mtp_inside and any(is_mtp_file(one.file) for one in listed.values())
    )
    shard_bytes = MAX_SHARD_BYTES if options.shard_bytes is None else options.shard_bytes
    apart = needs_mtp_file(model) and not options.mtp_inside
    return assign_shards(mapping, dtypes, model, None if is_other else imported, shard_bytes, apart)


def _messages(files: Collection[str]) -> tuple[str, ...]:
    apart = [name for name in files if is_mtp_file(name)]
    if not apart:
        return ()
    return (
        f"the layers of multi-token prediction are in {format_list(apart)}, which no index names: transformers would report "
        "them as unexpected. moefold import reads them; --mtp-inside writes them among the others, as DeepSeek does",
    )


def _check_tensors(
    mapping: StateDictMapping, source: CheckpointSource, checkpoint: Path, left_out: Collection[str]
) -> None:
    faults = [f"tensor {name} is missing" for name in mapping.shapes.keys() - source.shapes.keys()]
    faults += [
        f"tensor {name} has no place in its model"
        for name in source.shapes.keys() - mapping.shapes.keys() - {*left_out}
    ]
    faults += [
        f"tensor {name} has shape {list(source.shapes[name])}, its model means {list(shape)}"
        for name, shape in mapping.shapes.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    if faults:
        raise ConfigError(f"checkpoint {str(checkpoint)!r}: {format_list(sorted(faults))}")


def _hf_dtypes(mapping: StateDictMapping, source: CheckpointSource, options: ExportOptions) -> dict[str, str]:
    """The type of each tensor of theirs, as the format spells it. A bias of the choice of experts is never rounded."""
    if options.dtype == "auto" and source.meta.origin:
        return {theirs: DTYPE_NAMES[source.dtype(pieces[0].name)] for theirs, pieces in mapping.by_hf_name.items()}
    run_dtype = {"float32": "F32", "float64": "F64"}.get(source.meta.dtype, "BF16")
    dtype = run_dtype if options.dtype == "auto" else DTYPE_NAMES[EXPORT_DTYPES[options.dtype]]
    return {
        theirs: DTYPE_NAMES[source.dtype(pieces[0].name)] if pieces[0].name.endswith(".expert_bias") else dtype
        for theirs, pieces in mapping.by_hf_name.items()
    }


def _write_tensors(
    source: CheckpointSource,
    mapping: StateDictMapping,
    layouts: Mapping[str, FileLayout],
    world: World,
    on_bytes: OnBytes,
) -> dict[str, str]:
    """Write my tensors into the files; returns the hashes of all."""
    places = {name: stored for layout in layouts.values() for name, stored in layout.tensors.items()}
    mine = {}
    with FileWriter() as writer:
        for group in assign_groups(mapping, world):
            for theirs in group:
                place, digest, done = places[theirs], hashlib.sha256(), 0
                dtype = DTYPES[place.dtype]
                for rows in split_into_chunks(theirs, place.shape, dtype):
                    values = assemble_rows(source, mapping, rows, dtype)
                    _check_overflow(values, theirs, source.dtype(mapping.by_hf_name[theirs][0].name))
                    data = bytes_of(values)
                    writer.write(place, data, done)
                    digest.update(data)
                    done += len(data)
                    on_bytes(len(data))
                mine[theirs] = digest.hexdigest()
            source.clear_cache()
    return {name: digest for part in world.all_gather_object(mine) for name, digest in part.items()}


def _check_overflow(values: Tensor, name: str, source: torch.dtype) -> None:
    if values.dtype == torch.float16 != source and not torch.isfinite(values).all():
        raise ConfigError(f"tensor {name} has values that float16 cannot hold (above 65504); choose --dtype bfloat16")


def _manifest_entries(
    layouts: Mapping[str, FileLayout], hashes: Mapping[str, str], duplicates: Mapping[str, str]
) -> dict[str, ManifestEntry]:
    return {
        name: ManifestEntry(
            stored.file.name,
            stored.dtype,
            stored.shape,
            hashes[name],
            DUPLICATE_REASONS[duplicates[name]] if name in duplicates else "",
        )
        for layout in layouts.values()
        for name, stored in layout.tensors.items()
    }


CARD_FILE = "README.md"

_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- moefold
"""
_USE = """
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH_OR_NAME_OF_THIS_FOLDER")
```

Before you publish this model, add the data it was trained on, its evaluation, its limits and its licence.
"""


def write_model_card(folder: Path, family: str, model: ModelConfig, meta: CheckpointMeta) -> None:
    """Write README.md with the sizes of the model and how long it was trained.

    Args:
        folder: of the export.
        family: the `model_type` of its config.json.
        model: what the folder computes.
        meta: of the checkpoint, which a run has written.

    Raises:
        OSError: the file cannot be written.
    """
    count = count_parameters(model)
    sizes = f"{count.total:,} parameters"
    if model.num_experts:
        sizes += f", {count.active:,} of them active for each token ({model.top_k} of {model.num_experts} experts)"
    lines = [
        f"# {family} model trained with moefold",
        "",
        f"- architecture: `{family}`, {model.num_layers} layers, hidden size {model.hidden_size:,}",
        f"- size: {sizes}",
        f"- training: {meta.step:,} optimizer steps, {meta.tokens:,} tokens",
    ]
    tag = "- mixture-of-experts\n" if model.num_experts else ""
    (folder / CARD_FILE).write_text(f"{_HEAD}{tag}---\n" + "\n".join(lines) + "\n" + _USE, encoding="utf-8")
