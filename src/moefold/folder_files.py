"""Files of a folder that may be sent or copied: plain files, and links that do not lead out of the folder.

An untrusted folder may contain a link to a private key of the user who publishes a copy of the folder.
"""

from pathlib import Path

from moefold.errors import ConfigError

_HUB_REPOS = ("models--", "datasets--")


def list_files(folder: Path, *, hidden: bool = True) -> dict[str, Path]:
    """Return the files below a folder, by relative names with slashes, sorted.

    Args:
        hidden: include files and folders whose names begin with a dot.

    Raises:
        ConfigError: an entry is a link out of the folder or to a folder, a device or a pipe.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            continue
        if not hidden and any(part.startswith(".") for part in name.parts):
            continue
        if reason := unsendable_reason(folder, path):
            raise ConfigError(f"{str(folder)!r}: {name.as_posix()!r} {reason}")
        files[name.as_posix()] = path
    return files


def unsendable_reason(folder: Path, file: Path) -> str:
    """Return the reason why a file of a folder must not be sent or copied, with the way out, else empty.

    Links are followed within the folder, and from a snapshot of the Hugging Face hub's cache to its blobs.
    """
    if not file.is_file():
        kind = "is a link to no file" if file.is_symlink() else "is not a plain file"
        return f"{kind}; remove it, or put the file itself there"
    target = file.resolve()
    roots = [folder.resolve()]
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith(_HUB_REPOS):
        roots.append(folder.parent.parent.resolve() / "blobs")
    if any(target.is_relative_to(root) for root in roots):
        return ""
    return "is a link that leads out of the folder; remove it, or copy the file itself"
