"""Page of all recipe keys: `python -m tools.recipe_page > docs/recipe.md`."""

import re
from dataclasses import fields
from textwrap import TextWrapper

from moefold.config.aliases import KEY_OF
from moefold.config.key_annotations import own_maxima
from moefold.config.key_help import RecipeKey, recipe_keys, section_help
from moefold.config.limits import MAX_CHARACTERS, MAX_INTEGER, MAX_MICRO_BATCHES, MAX_NUMBER
from moefold.config.method_defaults import all_methods
from moefold.config.presets import preset_names, preset_summary
from moefold.config.suggestions import sections

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
        "A key that chooses a part takes a kind, or a table with `kind` and its settings, which follow the key",
        'on this page: `optimizer = "muon"`, or `optimizer = { kind = "muon", momentum = 0.9 }`. On the command line',
        "`train.optimizer.momentum=0.9` sets one of them, and `train.optimizer=adamw` keeps those that AdamW has too.",
        "`moefold recipe upgrade FILE` brings a recipe of an earlier version into this form, with its comments.",
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


def _entry(key: RecipeKey, elsewhere: list[str]) -> list[str]:
    """Return the lines of a key on the page: anchor, type and default, help, names in other software."""
    meaning = key.help.replace("*", r"\*")
    if elsewhere:
        meaning += f" Elsewhere: {', '.join(f'`{name}`' for name in elsewhere)}."
    kinds = f"Of {', '.join(f'`{kind}`' for kind in key.kinds)}. " if key.kinds else ""
    head = f"{kinds}{key.type[0].upper()}{key.type[1:]}; {f'default `{key.default}`' if key.default else 'required'}."
    filled = TextWrapper(PAGE_WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = [f'### <a id="{key.name}"></a>{key.name}', "", *filled.wrap(head), "", *_prose(filled.wrap(meaning)), ""]
    return lines + [line for kind, text in key.choices for line in _choice(kind, text)] + [""] * bool(key.choices)


def _choice(kind: str, text: str) -> list[str]:
    """Return the lines of a kind in the list of the kinds of a key."""
    linked = re.sub(r"\bdocs/([a-z0-9-]+\.md)", r"[\1](\1)", text.replace("*", r"\*"))
    wrapped = TextWrapper(
        PAGE_WIDTH, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ).wrap(f"`{kind}`: {linked}")
    return [wrapped[0], *("  " + line for line in _prose([line[2:] for line in wrapped[1:]]))]


def _prose(lines: list[str]) -> list[str]:
    """Escape characters that would begin a list or a quotation at the start of a line."""
    return [re.sub(r"^(\d*)([-+>.)] )", r"\1\\\2", line) for line in lines]


def _keys_by_max() -> dict[int, list[str]]:
    """Return the keys with their own bound, grouped by bound, largest first."""
    found: dict[int, list[str]] = {}
    for key, maximum in sorted(own_maxima().items(), key=lambda item: -item[1]):
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
