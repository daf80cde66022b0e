"""Axes of a mapping in the words of a user, such as `tp=2,ep=8`."""

from collections.abc import Sequence
from typing import Any

from moefold.config.base.limits import parse_count
from moefold.config.base.part_registry import built_in_kinds, find_part, kinds
from moefold.config.keys.paths import choices_of
from moefold.cost.recompute_parts import COMMON_PARTS, recompute_parts
from moefold.errors import ConfigError
from moefold.message_text import closest_match, join_with_or
from moefold.topology.schedules import schedule_named

NUMBERS = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp", "mbs", "zero")
CHOICE_AXES = ("schedule", "dispatcher")
RECOMPUTE = "recompute"
NO_PARTS = "none"
OPTIMIZER = "optimizer"
OFFLOAD = "offload"
OVERLAP = "overlap"
SWITCH_VALUES = {"on": True, "true": True, "off": False, "false": False}
AXIS_KEYS = (*NUMBERS, *CHOICE_AXES, RECOMPUTE, OFFLOAD, OVERLAP)


def parse_axes(options: Sequence[str], option: str) -> dict[str, Any]:
    """Parse the axes of options such as `tp=2,ep=8` or `recompute=norms+moe`."""
    axes: dict[str, Any] = {}
    for word in " ".join(options).replace(",", " ").split():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise ConfigError(
                f"{option} {word!r} must be AXIS=VALUE, such as tp=2; the axes are {', '.join(AXIS_KEYS)}"
            )
        if key not in AXIS_KEYS:
            guess = closest_match(key, AXIS_KEYS, cutoff=0.5)
            hint = f"; did you mean {guess}? The" if guess else "; the"
            raise ConfigError(f"{option} {word}: unknown axis {key!r}{hint} axes are {', '.join(AXIS_KEYS)}")
        if key in axes:
            raise ConfigError(f"{option} {word}: {key} is set twice")
        axes[key] = _parse_value(key, value, f"{option} {word}")
    if OFFLOAD in axes:
        # Optimizer moments have a separate key in a recipe.
        axes["moments"] = "host" if OPTIMIZER in axes[OFFLOAD] else "none"
        axes[OFFLOAD] = tuple(part for part in axes[OFFLOAD] if part != OPTIMIZER)
    if not axes:
        raise ConfigError(f"{option} names no axis; write for example tp=2,ep=8")
    return axes


def _is_searched(key: str, choice: str) -> bool:
    """Return whether the search tries a choice. It skips schedules from files and dispatchers that stand for others."""
    if key == "schedule":
        return not schedule_named(choice).is_for_one_mapping
    return not (choice in built_in_kinds(key) and find_part(key, choice).resolves_to)


def _is_from_outside(key: str, choice: str) -> bool:
    """Return whether a value of an axis is a kind from another package. The search tries it only if it is named."""
    is_outside = choice in kinds(key) and choice not in built_in_kinds(key)
    return is_outside and _is_searched(key, choice)


def _parse_value(key: str, text: str, label: str) -> Any:
    if key in NUMBERS:
        minimum, maximum = (0, 3) if key == "zero" else (1, None)
        number = parse_count(text)
        if number is None or number < minimum or (maximum is not None and number > maximum):
            legal = f"{minimum} to {maximum}" if maximum is not None else f"a whole number of at least {minimum}"
            raise ConfigError(f"{label} must be {legal}")
        return number
    if key in CHOICE_AXES:
        choices = [choice for choice in choices_of("parallel", key) if _is_searched(key, choice)]
        if text not in choices and not _is_from_outside(key, text):
            guess = closest_match(text, choices)
            raise ConfigError(
                f"{label} must be {join_with_or(choices)}" + (f"; did you mean {guess}?" if guess else "")
            )
        return text
    if key == OVERLAP:
        if text not in SWITCH_VALUES:
            raise ConfigError(f"{label} must be {join_with_or(list(SWITCH_VALUES))}")
        return SWITCH_VALUES[text]
    part_names = recompute_parts() if key == RECOMPUTE else (*COMMON_PARTS, OPTIMIZER)
    parts = () if text == NO_PARTS else tuple(text.split("+"))
    for part in parts:
        if part not in part_names:
            guess = closest_match(part, part_names)
            hint = f"; did you mean {guess}? The" if guess else "; the"
            raise ConfigError(f"{label}: {part!r} is no part; join some of {', '.join(part_names)} by +{hint}")
    return tuple(sorted(parts, key=part_names.index))
