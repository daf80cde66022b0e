"""The console of every table and note: rich's own, with control characters of the text escaped."""

from typing import Any

from rich.console import Console
from rich.text import Text

from moefold.printable import MULTILINE_CHARS, printable


class PrintableConsole(Console):
    """Prints strings, those in cells of tables among them, so that a terminal obeys none of their characters.

    A `Text` is printed as it is: who makes one escapes what comes from files, recipes or the command line.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text that a string stands for, escaped before its width is measured."""
        return super().render_str(printable(text, MULTILINE_CHARS), **options)
