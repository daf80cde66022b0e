"""Mappings and restrictions as words of the command line: `tp=2 cp=1 pp=8`, `tp=2,ep=8`."""

from collections.abc import Sequence
from typing import Any, get_args

from moefold.config.checks_offload import OFFLOAD_PARTS
from moefold.config.choices import any_of
from moefold.config.keys import key_types, nearest
from moefold.config.limits import read_count
from moefold.config.schema import RECOMPUTE_PARTS
from moefold.errors import ConfigError

NUMBERS = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp", "mbs", "zero")
CHOICES = ("schedule", "dispatcher")
RECOMPUTE = "recompute"
NOTHING = "none"
OPTIMIZER = "optimizer"
OFFLOAD = "offload"
OVERLAP = "overlap"
SWITCH = {"on": True, "true": True, "off": False, "false": False}
KEYS = (*NUMBERS, *CHOICES, RECOMPUTE, OFFLOAD, OVERLAP)


def read_axes(words: Sequence[str], option: str) -> dict[str, Any]:
    """The axes that some words set, such as `tp=2,ep=8` or `recompute=norms+moe`.

    Raises:
        ConfigError: a word is no axis, has no such value, or an axis is set twice.
    """
    found: dict[str, Any] = {}
    for word in " ".join(words).replace(",", " ").split():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise ConfigError(f"{option} {word!r} must be AXIS=VALUE, such as tp=2; the axes are {', '.join(KEYS)}")
        if key not in KEYS:
            guess = nearest(key, KEYS, cutoff=0.5)
            hint = f"; did you mean {guess}? The" if guess else "; the"
            raise ConfigError(f"{option} {word}: unknown axis {key!r}{hint} axes are {', '.join(KEYS)}")
        if key in found:
            raise ConfigError(f"{option} {word}: {key} is set twice")
        found[key] = _value(key, value, f"{option} {word}")
    if OFFLOAD in found:
        # The optimizer's moments are a key of their own in a recipe.
        found["moments"] = "host" if OPTIMIZER in found[OFFLOAD] else "none"
        found[OFFLOAD] = tuple(part for part in found[OFFLOAD] if part != OPTIMIZER)
    if not found:
        raise ConfigError(f"{option} names no axis; write for example tp=2,ep=8")
    return found


def _value(key: str, text: str, where: str) -> Any:
    if key in NUMBERS:
        least, most = (0, 3) if key == "zero" else (1, None)
        number = read_count(text)
        if number is None or number < least or (most is not None and number > most):
            legal = f"{least} to {most}" if most is not None else f"a whole number of at least {least}"
            raise ConfigError(f"{where} must be {legal}")
        return number
    if key in CHOICES:
        choices = [choice for choice in get_args(key_types("parallel")[key]) if choice not in ("csv", "auto")]
        if text not in choices:
            guess = nearest(text, choices)
            raise ConfigError(f"{where} must be {any_of(choices)}" + (f"; did you mean {guess}?" if guess else ""))
        return text
    if key == OVERLAP:
        if text not in SWITCH:
            raise ConfigError(f"{where} must be {any_of(list(SWITCH))}")
        return SWITCH[text]
    known = RECOMPUTE_PARTS if key == RECOMPUTE else (*OFFLOAD_PARTS, OPTIMIZER)
    parts = () if text == NOTHING else tuple(text.split("+"))
    for part in parts:
        if part not in known:
            guess = nearest(part, known)
            hint = f"; did you mean {guess}? The" if guess else "; the"
            raise ConfigError(f"{where}: {part!r} is no part; join some of {', '.join(known)} by +{hint}")
    return tuple(sorted(parts, key=known.index))
