"""Text from sources of the package `datasets`: parquet, arrow, JSON lines, CSV, saved data sets, data sets on the hub.

Rows are read in streaming mode, so no second copy of the data is made and memory is bounded. No code from a data set is
executed: the package's own readers read the files, and since version 4 it runs no scripts.
"""

import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, read_json
from moefold.config.schema import DataConfig
from moefold.config.suggestions import closest_match
from moefold.data.file_formats import column_values, is_jsonl, jsonl_records, open_parquet, unknown_column_message
from moefold.data.input_paths import check_no_duplicates, existing_path, files_below
from moefold.data.text_source import TextChunk
from moefold.errors import ConfigError
from moefold.extras import install_command
from moefold.remote_path import is_remote

if TYPE_CHECKING:
    import datasets

READERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
}
"""Reader of the package for each file suffix."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")
_METADATA_FILES = (*_SAVED_DATASET_FILES, "dataset_info.json", "dataset_infos.json")


@dataclass(frozen=True, slots=True)
class TextTable:
    """One source: a column of one split of a file, of a folder or of a data set on the hub."""

    name: str
    """Name in the recipe."""
    path: Path | None
    """The file or folder; None for a data set on the hub."""
    split: str
    column: str
    subset: str
    revision: str

    @property
    def identity(self) -> list[str | int]:
        """Cache key: values that must stay the same for a tokenised copy to stay valid.

        Paths, sizes and times of local files; name and revision of a data set on the hub: without a revision, later
        changes on the hub are not noticed.
        """
        found: list[str | int] = [self.split, self.column, self.subset]
        if self.path is None:
            return [*found, self.name, self.revision]
        for file in files_below(self.path):
            status = file.stat()
            found += [str(file), status.st_size, status.st_mtime_ns]
        return found

    def open(self) -> "datasets.IterableDataset":
        """Open the rows, with the text column only.

        Raises:
            ConfigError: the source, its split or the column does not exist, or cannot be read.
        """
        rows = self.rows()
        if rows.column_names is not None and self.column not in rows.column_names:
            raise ConfigError(
                f"data.column={self.column!r}: {self.name} has {unknown_column_message(self.column, rows.column_names)}"
            )
        return rows.select_columns([self.column]) if rows.column_names is not None else rows

    def text(self, row: dict[str, Any], number: int) -> str:
        """Return the text of row `number` (0-based, for the message).

        Raises:
            ConfigError: the row has no such column, or no text in it.
        """
        if self.column not in row:
            raise ConfigError(
                f"data.column={self.column!r}: {self.name} has {unknown_column_message(self.column, row)}"
            )
        text = row[self.column]
        if not isinstance(text, str):
            what = "nothing" if text is None else f"{type(text).__name__}"
            raise ConfigError(
                f"data.column={self.column!r} of {self.name} holds {what}, not text, in row {number + 1}; "
                "name a column of text"
            )
        return text

    def to_config_error(self, error: Exception) -> ConfigError:
        """Turn an error of the package into a ConfigError that names the broken file, if one can be found."""
        if self.path is not None:
            for file in files_below(self.path):
                if is_jsonl(file):
                    _find_broken_line(file)
                elif file.suffix == ".parquet":
                    _find_broken_row(file, self.column)
                elif self.path.is_dir() and _suffix(file) != ".json":
                    check_rows_readable(file, self.column)
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ConfigError(
            f"data.path={self.name!r} (split {self.split!r}) cannot be read by the package datasets: {detail}; "
            "check data.path, data.split and data.subset"
        )

    def rows(self) -> "datasets.IterableDataset":
        """Open the rows with all columns.

        Raises:
            ConfigError: the source or its split does not exist, or cannot be read.
        """
        import datasets

        datasets.utils.logging.set_verbosity(logging.CRITICAL)
        datasets.disable_progress_bars()
        try:
            if self.path is not None and _is_saved(self.path):
                return self._open_saved()
            if self.path is not None and self.path.is_file():
                reader = READERS[_suffix(self.path)]
                options = {"delimiter": "\t"} if _suffix(self.path) == ".tsv" else {}
                files = {"train": str(self.path)}
                return datasets.load_dataset(reader, data_files=files, split="train", streaming=True, **options)
            where = self.name if self.path is None else str(self.path)
            subset = self.subset or None
            revision = self.revision or None
            return datasets.load_dataset(where, subset, split=self.split, revision=revision, streaming=True)
        except ConfigError:
            raise
        except Exception as error:
            # The package, its file readers and its network library raise many types.
            raise self.to_config_error(error) from error

    def _open_saved(self) -> "datasets.IterableDataset":
        import datasets

        saved = datasets.load_from_disk(str(self.path))
        if isinstance(saved, datasets.DatasetDict):
            if self.split not in saved:
                guess = closest_match(self.split, saved)
                hint = f"did you mean {guess!r}?" if guess else f"the splits are {', '.join(sorted(saved))}"
                raise ConfigError(f"data.split={self.split!r} is not in {self.name}; {hint}")
            saved = saved[self.split]
        return saved.to_iterable_dataset()


@dataclass(frozen=True, slots=True)
class TextTables:
    """Sources in sequence, where each row is a document; input of the token cache and of streaming."""

    tables: tuple[TextTable, ...]
    kind: str = "huggingface"
    size_bytes: int | None = None
    """Unknown: files are compressed, and sizes on the hub are not queried."""

    @property
    def identity(self) -> list[list[str | int]]:
        """Cache key: values that must stay the same for a tokenised copy to stay valid."""
        return [table.identity for table in self.tables]

    def chunks(self) -> Iterator[TextChunk]:
        """Yield all documents.

        Raises:
            ConfigError: a source is missing, or a row holds no text.
        """
        for text, _ in self.documents(None):
            yield TextChunk(text, ends_document=True, size_bytes=len(text))

    def documents(self, state: Any) -> Iterator[tuple[str, Any]]:
        """Yield the nonempty documents from a state on (None: from the first), each with the state to restart at it.

        A state is JSON-serialisable: the number of the source, the number of the row, and the package's own state.
        """
        first, number, inner = (0, 0, None) if state is None else state
        for which in range(first, len(self.tables)):
            table = self.tables[which]
            rows = table.open()
            if inner is not None:
                rows.load_state_dict(inner)
            try:
                # The state to restart at a row is taken before the row is read.
                for row in rows:
                    text = table.text(row, number)
                    if text:
                        yield text, (which, number, inner)
                    inner = rows.state_dict()
                    number = number + 1
            except ConfigError:
                raise
            except Exception as error:
                raise table.to_config_error(error) from error
            number = 0
            inner = None


def text_tables(data: DataConfig, split: str, skipped: Set[Path] = frozenset()) -> TextTables:
    """Return the sources that data.path names, for one split, except skipped files.

    A name that exists is a file or folder; one of the form `owner/name` that does not is a data set on the hub.

    Raises:
        ConfigError: a file or folder does not exist, is named twice, or has no format that the package reads; or a key
            is set that applies to none of them.
    """
    names = [name for name in ((data.path,) if isinstance(data.path, str) else data.path) if name]
    if not names:
        raise ConfigError(
            'data.path is empty, but data.kind="huggingface" reads from it; name files, folders or data sets on the hub'
        )
    paths = [_local_path(name) for name in names]
    check_no_duplicates(tuple(path for path in paths if path is not None))
    for name, path in zip(names, paths, strict=True):
        _check_readable(name, path, split)
    _check_unused_keys(data, paths)
    tables = [
        TextTable(name, path, split, data.column, data.subset, data.revision)
        for name, path in zip(names, paths, strict=True)
    ]
    return TextTables(tuple(table for whole in tables for table in _exclude_files(whole, skipped)))


def check_rows_readable(file: Path, column: str) -> None:
    """Read all rows of a file.

    Raises:
        ConfigError: the file is broken.
    """
    if _suffix(file) not in READERS or file.name in _METADATA_FILES:
        return
    table = TextTable(str(file), file, "train", column, "", "")
    rows = table.rows()
    if rows.column_names is not None and column in rows.column_names:
        rows = rows.select_columns([column])
    try:
        for _ in rows:
            pass
    except Exception as error:
        # The package and its file readers raise many types.
        raise table.to_config_error(error) from error


def _exclude_files(table: TextTable, skipped: Set[Path]) -> list[TextTable]:
    """Return a source without some files: unchanged if it has none of them, else its other files one by one."""
    if table.path is None or not any(file == table.path or table.path in file.parents for file in skipped):
        return [table]
    files = [table.path] if table.path.is_file() else _files_of_split(table)
    return [replace(table, path=file, split="train", subset="") for file in files if file not in skipped]


def _files_of_split(table: TextTable) -> list[Path]:
    """Return the files of a split of a folder, in the order in which the package reads them."""
    import datasets

    assert table.path is not None
    if _is_saved(table.path):
        folder = table.path / table.split if (table.path / "dataset_dict.json").is_file() else table.path
        try:
            state = read_json(folder / "state.json", MAX_DESCRIPTION_BYTES)
            return [(folder / Path(file["filename"]).name).resolve() for file in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise table.to_config_error(error) from error
    try:
        builder = datasets.load_dataset_builder(str(table.path), table.subset or None)
        return [Path(file).resolve() for file in (builder.config.data_files or {})[table.split]]
    except Exception as error:
        raise table.to_config_error(error) from error


def check_package() -> None:
    """Raise ConfigError if the package `datasets` is missing."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            'data.kind="huggingface" needs the package datasets, which is not installed; install the extra hf: '
            + install_command("hf")
        )


def _local_path(name: str) -> Path | None:
    looks_local = name.startswith((".", "/", "~")) or _suffix(Path(name)) in READERS
    if looks_local or is_remote(name) or os.path.exists(name) or not _HUB_NAME.fullmatch(name):
        return existing_path("data.path", name)
    return None


def _check_readable(name: str, path: Path | None, split: str) -> None:
    if path is None or path.is_dir():
        return
    if _suffix(path) not in READERS:
        raise ConfigError(
            f"data.path={name!r} must end in {', '.join(READERS)}, be a folder or a name on the hub; "
            'use data.kind="text" for plain text'
        )
    if split != "train":
        raise ConfigError(
            f"data.path={name!r} is one file, whose only split is 'train', not {split!r}; name a folder that has splits"
        )


def _check_unused_keys(data: DataConfig, paths: Sequence[Path | None]) -> None:
    """Raise ConfigError for data.revision or data.subset if no source has revisions or configurations."""
    if data.revision and None not in paths:
        raise ConfigError(
            f"data.revision={data.revision!r} has no effect: nothing in data.path={data.path!r} is on the hub, and "
            "only data sets there have revisions; leave it out"
        )
    if data.subset and not any(path is None or (path.is_dir() and not _is_saved(path)) for path in paths):
        raise ConfigError(
            f"data.subset={data.subset!r} has no effect: data.path={data.path!r} is a file or a saved data set, which "
            "has no configurations; leave it out"
        )


def _suffix(path: Path) -> str:
    """Return the suffix of a file, ignoring that of compression."""
    return path.with_suffix("").suffix if path.suffix in (".gz", ".zst", ".bz2", ".xz") else path.suffix


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in _SAVED_DATASET_FILES)


def _find_broken_row(file: Path, column: str) -> None:
    """Raise ConfigError with file and row if a parquet file, or a text in it, cannot be read."""
    if column in open_parquet(file).schema_arrow.names:
        for _ in column_values(file, column):
            pass


def _find_broken_line(file: Path) -> None:
    """Raise ConfigError with file and line if a line is not JSON."""
    for _ in jsonl_records(file):
        pass
