"""Tables that come with the package: TOML and JSON files for the modules that read them."""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

_PACKAGE = Path(__file__).parent


def package_text(file: str) -> str:
    """Return the text of a file, given its path in the package."""
    return (_PACKAGE / file).read_text(encoding="utf-8")


@cache
def package_table(file: str) -> Mapping[str, Any]:
    """Return the table of a TOML or JSON file, given its path in the package. It is read once."""
    parse = json.loads if file.endswith(".json") else tomllib.loads
    return MappingProxyType(parse(package_text(file)))


def table_names(folder: str) -> tuple[str, ...]:
    """Return the names of the TOML files in a folder of the package, sorted."""
    return tuple(sorted(path.stem for path in (_PACKAGE / folder).glob("*.toml")))
