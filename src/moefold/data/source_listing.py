"""List the data files of a recipe by their names in the recipe."""

from pathlib import Path

from moefold.config.sections.data import DataConfig
from moefold.data.input_paths import (
    CHAT_TEMPLATE_FILE,
    ENDS_SUFFIXES,
    TOKEN_SUFFIXES,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    check_no_duplicates,
    data_paths,
    existing_path,
    files_below,
    is_jsonl,
    name_below,
)
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.remote_path import is_remote


def named_sources(data: DataConfig) -> list[tuple[str, Path]]:
    """Return the source files of the samples in order: named files, and files in named folders.

    Names are as in the recipe. Below a folder the relative path is appended, so names are the same on every machine.
    Data sets on the hub have no files. A missing token file that data.corrupt="skip" may skip is included.

    Raises:
        ConfigError: a path is missing.
    """
    if data.kind == "python-docs":
        from moefold.data.sources.text_source import python_docs_corpus

        return [(file.path.name, file.path) for file in python_docs_corpus().files]
    if data.kind in ("synthetic", "program", "task"):
        return []
    sources = []
    for name in data.paths:
        if not is_remote(name) and not (path := Path(name).expanduser()).exists():
            if data.kind == "huggingface":
                continue
            if data.drops_files and path.suffix in TOKEN_SUFFIXES:
                sources.append((name, path.absolute()))
                continue
        root = existing_path("data.path", name)
        for file in files_below(root):
            if not root.is_dir():
                sources.append((name, file))
            elif _is_source(data, file):
                sources.append((name_below(name, file.relative_to(root)), file))
    return sources


def settings_files(data: DataConfig) -> list[tuple[str, Path]]:
    """Return the files next to the sources that affect tokenisation: tokenizer and chat template."""
    entries = []
    if data.kind not in ("synthetic", "program") and data.tokenizer != "bytes":
        path = existing_path("data.tokenizer", data.tokenizer)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        entries = [
            (file.name, file),
            *((name, file.with_name(name)) for name in (TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE)),
        ]
    if data.chat_template:
        entries.append((data.chat_template, existing_path("data.chat_template", data.chat_template)))
    return [(name, file) for name, file in entries if file.is_file()]


def _is_source(data: DataConfig, file: Path) -> bool:
    if data.kind == "tokens":
        return file.suffix in TOKEN_SUFFIXES or (data.document_index and file.suffix in ENDS_SUFFIXES)
    return not data.reads_rows or is_jsonl(file)


def conversation_files(data: DataConfig) -> tuple[Path, ...]:
    """Return the JSON lines files that data.path names, folders recursively."""
    roots = data_paths(data.path, data.kind)
    files = tuple(file for root in roots for file in files_below(root) if not root.is_dir() or is_jsonl(file))
    if not files:
        raise ConfigError(f"{Setting('data.path', roots[0]):s} holds no .jsonl file; name files of conversations")
    check_no_duplicates(tuple(file.resolve() for file in files))
    return files
