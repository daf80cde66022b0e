"""Columns of parquet files, with the file and the row in every complaint."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moefold.bounded_read import check_regular_file
from moefold.errors import ConfigError

_BATCH_ROWS = 1024


def open_parquet(path: Path) -> Any:
    """Open a file; reads its description only.

    Returns:
        A `pyarrow.parquet.ParquetFile`.

    Raises:
        ConfigError: it is not readable, or no complete parquet file.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package pyarrow, which is not installed; install the extra hf: pip install -e '.[hf]'"
        ) from error
    try:
        check_regular_file(path)
        return ParquetFile(path)
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a complete parquet file ({error}); copy it anew or leave it out") from error


def column_values(path: Path, column: str, row_groups: Sequence[int] | None = None) -> Iterator[tuple[int, Any]]:
    """The values of a column, each with the number of its row (1-based).

    Args:
        path: the file.
        column: one that the file has.
        row_groups: row groups next to each other; None: all.

    Raises:
        ConfigError: the file is damaged, or a text is no UTF-8; the row is named.
    """
    from pyarrow import ArrowException

    file = open_parquet(path)
    chosen = list(range(file.num_row_groups) if row_groups is None else row_groups)
    row = sum(file.metadata.row_group(group).num_rows for group in range(chosen[0])) if chosen else 0
    batches = file.iter_batches(_BATCH_ROWS, row_groups=chosen, columns=[column])
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            values = _to_python_values(batch.column(0), path, column, row)
        except (OSError, ArrowException) as error:
            raise ConfigError(
                f"{path} is damaged behind row {row} (column {column!r}: {_first_line(error)}); copy it anew or leave "
                "it out"
            ) from error
        for value in values:
            row += 1
            yield row, value


def _to_python_values(values: Any, path: Path, column: str, row: int) -> list[Any]:
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError:
        for number, value in enumerate(values, row + 1):
            _check_utf8(value, f"{path}: column {column!r} holds no UTF-8 in row {number}")
        raise


def _check_utf8(value: Any, message: str) -> None:
    try:
        value.as_py()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{message} ({error.reason} at byte {error.start}); mend the text or write it anew as UTF-8"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
