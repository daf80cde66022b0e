"""A dense model made a checkpoint with experts, by any number of processes."""

from dataclasses import replace
from pathlib import Path

from moefold.checkpoint.folder import read_meta
from moefold.checkpoint.sound import refuse_damaged
from moefold.checkpoint.stream import seal
from moefold.config.schema import ModelConfig
from moefold.convert.companions import COMPANIONS, find_companions, tokenizer_fault
from moefold.convert.draft import agree, drafted
from moefold.convert.exportable import export_note
from moefold.convert.hf_config import is_hf_folder
from moefold.convert.import_folder import Advance, Conversion, finish_checkpoint, write_weights
from moefold.convert.manifest import copy_companions
from moefold.convert.start import open_weights
from moefold.convert.start_check import weights_folder
from moefold.convert.trained_tokenizer import choose_tokenizer
from moefold.convert.upcycle import UpcycledSource
from moefold.launch.crew import Crew


def upcycle_folder(
    dense: Path, out: Path, model: ModelConfig, seed: int, crew: Crew, *, advance: Advance
) -> Conversion:
    """Write the checkpoint of an upcycled model; collective over the crew.

    Args:
        dense: a Hugging Face folder, a checkpoint, or a run, which stands for its newest one.
        out: the checkpoint; must not exist.
        model: what to make of it, with `upcycle_from` set.
        seed: of router, noise and shared expert.
        crew: the processes that share the work.
        advance: told of the progress of this process.

    Raises:
        ConfigError: `dense` or `out` cannot be used; nothing is left written.
    """
    dense = crew.gather(weights_folder(dense))[0]
    if not is_hf_folder(dense):
        refuse_damaged(dense, crew)
    source = UpcycledSource(open_weights(dense), model, seed)
    companions, tokenizer = (dense, "") if is_hf_folder(dense) else (find_companions(dense), _tokenizer_of(dense))
    copied: tuple[str, ...] = ()
    theirs = () if is_hf_folder(dense) else choose_tokenizer(read_meta(dense), companions).left_out
    with drafted(out, crew) as draft:
        write_weights(source, draft, crew, advance)
        if crew.is_first:
            if companions is not None:
                copied = tuple(copy_companions(companions, draft / COMPANIONS, without=theirs))
            done = replace(model, upcycle_from="", upcycle_router="group", upcycle_scaling=True, upcycle_noise=0.0)
            finish_checkpoint(draft, out, done, f"upcycle of {dense}", tokenizer)
        agree(crew, "")
        seal(draft, crew)
    size = sum(path.stat().st_size for path in out.glob("*.distcp"))
    fault = ""
    if companions is not None and not tokenizer:
        fault = tokenizer_fault(companions, "set data.tokenizer, or train on token ids")
    notes = [note for note in (fault and f"recipe.toml names no tokenizer: {fault}", export_note(model)) if note]
    return Conversion(len(source.shapes), size, copied, notes=tuple(notes))


def _tokenizer_of(checkpoint: Path) -> str:
    """The tokenizer of the run that wrote a checkpoint, where it is a file; else empty."""
    found = str(read_meta(checkpoint).order.get("tokenizer", ""))
    return str(Path(found).absolute()) if found != "bytes" and Path(found).is_file() else ""
