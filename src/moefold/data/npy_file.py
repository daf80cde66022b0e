"""Arrays of numbers in .npy files of anybody's making: mapped, never unpickled, and refused in one kind of error."""

import tokenize
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from moefold.bounded_read import check_regular_file

_INVALID_FILE_ERRORS = (
    EOFError,
    MemoryError,
    OSError,
    OverflowError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
    zipfile.BadZipFile,
)
"""What numpy raises on a file that is none: its header is read by Python's own tokenizer."""


def map_npy(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    """Map an array read-only; reads its header alone.

    Raises:
        ValueError: it cannot be read, is no complete array of plain numbers, or an archive of several.
    """
    try:
        check_regular_file(path)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except _INVALID_FILE_ERRORS as error:
        raise ValueError((str(error) or type(error).__name__).splitlines()[0]) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("it is an archive of arrays, not one array")
    return array
