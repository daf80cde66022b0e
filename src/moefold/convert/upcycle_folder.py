"""Conversion of a dense model to a checkpoint with experts, on any number of processes."""

from dataclasses import replace
from pathlib import Path

from moefold.checkpoint.checkpoint_dir import check_integrity, read_meta
from moefold.checkpoint.streaming_io import write_manifest_in_parallel
from moefold.comm.groups import World
from moefold.config.schema import ModelConfig
from moefold.convert.atomic_dir import atomic_directory, raise_on_all_ranks
from moefold.convert.hf_config import is_hf_folder
from moefold.convert.hf_shards import copy_sidecar_files
from moefold.convert.hf_sidecar_files import SIDECAR_DIR, find_sidecar_dir, tokenizer_unsupported_reason
from moefold.convert.import_folder import Conversion, OnBytes, finish_checkpoint, write_weights
from moefold.convert.init_from import open_weights
from moefold.convert.init_from_check import resolve_weights_folder
from moefold.convert.tokenizer_export import choose_tokenizer
from moefold.convert.upcycle import UpcycledSource
from moefold.convert.upcycle_check import export_message


def upcycle_folder(
    dense: Path, out: Path, model: ModelConfig, seed: int, world: World, *, on_bytes: OnBytes
) -> Conversion:
    """Write the checkpoint of an upcycled model. Collective over `world`.

    Args:
        dense: a Hugging Face folder, a checkpoint, or a run, which means its newest checkpoint.
        out: the checkpoint; must not exist.
        model: the model with experts, with `upcycle_from` set.
        seed: of the router, the noise and the shared expert.
        world: the processes that share the work.
        on_bytes: called with the progress of this process.

    Raises:
        ConfigError: `dense` or `out` cannot be used; nothing remains written.
    """
    dense = world.all_gather_object(resolve_weights_folder(dense))[0]
    if not is_hf_folder(dense):
        check_integrity(dense, world)
    source = UpcycledSource(open_weights(dense), model, seed)
    sidecar_dir, tokenizer = (dense, "") if is_hf_folder(dense) else (find_sidecar_dir(dense), _tokenizer_of(dense))
    copied: tuple[str, ...] = ()
    excluded = () if is_hf_folder(dense) else choose_tokenizer(read_meta(dense), sidecar_dir).excluded
    with atomic_directory(out, world) as tmp_dir:
        write_weights(source, tmp_dir, world, on_bytes)
        if world.is_rank0:
            if sidecar_dir is not None:
                copied = tuple(copy_sidecar_files(sidecar_dir, tmp_dir / SIDECAR_DIR, excluded=excluded))
            final = replace(model, upcycle_from="", upcycle_router="group", upcycle_scaling=True, upcycle_noise=0.0)
            finish_checkpoint(tmp_dir, out, final, f"upcycle of {dense}", tokenizer)
        raise_on_all_ranks(world, "")
        write_manifest_in_parallel(tmp_dir, world)
    size = sum(path.stat().st_size for path in out.glob("*.distcp"))
    reason = ""
    if sidecar_dir is not None and not tokenizer:
        reason = tokenizer_unsupported_reason(sidecar_dir, "set data.tokenizer, or train on token ids")
    notes = [note for note in (reason and f"recipe.toml names no tokenizer: {reason}", export_message(model)) if note]
    return Conversion(len(source.shapes), size, copied, messages=tuple(notes))


def _tokenizer_of(checkpoint: Path) -> str:
    """Return the path of the tokenizer that a checkpoint's run used; empty if it is not a file."""
    found = str(read_meta(checkpoint).order.get("tokenizer", ""))
    return str(Path(found).absolute()) if found != "bytes" and Path(found).is_file() else ""
