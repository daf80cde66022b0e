"""Keys of earlier versions in a recipe or an override: refusals that name the new key, and overrides in new words."""

from collections.abc import Mapping, Sequence
from typing import Any

from moefold.config.base.part import NONE
from moefold.config.keys.paths import annotation_at, flat_settings, kind_settings, value_at
from moefold.config.tables.toml_text import shown_value, toml_value
from moefold.config.tables.tree import parsed_value
from moefold.config.upgrade.moved_keys import KIND, LAYERS, MOVED, OFF
from moefold.config.upgrade.recipe import kind_at, preset_of, upgraded
from moefold.errors import ConfigError
from moefold.message_text import join_with_or


def check_one_name(tree: Mapping[str, Any], old: Sequence[str], name: str) -> None:
    """Refuse a recipe that has a key under its old name and its new one.

    Args:
        tree: the sections of the recipe, unchecked.
        old: keys of MOVED that the recipe has.
        name: the file, for the message.

    Raises:
        ConfigError: the recipe has both.
    """
    if twice := [key for key in old if MOVED[key].setting != KIND and value_at(str(MOVED[key]), tree) is not None]:
        raise ConfigError(f"{name} has both {twice[0]} and {MOVED[twice[0]]}, its new name; remove one")


def moved_key_refusal(tree: Mapping[str, Any], name: str) -> str:
    """Return the refusal of a flat key in a recipe, with the table that it belongs to.

    Args:
        tree: the sections of the recipe, unchecked.
        name: a key of MOVED.
    """
    place = MOVED[name]
    section, _, key = name.partition(".")
    sections, unread = upgraded(tree)
    owners = place.kinds or kind_settings().get(str(place), ())
    key_of = f"a key of {join_with_or(list(map(repr, owners)))}" if owners else f"a key of {place.key}"
    if key in sections[section]:
        if str(place) == LAYERS:
            return f'{name} is {place} now: write the layers by name, such as {place} = "3 dense, 58 moe"'
        return f"{name} is {place} now, {key_of}, and no installed method does all of [sites]; leave out a part"
    if name in unread:
        kind = kind_at(place.key, sections, preset_of(sections))
        owner_kind = f"not of {kind!r}" if kind else "that is absent"
        return f"{name} is {place} now, {key_of}, and {owner_kind}; leave it out"
    path = place.key if name in OFF and not tree[section][key] else str(place)
    owner = path if path.startswith("model.") else ".".join(path.split(".")[:2])
    table = f"{owner} = {toml_value(value_at(owner, sections))}"
    return f"{name} is {place} now: write {table}, or run moefold recipe upgrade FILE"


def moved_override_refusal(name: str, text: str, tree: Mapping[str, Any]) -> str:
    """Return the refusal of an override of a flat key.

    Args:
        name: a key of MOVED.
        text: its value on the command line.
        tree: the sections of the recipe to override, unchecked.
    """
    needs_tree = str(MOVED[name]) == LAYERS or name.startswith("sites.")
    word = upgraded_word(f"{name}={text}", tree) if needs_tree else _word(name, text)
    return f"{name} is {MOVED[name]} now: write {word}"


def _word(name: str, text: str) -> str:
    """Return an override of a flat key, rewritten to the path of its table."""
    place = MOVED[name]
    if place.setting == KIND:
        return f"{place.key}={join_with_or(list(place.kinds))}"
    if annotation_at(str(place)) is not None and text in ("true", "false"):
        return f"{place}={'{}' if text == 'true' else NONE}"
    return f"{place.key}={NONE}" if name in OFF and text.rstrip(".0") == "" else f"{place}={text}"


def upgraded_word(word: str, tree: Mapping[str, Any]) -> str:
    """Return an override `section.key=value`, rewritten to the path of its table, or several if the kind also changes.

    Args:
        tree: the sections of the recipe to override, unchecked.

    Raises:
        ConfigError: the argument is not an override, or the part that the recipe chooses does not read its key.
    """
    name, equals, text = word.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot:
        raise ConfigError(f"{word!r} is not a setting; settings are section.key=value, such as train.lr=1e-3")
    if name not in MOVED:
        return word
    place = MOVED[name]
    keys = tree.get(section)
    before = keys if isinstance(keys, dict) else {}
    tree = {**tree, section: {**before, key: parsed_value(text)}}
    sections, unread = upgraded(tree)
    kind = kind_at(place.key, sections, preset_of(sections))
    if key in sections[section] or (name in unread and kind is not None):
        raise ConfigError(moved_key_refusal(tree, name))
    if str(place) == LAYERS:
        return f"{LAYERS}={shown_value(sections[section]['layers'])}"
    if section != "sites" and place.setting != KIND:
        return _word(name, text)
    old, new = (flat_settings({f"{section}.{key}": keys[key] for key in keys}) for keys in (before, sections[section]))
    words = [f"{key}={toml_value(value).strip(chr(34))}" for key, value in new.items() if old.get(key) != value]
    return " ".join(words) or f"{place.key}={kind}"
