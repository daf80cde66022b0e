"""Network interfaces of this machine, as the Linux kernel lists them. Torch-free."""

from pathlib import Path


def network_links(system: Path = Path("/sys/class")) -> list[str]:
    """Return one description for each network interface that is up, and each port of an InfiniBand or RoCE adapter.

    Empty where the kernel lists none, as on macOS.

    Args:
        system: folder of the kernel's device classes.
    """
    found = []
    for interface in sorted((system / "net").glob("*")):
        if _read(interface / "operstate") in ("up", "unknown"):
            speed = _read(interface / "speed")
            # Virtual interfaces have no speed, or -1.
            found.append(f"{interface.name} {int(speed) / 1000:g} Gb/s" if speed.isdecimal() else interface.name)
    for port in sorted((system / "infiniband").glob("*/ports/*")):
        state = _read(port / "state").partition(": ")[2].lower() or "state unknown"
        found.append(f"{port.parents[1].name}:{port.name} {_read(port / 'rate') or 'rate unknown'}, {state}")
    return found


def _read(file: Path) -> str:
    """Return the content of a file of the kernel; "" where it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
