"""Reference of all recipe keys, read from the schema: `python -m moefold.config.reference > docs/recipe.md`."""

import ast
import inspect
import json
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from textwrap import TextWrapper

from moefold.config.aliases import KEY_OF, key_hint
from moefold.config.bounds import own_maxima
from moefold.config.limits import MAX_CHARACTERS, MAX_INTEGER, MAX_MICRO_BATCHES, MAX_NUMBER
from moefold.config.method_defaults import LR_KEY, rates_table, rates_text
from moefold.config.presets import preset_names, preset_summary
from moefold.config.suggestions import closest_match, default_of, describe_key, key_types, sections
from moefold.errors import ConfigError

PAGE_WIDTH = 118


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


def recipe_page() -> str:
    """Return the text of the page `docs/recipe.md`."""
    lines = [
        "# The recipe: every key",
        "",
        "<!-- From the sections in src/moefold/config by `python -m moefold.config.reference > docs/recipe.md`. -->",
        "",
        "A recipe is a TOML file. Every key has a default, so that a recipe holds only what differs. On the command",
        "line, `section.key=value` words follow the recipe and win over it; text needs no quotes there. An unknown",
        "key, a wrong type and a setting that nothing would read are refused before anything starts. Keys that a",
        "preset fills are not settings of the recipe: `model.index_topk=0` may leave the keys of its indexer unread.",
        "Names of Hugging Face, Megatron, torchtitan and vLLM are answered with the names of this page:",
        "`learning_rate` is `train.lr`. `moefold train --keys lr` lists the keys with a word in their names. The",
        "anchor of a key is its name: `recipe.md#train.lr`.",
        "",
    ]
    names_elsewhere: dict[str, list[str]] = {}
    for theirs, ours in KEY_OF.items():
        names_elsewhere.setdefault(ours, []).append(theirs)
    for section in sections():
        lines += [f"## [{section}]", "", section_help(section), ""]
        for key in recipe_keys(section):
            lines += _entry(key, names_elsewhere.get(key.name, []))
    lines += [
        "## Largest values",
        "",
        "Every number has a bound far above what any machine runs, so that a typing error is refused at once.",
        f"Keys that are not in the table: integers are at most {MAX_INTEGER} and other numbers at most",
        f"{MAX_NUMBER:.0e}, either sign; a string has at most {MAX_CHARACTERS} characters, and a data-parallel",
        f"rank at most {MAX_MICRO_BATCHES} micro-batches in a step.",
        "",
        "| largest | keys |",
        "| --- | --- |",
    ]
    lines += [f"| {maximum} | {', '.join(f'`{key}`' for key in keys)} |" for maximum, keys in _keys_by_max().items()]
    lines += ["", "## Learning rates by method", ""]
    lines += ["Peak learning rates of recipes that leave `train.lr` out; the log says which one a run takes. A resumed"]
    lines += ["run keeps the one it began with, also if another version has another default.", "", *rates_table()]
    lines += ["", "## Presets", "", "`model.preset` fills the [model] keys that the recipe leaves out.", ""]
    lines += ["| preset | what it is |", "| --- | --- |"]
    lines += [f"| `{name}` | {preset_summary(name)} |" for name in preset_names()]
    return "\n".join(lines) + "\n"


def _entry(key: RecipeKey, elsewhere: list[str]) -> list[str]:
    """Return the lines of a key on the page: anchor, type and default, help, names in other software."""
    meaning = key.help.replace("*", r"\*")
    if elsewhere:
        meaning += f" Elsewhere: {', '.join(f'`{name}`' for name in elsewhere)}."
    head = f"{key.type[0].upper()}{key.type[1:]}; default `{key.default}`."
    filled = TextWrapper(PAGE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [f'### <a id="{key.name}"></a>{key.name}', "", *filled.wrap(head), "", *_prose(filled.wrap(meaning)), ""]


def _prose(lines: list[str]) -> list[str]:
    """Escape what would begin a list or a quotation at the start of a line."""
    return [re.sub(r"^(\d*)([-+>.)] )", r"\1\\\2", line) for line in lines]


def _keys_by_max() -> dict[int, list[str]]:
    """Return the keys with a bound of their own, grouped by bound, largest first."""
    found: dict[int, list[str]] = {}
    for key, maximum in sorted(own_maxima().items(), key=lambda item: -item[1]):
        found.setdefault(maximum, []).append(key)
    return found


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


if __name__ == "__main__":
    print(recipe_page(), end="")
