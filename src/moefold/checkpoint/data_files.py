"""How the files of the data differ from those that a checkpoint was trained on. Torch-free."""

from collections.abc import Mapping

SKIPPED = "skipped"


def file_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """In words, by name; what a file looked like is "SIZE HASH", or "skipped"."""
    found = []
    for name in [*then, *(name for name in now if name not in then)]:
        before, after = then.get(name), now.get(name)
        if before == after:
            continue
        if after is None:
            found.append(f"data file {name} is gone")
        elif before is None:
            found.append(f"data file {name} is new")
        elif after == SKIPPED:
            found.append(f"data file {name} is left out as corrupt, and was not then")
        elif before == SKIPPED:
            found.append(f"data file {name} was left out as corrupt then, and is not now")
        else:
            found.append(f"data file {name} has other content than then")
    return found
