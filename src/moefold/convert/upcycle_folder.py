"""A dense model made a checkpoint with experts, by any number of processes."""

from dataclasses import replace
from pathlib import Path

from moefold.checkpoint.checkpoint_dir import check_integrity, read_meta
from moefold.checkpoint.streaming_io import write_manifest_in_parallel
from moefold.comm.groups import World
from moefold.config.schema import ModelConfig
from moefold.convert.atomic_dir import atomic_directory, raise_on_all_ranks
from moefold.convert.hf_config import is_hf_folder
from moefold.convert.hf_folder import SIDECAR_DIR, find_sidecar_dir, tokenizer_unsupported_reason
from moefold.convert.hf_shards import copy_sidecar_files
from moefold.convert.import_folder import Conversion, OnBytes, finish_checkpoint, write_weights
from moefold.convert.init_from import open_weights
from moefold.convert.init_from_check import resolve_weights_folder
from moefold.convert.tokenizer_export import choose_tokenizer
from moefold.convert.upcycle import UpcycledSource
from moefold.convert.upcycle_check import export_message


def upcycle_folder(
    dense: Path, out: Path, model: ModelConfig, seed: int, world: World, *, on_bytes: OnBytes
) -> Conversion:
    """Write the checkpoint of an upcycled model; collective over the crew.

    Args:
        dense: a Hugging Face folder, a checkpoint, or a run, which stands for its newest one.
        out: the checkpoint; must not exist.
        model: what to make of it, with `upcycle_from` set.
        seed: of router, noise and shared expert.
        world: the processes that share the work.
        on_bytes: told of the progress of this process.

    Raises:
        ConfigError: `dense` or `out` cannot be used; nothing is left written.
    """
    dense = world.all_gather_object(resolve_weights_folder(dense))[0]
    if not is_hf_folder(dense):
        check_integrity(dense, world)
    source = UpcycledSource(open_weights(dense), model, seed)
    companions, tokenizer = (dense, "") if is_hf_folder(dense) else (find_sidecar_dir(dense), _tokenizer_of(dense))
    copied: tuple[str, ...] = ()
    theirs = () if is_hf_folder(dense) else choose_tokenizer(read_meta(dense), companions).excluded
    with atomic_directory(out, world) as draft:
        write_weights(source, draft, world, on_bytes)
        if world.is_rank0:
            if companions is not None:
                copied = tuple(copy_sidecar_files(companions, draft / SIDECAR_DIR, excluded=theirs))
            done = replace(model, upcycle_from="", upcycle_router="group", upcycle_scaling=True, upcycle_noise=0.0)
            finish_checkpoint(draft, out, done, f"upcycle of {dense}", tokenizer)
        raise_on_all_ranks(world, "")
        write_manifest_in_parallel(draft, world)
    size = sum(path.stat().st_size for path in out.glob("*.distcp"))
    fault = ""
    if companions is not None and not tokenizer:
        fault = tokenizer_unsupported_reason(companions, "set data.tokenizer, or train on token ids")
    notes = [note for note in (fault and f"recipe.toml names no tokenizer: {fault}", export_message(model)) if note]
    return Conversion(len(source.shapes), size, copied, messages=tuple(notes))


def _tokenizer_of(checkpoint: Path) -> str:
    """The tokenizer of the run that wrote a checkpoint, where it is a file; else empty."""
    found = str(read_meta(checkpoint).order.get("tokenizer", ""))
    return str(Path(found).absolute()) if found != "bytes" and Path(found).is_file() else ""
