"""Rows of text from tables: parquet, arrow, JSON and CSV files, folders, saved data sets, data sets on the hub.

Files are read here, in parts of bounded size. The package `datasets` reads data sets on the hub in streaming mode,
without a second copy of the data. Code of a data set is never executed: since version 4 the package runs no scripts.
"""

import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.config.sections.data import DataConfig
from moefold.data.input_paths import check_no_duplicates, existing_path, files_below, refuse_data_set, table_suffix
from moefold.data.sources.file_formats import unknown_column_message
from moefold.data.sources.table_rows import TABLE_SUFFIXES, is_saved_dataset, split_files, text_rows
from moefold.data.sources.text_source import TextChunk
from moefold.errors import ConfigError, install_command
from moefold.message_text import Problem, Setting, first_line
from moefold.remote_path import is_remote

if TYPE_CHECKING:
    import datasets

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class TextTable:
    """One source: a column of one split of a file, of a folder or of a data set on the hub."""

    name: str
    """Name in the recipe."""
    path: Path | None
    """The file or folder, or None for a data set on the hub."""
    split: str
    column: str
    subset: str
    revision: str

    @property
    def identity(self) -> list[str | int]:
        """Cache key: values that must stay the same for a tokenised copy to stay valid.

        It has paths, sizes and times of local files, and name and revision of a data set on the hub. Without a
        revision, later changes on the hub are not noticed.
        """
        fields: list[str | int] = [self.split, self.column, self.subset]
        if self.path is None:
            return [*fields, self.name, self.revision]
        for file in files_below(self.path):
            status = file.stat()
            fields += [str(file), status.st_size, status.st_mtime_ns]
        return fields

    def files(self) -> list[Path]:
        """Return the files of the split, in order. Raises ConfigError if the folder lacks the split, or tables."""
        assert self.path is not None
        return split_files(self.path, self.split, self.subset) if self.path.is_dir() else [self.path]

    def documents(self, number: int, place: Any) -> Iterator[tuple[str, int, Any]]:
        """Yield the texts from a place on, each with its row number (0-based) and place.

        Args:
            place: a yielded place, JSON-serialisable. None means the first row. It is the number of the file and of the
                row in it, or the state of the package for a data set on the hub.

        Raises:
            ConfigError: the source is broken, or a row holds no text.
        """
        yield from self._hub_documents(number, place) if self.path is None else self._file_documents(number, place)

    def _file_documents(self, number: int, place: Any) -> Iterator[tuple[str, int, Any]]:
        files = self.files()
        first = 0
        start = 0
        if isinstance(place, list | tuple):
            first, start = map(int, place)
        elif place is not None:
            # A state of the package from an earlier version: the rows have the same order.
            for text, row, position in self._file_documents(0, None):
                if row >= number:
                    yield text, row, position
            return
        for index in range(first, len(files)):
            for row, text in text_rows(files[index], self.column, start):
                yield text, number, [index, row]
                number += 1
            start = 0

    def _hub_documents(self, number: int, place: Any) -> Iterator[tuple[str, int, Any]]:
        rows = self._open_hub()
        if place is not None:
            rows.load_state_dict(place)
        try:
            # The state to restart at a row is taken before the row is read.
            for row in rows:
                yield self._hub_text(row, number), number, place
                place = rows.state_dict()
                number += 1
        except ConfigError:
            raise
        except Exception as error:
            raise self._hub_error(error) from error

    def _open_hub(self) -> "datasets.IterableDataset":
        import datasets

        datasets.utils.logging.set_verbosity(logging.CRITICAL)
        datasets.disable_progress_bars()
        try:
            subset = self.subset or None
            revision = self.revision or None
            rows = datasets.load_dataset(self.name, subset, split=self.split, revision=revision, streaming=True)
        except Exception as error:
            # The package, its file readers and its network library raise many types.
            raise self._hub_error(error) from error
        if rows.column_names is None:
            return rows
        if self.column not in rows.column_names:
            rule = f": {self.name} has {unknown_column_message(self.column, rows.column_names)}"
            raise ConfigError(Problem("data.column", self.column, rule))
        return rows.select_columns([self.column])

    def _hub_text(self, row: dict[str, Any], number: int) -> str:
        if self.column not in row:
            rule = f": {self.name} has {unknown_column_message(self.column, row)}"
            raise ConfigError(Problem("data.column", self.column, rule))
        text = row[self.column]
        if not isinstance(text, str):
            kind = "nothing" if text is None else f"{type(text).__name__}"
            rule = f"of {self.name} holds {kind}, not text, in row {number + 1}"
            raise ConfigError(Problem("data.column", self.column, rule, "name a column of text"))
        return text

    def _hub_error(self, error: Exception) -> ConfigError:
        rule = f"(split {self.split!r}) cannot be read by the package datasets: {first_line(error)}"
        way_out = f"check {Setting('data.path')}, data.split and data.subset"
        return ConfigError(Problem("data.path", self.name, rule, way_out))


@dataclass(frozen=True, slots=True)
class TextTables:
    """Sources in sequence, where each row is a document. They are the input of the token cache and of streaming."""

    tables: tuple[TextTable, ...]
    kind: str = "huggingface"
    size_bytes: int | None = None
    """Unknown: files are compressed, and sizes on the hub are not queried."""

    @property
    def identity(self) -> list[list[str | int]]:
        """Cache key: values that must stay the same for a tokenised copy to stay valid."""
        return [table.identity for table in self.tables]

    def chunks(self) -> Iterator[TextChunk]:
        """Yield all documents. Raises ConfigError if a source is missing, or a row holds no text."""
        for text, _ in self.documents(None):
            yield TextChunk(text, ends_document=True, size_bytes=len(text))

    def documents(self, state: Any) -> Iterator[tuple[str, Any]]:
        """Yield the nonempty documents from a state on (None: from the first), each with its own state for a restart.

        A state is JSON-serialisable: the number of the source, of the row, and its place (`TextTable.documents`).
        """
        first, number, place = (0, 0, None) if state is None else state
        for number_of_table in range(first, len(self.tables)):
            for text, row, position in self.tables[number_of_table].documents(number, place):
                if text:
                    yield text, (number_of_table, row, position)
            number = 0
            place = None


def text_tables(data: DataConfig, split: str, skipped: Set[Path] = frozenset()) -> TextTables:
    """Return the sources that data.path names, for one split, except skipped files.

    An existing name is a file or folder. Any other name of the form `owner/name` is a data set on the hub.

    Raises:
        ConfigError: a file or folder does not exist, is named twice, or has no format that the package reads, or a key
            is set that applies to no source.
    """
    names = [name for name in data.paths if name]
    if not names:
        rule = 'is empty, but data.kind="huggingface" reads from it'
        raise ConfigError(Problem("data.path", None, rule, "name files, folders or data sets on the hub"))
    paths = [_local_path(name) for name in names]
    check_no_duplicates(tuple(path for path in paths if path is not None))
    for name, path in zip(names, paths, strict=True):
        _check_readable(name, path, split)
    _check_unused_keys(data, paths)
    tables = [
        TextTable(name, path, split, data.column, data.subset, data.revision)
        for name, path in zip(names, paths, strict=True)
    ]
    return TextTables(tuple(table for split_tables in tables for table in _exclude_files(split_tables, skipped)))


def _exclude_files(table: TextTable, skipped: Set[Path]) -> list[TextTable]:
    """Return a source without some files: unchanged if it has none of them, else its other files individually."""
    if table.path is None or not any(file == table.path or table.path in file.parents for file in skipped):
        return [table]
    return [replace(table, path=file, split="train", subset="") for file in table.files() if file not in skipped]


def check_package() -> None:
    """Raise ConfigError if the package `datasets` is missing."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            'data.kind="huggingface" needs the package datasets, which is not installed; install the extra hf: '
            + install_command("hf")
        )


def _local_path(name: str) -> Path | None:
    looks_local = name.startswith((".", "/", "~")) or table_suffix(Path(name)) in TABLE_SUFFIXES
    if looks_local or is_remote(name) or os.path.exists(name) or not _HUB_NAME.fullmatch(name):
        return existing_path("data.path", name)
    return None


def _check_readable(name: str, path: Path | None, split: str) -> None:
    if path is not None and path.is_dir():
        refuse_data_set("data.path", path, reads_saved=True)
    if path is None or path.is_dir():
        return
    if table_suffix(path) not in TABLE_SUFFIXES:
        rule = f"must end in {', '.join(TABLE_SUFFIXES)}, be a folder or a name on the hub"
        raise ConfigError(Problem("data.path", name, rule, 'use data.kind="text" for plain text'))
    if split != "train":
        rule = f"is one file, whose only split is 'train', not {split!r}"
        raise ConfigError(Problem("data.path", name, rule, "name a folder that has splits"))


def _check_unused_keys(data: DataConfig, paths: Sequence[Path | None]) -> None:
    if data.revision and None not in paths:
        raise ConfigError(
            f"data.revision={data.revision!r} has no effect: nothing in {Setting('data.path', data.path)} is on the "
            "hub, and only data sets there have revisions; leave it out"
        )
    if data.subset and not any(path is None or (path.is_dir() and not is_saved_dataset(path)) for path in paths):
        raise ConfigError(
            f"data.subset={data.subset!r} has no effect: {Setting('data.path', data.path)} is a file or a saved data "
            "set, which has no configurations; leave it out"
        )
