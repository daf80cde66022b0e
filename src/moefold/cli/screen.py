"""Output width of commands, and tables that never truncate a number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from moefold.console import PrintableConsole

DEFAULT_WIDTH = 240
"""Width without a terminal and without COLUMNS: enough for any table."""
MIN_WIDTH = 40
MAX_PROSE_WIDTH = 100
"""Maximum width of a paragraph."""
HEAD_WIDTH = len("predicted: ")
"""Width of the head of a paragraph."""
GAP = 2
"""Blanks between the columns of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    cells: "Sequence[str | Text]"
    justify: Literal["left", "right"] = "left"
    wraps: bool = False
    """True if long cells may be wrapped between words. Numbers are never wrapped."""

    @property
    def width(self) -> int:
        """Width of the longest cell."""
        return max(map(len, (self.name, *self.cells)))

    @property
    def min_width(self) -> int:
        """Width with long cells wrapped."""
        if not self.wraps:
            return self.width
        return max(len(word) for cell in (self.name, *self.cells) for word in str(cell).split() or [""])


def numbers(name: str, cells: "Sequence[str | Text]") -> Column:
    """Return a column of numbers."""
    return Column(name=name, cells=cells, justify="right")


def open_console() -> "PrintableConsole":
    """Return a console with the width of COLUMNS, else of the terminal, else `DEFAULT_WIDTH`."""
    from moefold.console import PrintableConsole

    width = max(MIN_WIDTH, get_terminal_size((DEFAULT_WIDTH, 25)).columns)
    return PrintableConsole(width=width, highlight=False, markup=False, emoji=False)


def print_columns(console: "Console", columns: Sequence[Column], *, num_keys: int = 1) -> None:
    """Print a table, split into several tables if it is too wide.

    Args:
        num_keys: number of leading columns that name a row and are repeated in each of the tables.
    """
    keys = columns[:num_keys]
    for i, group in enumerate(_split_columns(columns[num_keys:], console.width - _min_table_width(keys))):
        if i:
            console.print()
        console.print(_table([*keys, *group]))


def print_prose(console: "Console", head: str, text: str) -> None:
    """Print a paragraph after a short head, with a hanging indent."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=0)
    grid.add_column(width=HEAD_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(f"{head}:", style="bold"), text)
    console.print(grid, width=min(MAX_PROSE_WIDTH, console.width))


def _min_table_width(columns: Sequence[Column]) -> int:
    return sum(column.min_width + GAP for column in columns)


def _split_columns(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """Yield the columns in groups that fit next to the key columns, each group as large as possible."""
    group: list[Column] = []
    for column in columns:
        if group and _min_table_width([*group, column]) - GAP > width:
            yield group
            group = []
        group.append(column)
    yield group


def _table(columns: Sequence[Column]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column in columns:
        # A word that is too long for a column is wrapped, never truncated.
        table.add_column(column.name, justify=column.justify, no_wrap=not column.wraps, overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table
