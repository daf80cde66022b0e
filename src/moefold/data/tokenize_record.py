"""Record of `moefold tokenize` in an output folder: its input, settings and tokenizer, and whether it is complete."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, read_json, read_json_object
from moefold.data.tokenizer import NumberTokenizer, Tokenizer
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

TOKENIZE_INFO_FILE = "tokenize.json"
"""File with which `moefold tokenize` describes an output folder."""

FORMAT_VERSION = 2
"""Version of the record. Version 1 identified a tokenizer by the bytes of its file."""
_MISMATCH_MESSAGES = {
    "format": "of another version of this program",
    "tokenizer": "another --tokenizer",
    "vocab_size": "another --tokenizer",
    "separator_id": "another --tokenizer",
    "column": "another --column",
    "skip_bad_rows": "another --skip-bad-rows",
    "shard_bytes": "another --shard-mb",
    "files": "other input files, or files that changed",
    "num_shards": "another number of shards",
}
"""Messages for keys of `TOKENIZE_INFO_FILE` that differ, in terms of the command line."""


def check_finished(folder: Path) -> None:
    """Raise ConfigError if `moefold tokenize` has not finished the folder."""
    info = read_tokenize_info(folder)
    if info and info.get("is_complete") is not True:
        raise ConfigError(
            f"{Setting('data.path', folder):s} is not finished; run the same `moefold tokenize` command again, which "
            "resumes"
        )


def read_tokenize_info(folder: Path) -> dict[str, Any]:
    """Return the record of `moefold tokenize` on the token files of a folder, or {} if it did not make them."""
    try:
        return read_json_object(folder / TOKENIZE_INFO_FILE, MAX_DESCRIPTION_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / TOKENIZE_INFO_FILE} is broken ({error}); tokenise again into another folder"
        ) from error


def compare_tokenizers(files: Iterable[Path], tokenizer: Tokenizer, name: str) -> str:
    """Compare the tokenizers of token files and of a run, by the facts that determine the ids of a text.

    Bare numbers are not compared. `name` is data.tokenizer, for messages.

    Returns:
        A note if the tokenizer of some files is not known, or else "".

    Raises:
        ConfigError: files were made with another tokenizer.
    """
    from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer

    if isinstance(tokenizer, NumberTokenizer):
        return ""
    unknown = []
    for folder in sorted({file.parent for file in files}):
        info = read_tokenize_info(folder)
        made_with = str(info.get("tokenizer", "")).split()
        identity = tokenizer.identity.split()
        if not made_with:
            unknown.append(str(folder))
        elif made_with[0] == identity[0]:
            continue
        elif info.get("format") == 1 and made_with[0] != "bytes" and isinstance(tokenizer, JsonTokenizer):
            if made_with[0] != tokenizer.folder.process.sha256:
                unknown.append(str(folder))
        else:
            recorded = str(info.get("tokenizer_name", "")) or "another one"
            rule = f"is not the tokenizer that made the ids of {folder}: `moefold tokenize` had {recorded!r}"
            raise ConfigError(Problem("data.tokenizer", name, rule, f"set {Setting('data.tokenizer')} to that one"))
    if not unknown or name == "bytes":
        return ""
    return (
        f"note: {unknown[0]} does not say which tokenizer made its ids, so {Setting('data.tokenizer', name)} is not "
        "compared with it; `moefold tokenize` records it"
    )


def check_same_job(out: Path, info: dict[str, Any]) -> None:
    """Raise ConfigError if the folder has tokens of another input or other settings, or files of another program."""
    try:
        stored = read_json(out / TOKENIZE_INFO_FILE, MAX_DESCRIPTION_BYTES)
    except FileNotFoundError:
        if any(path.name != ".lock" for path in out.iterdir()):
            raise ConfigError(f"--out {out} is not empty and holds no tokens of this program; choose another") from None
        return
    except ValueError:
        stored = None
    if not isinstance(stored, dict):
        raise ConfigError(
            f"{out / TOKENIZE_INFO_FILE} is broken, so the input of its tokens is unknown; remove --out {out}"
        )
    if stored.get("is_complete") is not True and not any(out.glob("tokens-*.npy")):
        # A call that failed before its first shard does not restrict the input of this call.
        return
    changed = [key for key, value in info.items() if stored.get(key) != value]
    if changed:
        raise ConfigError(
            f"--out {out} holds tokens of other input or settings ({_MISMATCH_MESSAGES[changed[0]]}); choose another "
            "folder or remove it"
        )


def write_tokenize_info(out: Path, info: dict[str, Any]) -> None:
    """Replace the record of a folder."""
    draft = out / f".{TOKENIZE_INFO_FILE}.partial"
    with draft.open("w", encoding="utf-8") as file:
        json.dump(info, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(out / TOKENIZE_INFO_FILE)
