"""The pip commands that install the extras of moefold. Torch-free."""

import json


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra, for the way in which moefold itself is installed.

    A checkout is installed in editable mode again, from its folder; an installed wheel is extended by name.

    Args:
        extra: name in `[project.optional-dependencies]` of pyproject.toml.
    """
    return f"pip install -e '.[{extra}]'" if _is_checkout() else f"pip install 'moefold[{extra}]'"


def _is_checkout() -> bool:
    """Return whether moefold runs from a checkout: in editable mode (PEP 610), or without an installation."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        # Absent for a wheel from a package index.
        origin = distribution("moefold").read_text("direct_url.json")
    except PackageNotFoundError:
        return True
    return origin is not None and json.loads(origin).get("dir_info", {}).get("editable", False) is True
