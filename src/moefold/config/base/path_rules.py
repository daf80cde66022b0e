"""Rules on the names of files and folders in a recipe: "~", and bytes that are not UTF-8."""

from moefold.config.base.field import Bound

NO_TILDE = Bound(
    'must not begin with "~", which moefold does not replace by the home folder; write the whole path',
    lambda name: not name.startswith("~"),
)
"""Rule on the name of a folder that a run creates."""


def non_unicode_reason(text: str) -> str:
    """Return the part of a text that is not Unicode, such as a byte of a file name that is not UTF-8, or "" if none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python's file names have surrogates instead of such bytes (PEP 383).
        is_byte = 0xDC80 <= code <= 0xDCFF
        fault = f"the byte 0x{code - 0xDC00:02X}, which is not UTF-8" if is_byte else f"a lone surrogate U+{code:04X}"
        return f"has {fault}; rename the file or folder, or link to it by a name in UTF-8"
    return ""
