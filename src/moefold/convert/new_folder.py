"""Check that a folder can be created, without torch."""

from pathlib import Path


def new_folder_unsupported_reason(final: Path) -> str:
    """Return why a new folder cannot have this path, or ""."""
    try:
        if final.exists() or final.is_symlink():
            return f"{str(final)!r} exists; name another folder, or remove it"
    except (OSError, ValueError) as error:
        return f"{str(final)!r} cannot be written: {getattr(error, 'strerror', None) or error}"
    return "" if final.name not in ("", "..") else f"{str(final)!r} is no name of a new folder"
