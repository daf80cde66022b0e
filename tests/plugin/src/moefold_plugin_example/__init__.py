"""Parts of moefold recipes, one file each; `pyproject.toml` names them as entry points."""
