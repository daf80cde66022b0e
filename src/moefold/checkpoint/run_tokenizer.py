"""Copy of the tokenizer and the chat template of a run next to its checkpoints.

Functions import the reader of tokenizer folders, which a run on bytes or token files does not need.

A recipe names the tokenizer by a path, which may be relative, or on another machine. So its files are copied next to
the checkpoints, and all users of a checkpoint read the copy. A checkpoint without a copy has the tokenizer's
fingerprint, and a different file with the recorded name is refused.
"""

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.bounded_read import have_same_content
from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.checkpoint.find_checkpoint import checkpoint_folder
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.run import RunConfig
from moefold.data.fingerprint import matches_fingerprint
from moefold.data.input_paths import CHAT_TEMPLATE_FILE, TEMPLATE_DIR, TOKENIZER_FILE, existing_path
from moefold.errors import ConfigError
from moefold.remote_path import RemotePath, is_remote

RUN_TOKENIZER_DIR = "tokenizer"
"""Folder of a run's tokenizer and chat template, next to its checkpoints."""
CHAT_KINDS = ("sft", "preference", "prompts")
"""Kinds of data that train a model to end its turns like a chat template."""
TEXT_KINDS = ("python-docs", "text", "huggingface", "sft", "preference", "task", "prompts")


def tokenizer_name(order: Mapping[str, Any]) -> str:
    """Return the tokenizer of a run's [data]: "bytes" or a path, or empty if it is unknown or the run read no text."""
    name = str(order.get("tokenizer", ""))
    kind = order.get("kind", DataConfig().kind)
    return name if kind in TEXT_KINDS or (kind == "tokens" and name != "bytes") else ""


def save_run_tokenizer(run: RunConfig, data: DataConfig, checkpoint: CheckpointConfig, *, is_resumed: bool) -> None:
    """Copy the tokenizer and the chat template of a run next to its checkpoints.

    Args:
        is_resumed: whether the run continues from a checkpoint. Then existing copies are kept.

    Raises:
        ConfigError: a file cannot be read or written.
    """
    name = tokenizer_name({"kind": data.kind, "tokenizer": data.tokenizer})
    files: dict[str, Path] = {}
    if name and name != "bytes":
        from moefold.data.hf_tokenizer.tokenizer_folder import declaring_files

        path = existing_path("data.tokenizer", name)
        files = declaring_files(path)
    if data.chat_template:
        files = {file: path for file, path in files.items() if not file.startswith(TEMPLATE_DIR)}
        files[CHAT_TEMPLATE_FILE] = existing_path("data.chat_template", data.chat_template)
    target = checkpoint_folder(run, checkpoint) / RUN_TOKENIZER_DIR
    is_own_copy = any(target in path.parents for path in files.values())
    if is_own_copy or (is_resumed and target.exists()):
        return
    try:
        _copy_files(files, target)
    except OSError as error:
        raise ConfigError(
            f"the tokenizer {name!r} cannot be copied to {str(target)!r} ({error.strerror or error}); make it writable"
        ) from error


def _copy_files(files: Mapping[str, Path], target: Path) -> None:
    """Replace a folder by files, given by name."""
    if isinstance(target, RemotePath):
        for name, path in files.items():
            (target / name).upload(path)
        return
    shutil.rmtree(target, ignore_errors=True)
    if not files:
        return
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    for name, path in files.items():
        (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, unfinished / name)
    unfinished.rename(target)


def check_run_tokenizer(data: DataConfig, checkpoint: Path) -> None:
    """Check that a run continues with its first tokenizer. Only facts that determine ids and text are compared.

    Raises:
        ConfigError: the tokenizer or its chat template is different.
    """
    from moefold.data.hf_tokenizer.tokenizer_folder import read_tokenizer_folder, tokenizer_file

    saved = find_run_tokenizer(checkpoint)
    name = tokenizer_name({"kind": data.kind, "tokenizer": data.tokenizer})
    if saved is None or name in ("", "bytes") or not tokenizer_file(saved).is_file():
        return
    present = read_tokenizer_folder(existing_path("data.tokenizer", name))
    recorded = read_tokenizer_folder(saved)
    advice = f"the run began with the one in {saved}; name that one, or start another run (run.dir)"
    if (
        present.process.content_hash() != recorded.process.content_hash()
        or present.end_of_text()[0] != recorded.end_of_text()[0]
    ):
        raise ConfigError(f"data.tokenizer={name!r} makes other ids of a text than the tokenizer of the run: {advice}")
    if data.reads_rows and not data.chat_template and present.templates != recorded.templates:
        raise ConfigError(f"data.tokenizer={name!r} has another chat template than the tokenizer of the run: {advice}")


def find_run_tokenizer(checkpoint: Path) -> Path | None:
    """Return the folder of a run's tokenizer and chat template, in or next to a checkpoint, or None without one."""
    for folder in (checkpoint / RUN_TOKENIZER_DIR, checkpoint.parent / RUN_TOKENIZER_DIR):
        if folder.is_dir():
            if not is_remote(folder):
                return folder
            from moefold.remote_copy import local_copy

            return Path(local_copy(str(folder)))
    return None


def recorded_fingerprint(meta: CheckpointMeta) -> str:
    """Return the fingerprint of the tokenizer that a checkpoint's run read, or empty if there is none."""
    name = tokenizer_name(meta.order)
    return meta.data_files.get(Path(name).name, "") or meta.data_files.get(TOKENIZER_FILE, "")


def other_tokenizer_reason(name: str, file: Path, fingerprint: str) -> str:
    """Return the reason why the file with a recorded name is not a run's tokenizer. Empty if it is, or if unknown."""
    if not fingerprint or not file.is_file() or matches_fingerprint(file, fingerprint):
        return ""
    return f"data.tokenizer={name!r} has other content than at the training: {file} is another tokenizer"


def trained_tokenizer(checkpoint: Path, meta: CheckpointMeta) -> str:
    """Return the tokenizer that a checkpoint's run read: "bytes", an absolute path, or "" if it is unknown or gone.

    The result is the file that the recipe named if it still exists, else the copy next to the checkpoint.
    """
    name = tokenizer_name(meta.order)
    if name in ("", "bytes") or is_remote(name):
        return name
    from moefold.data.hf_tokenizer.tokenizer_folder import tokenizer_file

    file = tokenizer_file(Path(name).expanduser().absolute())
    saved = find_run_tokenizer(checkpoint)
    copy = None if saved is None else tokenizer_file(saved)
    if copy is not None and copy.is_file():
        try:
            return str(file if have_same_content(file, copy) else copy)
        except OSError:
            return str(copy)
    is_usable = file.is_file() and not other_tokenizer_reason(name, file, recorded_fingerprint(meta))
    return str(file) if is_usable else ""


def have_same_ids(first: Path, second: Path) -> bool:
    """Return whether two tokenizers encode text to the same ids, even if the bytes of their files differ."""
    from moefold.data.hf_tokenizer.tokenizer_folder import has_same_content_hash

    try:
        return have_same_content(first, second) or has_same_content_hash(first, second)
    except (OSError, ConfigError):
        return False
