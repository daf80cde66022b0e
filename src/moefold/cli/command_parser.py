"""The parser of every command's words, whose messages a terminal can show."""

import argparse
from typing import NoReturn

from moefold.printable import LINES, printable


class CommandParser(argparse.ArgumentParser):
    """Refuses wrong words as argparse does, with the control characters in them escaped."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and a message that repeats the user's words, and leave with status 2."""
        super().error(printable(message, LINES))
