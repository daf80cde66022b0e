"""A Hugging Face folder made a checkpoint, tensor by tensor, by any number of processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from moefold.checkpoint.folder import FORMAT, CheckpointMeta, model_sizes, write_meta
from moefold.checkpoint.stream import CheckpointSource, Chunk, chunks_of, seal, write_chunks
from moefold.config.checks_effect import check_explicit
from moefold.config.checks_routing import gradient_faults
from moefold.config.schema import Config, ModelConfig
from moefold.convert.companions import COMPANIONS, RECIPE_FILE, TOKENIZER, tokenizer_fault
from moefold.convert.compare import compare_with_folder
from moefold.convert.draft import agree, drafted
from moefold.convert.early_check import NO_TOKENIZER
from moefold.convert.hf_config import model_of
from moefold.convert.hf_folder import HfFolder, open_hf_folder
from moefold.convert.manifest import (
    Listed,
    Manifest,
    changed_tensors,
    copy_companions,
    hash_stored,
    keep_index,
    read_manifest,
    write_manifest,
)
from moefold.convert.safetensors_file import WRITTEN_METADATA, read_metadata
from moefold.convert.weights import HfSource, WeightSource
from moefold.errors import ConfigError, some
from moefold.launch.crew import Crew

Advance = Callable[[int], None]
"""Called with the bytes that were dealt with since the last call."""


@dataclass(frozen=True)
class ImportWish:
    """What the user may leave open."""

    check: bool = False
    """Read the result again and compare each byte."""
    needs_tokenizer: bool = True
    """Refuse a folder without one that moefold reads."""
    leaves_out_mtp: bool = False
    """Leave the layers of multi-token prediction out."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did."""

    tensors: int
    """Of the Hugging Face folder."""
    num_bytes: int
    companions: tuple[str, ...]
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the source that are not in the result, with the reason."""
    notes: tuple[str, ...] = ()
    """What the user should know of the result, with the way out."""


def import_folder(
    folder: Path, out: Path, crew: Crew, wish: ImportWish | None = None, *, advance: Advance
) -> Conversion:
    """Write the checkpoint of a Hugging Face folder; collective over the crew.

    `out` then holds the weights, as the folder has them (bfloat16 stays bfloat16), `recipe.toml` to train from them,
    and, in `hf`, the files that travel along and the manifest.

    Args:
        folder: the Hugging Face folder.
        out: the checkpoint; must not exist.
        crew: the processes that share the work.
        wish: what the user may leave open.
        advance: told of the progress of this process.

    Raises:
        ConfigError: the folder or `out` cannot be used; nothing is left written.
    """
    wish = wish or ImportWish()
    source = HfSource(open_hf_folder(folder), leaves_out_mtp=wish.leaves_out_mtp)
    if wish.needs_tokenizer and (fault := tokenizer_fault(folder, NO_TOKENIZER)):
        raise ConfigError(fault)
    with drafted(out, crew) as draft:
        write_weights(source, draft, crew, advance)
        manifest = _manifest(source, crew)
        companions: tuple[str, ...] = ()
        if crew.is_first:
            companions = tuple(copy_companions(folder, draft / COMPANIONS))
            keep_index(folder, draft / COMPANIONS)
            write_manifest(draft / COMPANIONS, manifest)
            finish_checkpoint(draft, out, source.model, f"import of {folder}")
        agree(crew, "")
        seal(draft, crew)
        if wish.check:
            compare_with_folder(CheckpointSource(draft), source, crew)
    taken = [source.stored(name) for name in source.plan.their_shapes]
    size = sum(stored.num_bytes for stored in taken)
    return Conversion(len(taken), size, companions, source.passed_over, _notes(source))


def _notes(source: HfSource) -> tuple[str, ...]:
    notes = [f"moefold train refuses this model: {fault}" for fault in gradient_faults(Config(model=source.model))]
    counted = model_of(source.folder.keys, source.folder.path).mtp_layers
    if not counted or source.folder.model.mtp_layers:
        return tuple(notes)
    return (
        *notes,
        f"config.json counts num_nextn_predict_layers={counted}, but the folder holds none of their tensors: the model "
        "has no layers of multi-token prediction",
    )


def write_weights(source: WeightSource, draft: Path, crew: Crew, advance: Advance) -> None:
    """Write all tensors of a source as a checkpoint's; collective. In memory is one chunk at a time."""
    dtypes = {name: source.dtype(name) for name in source.shapes}
    last = ""

    def read(chunk: Chunk) -> torch.Tensor:
        nonlocal last
        if chunk.name != last:
            source.forget()
        last = chunk.name
        region = (slice(chunk.start, chunk.stop), *(slice(0, size) for size in source.shapes[chunk.name][1:]))
        values = source.read(chunk.name, region).contiguous()
        advance(values.nbytes)
        storage = values.untyped_storage()
        # What was read of a checkpoint is kept there for the next read, and its memory cannot be given back early.
        return values if storage.nbytes() == values.nbytes and storage.resizable() else values.clone()

    write_chunks(draft, source.shapes, dtypes, share(_all_chunks(source.shapes, dtypes), source, crew), read)


def finish_checkpoint(draft: Path, out: Path, model: ModelConfig, origin: str, tokenizer: str = "") -> None:
    """Write what makes a folder of weights a checkpoint, and a recipe that starts from it.

    Args:
        draft: the folder.
        out: what it will be called.
        model: its model.
        origin: where the weights come from.
        tokenizer: what the recipe reads text with where none came along; empty: nothing is known.
    """
    meta = CheckpointMeta(
        format=FORMAT,
        step=0,
        samples=0,
        tokens=0,
        order={},
        model=model_sizes(model),
        parallel={},
        origin=origin,
    )
    write_meta(draft, meta)
    if (draft / COMPANIONS / TOKENIZER).is_file():
        tokenizer = str(out.absolute() / COMPANIONS / TOKENIZER)
    (draft / RECIPE_FILE).write_text(recipe_text(model, out.absolute(), tokenizer), encoding="utf-8")


def recipe_text(model: ModelConfig, checkpoint: Path, tokenizer: str) -> str:
    """A recipe that trains a model from a checkpoint: the settings that follow from the weights, and no others."""
    default, ours = asdict(ModelConfig()), asdict(model)
    sizes = [
        f"{key} = {_toml(value)}"
        for key, value in ours.items()
        if value != default[key] and _has_effect(f"model.{key}", model)
    ]
    lines = [
        "# Trains on from these weights; the rest is as you like it:",
        "#   moefold train recipe.toml data.kind=text data.path=TEXT run.steps=1000",
        "",
        *("[run]", f"dir = {_toml(f'runs/{checkpoint.name}')}", ""),
        *("[model]", *sizes, ""),
        *("[checkpoint]", f"init_from = {_toml(str(checkpoint))}"),
    ]
    if tokenizer:
        lines += ["", "[data]", f"tokenizer = {_toml(tokenizer)}"]
    return "\n".join(lines) + "\n"


def _has_effect(key: str, model: ModelConfig) -> bool:
    """Whether a recipe may give a key of [model]: what nothing would read is refused there."""
    try:
        check_explicit(frozenset({key}), Config(model=model))
    except ConfigError:
        return False
    return True


def share(chunks: Sequence[Chunk], source: WeightSource, crew: Crew) -> list[Chunk]:
    """My part of the chunks: neighbours, of about as many bytes as the others'."""
    sizes = [_bytes_of(chunk, source) for chunk in chunks]
    total, done, mine = sum(sizes), 0, []
    for chunk, size in zip(chunks, sizes, strict=True):
        if min(crew.size - 1, done * crew.size // max(1, total)) == crew.rank:
            mine.append(chunk)
        done += size
    return mine


def _bytes_of(chunk: Chunk, source: WeightSource) -> int:
    row = source.dtype(chunk.name).itemsize
    for size in source.shapes[chunk.name][1:]:
        row *= size
    return row * (chunk.stop - chunk.start)


def _all_chunks(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> list[Chunk]:
    return [chunk for name, shape in shapes.items() for chunk in chunks_of(name, shape, dtypes[name])]


def _manifest(source: HfSource, crew: Crew) -> Manifest:
    """Hash the tensors of a folder, each on one process; refuses what differs from the folder's own manifest."""
    folder: HfFolder = source.folder
    names = sorted(folder.tensors)
    mine = {name: hash_stored(folder.tensors[name]) for name in names[crew.rank :: crew.size]}
    hashes = {name: digest for part in crew.gather(mine) for name, digest in part.items()}
    own = read_manifest(folder.path)
    if own is not None and (changed := changed_tensors(own, hashes)):
        raise ConfigError(f"{str(folder.path)!r}: changed since its manifest was written: {some(sorted(changed))}")
    in_order = sorted(hashes, key=lambda name: (folder.tensors[name].file.name, folder.tensors[name].start))
    listed = {
        name: Listed(stored.file.name, stored.dtype, stored.shape, hashes[name], source.passed_over.get(name, ""))
        for name, stored in ((name, folder.tensors[name]) for name in in_order)
    }
    files = sorted({stored.file for stored in folder.tensors.values()})
    metadata = {file.name: found for file in files if (found := read_metadata(file)) != WRITTEN_METADATA}
    return Manifest(folder.family.name, source.layout, listed, metadata)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
