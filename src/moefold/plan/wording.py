"""Mappings and predicted numbers as a reader is shown them. Torch-free."""

from moefold.plan.mapping import ParallelMapping


def format_compact_degrees(mapping: ParallelMapping) -> str:
    """Return the degrees in a few letters, such as `tp1 pp2x8 ep8 dp32 z1`.

    pp2x8 is pp=2 with 8 virtual stages, z1 is ZeRO 1; cp, etp and mbs are left out where they are 1.
    """
    m = mapping
    words = [f"tp{m.tp}", f"pp{m.pp}x{m.vpp}" if m.vpp > 1 else f"pp{m.pp}"]
    words += [f"cp{m.cp}"] if m.cp > 1 else []
    words.append(f"ep{m.ep}")
    words += [f"etp{m.etp}"] if m.etp > 1 else []
    words += [f"dp{m.dp}", f"z{m.zero}"]
    return " ".join([*words, *([f"mbs{m.mbs}"] if m.mbs > 1 else [])])


def describe_strategy(mapping: ParallelMapping) -> str:
    """Return how a mapping saves memory and hides communication, beyond its degrees; empty if it does neither."""
    m = mapping
    words = [m.schedule] if m.pp > 1 and m.schedule != "1f1b" else []
    words += [f"recompute: {' + '.join(m.recompute)}"] if m.recompute else []
    words += [f"offload: {' + '.join(m.offload)}"] if m.offload else []
    return ", ".join([*words, *(["experts' exchange overlapped"] if m.overlap else [])])


def format_seconds(seconds: float) -> str:
    """Return seconds with three significant digits: a prediction has no more."""
    digits = next((digits for least, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)) if seconds >= least), 4)
    return f"{seconds:.{digits}f}"


def format_rate(value: float) -> str:
    """Return a rate with three significant digits and thousands apart, such as `6,230`."""
    scale = 10 ** max(0, len(f"{value:.0f}") - 3)
    return f"{round(value / scale) * scale:,}"
