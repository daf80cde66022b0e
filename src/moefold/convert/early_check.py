"""Early checks of a conversion, without torch, which takes seconds to import."""

from pathlib import Path

from moefold.checkpoint.checkpoint_dir import check_file_sizes, locate_checkpoint
from moefold.convert.hf_config import read_model_config
from moefold.convert.hf_sidecar_files import tokenizer_unsupported_reason
from moefold.convert.init_from_check import read_model
from moefold.convert.new_folder import new_folder_unsupported_reason
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv


def check_import(folder: Path, out: Path, rank_env: RankEnv | None, *, needs_tokenizer: bool) -> None:
    """Check the config and the tokenizer of a Hugging Face folder, and that the checkpoint can be created.

    Raises:
        ConfigError: on the first error.
    """
    read_model_config(folder)
    if needs_tokenizer and (reason := tokenizer_unsupported_reason(folder, NO_TOKENIZER_HINT)):
        raise ConfigError(reason)
    check_out(out, rank_env)


def check_export(checkpoint: Path, out: Path, rank_env: RankEnv | None) -> None:
    """Check the metadata of a checkpoint and the sizes of its files, and that the folder can be created.

    Raises:
        ConfigError: on the first error.
    """
    found = locate_checkpoint(checkpoint)
    check_file_sizes(found)
    read_model(found)
    check_out(out, rank_env)


def check_out(out: Path, rank_env: RankEnv | None) -> None:
    """Check on rank 0 that the output path is free.

    Raises:
        ConfigError: the path exists already, or cannot be created.
    """
    if (rank_env is None or rank_env.rank == 0) and (reason := new_folder_unsupported_reason(out)):
        raise ConfigError(reason)


NO_TOKENIZER_HINT = "add --no-tokenizer to train on token ids"
