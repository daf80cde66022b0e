"""Mappings and restrictions as words of the command line: `tp=2 cp=1 pp=8`, `tp=2,ep=8`."""

from collections.abc import Sequence
from typing import Any, get_args

from moefold.config.checks_offload import OFFLOAD_PARTS
from moefold.config.choices import join_with_or
from moefold.config.keys import closest_match, key_types
from moefold.config.limits import parse_count
from moefold.config.schema import RECOMPUTE_PARTS
from moefold.errors import ConfigError

NUMBER_AXES = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp", "mbs", "zero")
CHOICE_AXES = ("schedule", "dispatcher")
RECOMPUTE = "recompute"
NO_PARTS = "none"
OPTIMIZER = "optimizer"
OFFLOAD = "offload"
OVERLAP = "overlap"
SWITCH_VALUES = {"on": True, "true": True, "off": False, "false": False}
AXIS_KEYS = (*NUMBER_AXES, *CHOICE_AXES, RECOMPUTE, OFFLOAD, OVERLAP)


def parse_axes(options: Sequence[str], option: str) -> dict[str, Any]:
    """The axes that some words set, such as `tp=2,ep=8` or `recompute=norms+moe`.

    Raises:
        ConfigError: a word is no axis, has no such value, or an axis is set twice.
    """
    found: dict[str, Any] = {}
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
        if key in found:
            raise ConfigError(f"{option} {word}: {key} is set twice")
        found[key] = _parse_value(key, value, f"{option} {word}")
    if OFFLOAD in found:
        # The optimizer's moments are a key of their own in a recipe.
        found["moments"] = "host" if OPTIMIZER in found[OFFLOAD] else "none"
        found[OFFLOAD] = tuple(part for part in found[OFFLOAD] if part != OPTIMIZER)
    if not found:
        raise ConfigError(f"{option} names no axis; write for example tp=2,ep=8")
    return found


def _parse_value(key: str, text: str, label: str) -> Any:
    if key in NUMBER_AXES:
        least, most = (0, 3) if key == "zero" else (1, None)
        number = parse_count(text)
        if number is None or number < least or (most is not None and number > most):
            legal = f"{least} to {most}" if most is not None else f"a whole number of at least {least}"
            raise ConfigError(f"{label} must be {legal}")
        return number
    if key in CHOICE_AXES:
        choices = [choice for choice in get_args(key_types("parallel")[key]) if choice not in ("csv", "auto")]
        if text not in choices:
            guess = closest_match(text, choices)
            raise ConfigError(
                f"{label} must be {join_with_or(choices)}" + (f"; did you mean {guess}?" if guess else "")
            )
        return text
    if key == OVERLAP:
        if text not in SWITCH_VALUES:
            raise ConfigError(f"{label} must be {join_with_or(list(SWITCH_VALUES))}")
        return SWITCH_VALUES[text]
    known = RECOMPUTE_PARTS if key == RECOMPUTE else (*OFFLOAD_PARTS, OPTIMIZER)
    parts = () if text == NO_PARTS else tuple(text.split("+"))
    for part in parts:
        if part not in known:
            guess = closest_match(part, known)
            hint = f"; did you mean {guess}? The" if guess else "; the"
            raise ConfigError(f"{label}: {part!r} is no part; join some of {', '.join(known)} by +{hint}")
    return tuple(sorted(parts, key=known.index))
