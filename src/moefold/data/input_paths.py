"""Resolve the literal paths of a recipe to files, and compare their fingerprints with a checkpoint's."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, read_json
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting
from moefold.remote_path import HUB_SCHEME, RemotePath, is_remote

if TYPE_CHECKING:
    from moefold.hub import HubKind

MIN_SIMILARITY = 0.75
"""Minimum similarity (0 to 1) to a missing name for a suggestion."""
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIR = "additional_chat_templates"
TOKENS_MAP_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_PATTERNS = (
    *("tokenizer*", "*.jinja", TOKENS_MAP_FILE, ADDED_TOKENS_FILE, "chat_template.json", "vocab.*"),
    *("merges.txt", CONFIG_FILE, GENERATION_FILE),
)
"""Files that are fetched if only the tokenizer is read."""
_HUB_KIND_BY_KEY: "dict[str, HubKind]" = {
    "data.path": "dataset",
    "INPUT": "dataset",
    "MODEL": "model",
    "data.tokenizer": "model",
    "--tokenizer": "model",
}
"""Kind of repository on the Hugging Face hub that a key may name."""


def data_paths(path: str | tuple[str, ...], kind: str) -> tuple[Path, ...]:
    """Return the existing files and folders that data.path names, each once, absolute, in the recipe's order."""
    names = (path,) if isinstance(path, str) else path
    names = tuple(name for name in names if name)
    if not names:
        rule = f'is empty, but data.kind="{kind}" reads from it'
        raise ConfigError(Problem("data.path", None, rule, "name a file, a folder or a list of them"))
    paths = tuple(existing_path("data.path", name) for name in names)
    check_no_duplicates(paths)
    return paths


def existing_path(key: str, name: str) -> Path:
    """Return the absolute path of a file or folder that the recipe names under `key`. `~` is the home folder.

    Remote files, and files on the hub, are copied to this machine: the path is the path of the copy.

    Raises:
        ConfigError: the file does not exist. The message has the most similar name in the nearest existing folder.
    """
    if is_remote(name):
        return _fetched(key, name)
    try:
        path = Path(name).expanduser().absolute()
        if path.exists():
            return path.resolve()
        missing = path
        while not missing.parent.exists():
            missing = missing.parent
        folder = missing.parent
        if not folder.is_dir():
            raise ConfigError(f"{Setting(key, name)} does not exist: {folder} is a file, not a folder")
        is_hidden = missing.name.startswith(".")
        candidates = sorted(name for name in os.listdir(folder) if is_hidden or not name.startswith("."))
        similar = difflib.get_close_matches(missing.name, candidates, n=1, cutoff=MIN_SIMILARITY)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{Setting(key, name)} cannot be reached ({error}); name a readable file or folder"
        ) from error
    from moefold.hub import download_advice

    advice = (
        download_advice(name, _HUB_KIND_BY_KEY[key], allows_bare_name="tokenizer" in key)
        if key in _HUB_KIND_BY_KEY
        else ""
    )
    otherwise = advice or f"{folder} holds no similar name"
    hint = f"did you mean {str(folder / similar[0])!r}?" if similar else otherwise
    raise ConfigError(f"{Setting(key, name)} does not exist; {hint}")


def _fetched(key: str, name: str) -> Path:
    from moefold.remote_copy import local_copy

    try:
        if name.startswith(HUB_SCHEME):
            from moefold.hub import snapshot

            patterns = TOKENIZER_PATTERNS if "tokenizer" in key else ()
            return snapshot(name, _HUB_KIND_BY_KEY.get(key, "model"), patterns=patterns)
        if "tokenizer" not in key:
            return local_copy(name.rstrip("/"))
        # The settings next to the file belong to it. Weights in the same folder do not.
        remote = RemotePath(name)
        if remote.is_file():
            return local_copy(str(remote.parent), (*TOKENIZER_PATTERNS, escape(remote.name))) / remote.name
        return local_copy(str(remote), TOKENIZER_PATTERNS)
    except ConfigError as error:
        raise error.with_start(f"{Setting(key)}: ") from None


def name_below(root: str, relative: Path | str) -> str:
    """Return the name in the recipe of a file below a folder that the recipe names."""
    return f"{root.rstrip('/')}/{relative}" if is_remote(root) else str(Path(root) / relative)


def data_file_path(name: str, roots: Iterable[str]) -> Path:
    """Return the absolute path of a data file by its name in the recipe. It need not exist, unless it is remote.

    Args:
        roots: data.path, which names the file or a folder above it.
    """
    if not is_remote(name):
        return Path(name).expanduser().absolute()
    root = next(root for root in roots if is_below(Path(name), Path(root)))
    folder = existing_path("data.path", root)
    return folder if Path(name) == Path(root) else folder / name.removeprefix(root.rstrip("/") + "/")


def files_below(path: Path, *, skipped_folders: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the file itself, or all files of a folder, recursively: each folder's files by name, then its folders.

    Hidden files and folders (a leading dot) and `skipped_folders` are skipped, and links to folders are not followed.
    The function is lazy: reading the first files of a big folder is cheap.
    """
    if not path.is_dir():
        yield path
        return
    for folder, folders, files in os.walk(path, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped_folders)
        for name in sorted(files):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def check_no_duplicates(paths: tuple[Path, ...]) -> None:
    """Raise ConfigError if a file occurs twice: its text could be in both training and validation."""
    seen_paths: set[Path] = set()
    for path in paths:
        if path in seen_paths:
            rule = f"reaches {path} twice"
            raise ConfigError(Problem("data.path", None, rule, "name every file once, alone or by its folder"))
        seen_paths.add(path)


def refuse_data_set(key: str, root: Path, *, reads_saved: bool = False) -> None:
    """Raise ConfigError for a folder of `datasets` or mosaicml-streaming: only the files that describe it are text.

    An index of mosaicml-streaming may also be right below, in a folder of a split. `reads_saved`: the caller reads what
    `save_to_disk` writes.
    """
    has_state = all((root / name).is_file() for name in ("state.json", "dataset_info.json"))
    if not reads_saved and (has_state or (root / "dataset_dict.json").is_file()):
        raise ConfigError(
            f'{key}: {root} is a data set that save_to_disk of the package datasets wrote; data.kind="huggingface" '
            "reads it"
        )
    for folder in [root, *sorted(path for path in root.iterdir() if path.is_dir())] if root.is_dir() else []:
        try:
            index = read_json(folder / "index.json", MAX_DESCRIPTION_BYTES)
        except (OSError, ValueError):
            continue
        if isinstance(index, dict) and isinstance(index.get("shards"), list) and "version" in index:
            raise ConfigError(
                f"{key}: {folder} holds shards of mosaicml-streaming, which are not read; write their rows to parquet "
                "or to JSON lines"
            )


def _raise_unreadable(error: OSError) -> None:
    rule = f": {error.filename} is not readable ({error.strerror})"
    raise ConfigError(Problem("data.path", None, rule, "give read access")) from error


COMPRESSION_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
JSONL_SUFFIXES = tuple(suffix + end for suffix in (".jsonl", ".ndjson") for end in ("", *COMPRESSION_SUFFIXES))
TOKEN_SUFFIXES = (".bin", ".npy")
SKIPPED = "skipped"
ENDS_SUFFIX = ".ends"
"""Suffix of the document index of a token file. A run that uses the index cannot use the file without it."""
ENDS_SUFFIXES = (ENDS_SUFFIX, ".idx")
"""`ENDS_SUFFIX` and the suffix of Megatron's index."""


def is_jsonl(path: Path) -> bool:
    """Return whether a file has a suffix of JSON lines."""
    return path.name.lower().endswith(JSONL_SUFFIXES)


def table_suffix(path: Path) -> str:
    """Return the suffix of a file, ignoring a suffix of compression."""
    return path.with_suffix("").suffix if path.suffix in COMPRESSION_SUFFIXES else path.suffix


def file_differences(saved: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """Return descriptions of the changed files by name. A fingerprint is "SIZE HASH [HASH]", or "skipped"."""
    differences = {}
    for name in [*saved, *(name for name in current if name not in saved)]:
        before = saved.get(name)
        after = current.get(name)
        if before == after or (before is not None and after is not None and has_same_content(before, after)):
            continue
        if after is None:
            differences[name] = f"data file {name} is gone"
        elif before is None:
            differences[name] = f"data file {name} is new"
        elif after == SKIPPED:
            differences[name] = f"data file {name} is left out as corrupt, and was not then"
        elif before == SKIPPED:
            differences[name] = f"data file {name} was left out as corrupt then, and is not now"
        else:
            differences[name] = f"data file {name} has other content than then"
    return differences


def has_same_content(saved: str, current: str) -> bool:
    """Return whether two fingerprints have the same content. Old versions wrote no hash of all bytes."""
    first = saved.split()
    other = current.split()
    length = min(len(first), len(other))
    return saved == current or (length > 1 and first[:length] == other[:length])


def separate_dropped_files(
    saved: Mapping[str, str], differences: Mapping[str, str], tokens: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, str]]:
    """Separate lost files, without which a run can continue, from other differences.

    Args:
        saved: fingerprints in the checkpoint.
        differences: descriptions of the changes, by file name.
        tokens: the token files of the run, and the number of tokens in each.

    Returns:
        The files that are lost, or were always skipped and have changed, with descriptions, and the other differences.
    """
    dropped = {}
    more = {}
    left_out = [name for name, digest in saved.items() if digest == SKIPPED] if tokens else []
    file_of = {str(Path(name).with_suffix(suffix)): name for name in [*left_out, *tokens] for suffix in ENDS_SUFFIXES}
    for name, difference in differences.items():
        if name in tokens or name in left_out:
            dropped[name] = difference
        elif name in file_of:
            dropped[file_of[name]] = difference
        else:
            more[name] = difference
    return dropped, more


def is_below(file: Path, root: Path) -> bool:
    """Return whether a file is equal to a path of the recipe or below it, without reading the disk."""
    return file == root or (root in file.parents and ".." not in file.parts[len(root.parts) :])


def check_data_file_names(path: object, files: Iterable[str], tokens: Iterable[str], dropped: Iterable[str]) -> None:
    """Raise TypeError for data file names that no run writes, which a forged checkpoint could use to read other files.

    Args:
        tokens: names of its token files, in the order of `files`, or empty if they are unknown.
    """
    file_names = list(files)
    tokens = list(tokens)
    if odd := [name for name in file_names if not Path(name).name]:
        raise TypeError(f"data_files names no file: {odd[0]!r}")
    for key, names in (("data_tokens", tokens), ("data_lost", list(dropped))):
        if odd := [name for name in names if name not in file_names]:
            raise TypeError(f"{key} names {odd[0]!r}, which is not among data_files")
    token_names = frozenset(tokens)
    if tokens != [name for name in file_names if name in token_names]:
        raise TypeError("data_tokens has another order than data_files")
    paths = path if isinstance(path, list) else [path]
    roots = [Path(root) for root in paths if isinstance(root, str)]
    if odd := [name for name in tokens if not any(is_below(Path(name), root) for root in roots)]:
        raise TypeError(f"data_tokens names {odd[0]!r}, which is not below {Setting('data.path')}")
