"""Reference of all recipe keys, read from the schema."""

import ast
import inspect
import json
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise

from moefold.config.aliases import key_hint
from moefold.config.method_defaults import LR_KEY, rates_text
from moefold.config.presets import preset_names, preset_summary
from moefold.config.suggestions import closest_match, default_of, describe_key, key_types, sections
from moefold.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """One recipe key: "section.key", description of its type, default as TOML, and help."""

    name: str
    type: str
    default: str
    help: str


def recipe_keys(section: str) -> tuple[RecipeKey, ...]:
    """Return the keys of one section, in schema order."""
    help_texts = _field_help(sections()[section])
    keys = (
        RecipeKey(f"{section}.{key}", describe_key(section, key), json.dumps(default_of(section, key)), help_texts[key])
        for key in key_types(section)
    )
    return tuple(
        replace(key, default="by method", help=f"{key.help} {rates_text()}") if key.name == LR_KEY else key
        for key in keys
    )


def section_help(section: str) -> str:
    """Return the help of a section: the docstring of its dataclass."""
    return (sections()[section].__doc__ or "").strip()


def keys_text(pattern: str = "") -> str:
    """Return the keys with type, default and help, formatted for a terminal.

    Args:
        pattern: text of a key's name, or a pattern of the whole name with * and ?, in any case; a key that has it in
            its help is listed only if no name has it. "": all keys, and the presets.

    Raises:
        ConfigError: no key has it.
    """
    lines: list[str] = []
    found = _matching_keys(pattern)
    for section in sections():
        keys = [key for key in recipe_keys(section) if key.name in found]
        lines += [f"[{section}]  {_without_links(section_help(section))}", ""] if keys else []
        for key in keys:
            lines += [f"  {key.name} = {key.default}    ({key.type})", f"      {_without_links(key.help)}"]
        lines += [""] if keys else []
    if pattern:
        return "\n".join(lines)
    lines += ["Presets (model.preset):", ""]
    lines += [f"  {name}\n      {preset_summary(name)}" for name in preset_names()]
    return "\n".join(lines) + "\n"


def _matching_keys(pattern: str) -> set[str]:
    """Return the names of the keys that have a pattern in their name, or else in their help."""
    keys = {key.name: key.help for section in sections() for key in recipe_keys(section)}
    wanted = pattern.lower()
    if any(char in wanted for char in "*?["):
        found = {name for name in keys if fnmatchcase(name, wanted) or fnmatchcase(name.partition(".")[2], wanted)}
    else:
        found = {name for name in keys if wanted in name}
        found = found or {name for name, text in keys.items() if wanted in text.lower()}
    if found:
        return found
    guess = closest_match(wanted, [*keys, *(name.partition(".")[2] for name in keys)])
    hint = key_hint(pattern) or (f"did you mean {guess!r}?" if guess else "`moefold train --keys` lists all")
    raise ConfigError(f"--keys {pattern!r}: no key has it in its name or help; {hint}")


def _without_links(markdown: str) -> str:
    """Replace Markdown links for a terminal: a documentation page by its path, any other link by its address."""
    return re.sub(r"\[[^]]*\]\(([^)]*)\)", lambda link: link[1] if ":" in link[1] else f"docs/{link[1]}", markdown)


@cache
def _field_help(section: type) -> dict[str, str]:
    """Return the docstring under each field of a section's dataclass, read from its source."""
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
