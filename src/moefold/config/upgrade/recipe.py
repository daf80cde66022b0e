"""Upgrade of recipes of earlier versions, which have flat keys, to tables of parts."""

import re
from collections.abc import Mapping
from typing import Any

from moefold.config.base.layer_words import parse_layers, repeat_layers, spell_layers
from moefold.config.base.part import NONE
from moefold.config.base.part_registry import find_part, kinds
from moefold.config.keys.paths import annotation_at, choices_of, default_of, group_at, kind_settings, value_at
from moefold.config.tables.tree import put
from moefold.config.upgrade.moved_keys import KIND, LAYERS, MOVED, OFF, PATTERNS, SITES_MORE, SITES_OFF


def upgraded(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the sections of a recipe with flat keys moved to tables of parts, and the flat keys that no part reads.

    Args:
        tree: sections, unchecked. Tables of parts are kept.
    """
    sections = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in tree.items()}
    base = preset_of(sections)
    if isinstance(model := sections.get("model"), dict):
        _put_layers(model, base.get("model", {}))
    is_clear = not isinstance(sites := sections.get("sites"), dict) or _put_site_method(sites)
    unread = []
    for name, place in MOVED.items():
        section, _, key = name.partition(".")
        keys = sections.get(section)
        if str(place) == LAYERS or not isinstance(keys, dict) or key not in keys or (keys is sites and not is_clear):
            continue
        move = _move_kind if place.setting == KIND else _move_setting
        if not move(name, keys.pop(key), sections, base):
            unread.append(name)
    return sections, unread


def _move_kind(name: str, value: Any, sections: dict[str, Any], base: Mapping[str, Any]) -> bool:
    """Set the kind that a flat key enables, and return whether a part reads the key."""
    place = MOVED[name]
    kind = kind_at(place.key, sections, base)
    kind_there = next((candidate for candidate in place.kinds if candidate.endswith(f"_{kind}")), "")
    if value and kind_there:
        put(sections, place.key.split("."), kind_there)
        return True
    return bool(value) and kind in place.kinds


def _move_setting(name: str, value: Any, sections: dict[str, Any], base: Mapping[str, Any]) -> bool:
    """Set the setting or the table of a flat key, and return whether a part reads the key."""
    place = MOVED[name]
    path = str(place)
    owner = place.key
    kind = kind_at(owner, sections, base)
    if annotation_at(path) is not None and isinstance(value, bool):
        value = {} if value else NONE
    elif name in OFF and not value:
        path, value = owner, NONE
    if not _is_read(owner if name in OFF else path, sections, base, place.kinds):
        return False
    if value != NONE or value_at(path, base) is not None:
        owner_path = owner.split(".", 1)
        if group_at(owner) and value != NONE and (not name.startswith("model.") or default_of(*owner_path) is None):
            put(sections, [*owner.split("."), KIND], kind or choices_of(*owner_path)[0])
        put(sections, path.split("."), value)
    return True


def preset_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section [model] of the preset of a recipe. It is empty without a preset, or for an unknown one."""
    model = tree.get("model")
    name = model.get("preset") if isinstance(model, dict) else ""
    if not isinstance(name, str) or not name:
        return {}
    # Without a preset, reading a checkpoint needs no files of presets.
    from moefold.config.presets import load_preset, preset_names

    return {"model": load_preset(name)} if name in preset_names() else {}


def _put_site_method(sites: dict[str, Any]) -> bool:
    """Set the method for flat keys of [sites], and the keys that it would change, and return whether it was set."""
    method = sites.get("method", "mean")
    before = method.get(KIND) if isinstance(method, dict) else method
    method_of = {key: MOVED[f"sites.{key}"].kinds[0] for key in (*SITES_OFF, *SITES_MORE)}
    # Absent keys have the defaults of the given method, which enable it. For another method they count as off.
    silent = {key: None if method_of[key] == before else off for key, off in SITES_OFF.items()}
    on = {method_of[key] for key, off in SITES_OFF.items() if sites.get(key, silent[key]) != off}
    after = next(iter(on), "mean" if before in method_of.values() else before)
    if len(on) > 1 or (after != before and any(kind not in kinds("site_method") for kind in (before, after))):
        return False
    if after == before:
        return True
    period = sites.get("every", default_of("sites", "every"))
    old, new = (find_part("site_method", kind)().values(period) for kind in (before, after))
    defaults = {key: default_of("sites", key) for key in {**old, **new}}
    settings = {key: off for key, off in {**SITES_OFF, **SITES_MORE}.items() if method_of[key] == after}
    settings |= {key: old.get(key, off) for key, off in defaults.items() if new.get(key, off) != old.get(key, off)}
    sites |= {"method": after} | {key: value for key, value in settings.items() if key not in sites}
    return True


def _put_layers(model: dict[str, Any], preset: Mapping[str, Any]) -> None:
    """Replace the number of layers and their patterns by words. Unknown patterns stay, to be refused later."""
    # Checkpoints have the pattern repeated to the length of the model.
    model.pop("layer_kinds", None)
    former = {key: model[key] for key in ("num_layers", *PATTERNS) if key in model}
    if not former:
        return
    try:
        rows = parse_layers(model.get("layers", preset.get("layers", 4)))
        rows = repeat_layers(rows, len(parse_layers(former.get("num_layers", len(rows)))))
        for key, (column, words) in PATTERNS.items():
            if key in former:
                cells = _expanded(former[key], words, len(rows))
                rows = tuple(row._replace(**{column: cells[i % len(cells)]}) for i, row in enumerate(rows))
    except (KeyError, TypeError, ValueError):
        return
    for key in former:
        del model[key]
    model["layers"] = spell_layers(rows)


def _expanded(pattern: str, words: Mapping[str, str], num_layers: int) -> list[str]:
    """Return the words of a pattern of letters with counts, such as "D3M2".

    Raises:
        KeyError: unknown letter.
        ValueError: another form, or longer than the model.
    """
    runs = [(letter, int(count or 1)) for letter, count in re.findall(r"([A-Z])(\d{0,5})", pattern)]
    counts = [count for _, count in runs]
    if not re.fullmatch(r"([A-Z]\d{0,5})+", pattern) or not all(counts) or sum(counts) > num_layers:
        raise ValueError(f"unexpected pattern {pattern!r}")
    return [words[letter] for letter, count in runs for _ in range(count)]


def kind_at(path: str, tree: Any, base: Any) -> str | None:
    """Return the kind of a part in a recipe, its preset or by default, "" without kinds, or None without a table."""
    section, _, key = path.partition(".")
    if not key:
        return ""
    values = [value_at(path, tree), value_at(path, base), default_of(section, key)]
    for value in values:
        kind = value.get(KIND) if isinstance(value, dict) else getattr(value, KIND, value)
        if kind == NONE and NONE not in choices_of(section, key):
            return None
        if isinstance(kind, str):
            return kind
    return None if values == [None] * 3 else next(iter(choices_of(section, key)), "")


def _is_read(path: str, tree: Any, base: Any, kinds: tuple[str, ...] = ()) -> bool:
    """Return whether the parts of a recipe read a key of `kinds`, or if empty, of built-in kinds with the setting."""
    owner = path.rpartition(".")[0]
    if not owner.count("."):
        return True
    kind = kind_at(owner, tree, base) if _is_read(owner, tree, base) else None
    kinds = kinds or kind_settings().get(path, ())
    return kind is not None and (kind in kinds if kinds else path in kind_settings())


def upgraded_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by "section.key" with flat keys moved to tables of parts, like `upgraded`."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    return {f"{section}.{key}": value for section, keys in upgraded(tree)[0].items() for key, value in keys.items()}
