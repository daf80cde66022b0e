"""Width of what commands print, and tables that keep every number at any width."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moefold.terminal import PrintableConsole

DEFAULT_WIDTH = 240
"""Columns where the output is no terminal and COLUMNS is not set: as wide as any table needs."""
MIN_WIDTH = 40
MAX_PROSE_WIDTH = 100
"""Most columns of a sentence."""
HEAD_WIDTH = len("predicted: ")
"""Columns of the head of a paragraph."""
GAP = 2
"""Blanks between two columns of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "left"
    wraps: bool = False
    """Whether long cells may be broken between words; numbers never are."""

    @property
    def width(self) -> int:
        """Columns that the longest cell takes."""
        return max(map(len, (self.name, *self.cells)))

    @property
    def min_width(self) -> int:
        """Columns that it takes where long cells are broken."""
        if not self.wraps:
            return self.width
        return max(len(word) for cell in (self.name, *self.cells) for word in cell.split() or [""])


def open_console() -> "PrintableConsole":
    """Return a console as wide as COLUMNS says, else as the terminal, else as any table needs."""
    from moefold.terminal import PrintableConsole

    width = max(MIN_WIDTH, get_terminal_size((DEFAULT_WIDTH, 25)).columns)
    return PrintableConsole(width=width, highlight=False, markup=False, emoji=False)


def print_columns(console: "Console", columns: Sequence[Column], *, num_keys: int = 1) -> None:
    """Print a table; where it is too wide, as several tables one after another.

    Args:
        console: where to.
        columns: of the table.
        num_keys: the first so many columns name a row and are repeated in each of the tables.
    """
    keys = columns[:num_keys]
    for i, part in enumerate(_split_columns(columns[num_keys:], console.width - _min_table_width(keys))):
        if i:
            console.print()
        console.print(_table([*keys, *part]))


def print_prose(console: "Console", head: str, text: str) -> None:
    """Print a paragraph behind a short head; further lines are indented as far as the first."""
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
    """The columns in groups that fit beside the keys, each as full as can be."""
    part: list[Column] = []
    for column in columns:
        if part and _min_table_width([*part, column]) - GAP > width:
            yield part
            part = []
        part.append(column)
    yield part


def _table(columns: Sequence[Column]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column in columns:
        # A word that is too long for a column is broken, never cut.
        table.add_column(column.name, justify=column.justify, no_wrap=not column.wraps, overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table
