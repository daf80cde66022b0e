"""Why no mapping of a question is legal: what the runtime says against the nearest one that is. Torch-free."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from moefold.config.checks import check_config
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.plan.legality import AXES, Legality
from moefold.plan.restriction import METHODS, Restriction
from moefold.plan.space import HOST, MappingSpace

MOST_TRIED = 8
"""Folds on which a fixed value is tried, evenly over those that are legal without it."""


def why_illegal(legality: Legality, restriction: Restriction) -> str:
    """What keeps a part of a space empty, in one line.

    A mapping that is legal but for one fixed axis takes that axis's value, so that what the runtime then refuses is
    the reason. Where no single axis is to blame, the fixed axes are tried with few other degrees.

    Args:
        legality: the runtime's answers for the recipe.
        restriction: the part, without a legal mapping.
    """
    return (
        _outside_of_search(MappingSpace(legality, restriction), restriction)
        or _with_one_axis(legality, restriction)
        or _whatever_the_degrees(legality, restriction)
        or _derived(legality, restriction)
        or f"no such mapping is of method {restriction.method!r}, or it needs other axes than those given"
    )


def _outside_of_search(space: MappingSpace, restriction: Restriction) -> str:
    """What the runtime may allow and no search prices."""
    fixed, method = restriction.fixed, METHODS[restriction.method]
    zero = fixed.get("zero", method.zero)
    if method.zero not in (None, zero):
        return f"zero={zero} is not of method {restriction.method!r}, which has zero={method.zero}"
    if not space.has_host and (fixed.get("offload") or fixed.get("moments") == HOST):
        axis = "offload" if fixed.get("offload") else "moments"
        value = "+".join(fixed[axis]) if axis == "offload" else fixed[axis]
        return f"{axis}={value} needs a GPU and train.offload_to='host': nothing else has a memory that is priced"
    return ""


def _with_one_axis(legality: Legality, restriction: Restriction) -> str:
    """What stands against the mappings that are legal without one fixed value, once they have it.

    Of several faults the one that names most of the fixed keys, then the one that is found most often.
    """
    keys = [AXES[axis] for axis in restriction.fixed if axis in AXES]
    ranked: dict[str, tuple[int, float]] = {}
    for axis, value in restriction.fixed.items():
        if axis not in AXES:
            continue
        tried = [_faults(legality.config_of({**v, axis: value})) for v in _legal_without(legality, restriction, axis)]
        # What the runtime takes anyway is kept out by the restriction, not by its rules.
        refused = tried if all(tried) else []
        for fault, count in Counter(fault for faults in refused for fault in faults).items():
            rank = sum(f"{section}.{key}" in fault for section, key in keys), count / len(tried)
            ranked[fault] = max(rank, ranked.get(fault, rank))
    return max(ranked, key=lambda fault: ranked[fault], default="")


def _legal_without(legality: Legality, restriction: Restriction, axis: str) -> Iterator[Mapping[str, Any]]:
    """Mappings of some folds that are legal where an axis is free."""
    space = MappingSpace(legality, _without(restriction, axis))
    for fold, view in space.folds[:: 1 + len(space.folds) // MOST_TRIED]:
        yield from space.samples_of(fold, view)


def _without(restriction: Restriction, axis: str) -> Restriction:
    return replace(restriction, fixed={name: value for name, value in restriction.fixed.items() if name != axis})


def _whatever_the_degrees(legality: Legality, restriction: Restriction) -> str:
    """Of what stands against the fixed axes alone, the fault that most of the mappings with one more degree have."""
    values, world = _alone(restriction), legality.base.parallel.world_size
    others = [{**values, axis: world} for axis in ("pp", "tp", "cp") if axis not in restriction.fixed]
    found = Counter(fault for degrees in others for fault in _faults(legality.config_of(degrees)))
    return max(_faults(legality.config_of(values)), key=lambda fault: found[fault], default="")


def _alone(restriction: Restriction) -> dict[str, Any]:
    """The fixed axes, and 1 for all other degrees."""
    values: dict[str, Any] = dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "mbs"), 1)
    values |= {axis: value for axis, value in restriction.fixed.items() if axis in AXES}
    if values.get("vpp", 1) > 1 and "schedule" not in values:
        values["schedule"] = "interleaved"
    return values


def _derived(legality: Legality, restriction: Restriction) -> str:
    """What is wrong with degrees that follow from others."""
    for axis in ("dp", "edp"):
        folds = MappingSpace(legality, _without(restriction, axis)).folds if axis in restriction.fixed else ()
        if folds:
            may_be = " or ".join(map(str, sorted({getattr(fold, axis) for fold, _ in folds})))
            return (
                f"{axis}={may_be} follows from the other degrees on {legality.base.parallel.world_size} GPUs, not "
                f"{restriction.fixed[axis]}"
            )
    return ""


def _faults(cfg: Config) -> list[str]:
    """What the runtime finds; empty if there is nothing."""
    try:
        check_config(cfg)
    except ConfigError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        # Several faults come one a line, under a line that counts them.
        return lines[1:] or lines
    return []
