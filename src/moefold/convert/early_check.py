"""What can be wrong with a conversion, as far as it shows without torch, which takes seconds to import."""

from pathlib import Path

from moefold.checkpoint.folder import locate_checkpoint
from moefold.checkpoint.sound import refuse_cut
from moefold.convert.companions import tokenizer_fault
from moefold.convert.hf_config import read_model_config
from moefold.convert.new_folder import new_folder_fault
from moefold.convert.start_check import model_in
from moefold.errors import ConfigError
from moefold.launch.place import Place


def check_import(folder: Path, out: Path, place: Place | None, *, needs_tokenizer: bool) -> None:
    """Check the config and the tokenizer of a Hugging Face folder, and that the checkpoint can be made.

    Raises:
        ConfigError: the first fault.
    """
    read_model_config(folder)
    if needs_tokenizer and (fault := tokenizer_fault(folder, NO_TOKENIZER)):
        raise ConfigError(fault)
    check_out(out, place)


def check_export(checkpoint: Path, out: Path, place: Place | None) -> None:
    """Check the description of a checkpoint and the sizes of its files, and that the folder can be made.

    Raises:
        ConfigError: the first fault.
    """
    found = locate_checkpoint(checkpoint)
    refuse_cut(found)
    model_in(found)
    check_out(out, place)


def check_out(out: Path, place: Place | None) -> None:
    """Check that a result has a name of its own; the first rank does.

    Raises:
        ConfigError: it exists already, or could not be made.
    """
    if (place is None or place.rank == 0) and (fault := new_folder_fault(out)):
        raise ConfigError(fault)


NO_TOKENIZER = "say --no-tokenizer to train on token ids"
