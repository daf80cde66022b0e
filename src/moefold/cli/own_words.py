"""Errors of code that several commands share, in the words of the command at hand."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from moefold.errors import ConfigError

DEVICE_OPTION = (
    (r"parallel\.world_size=(\d+) needs a GPU", r"--device cuda needs a GPU"),
    (r"run\.device=", "--device "),
)
"""For commands whose device is an option."""
TOKENIZER_OPTION = ((r"data\.tokenizer=", "--tokenizer "),)
"""For commands whose tokenizer is an option."""


@contextmanager
def reworded_errors(*replacements: tuple[str, str]) -> Iterator[None]:
    """Replace what the messages of errors inside say of a recipe by the options of a command.

    Args:
        replacements: regular expressions, and what stands in their place.

    Raises:
        ConfigError: the one that came, reworded.
    """
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for pattern, words in replacements:
            text = re.sub(pattern, words, text)
        raise ConfigError(text) from error
