"""Check a pickle before it is loaded: of the operations alone that an index of a checkpoint is made of. Torch-free.

A pickle is a program: with operations that an index has no use for, a few bytes make a memo of gigabytes, or text that
fills the memory. Those that it has cost memory in proportion to the file, and no more than a few times what the same
number of bytes cost in an index of the library.
"""

import re

MAX_INDEX_BYTES = 1 << 30
"""Of an index: 10 million parts of about 100 bytes, as 1,024 ranks with 10,000 tensors write them."""
PICKLE_HEADERS = (b"\x80\x04", b"\x80\x05")
"""PROTO 4 or 5: what every Python that runs the library writes."""
_MAX_RUN_OPCODES = 4096
_SPARE_OPCODES = 1 << 16
_TEXT_OPCODE = re.compile(rb"\x8c(.)|X(.{4})", re.DOTALL)
_ONE_BYTE_OPCODES = b"()NRabestu]}\x81\x85\x86\x87\x88\x89\x93\x94"
"""MARK EMPTY_TUPLE NONE REDUCE APPEND BUILD APPENDS SETITEM TUPLE SETITEMS EMPTY_LIST EMPTY_DICT NEWOBJ TUPLE1 to
TUPLE3 NEWTRUE NEWFALSE STACK_GLOBAL MEMOIZE: one byte each, which makes up to 64."""
_OPCODE_RUN = re.compile(
    b"(?:["
    + re.escape(_ONE_BYTE_OPCODES)
    + rb"]|[hK].|M..|[Jj].{4}|\x95.{8}|\x80[\x04\x05]|"
    # BINGET BININT1 BININT2 BININT LONG_BINGET FRAME PROTO, and LONG1 of up to 9 bytes.
    + b"|".join(b"\\x8a" + bytes([count]) + b".{%d}" % count for count in range(9))
    + rb"|\x8a\x09.{9}){1,%d}+" % _MAX_RUN_OPCODES,
    re.DOTALL,
)


def check_opcodes(pickled: bytes) -> None:
    """Check that a pickle has no operation but those of an index, and no more of the small ones than one has.

    Raises:
        ValueError: it has others, more, or no end.
    """
    if not pickled.startswith(PICKLE_HEADERS):
        raise ValueError("it is no pickle of protocol 4 or 5")
    # In an index of the library a third of the bytes are such operations; those within numbers and texts count too.
    if len(pickled) - len(pickled.translate(None, delete=_ONE_BYTE_OPCODES)) > len(pickled) // 2 + _SPARE_OPCODES:
        raise ValueError("it has more operations than an index of its size")
    at = 0
    while True:
        if run := _OPCODE_RUN.match(pickled, at):
            at = run.end()
        elif text := _TEXT_OPCODE.match(pickled, at):
            at = text.end() + int.from_bytes(text[1] or text[2], "little")
        elif pickled[at : at + 1] == b".":
            return
        else:
            raise ValueError(f"byte {at} is no operation of an index")
