"""Export of the tokenizer in a checkpoint's training, which may differ from the imported tokenizer."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_CONFIG_BYTES, read_json_object
from moefold.checkpoint.checkpoint_meta import CheckpointMeta, read_meta
from moefold.checkpoint.io_errors import translate_io_errors
from moefold.checkpoint.run_tokenizer import (
    find_run_tokenizer,
    have_same_ids,
    tokenizer_name,
    trained_tokenizer,
)
from moefold.config.sections.data import DataConfig
from moefold.convert.families.hf_config import is_hf_folder
from moefold.convert.hf_sidecar_files import find_sidecar_dir
from moefold.data.fingerprint import matches_fingerprint
from moefold.data.hf_tokenizer.tokenizer_folder import (
    SLOW_FILES,
    UNREAD_FILES,
    JsonTokenizer,
    declaring_files,
    read_tokenizer_folder,
    tokenizer_file,
)
from moefold.data.input_paths import (
    ADDED_TOKENS_FILE,
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENS_MAP_FILE,
    existing_path,
)
from moefold.data.tokenizer import ByteTokenizer
from moefold.errors import ConfigError
from moefold.folder_files import unsendable_reason
from moefold.message_text import Problem, format_list
from moefold.remote_path import is_remote

TOKENIZER_SIDECAR_FILES = (
    TOKENIZER_CONFIG_FILE,
    CHAT_TEMPLATE_FILE,
    TOKENS_MAP_FILE,
    ADDED_TOKENS_FILE,
    "chat_template.json",
)
"""Files next to a tokenizer.json that are copied with it."""
TOKENIZER_FILES = (TOKENIZER_FILE, *TOKENIZER_SIDECAR_FILES, "merges.txt", *UNREAD_FILES)
"""Tokenizer files of a Hugging Face folder, as patterns."""
PLAIN_CLASS = "PreTrainedTokenizerFast"
"""The transformers class that uses a tokenizer.json unchanged. Classes of model families may modify it."""


@dataclass(frozen=True)
class TokenizerChoice:
    """Tokenizer of an exported folder. The default keeps the imported tokenizer, if any."""

    file: Path | None = None
    """The run's tokenizer.json to copy."""
    sidecar_files: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy with the tokenizer, by their names in the folder."""
    excluded: tuple[str, ...] = ()
    """Imported files that belong to another tokenizer."""
    token_ids: Mapping[str, int | None] = field(default_factory=dict)
    """Keys of config.json that follow from the choice, or empty if the imported ids stay."""
    messages: tuple[str, ...] = ()


def choose_tokenizer(
    meta: CheckpointMeta, sidecar_dir: Path | None, run_tokenizer: Path | None = None
) -> TokenizerChoice:
    """Choose the tokenizer to export with a checkpoint: the tokenizer of its run.

    Args:
        sidecar_dir: sidecar files of the weights that the run started from.
        run_tokenizer: the copy next to the checkpoint (`find_run_tokenizer`). None means the file that the recipe
    named.
    """
    name = tokenizer_name(meta.order)
    imported = tokenizer_files(sidecar_dir)
    if not name:
        return TokenizerChoice()
    ignored = (f"ignored, as they belong to another tokenizer: {format_list(list(imported))}",) if imported else ()
    if name == "bytes":
        note = (
            'no tokenizer is written: the run read text as bytes (data.tokenizer="bytes"), for which transformers has '
            "none; its ids are the bytes of the text in UTF-8, and moefold generate takes --tokenizer bytes"
        )
        return TokenizerChoice(
            excluded=imported, token_ids=_token_ids(ByteTokenizer.separator_id), messages=(note, *ignored)
        )
    if run_tokenizer is not None and tokenizer_file(run_tokenizer).is_file():
        return _choose_copy(meta, sidecar_dir, run_tokenizer, imported)
    try:
        file = _tokenizer_path(name)
    except ConfigError as error:
        note = f"no tokenizer is written: {error}"
        return TokenizerChoice(excluded=imported, token_ids=_token_ids(None), messages=(note, *ignored))
    recorded = meta.data_files.get(file.name, "")
    if sidecar_dir is not None and tokenizer_file(sidecar_dir).is_file():
        if _is_same_tokenizer(tokenizer_file(sidecar_dir), file, recorded):
            own_template, notes = _usable_files(_own_template(meta), meta)
            return TokenizerChoice(sidecar_files=own_template, messages=notes)
        if not recorded and not file.is_file():
            note = f"data.tokenizer={name!r} is gone: the tokenizer of the imported weights is written uncompared"
            return TokenizerChoice(messages=(note,))
    try:
        if reason := _unusable_reason(file, recorded):
            raise ConfigError(Problem("data.tokenizer", name, reason))
        separator = JsonTokenizer(file.resolve()).separator_id
    except ConfigError as error:
        note = f"no tokenizer is written: {error}; put the file of the training back there and export again"
        return TokenizerChoice(excluded=imported, token_ids=_token_ids(None), messages=(note, *ignored))
    sidecars = {name: (name, path) for name in TOKENIZER_SIDECAR_FILES if (path := file.with_name(name)).is_file()}
    sidecar_files, notes = _usable_files({**sidecars, **_own_template(meta)}, meta)
    return TokenizerChoice(file, sidecar_files, imported, _token_ids(separator), (*notes, *ignored))


def _choose_copy(
    meta: CheckpointMeta, sidecar_dir: Path | None, run_tokenizer: Path, imported: tuple[str, ...]
) -> TokenizerChoice:
    """Choose the tokenizer that was copied next to a checkpoint, unless the imported tokenizer has the same ids."""
    file = tokenizer_file(run_tokenizer)
    files = {
        name: path
        for name, path in declaring_files(run_tokenizer).items()
        if name not in (TOKENIZER_FILE, *SLOW_FILES, CONFIG_FILE, GENERATION_FILE)
    }
    if sidecar_dir is not None and have_same_ids(tokenizer_file(sidecar_dir), file):
        path = str(meta.order.get("chat_template", ""))
        return TokenizerChoice(sidecar_files={CHAT_TEMPLATE_FILE: files[CHAT_TEMPLATE_FILE]} if path else {})
    separator = JsonTokenizer(run_tokenizer).separator_id
    ignored = (f"ignored, as they belong to another tokenizer: {format_list(list(imported))}",) if imported else ()
    return TokenizerChoice(file, files, imported, _token_ids(separator), ignored)


def write_tokenizer(tmp_dir: Path, choice: TokenizerChoice) -> None:
    """Write the chosen tokenizer into a folder that already holds the other sidecar files."""
    with translate_io_errors(f"the tokenizer {str(choice.file)!r} cannot be copied to {str(tmp_dir)!r}"):
        for name, file in choice.sidecar_files.items():
            (tmp_dir / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, tmp_dir / name)
    if choice.file is not None:
        with translate_io_errors(f"the tokenizer {str(choice.file)!r} cannot be copied to {str(tmp_dir)!r}"):
            if choice.file.name == SLOW_FILES[0]:
                (tmp_dir / TOKENIZER_FILE).write_bytes(read_tokenizer_folder(choice.file).process.serialize())
            else:
                shutil.copyfile(choice.file, tmp_dir / TOKENIZER_FILE)
        settings: dict[str, Any] = {}
        eos = choice.token_ids["eos_token_id"]
        if (tmp_dir / TOKENIZER_CONFIG_FILE).is_file():
            settings = read_side_file(tmp_dir / TOKENIZER_CONFIG_FILE)
        elif eos is not None:
            settings = {"eos_token": JsonTokenizer(tmp_dir / TOKENIZER_FILE).decode([eos])}
        if "tokenizer_class" not in settings:
            write_side_file(tmp_dir / TOKENIZER_CONFIG_FILE, settings | {"tokenizer_class": PLAIN_CLASS})
    if choice.token_ids and (tmp_dir / GENERATION_FILE).is_file():
        write_side_file(tmp_dir / GENERATION_FILE, read_side_file(tmp_dir / GENERATION_FILE) | {**choice.token_ids})


def tokenizer_mismatch_message(data: DataConfig, weights_folder: Path) -> str:
    """Return a note if the tokenizer of a run differs from the tokenizer of its initial weights, else empty."""
    run_tokenizer = tokenizer_name({"kind": data.kind, "tokenizer": data.tokenizer})
    trained = _trained_tokenizer(weights_folder)
    if not run_tokenizer or not trained or run_tokenizer == trained:
        return ""
    if "bytes" not in (run_tokenizer, trained) and _is_same_tokenizer(
        _tokenizer_path(run_tokenizer), _tokenizer_path(trained), ""
    ):
        return ""
    return (
        f"data.tokenizer={run_tokenizer!r} is not the tokenizer that these weights were trained with; set "
        f"data.tokenizer={trained!r}, unless the model is to learn another one"
    )


def tokenizer_files(folder: Path | None) -> tuple[str, ...]:
    """Return the files of a folder that belong to its tokenizer."""
    if folder is None:
        return ()
    return tuple(sorted({file.name for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}))


def _trained_tokenizer(weights_folder: Path) -> str:
    """Return the tokenizer that weights were trained with: "bytes" or a path, or empty if unknown."""
    if is_hf_folder(weights_folder):
        folder: Path | None = weights_folder
    else:
        meta = read_meta(weights_folder)
        folder = find_sidecar_dir(weights_folder)
        if tokenizer_name(meta.order) == "bytes":
            return "bytes"
        choice = choose_tokenizer(meta, folder, find_run_tokenizer(weights_folder))
        if choice.file is not None:
            name = trained_tokenizer(weights_folder, meta)
            return tokenizer_name(meta.order) if name and not name.startswith(str(weights_folder.parent)) else name
        folder = None if choice.excluded else folder
    return str(tokenizer_file(folder)) if folder is not None and tokenizer_file(folder).is_file() else ""


def _tokenizer_path(name: str) -> Path:
    """Return the tokenizer.json of data.tokenizer, which may no longer exist."""
    return tokenizer_file(existing_path("data.tokenizer", name) if is_remote(name) else _expand_user(name))


def _expand_user(name: str) -> Path:
    """Expand `~` in a path, if the home folder is known, and return the local copy of a remote file."""
    if is_remote(name):
        return existing_path("data.chat_template", name)
    return Path(os.path.expanduser(name))


def _is_same_tokenizer(ours: Path, trained: Path, fingerprint: str) -> bool:
    """Return whether a tokenizer.json has the tokenizer of a run, by its recorded fingerprint, else by content."""
    try:
        return matches_fingerprint(ours, fingerprint) if fingerprint else have_same_ids(ours, trained)
    except OSError:
        return False


def _unusable_reason(file: Path, fingerprint: str) -> str:
    if not file.is_file():
        return "is gone"
    return (
        "has other content than at the training" if fingerprint and not matches_fingerprint(file, fingerprint) else ""
    )


def _own_template(meta: CheckpointMeta) -> dict[str, tuple[str, Path]]:
    """Return data.chat_template of a run, by its name in an exported folder: its recorded name, and its path."""
    # Untrusted metadata may name any file: without a fingerprint from the training, no file is copied.
    path = str(meta.order.get("chat_template", ""))
    return {CHAT_TEMPLATE_FILE: (path, _expand_user(path))} if path and meta.data_files.get(path) else {}


def _usable_files(
    wanted: Mapping[str, tuple[str, Path]], meta: CheckpointMeta
) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the files that have not changed since the training, by name, and notes on the others."""
    reasons = {
        name: _unusable_reason(path, meta.data_files.get(recorded, "")) or unsendable_reason(path.parent, path)
        for name, (recorded, path) in wanted.items()
    }
    notes = [f"{wanted[name][1]} is not written: it {reason}" for name, reason in reasons.items() if reason]
    return {name: path for name, (_, path) in wanted.items() if not reasons[name]}, tuple(notes)


def _token_ids(separator: int | None) -> dict[str, int | None]:
    """Return the token ids of a model trained by moefold, which uses no BOS and no padding token."""
    return {"bos_token_id": None, "eos_token_id": separator, "pad_token_id": None}


def read_side_file(file: Path) -> dict[str, Any]:
    """Return the keys of a JSON file next to a tokenizer. Raises ConfigError if it is not JSON."""
    try:
        return read_json_object(file, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file.name} next to the tokenizer is not JSON ({error}); mend or remove it") from None


def write_side_file(file: Path, keys: Mapping[str, Any]) -> None:
    """Write a JSON file next to a tokenizer."""
    file.write_text(json.dumps(keys, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
