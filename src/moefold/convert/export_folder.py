"""A checkpoint made a Hugging Face folder, tensor by tensor, by any number of processes."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moefold import __version__
from moefold.checkpoint.folder import CheckpointMeta, locate_checkpoint, model_differences, model_sizes
from moefold.checkpoint.sound import refuse_damaged
from moefold.checkpoint.stream import CheckpointSource, chunks_of
from moefold.config.schema import ModelConfig
from moefold.convert.compare import assemble, compare_with_folder, share_groups, work_order
from moefold.convert.draft import agree, drafted
from moefold.convert.families import FAMILIES, Family
from moefold.convert.hf_config import families_for, model_of, read_hf_config, what_family_lacks
from moefold.convert.hf_folder import INDEX_FILE, SINGLE_FILE, open_hf_folder
from moefold.convert.import_folder import Advance, Conversion
from moefold.convert.manifest import (
    Listed,
    Manifest,
    copy_companions,
    find_companions,
    read_manifest,
    write_manifest,
)
from moefold.convert.piece import Plan
from moefold.convert.safetensors_file import DTYPES, NAMES, FileWriter, Layout, begin_file, bytes_of, plan_file
from moefold.convert.start_check import model_in
from moefold.convert.weights import ECHO, EMBEDDING, HEAD, HfSource, plan_for
from moefold.errors import ConfigError, some
from moefold.launch.crew import Crew

SHARD_BYTES = 5_000_000_000
"""Files are at most so large, or hold one tensor: the limit of transformers."""
TRAVELLING_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "use_cache")
"""Keys of a config.json that stay true when the model it came with has been changed."""

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
    model = model_in(checkpoint)
    companions = find_companions(checkpoint)
    before = read_manifest(companions) if companions is not None else None
    family = _choose_family(model, wish.family, companions)
    same_family = before is not None and before.family == family.name
    number = before.layout if before is not None and same_family else 0
    plan = plan_for(model, family.layouts[number], family)
    passed_over: dict[str, str] = {}
    if same_family and model.tie_embeddings and _had_echo(before):
        plan, passed_over = _with_echo(plan), {HEAD: ECHO}
    _refuse_differences(plan, source, checkpoint)
    dtypes = _their_dtypes(plan, source, wish)
    kept = before if same_family and wish.shard_bytes is None else None
    files = _files(plan, dtypes, kept, SHARD_BYTES if wish.shard_bytes is None else wish.shard_bytes)
    with drafted(out, crew) as draft:
        layouts = {name: plan_file(draft / name, tensors) for name, tensors in files.items()}
        if crew.is_first:
            for name, layout in layouts.items():
                begin_file(draft / name, layout)
        agree(crew, "")
        hashes = _write_tensors(source, plan, layouts, crew, advance)
        manifest = Manifest(family.name, number, _listed(layouts, hashes, passed_over))
        if crew.is_first:
            if companions is not None:
                copy_companions(companions, draft)
            _write_config(draft, family, model, source.meta, dtypes, companions)
            _write_index(draft, layouts)
            write_manifest(draft, manifest)
        agree(crew, "")
        if wish.check:
            compare_with_folder(source, HfSource(open_hf_folder(draft)), crew)
    size = sum(stored.num_bytes for layout in layouts.values() for stored in layout.tensors.values())
    return Conversion(len(dtypes), size, tuple(sorted(path.name for path in out.iterdir() if path.is_file())))


def _had_echo(manifest: Manifest | None) -> bool:
    return manifest is not None and HEAD in manifest.tensors and manifest.tensors[HEAD].passed_over == ECHO


def _with_echo(plan: Plan) -> Plan:
    """The plan of a folder that holds the embedding a second time, as the head."""
    pieces = tuple(replace(piece, theirs=HEAD) for piece in plan.by_theirs[EMBEDDING])
    by_theirs = {**plan.by_theirs, HEAD: pieces}
    return replace(plan, by_theirs=by_theirs, their_shapes={**plan.their_shapes, HEAD: plan.their_shapes[EMBEDDING]})


def _choose_family(model: ModelConfig, wish: str, companions: Path | None) -> Family:
    if wish != "auto":
        if lacks := what_family_lacks(FAMILIES[wish], model):
            raise ConfigError(f"--family {wish}: it cannot say what this model computes: {lacks}")
        return FAMILIES[wish]
    able = families_for(model)
    if companions is not None and (companions / "config.json").is_file():
        came_from = read_hf_config(companions).get("model_type")
        able.sort(key=lambda family: family.name != came_from)
    if able:
        return able[0]
    reasons = [f"{family.name}: {what_family_lacks(family, model)}" for family in FAMILIES.values()]
    raise ConfigError(
        "no family of Hugging Face models computes what this model does; the nearest are\n  "
        + "\n  ".join(sorted(reasons, key=len)[:3])
    )


def _refuse_differences(plan: Plan, source: CheckpointSource, checkpoint: Path) -> None:
    faults = [f"tensor {name} is missing" for name in plan.our_shapes.keys() - source.shapes.keys()]
    faults += [f"tensor {name} has no place in its model" for name in source.shapes.keys() - plan.our_shapes.keys()]
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


def _files(
    plan: Plan, dtypes: Mapping[str, str], kept: Manifest | None, shard_bytes: int
) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """The tensors of each file, in its order: as the imported folder had them, or cut in the order of the model."""
    tensors = {name: (dtypes[name], shape) for name, shape in plan.their_shapes.items()}
    known = {} if kept is None else {name: listed for name, listed in kept.tensors.items() if name in tensors}
    if known.keys() == tensors.keys():
        found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, listed in known.items():
            found.setdefault(listed.file, {})[name] = tensors[name]
        return found
    shards: list[list[str]] = [[]]
    filled = 0
    for name in (name for group in work_order(plan) for name in group):
        dtype, shape = tensors[name]
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if shards[-1] and shard_bytes and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE_FILE: {name: tensors[name] for name in sorted(shards[0])}}
    return {
        f"model-{i:05d}-of-{len(shards):05d}.safetensors": {name: tensors[name] for name in sorted(shard)}
        for i, shard in enumerate(shards, 1)
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
                    data = bytes_of(assemble(source, plan, rows, dtype))
                    writer.write(place, data, done)
                    digest.update(data)
                    done += len(data)
                    advance(len(data))
                mine[theirs] = digest.hexdigest()
            source.forget()
    return {name: digest for part in crew.gather(mine) for name, digest in part.items()}


def _listed(
    layouts: Mapping[str, Layout], hashes: Mapping[str, str], passed_over: Mapping[str, str]
) -> dict[str, Listed]:
    return {
        name: Listed(stored.file.name, stored.dtype, stored.shape, hashes[name], passed_over.get(name, ""))
        for layout in layouts.values()
        for name, stored in layout.tensors.items()
    }


def _write_config(
    draft: Path,
    family: Family,
    model: ModelConfig,
    meta: CheckpointMeta,
    dtypes: Mapping[str, str],
    companions: Path | None,
) -> None:
    """The config.json that came along where it still says what is computed, else a new one with its token ids."""
    path = draft / "config.json"
    came: dict[str, Any] = {}
    if companions is not None and (companions / "config.json").is_file():
        came = read_hf_config(companions)
    dtype = _word(dtypes)
    if came.get("model_type") == family.name and not _differs(came, companions, model):
        if came.get("dtype", came.get("torch_dtype", dtype)) == dtype:
            return
        keys = came
    else:
        keys = family.write(model)
        keys |= {"max_position_embeddings": longest(model, meta), "moefold_version": __version__}
        keys |= {key: came[key] for key in TRAVELLING_KEYS if key in came}
    keys.pop("torch_dtype", None)
    keys["dtype"] = dtype
    path.write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _differs(came: Mapping[str, Any], companions: Path | None, model: ModelConfig) -> bool:
    try:
        before = model_of(came, companions or Path())
    except ConfigError:
        return True
    return bool(model_differences(model_sizes(before), model))


def longest(model: ModelConfig, meta: CheckpointMeta) -> int:
    """Positions that the model is said to take: those that the run trained on, or those of the stretched rotation."""
    is_stretched = model.rope_scaling in ("llama3", "yarn")
    stretched = round(model.rope_original_seq_len * model.rope_scaling_factor) if is_stretched else 0
    return max(int(meta.order.get("seq_len", 0)), stretched) or 2048


def _word(dtypes: Mapping[str, str]) -> str:
    """The type of a folder, as config.json spells it: that of most tensors."""
    kinds = list(dtypes.values())
    return str(DTYPES[max(sorted(set(kinds)), key=kinds.count)]).removeprefix("torch.")


def _write_index(draft: Path, layouts: Mapping[str, Layout]) -> None:
    if list(layouts) == [SINGLE_FILE]:
        return
    places = {name: stored for layout in layouts.values() for name, stored in layout.tensors.items()}
    total = {
        "total_parameters": sum(math.prod(stored.shape) for stored in places.values()),
        "total_size": sum(stored.num_bytes for stored in places.values()),
    }
    index = {"metadata": total, "weight_map": {name: stored.file.name for name, stored in places.items()}}
    (draft / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
