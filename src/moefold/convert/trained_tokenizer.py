"""The tokenizer that the weights of a checkpoint were trained with, whatever other one came along with them."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moefold.bounded_read import CONFIG_BYTES, read_json, same_content
from moefold.checkpoint.folder import CheckpointMeta, read_meta
from moefold.checkpoint.store import explained
from moefold.config.schema import DataConfig
from moefold.convert.companions import OTHER_TOKENIZERS, TOKENIZER, find_companions
from moefold.convert.hf_config import GENERATION_FILE, is_hf_folder
from moefold.data.fingerprint import is_as_noted
from moefold.data.source_file import BESIDE_TOKENIZER
from moefold.data.tokenizer import ByteTokenizer, JsonTokenizer
from moefold.errors import ConfigError, some

SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
BESIDE = (*BESIDE_TOKENIZER, "special_tokens_map.json", "added_tokens.json", "chat_template.json")
"""Files beside a tokenizer.json that travel with it."""
TOKENIZER_FILES = (TOKENIZER, *BESIDE, "merges.txt", *OTHER_TOKENIZERS)
"""What of a Hugging Face folder belongs to its tokenizer; patterns."""
TEXT_KINDS = ("python-docs", "text", "huggingface", "sft")
PLAIN_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that takes a tokenizer.json as it is; those of the families may read it otherwise."""


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer an exported folder gets. The default: what came along with the weights, if anything did."""

    file: Path | None = None
    """The tokenizer.json of the run, to copy; None for none."""
    beside: Mapping[str, Path] = field(default_factory=dict)
    """What is to be copied with it, by its name in the folder."""
    left_out: tuple[str, ...] = ()
    """Files that came along and belong to another tokenizer."""
    token_ids: Mapping[str, int | None] = field(default_factory=dict)
    """Keys of config.json that the choice decides; none where those that came along stay."""
    notes: tuple[str, ...] = ()


def named_tokenizer(order: Mapping[str, Any]) -> str:
    """What a run read its text with, of [data]: "bytes" or a path; empty where it read none, or nothing is known."""
    name = str(order.get("tokenizer", ""))
    kind = order.get("kind", DataConfig().kind)
    return name if kind in TEXT_KINDS or (kind == "tokens" and name != "bytes") else ""


def choose_tokenizer(meta: CheckpointMeta, companions: Path | None) -> TokenizerChoice:
    """The tokenizer to export with a checkpoint: the one that its run read text with.

    Args:
        meta: what the checkpoint says of itself.
        companions: what came along with the weights that the run started from.
    """
    name, came = named_tokenizer(meta.order), tokenizer_files(companions)
    if not name:
        return TokenizerChoice()
    over = (f"passed over, as they belong to another tokenizer: {some(list(came))}",) if came else ()
    if name == "bytes":
        note = (
            'no tokenizer is written: the run read text as bytes (data.tokenizer="bytes"), for which transformers has '
            "none; its ids are the bytes of the text in UTF-8, and moefold generate takes --tokenizer bytes"
        )
        return TokenizerChoice(left_out=came, token_ids=_ids(ByteTokenizer.separator_id), notes=(note, *over))
    file = _file_of(name)
    seen = meta.data_files.get(file.name, "")
    if TOKENIZER in came and companions is not None:
        if _is_trained_on(companions / TOKENIZER, file, seen):
            return TokenizerChoice()
        if not seen and not file.is_file():
            note = f"data.tokenizer={name!r} is gone: the tokenizer that came with the weights is written uncompared"
            return TokenizerChoice(notes=(note,))
    try:
        if fault := _fault(file, seen):
            raise ConfigError(f"data.tokenizer={name!r} {fault}")
        separator = JsonTokenizer(file.resolve()).separator_id
    except ConfigError as error:
        note = f"no tokenizer is written: {error}; put the file of the training back there and export again"
        return TokenizerChoice(left_out=came, token_ids=_ids(None), notes=(note, *over))
    beside, faults = _beside(file, meta)
    return TokenizerChoice(file, beside, came, _ids(separator), (*faults, *over))


def place_tokenizer(draft: Path, choice: TokenizerChoice) -> None:
    """Put the chosen tokenizer into a folder in which the other files that came along are already.

    Raises:
        ConfigError: the disk refuses, or a file is broken.
    """
    if choice.file is not None:
        with explained(f"the tokenizer {str(choice.file)!r} cannot be copied to {str(draft)!r}"):
            shutil.copyfile(choice.file, draft / TOKENIZER)
            for name, file in choice.beside.items():
                shutil.copyfile(file, draft / name)
        settings: dict[str, Any] = {}
        eos = choice.token_ids["eos_token_id"]
        if (draft / SETTINGS).is_file():
            settings = _read(draft / SETTINGS)
        elif eos is not None:
            settings = {"eos_token": JsonTokenizer(draft / TOKENIZER).decode([eos])}
        if "tokenizer_class" not in settings:
            _write(draft / SETTINGS, settings | {"tokenizer_class": PLAIN_CLASS})
    if choice.token_ids and (draft / GENERATION_FILE).is_file():
        _write(draft / GENERATION_FILE, _read(draft / GENERATION_FILE) | {**choice.token_ids})


def tokenizer_note(data: DataConfig, start: Path) -> str:
    """That a run reads text with another tokenizer than the weights know that it starts from; empty if it does not.

    Args:
        data: of the run.
        start: a Hugging Face folder or a checkpoint.
    """
    ours, known = named_tokenizer({"kind": data.kind, "tokenizer": data.tokenizer}), _known_tokenizer(start)
    if not ours or not known or ours == known:
        return ""
    if "bytes" not in (ours, known) and _is_trained_on(_file_of(ours), _file_of(known), ""):
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


def _known_tokenizer(start: Path) -> str:
    """The tokenizer that weights were trained with: "bytes" or a path; empty where nothing is known."""
    if is_hf_folder(start):
        came: Path | None = start
    else:
        meta, came = read_meta(start), find_companions(start)
        if (name := named_tokenizer(meta.order)) == "bytes":
            return name
        choice = choose_tokenizer(meta, came)
        if choice.file is not None:
            return str(choice.file)
        came = None if choice.left_out else came
    return str(came / TOKENIZER) if came is not None and (came / TOKENIZER).is_file() else ""


def _file_of(name: str) -> Path:
    """The tokenizer.json that data.tokenizer means, which may be gone."""
    path = _expanded(name)
    return path / TOKENIZER if path.is_dir() else path


def _expanded(name: str) -> Path:
    """A path with the home folder for `~`, where there is such a folder."""
    return Path(os.path.expanduser(name))


def _is_trained_on(here: Path, there: Path, seen: str) -> bool:
    """Whether a tokenizer.json is the one of a run, by what was noted of that, else by its content."""
    try:
        return is_as_noted(here, seen) if seen else same_content(here, there)
    except OSError:
        return False


def _fault(file: Path, seen: str) -> str:
    if not file.is_file():
        return "is gone"
    return "has other content than at the training" if seen and not is_as_noted(file, seen) else ""


def _beside(file: Path, meta: CheckpointMeta) -> tuple[dict[str, Path], tuple[str, ...]]:
    """What travels with a tokenizer.json, by its name in the folder, and notes on what does not."""
    wanted = {name: (name, file.with_name(name)) for name in BESIDE if file.with_name(name).is_file()}
    # A description that a stranger wrote may name any file: without its looks from the training, none is taken.
    if (own := str(meta.order.get("chat_template", ""))) and meta.data_files.get(own):
        wanted[TEMPLATE] = (own, _expanded(own))
    faults = {name: _fault(path, meta.data_files.get(noted, "")) for name, (noted, path) in wanted.items()}
    notes = [f"{wanted[name][1]} is not written: it {fault}" for name, fault in faults.items() if fault]
    return {name: path for name, (_, path) in wanted.items() if not faults[name]}, tuple(notes)


def _ids(separator: int | None) -> dict[str, int | None]:
    """The ids of a model that was trained here: nothing stands before a text, and nothing fills one up."""
    return {"bos_token_id": None, "eos_token_id": separator, "pad_token_id": None}


def _read(file: Path) -> dict[str, Any]:
    try:
        keys = read_json(file, CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file.name} beside the tokenizer is not JSON ({error}); mend or remove it") from None
    if not isinstance(keys, dict):
        raise ConfigError(f"{file.name} beside the tokenizer is no JSON object; mend or remove it")
    return keys


def _write(file: Path, keys: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(keys, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
