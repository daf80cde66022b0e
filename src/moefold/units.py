"""Units of bytes, and how bytes and counts are printed."""

KIB = 2**10
MIB = 2**20
GIB = 2**30
UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))


def format_bytes(size: int) -> str:
    """Format bytes with three digits in the largest fitting unit: "1.5 GiB"."""
    unit, name = next(entry for entry in UNITS if size >= entry[0] or entry[0] == 1)
    return f"{size / unit:.3g} {name}"


def format_count(count: float) -> str:
    """Return a count with three significant digits and a suffix: 950, 12.3k, 4.56M."""
    for suffix, size in (("", 1.0), ("k", 1e3), ("M", 1e6)):
        if count < 999.5 * size:
            return f"{count / size:.3g}{suffix}"
    return f"{count / 1e9:.3g}G"
