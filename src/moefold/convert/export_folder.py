"""A checkpoint made a Hugging Face folder, tensor by tensor, by any number of processes."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moefold.checkpoint.folder import locate_checkpoint
from moefold.checkpoint.sound import refuse_damaged
from moefold.checkpoint.stream import CheckpointSource, chunks_of
from moefold.config.schema import ModelConfig
from moefold.convert.companions import find_companions
from moefold.convert.compare import assemble, compare_with_folder, share_groups
from moefold.convert.draft import agree, drafted
from moefold.convert.echo import HEAD, REASONS, echoes_of
from moefold.convert.export_config import Origin, write_config
from moefold.convert.export_files import SHARD_BYTES, Tensors, belongs_apart, export_files, is_apart, write_index
from moefold.convert.families import FAMILIES, Family
from moefold.convert.further_layer import further_numbers
from moefold.convert.hf_config import families_for, what_family_lacks
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.import_folder import Advance, Conversion
from moefold.convert.manifest import (
    Listed,
    Manifest,
    copy_companions,
    read_manifest,
    write_manifest,
)
from moefold.convert.model_card import write_model_card
from moefold.convert.piece import Plan
from moefold.convert.safetensors_file import (
    DTYPES,
    NAMES,
    WRITTEN_METADATA,
    FileWriter,
    Layout,
    begin_file,
    bytes_of,
    plan_file,
)
from moefold.convert.start_check import model_in
from moefold.convert.trained_tokenizer import TokenizerChoice, choose_tokenizer, place_tokenizer
from moefold.convert.weights import FURTHER, HfSource, plan_for
from moefold.errors import ConfigError, some
from moefold.launch.crew import Crew

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ExportWish:
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


def export_folder(checkpoint: Path, out: Path, crew: Crew, wish: ExportWish, *, advance: Advance) -> Conversion:
    """Write the Hugging Face folder of a checkpoint; collective over the crew.

    Args:
        checkpoint: any checkpoint, of a run or of an import; a run or a folder of them stands for the newest.
        out: the folder; must not exist.
        crew: the processes that share the work.
        wish: type, family, size of files, check.
        advance: told of the progress of this process.

    Raises:
        ConfigError: the checkpoint or `out` cannot be used, or no family can say what the model computes; nothing is
            left written.
    """
    # The first process decides: a run may save one more meanwhile.
    checkpoint = crew.gather(locate_checkpoint(checkpoint))[0]
    refuse_damaged(checkpoint, crew, reads_all=wish.verify)
    source = CheckpointSource(checkpoint)
    model, left_out = _wished_model(model_in(checkpoint), source, wish)
    companions = find_companions(checkpoint)
    family = _choose_family(model, wish, Origin(companions, None))
    before = read_manifest(companions) if companions is not None else None
    origin = Origin(companions, before if before is not None and before.family == family.name else None)
    number = 0 if origin.manifest is None else origin.manifest.layout
    echoes = _echoes(model, origin.manifest)
    plan = _with_echoes(plan_for(model, family.layouts[number], family), echoes)
    _refuse_differences(plan, source, checkpoint, left_out)
    dtypes = _their_dtypes(plan, source, wish)
    files = _files(plan, dtypes, model, origin.manifest, wish)
    metadata = {} if origin.manifest is None else origin.manifest.metadata
    with drafted(out, crew) as draft:
        layouts = {
            name: plan_file(draft / name, tensors, metadata.get(name, WRITTEN_METADATA))
            for name, tensors in files.items()
        }
        if crew.is_first:
            for name, layout in layouts.items():
                begin_file(draft / name, layout)
        agree(crew, "")
        hashes = _write_tensors(source, plan, layouts, crew, advance)
        manifest = Manifest(
            family.name,
            number,
            _listed(layouts, hashes, echoes),
            {name: metadata[name] for name in files if name in metadata},
        )
        tokenizer = TokenizerChoice()
        if crew.is_first:
            tokenizer = choose_tokenizer(source.meta, companions)
            if companions is not None:
                copy_companions(companions, draft, without=tokenizer.left_out)
            place_tokenizer(draft, tokenizer)
            write_config(draft, family, model, source.meta, dtypes, origin, tokenizer.token_ids)
            write_index(draft, layouts, companions)
            write_manifest(draft, manifest)
            if not source.meta.origin:
                write_model_card(draft, family.name, model, source.meta)
        agree(crew, "")
        if wish.check:
            compare_with_folder(source, HfSource(open_hf_folder(draft)), crew)
    size = sum(stored.num_bytes for layout in layouts.values() for stored in layout.tensors.values())
    written = tuple(sorted(path.name for path in out.iterdir() if path.is_file() and path.name not in layouts))
    return Conversion(len(dtypes), size, written, dict.fromkeys(left_out, FURTHER), (*_notes(files), *tokenizer.notes))


def _wished_model(model: ModelConfig, source: CheckpointSource, wish: ExportWish) -> tuple[ModelConfig, list[str]]:
    """The model to write, and the tensors of the checkpoint that it does without."""
    if wish.mtp_inside and not model.mtp_layers:
        raise ConfigError("--mtp-inside has no effect: the model has no layers of multi-token prediction; leave it out")
    if not wish.leaves_out_mtp:
        return model, []
    prefixes = tuple(f"layers.{number}." for number in further_numbers(model))
    return replace(model, mtp_layers=0), [name for name in source.shapes if name.startswith(prefixes)]


def _echoes(model: ModelConfig, before: Manifest | None) -> dict[str, str]:
    """The tensors to write that repeat others: those that came, else those that DeepSeek's folder has."""
    echoes = echoes_of(model)
    if before is None:
        return {name: original for name, original in echoes.items() if name != HEAD}
    came = {name for name, listed in before.tensors.items() if listed.passed_over in REASONS.values()}
    return {name: original for name, original in echoes.items() if name in came}


def _with_echoes(plan: Plan, echoes: Mapping[str, str]) -> Plan:
    """The plan of a folder that holds some tensors a second time, under other names."""
    by_theirs, their_shapes = dict(plan.by_theirs), dict(plan.their_shapes)
    for name, original in echoes.items():
        by_theirs[name] = tuple(replace(piece, theirs=name) for piece in plan.by_theirs[original])
        their_shapes[name] = plan.their_shapes[original]
    return replace(plan, by_theirs=by_theirs, their_shapes=their_shapes)


def _choose_family(model: ModelConfig, wish: ExportWish, origin: Origin) -> Family:
    plain = replace(model, mtp_layers=0)
    if wish.family != "auto":
        if lacks := what_family_lacks(FAMILIES[wish.family], model):
            fits = model.mtp_layers and not what_family_lacks(FAMILIES[wish.family], plain)
            way_out = "; --without-mtp leaves those layers out" if fits else ""
            raise ConfigError(f"--family {wish.family}: it cannot say what this model computes: {lacks}{way_out}")
        return FAMILIES[wish.family]
    able = families_for(model)
    came_from = origin.config().get("model_type")
    able.sort(key=lambda family: family.name != came_from)
    if able:
        return able[0]
    if model.mtp_layers and families_for(plain):
        raise ConfigError(
            f"no family of Hugging Face models has layers of multi-token prediction (model.mtp_layers="
            f"{model.mtp_layers}) behind those of this one; --without-mtp leaves them out"
        )
    reasons = [f"{family.name}: {what_family_lacks(family, model)}" for family in FAMILIES.values()]
    raise ConfigError(
        "no family of Hugging Face models computes what this model does; the nearest are\n  "
        + "\n  ".join(sorted(reasons, key=len)[:3])
    )


def _files(
    plan: Plan, dtypes: Mapping[str, str], model: ModelConfig, came: Manifest | None, wish: ExportWish
) -> dict[str, Tensors]:
    """The tensors of each file: as the imported folder had them, unless the user wants other files."""
    listed = {} if came is None else came.tensors
    is_other = wish.shard_bytes is not None or (wish.mtp_inside and any(is_apart(one.file) for one in listed.values()))
    shard_bytes = SHARD_BYTES if wish.shard_bytes is None else wish.shard_bytes
    apart = belongs_apart(model) and not wish.mtp_inside
    return export_files(plan, dtypes, model, None if is_other else came, shard_bytes, apart)


def _notes(files: Collection[str]) -> tuple[str, ...]:
    apart = [name for name in files if is_apart(name)]
    if not apart:
        return ()
    return (
        f"the layers of multi-token prediction are in {some(apart)}, which no index names: transformers would report "
        "them as unexpected. moefold import reads them; --mtp-inside writes them among the others, as DeepSeek does",
    )


def _refuse_differences(plan: Plan, source: CheckpointSource, checkpoint: Path, left_out: Collection[str]) -> None:
    faults = [f"tensor {name} is missing" for name in plan.our_shapes.keys() - source.shapes.keys()]
    faults += [
        f"tensor {name} has no place in its model"
        for name in source.shapes.keys() - plan.our_shapes.keys() - {*left_out}
    ]
    faults += [
        f"tensor {name} has shape {list(source.shapes[name])}, its model means {list(shape)}"
        for name, shape in plan.our_shapes.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    if faults:
        raise ConfigError(f"checkpoint {str(checkpoint)!r}: {some(sorted(faults))}")


def _their_dtypes(plan: Plan, source: CheckpointSource, wish: ExportWish) -> dict[str, str]:
    """The type of each tensor of theirs, as the format spells it. A bias of the choice of experts is never rounded."""
    if wish.dtype == "auto" and source.meta.origin:
        return {theirs: NAMES[source.dtype(pieces[0].ours)] for theirs, pieces in plan.by_theirs.items()}
    run_dtype = {"float32": "F32", "float64": "F64"}.get(source.meta.dtype, "BF16")
    dtype = run_dtype if wish.dtype == "auto" else NAMES[EXPORT_DTYPES[wish.dtype]]
    return {
        theirs: NAMES[source.dtype(pieces[0].ours)] if pieces[0].ours.endswith(".expert_bias") else dtype
        for theirs, pieces in plan.by_theirs.items()
    }


def _write_tensors(
    source: CheckpointSource, plan: Plan, layouts: Mapping[str, Layout], crew: Crew, advance: Advance
) -> dict[str, str]:
    """Write my tensors into the files; returns the hashes of all."""
    places = {name: stored for layout in layouts.values() for name, stored in layout.tensors.items()}
    mine = {}
    with FileWriter() as writer:
        for group in share_groups(plan, crew):
            for theirs in group:
                place, digest, done = places[theirs], hashlib.sha256(), 0
                dtype = DTYPES[place.dtype]
                for rows in chunks_of(theirs, place.shape, dtype):
                    values = assemble(source, plan, rows, dtype)
                    _refuse_overflow(values, theirs, source.dtype(plan.by_theirs[theirs][0].ours))
                    data = bytes_of(values)
                    writer.write(place, data, done)
                    digest.update(data)
                    done += len(data)
                    advance(len(data))
                mine[theirs] = digest.hexdigest()
            source.forget()
    return {name: digest for part in crew.gather(mine) for name, digest in part.items()}


def _refuse_overflow(values: Tensor, name: str, source: torch.dtype) -> None:
    if values.dtype == torch.float16 != source and not torch.isfinite(values).all():
        raise ConfigError(f"tensor {name} has values that float16 cannot hold (above 65504); choose --dtype bfloat16")


def _listed(layouts: Mapping[str, Layout], hashes: Mapping[str, str], echoes: Mapping[str, str]) -> dict[str, Listed]:
    return {
        name: Listed(
            stored.file.name, stored.dtype, stored.shape, hashes[name], REASONS[echoes[name]] if name in echoes else ""
        )
        for layout in layouts.values()
        for name, stored in layout.tensors.items()
    }
