"""Compare the fingerprints of data files with those in a checkpoint. Torch-free."""

from collections.abc import Iterable, Mapping
from pathlib import Path

SKIPPED = "skipped"
ENDS_SUFFIX = ".ends"
"""Suffix of the document index of a token file; a run that uses the index cannot use the file without it."""


def file_differences(saved: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """Return descriptions of the changed files by name; a fingerprint is "SIZE HASH", or "skipped"."""
    found = {}
    for name in [*saved, *(name for name in current if name not in saved)]:
        before = saved.get(name)
        after = current.get(name)
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
    """Separate lost files, without which a run can continue, from other differences.

    Args:
        saved: fingerprints in the checkpoint.
        differences: descriptions of the changes, by file name.
        tokens: the token files of the run, and the number of tokens in each.

    Returns:
        The files that are lost, or were skipped from the start and have changed, with their descriptions; and the other
        differences.
    """
    lost = {}
    others = {}
    left_out = [name for name, seen in saved.items() if seen == SKIPPED] if tokens else []
    file_of = {str(Path(name).with_suffix(ENDS_SUFFIX)): name for name in [*left_out, *tokens]}
    for name, difference in differences.items():
        if name in tokens or name in left_out:
            lost[name] = difference
        elif name in file_of:
            lost[file_of[name]] = difference
        else:
            others[name] = difference
    return lost, others


def is_below(file: Path, root: Path) -> bool:
    """Return whether a file is a path that the recipe names, or is below it, judged by the path alone."""
    return file == root or (root in file.parents and ".." not in file.parts[len(root.parts) :])


def check_data_file_names(path: object, files: Iterable[str], tokens: Iterable[str], dropped: Iterable[str]) -> None:
    """Raise TypeError for data file names that no run writes, which a forged checkpoint could use to read other files.

    Args:
        path: data.path of the run.
        files: names of all its data files.
        tokens: names of its token files, in the order of `files`; empty if unknown.
        dropped: names of the dropped files.
    """
    known = list(files)
    tokens = list(tokens)
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
