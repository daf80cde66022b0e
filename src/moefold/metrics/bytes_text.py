"""Bytes for people. Torch-free."""

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def format_bytes(size: int) -> str:
    """Three digits in the largest unit of which there is one: "1.5 GiB"."""
    unit, name = next(entry for entry in UNITS if size >= entry[0] or entry[0] == 1)
    return f"{size / unit:.3g} {name}"
