"""The tokenizer that the weights of a checkpoint were trained with, whatever other one came along with them."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_CONFIG_BYTES, read_json, same_content
from moefold.checkpoint.checkpoint_dir import CheckpointMeta, read_meta
from moefold.checkpoint.save_load import translate_io_errors
from moefold.config.schema import DataConfig
from moefold.convert.hf_config import GENERATION_FILE, is_hf_folder
from moefold.convert.hf_folder import TOKENIZER_FILE, UNSUPPORTED_TOKENIZER_FILES, find_sidecar_dir
from moefold.data.fingerprint import matches_fingerprint
from moefold.data.source_listing import TOKENIZER_CONFIG_FILES
from moefold.data.tokenizer import ByteTokenizer, JsonTokenizer
from moefold.errors import ConfigError, format_list

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_SIDECAR_FILES = (
    *TOKENIZER_CONFIG_FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
"""Files beside a tokenizer.json that travel with it."""
TOKENIZER_FILES = (TOKENIZER_FILE, *TOKENIZER_SIDECAR_FILES, "merges.txt", *UNSUPPORTED_TOKENIZER_FILES)
"""What of a Hugging Face folder belongs to its tokenizer; patterns."""
TEXT_KINDS = ("python-docs", "text", "huggingface", "sft")
PLAIN_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that takes a tokenizer.json as it is; those of the families may read it otherwise."""


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer an exported folder gets. The default: what came along with the weights, if anything did."""

    file: Path | None = None
    """The tokenizer.json of the run, to copy; None for none."""
    sidecar_files: Mapping[str, Path] = field(default_factory=dict)
    """What is to be copied with it, by its name in the folder."""
    excluded: tuple[str, ...] = ()
    """Files that came along and belong to another tokenizer."""
    token_ids: Mapping[str, int | None] = field(default_factory=dict)
    """Keys of config.json that the choice decides; none where those that came along stay."""
    messages: tuple[str, ...] = ()


def tokenizer_name(order: Mapping[str, Any]) -> str:
    """What a run read its text with, of [data]: "bytes" or a path; empty where it read none, or nothing is known."""
    name = str(order.get("tokenizer", ""))
    kind = order.get("kind", DataConfig().kind)
    return name if kind in TEXT_KINDS or (kind == "tokens" and name != "bytes") else ""


def choose_tokenizer(meta: CheckpointMeta, sidecar_dir: Path | None) -> TokenizerChoice:
    """The tokenizer to export with a checkpoint: the one that its run read text with.

    Args:
        meta: what the checkpoint says of itself.
        sidecar_dir: what came along with the weights that the run started from.
    """
    name, came = tokenizer_name(meta.order), tokenizer_files(sidecar_dir)
    if not name:
        return TokenizerChoice()
    over = (f"passed over, as they belong to another tokenizer: {format_list(list(came))}",) if came else ()
    if name == "bytes":
        note = (
            'no tokenizer is written: the run read text as bytes (data.tokenizer="bytes"), for which transformers has '
            "none; its ids are the bytes of the text in UTF-8, and moefold generate takes --tokenizer bytes"
        )
        return TokenizerChoice(excluded=came, token_ids=_token_ids(ByteTokenizer.separator_id), messages=(note, *over))
    file = _tokenizer_path(name)
    seen = meta.data_files.get(file.name, "")
    if TOKENIZER_FILE in came and sidecar_dir is not None:
        if _is_same_tokenizer(sidecar_dir / TOKENIZER_FILE, file, seen):
            return TokenizerChoice()
        if not seen and not file.is_file():
            note = f"data.tokenizer={name!r} is gone: the tokenizer that came with the weights is written uncompared"
            return TokenizerChoice(messages=(note,))
    try:
        if fault := _unusable_reason(file, seen):
            raise ConfigError(f"data.tokenizer={name!r} {fault}")
        separator = JsonTokenizer(file.resolve()).separator_id
    except ConfigError as error:
        note = f"no tokenizer is written: {error}; put the file of the training back there and export again"
        return TokenizerChoice(excluded=came, token_ids=_token_ids(None), messages=(note, *over))
    beside, faults = _sidecar_files(file, meta)
    return TokenizerChoice(file, beside, came, _token_ids(separator), (*faults, *over))


def write_tokenizer(tmp_dir: Path, choice: TokenizerChoice) -> None:
    """Put the chosen tokenizer into a folder in which the other files that came along are already.

    Raises:
        ConfigError: the disk refuses, or a file is broken.
    """
    if choice.file is not None:
        with translate_io_errors(f"the tokenizer {str(choice.file)!r} cannot be copied to {str(tmp_dir)!r}"):
            shutil.copyfile(choice.file, tmp_dir / TOKENIZER_FILE)
            for name, file in choice.sidecar_files.items():
                shutil.copyfile(file, tmp_dir / name)
        settings: dict[str, Any] = {}
        eos = choice.token_ids["eos_token_id"]
        if (tmp_dir / TOKENIZER_CONFIG_FILE).is_file():
            settings = _read_json(tmp_dir / TOKENIZER_CONFIG_FILE)
        elif eos is not None:
            settings = {"eos_token": JsonTokenizer(tmp_dir / TOKENIZER_FILE).decode([eos])}
        if "tokenizer_class" not in settings:
            _write_json(tmp_dir / TOKENIZER_CONFIG_FILE, settings | {"tokenizer_class": PLAIN_CLASS})
    if choice.token_ids and (tmp_dir / GENERATION_FILE).is_file():
        _write_json(tmp_dir / GENERATION_FILE, _read_json(tmp_dir / GENERATION_FILE) | {**choice.token_ids})


def tokenizer_mismatch_message(data: DataConfig, weights_folder: Path) -> str:
    """That a run reads text with another tokenizer than the weights know that it starts from; empty if it does not.

    Args:
        data: of the run.
        weights_folder: a Hugging Face folder or a checkpoint.
    """
    ours, known = tokenizer_name({"kind": data.kind, "tokenizer": data.tokenizer}), _trained_tokenizer(weights_folder)
    if not ours or not known or ours == known:
        return ""
    if "bytes" not in (ours, known) and _is_same_tokenizer(_tokenizer_path(ours), _tokenizer_path(known), ""):
        return ""
    return (
        f"data.tokenizer={ours!r} is not the tokenizer that these weights were trained with; set "
        f"data.tokenizer={known!r}, unless the model is to learn another one"
    )


def tokenizer_files(folder: Path | None) -> tuple[str, ...]:
    """The files of a folder that belong to its tokenizer."""
    if folder is None:
        return ()
    return tuple(sorted({file.name for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}))


def _trained_tokenizer(weights_folder: Path) -> str:
    """The tokenizer that weights were trained with: "bytes" or a path; empty where nothing is known."""
    if is_hf_folder(weights_folder):
        came: Path | None = weights_folder
    else:
        meta, came = read_meta(weights_folder), find_sidecar_dir(weights_folder)
        if (name := tokenizer_name(meta.order)) == "bytes":
            return name
        choice = choose_tokenizer(meta, came)
        if choice.file is not None:
            return str(choice.file)
        came = None if choice.excluded else came
    return str(came / TOKENIZER_FILE) if came is not None and (came / TOKENIZER_FILE).is_file() else ""


def _tokenizer_path(name: str) -> Path:
    """The tokenizer.json that data.tokenizer means, which may be gone."""
    path = _expand_user(name)
    return path / TOKENIZER_FILE if path.is_dir() else path


def _expand_user(name: str) -> Path:
    """A path with the home folder for `~`, where there is such a folder."""
    return Path(os.path.expanduser(name))


def _is_same_tokenizer(ours: Path, trained: Path, fingerprint: str) -> bool:
    """Whether a tokenizer.json is the one of a run, by what was noted of that, else by its content."""
    try:
        return matches_fingerprint(ours, fingerprint) if fingerprint else same_content(ours, trained)
    except OSError:
        return False


def _unusable_reason(file: Path, fingerprint: str) -> str:
    if not file.is_file():
        return "is gone"
    return (
        "has other content than at the training" if fingerprint and not matches_fingerprint(file, fingerprint) else ""
    )


def _sidecar_files(file: Path, meta: CheckpointMeta) -> tuple[dict[str, Path], tuple[str, ...]]:
    """What travels with a tokenizer.json, by its name in the folder, and notes on what does not."""
    wanted = {name: (name, file.with_name(name)) for name in TOKENIZER_SIDECAR_FILES if file.with_name(name).is_file()}
    # A description that a stranger wrote may name any file: without its looks from the training, none is taken.
    if (own := str(meta.order.get("chat_template", ""))) and meta.data_files.get(own):
        wanted[CHAT_TEMPLATE_FILE] = (own, _expand_user(own))
    faults = {name: _unusable_reason(path, meta.data_files.get(noted, "")) for name, (noted, path) in wanted.items()}
    notes = [f"{wanted[name][1]} is not written: it {fault}" for name, fault in faults.items() if fault]
    return {name: path for name, (_, path) in wanted.items() if not faults[name]}, tuple(notes)


def _token_ids(separator: int | None) -> dict[str, int | None]:
    """The ids of a model that was trained here: nothing stands before a text, and nothing fills one up."""
    return {"bos_token_id": None, "eos_token_id": separator, "pad_token_id": None}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        keys = read_json(file, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file.name} beside the tokenizer is not JSON ({error}); mend or remove it") from None
    if not isinstance(keys, dict):
        raise ConfigError(f"{file.name} beside the tokenizer is no JSON object; mend or remove it")
    return keys


def _write_json(file: Path, keys: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(keys, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
