"""Page of all recipe keys: `python -m tools.recipe_page > docs/recipe.md`."""

import re
from collections.abc import Sequence
from dataclasses import fields
from textwrap import TextWrapper

from moefold.config.base.aliases import our_names
from moefold.config.base.field import MaxMagnitude
from moefold.config.base.limits import MAX_CHARACTERS, MAX_INTEGER, MAX_MICRO_BATCHES, MAX_NUMBER
from moefold.config.base.part import metadata_of
from moefold.config.keys.help import RecipeKey, recipe_keys, section_help
from moefold.config.keys.learning_rates import all_methods
from moefold.config.keys.paths import kind_settings, last_name, owner_of, sections
from moefold.config.presets import preset_names, preset_summary

PAGE_WIDTH = 118


def recipe_page() -> str:
    """Return the text of the page `docs/recipe.md`."""
    lines = [
        "# The recipe: every key",
        "",
        "<!-- From the sections in src/moefold/config by `python -m tools.recipe_page > docs/recipe.md`. -->",
        "",
        "A recipe is a TOML file. Every key has a default, so that a recipe holds only what differs. On the command",
        "line, `section.key=value` words follow the recipe and win over it; text needs quotes there only if it has",
        "a space at an end or reads as a number. An unknown key, a wrong type and a setting that nothing would read",
        "are refused before anything starts. Keys that a preset fills are not settings of the recipe:",
        "`model.attention.indexer=none` may leave the keys of its indexer unread.",
        "Names of Hugging Face, Megatron, torchtitan and vLLM are answered with the names of this page:",
        "`learning_rate` is `train.lr`. `moefold train --keys lr` lists the keys with a word in their names. The",
        "anchor of a key is its name: `recipe.md#train.lr`.",
        "",
        "A key that chooses a part takes a kind, or a table with `kind` and its settings, which are a table below",
        'the key: `optimizer = "muon"`, or `optimizer = { kind = "muon", momentum = 0.9 }`. On the command line',
        "`train.optimizer.momentum=0.9` sets one of them, and `train.optimizer=adamw` keeps those that AdamW has too.",
        "`moefold recipe upgrade FILE` brings a recipe of an earlier version into this form, with its comments.",
        "",
    ]
    names_elsewhere: dict[str, list[str]] = {}
    for theirs, ours in our_names("keys").items():
        names_elsewhere.setdefault(ours, []).append(theirs)
    for section in sections():
        lines += [f"## [{section}]", "", section_help(section), ""]
        keys = recipe_keys(section)
        for key in keys:
            if key.name.count(".") == 1:
                lines += _entry(key, names_elsewhere)
                lines += _settings_of(key, keys, names_elsewhere)
    lines += [
        "## Largest values",
        "",
        "Every number has a bound far above what any machine runs, so that a typing error is refused immediately.",
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
    lines += ["run keeps the one it began with, also if another version has another default.", "", *_rates_table()]
    lines += ["", "## Presets", "", "`model.preset` fills the [model] keys that the recipe leaves out.", ""]
    lines += ["| preset | what it is |", "| --- | --- |"]
    lines += [f"| `{name}` | {preset_summary(name)} |" for name in preset_names()]
    return "\n".join(lines) + "\n"


def _entry(key: RecipeKey, names_elsewhere: dict[str, list[str]]) -> list[str]:
    """Return the lines of a key on the page: anchor, type and default, help, names in other software."""
    kind = f"{key.type[0].upper()}{key.type[1:]}; {_default(key)}."
    filled = TextWrapper(PAGE_WIDTH, break_long_words=False, break_on_hyphens=False)
    meaning = _prose(filled.wrap(_meaning(key, names_elsewhere)))
    return [f'### <a id="{key.name}"></a>{key.name}', "", *filled.wrap(kind), "", *meaning, "", *_choices(key)]


def _choices(key: RecipeKey) -> list[str]:
    """Return the list of the kinds that a key may name; empty if it chooses no part."""
    filled = TextWrapper(PAGE_WIDTH, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)
    lines: list[str] = []
    for kind, text in key.choices:
        linked = re.sub(r"\bdocs/([a-z0-9-]+\.md)", r"[\1](\1)", text.replace("*", r"\*"))
        lines += _prose(filled.wrap(f"`{kind}`: {linked}"))
    return [*lines, ""] if lines else []


def _settings_of(key: RecipeKey, keys: Sequence[RecipeKey], names_elsewhere: dict[str, list[str]]) -> list[str]:
    """Return the table of the settings of a key, and the tables of those that have settings themselves."""
    settings = [other for other in keys if other.name.rpartition(".")[0] == key.name]
    if not settings:
        return []
    lines = [f"| setting of `{key.name}` | type | meaning |", "| --- | --- | --- |"]
    all_kinds = re.findall(r"'([\w-]+)'", key.type)
    for setting in settings:
        kinds = "" if sorted(setting.kinds) == sorted(all_kinds) else ", ".join(f"`{kind}`" for kind in setting.kinds)
        meaning = f"{f'Of {kinds}. ' if kinds else ''}{_meaning(setting, names_elsewhere)}"
        name = f'<a id="{setting.name}"></a>`{setting.name.rpartition(".")[2]}`'
        lines.append(f"| {name} | {setting.type}; {_default(setting)} | {meaning} |")
    lines.append("")
    for setting in settings:
        lines += [f"Kinds of `{setting.name}`:", "", *_choices(setting)] if setting.choices else []
        lines += _settings_of(setting, keys, names_elsewhere)
    return lines


def _default(key: RecipeKey) -> str:
    return f"default `{key.default}`" if key.default else "required"


def _meaning(key: RecipeKey, names_elsewhere: dict[str, list[str]]) -> str:
    """Return the help of a key, with its names in other software."""
    elsewhere = ", ".join(f"`{name}`" for name in names_elsewhere.get(key.name, ()))
    return key.help.replace("*", r"\*") + (f" Elsewhere: {elsewhere}." if elsewhere else "")


def _prose(lines: list[str]) -> list[str]:
    """Escape characters that would begin a list or a quotation at the start of a line."""
    return [re.sub(r"^(\s*\d*)([-+>.)] )", r"\1\\\2", line) for line in lines]


def _keys_by_max() -> dict[int, list[str]]:
    """Return the keys with their own bound, grouped by bound, largest first."""
    annotations = {
        f"{section}.{key}": marks for section, owner in sections().items() for key, marks in metadata_of(owner).items()
    }
    annotations |= {path: metadata_of(owner_of(path))[last_name(path)] for path in kind_settings()}
    maxima = {key: mark.value for key, marks in annotations.items() for mark in marks if isinstance(mark, MaxMagnitude)}
    found: dict[int, list[str]] = {}
    for key, maximum in sorted(maxima.items(), key=lambda item: -item[1]):
        found.setdefault(maximum, []).append(key)
    return found


def _rates_table() -> list[str]:
    """Return the defaults of all methods as lines of a Markdown table, with their sources."""
    lines = ["| method | all weights | adapters ([lora]) | source |", "| --- | --- | --- | --- |"]
    for rates in all_methods():
        method, full, adapters, source = (getattr(rates, one.name) for one in fields(rates))
        lines.append(f"| {method} | {full:g} | {adapters:g} | {source} |")
    return lines


if __name__ == "__main__":
    print(recipe_page(), end="")
