"""Rich console that escapes control characters of names and messages."""

from typing import Any

from rich.console import Console
from rich.text import Text

from moefold.terminal import MULTILINE_CHARS, printable


class PrintableConsole(Console):
    """Rich console that escapes control characters of strings, including those in table cells.

    A `Text` is printed unchanged: its creator escapes text from files, recipes or the command line.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the rendered string, escaped before its width is measured."""
        return super().render_str(printable(text, MULTILINE_CHARS), **options)
