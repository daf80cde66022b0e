"""Values of recipe keys as TOML, in files and in messages. Torch-free."""

import json
from collections.abc import Mapping
from typing import Any

from moefold.config.part import Part, without_source


def toml_value(value: Any) -> str:
    """Return a value as a file has it: strings, numbers, truth values and lists are written as in JSON."""
    match value:
        case Part():
            return toml_table(value.as_table())
        case dict():
            return toml_table(without_source(value))
        case tuple():
            return json.dumps(list(value), default=str, ensure_ascii=False)
        case _:
            return json.dumps(value, default=str, ensure_ascii=False)


def toml_table(table: Mapping[str, Any]) -> str:
    """Return the table of a part as a recipe writes it; a part of a file is named by the path, where it is recorded."""
    keys = without_source(table)
    if file := table.get("from", {}).get("file"):
        keys["kind"] = f"{file}:{keys['kind'].rpartition(':')[2]}"
    return f"{{ {', '.join(f'{key} = {toml_value(value)}' for key, value in keys.items() if value is not None)} }}"


def shown_value(value: Any) -> str:
    """Return a value as a message shows it: as in TOML, with strings in single quotes."""
    match value:
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(shown_value, value))}]"
        case Part():
            return repr(value.kind)
        case _:
            return repr(value)
