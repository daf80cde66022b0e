"""How the files of the data differ from those that a checkpoint was trained on. Torch-free."""

from collections.abc import Iterable, Mapping
from pathlib import Path

SKIPPED = "skipped"
ENDS_SUFFIX = ".ends"
"""Of the index of a token file's documents, without which the file is of no use to a run that reads it."""


def file_differences(saved: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """In words, by the names of the files; what a file looked like is "SIZE HASH", or "skipped"."""
    found = {}
    for name in [*saved, *(name for name in current if name not in saved)]:
        before, after = saved.get(name), current.get(name)
        if before == after:
            continue
        if after is None:
            found[name] = f"data file {name} is gone"
        elif before is None:
            found[name] = f"data file {name} is new"
        elif after == SKIPPED:
            found[name] = f"data file {name} is left out as corrupt, and was not then"
        elif before == SKIPPED:
            found[name] = f"data file {name} was left out as corrupt then, and is not now"
        else:
            found[name] = f"data file {name} has other content than then"
    return found


def separate_dropped_files(
    saved: Mapping[str, str], differences: Mapping[str, str], tokens: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, str]]:
    """Which differences are files that a run can go on without.

    Args:
        saved: what the files of the checkpoint looked like.
        differences: what has become of them, by name.
        tokens: the files that the run reads, and how many tokens each holds.

    Returns:
        The files that are lost, or were left out from the start and look otherwise now, with what is to be said of
        them; and the other differences.
    """
    lost, others = {}, {}
    left_out = [name for name, seen in saved.items() if seen == SKIPPED] if tokens else []
    file_of = {str(Path(name).with_suffix(ENDS_SUFFIX)): name for name in [*left_out, *tokens]}
    for name, words in differences.items():
        if name in tokens or name in left_out:
            lost[name] = words
        elif name in file_of:
            lost[file_of[name]] = words
        else:
            others[name] = words
    return lost, others


def is_below(file: Path, root: Path) -> bool:
    """Whether a file is a path that the recipe names, or lies below it, by its name alone."""
    return file == root or (root in file.parents and ".." not in file.parts[len(root.parts) :])


def check_data_file_names(path: object, files: Iterable[str], tokens: Iterable[str], dropped: Iterable[str]) -> None:
    """Raise TypeError for names of data files that no run writes: whoever made the checkpoint may have meant others.

    Args:
        path: data.path of the run.
        files: names of all files of its data.
        tokens: names of its token files in their order, which is that of all files; empty if it tells none.
        dropped: names of those that are left out.
    """
    known, tokens = list(files), list(tokens)
    if odd := [name for name in known if not Path(name).name]:
        raise TypeError(f"data_files names no file: {odd[0]!r}")
    for key, names in (("data_tokens", tokens), ("data_lost", list(dropped))):
        if odd := [name for name in names if name not in known]:
            raise TypeError(f"{key} names {odd[0]!r}, which is not among data_files")
    wanted = frozenset(tokens)
    if tokens != [name for name in known if name in wanted]:
        raise TypeError("data_tokens has another order than data_files")
    paths = path if isinstance(path, list) else [path]
    roots = [Path(root) for root in paths if isinstance(root, str)]
    if odd := [name for name in tokens if not any(is_below(Path(name), root) for root in roots)]:
        raise TypeError(f"data_tokens names {odd[0]!r}, which is not below data.path")
