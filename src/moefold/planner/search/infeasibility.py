"""Why no mapping of a question is legal: what the runtime says against the nearest one that is. Torch-free."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.planner.search.constraints import AXIS_KEYS, METHODS, MappingConstraints, Restriction
from moefold.planner.search.space import HOST, MappingSpace
from moefold.validate.config import check_config

MAX_SAMPLED_FOLDS = 8
"""Folds on which a fixed value is tried, evenly over those that are legal without it."""


def explain_illegal(constraints: MappingConstraints, restriction: Restriction) -> str:
    """What keeps a part of a space empty, in one line.

    A mapping that is legal but for one fixed axis takes that axis's value, so that what the runtime then refuses is
    the reason. Where no single axis is to blame, the fixed axes are tried with few other degrees.

    Args:
        constraints: the runtime's answers for the recipe.
        restriction: the part, without a legal mapping.
    """
    return (
        _unsearchable_reason(MappingSpace(constraints, restriction), restriction)
        or _single_axis_reason(constraints, restriction)
        or _fixed_axes_reason(constraints, restriction)
        or _derived_degree_reason(constraints, restriction)
        or f"no such mapping is of method {restriction.method!r}, or it needs other axes than those given"
    )


def _unsearchable_reason(space: MappingSpace, restriction: Restriction) -> str:
    """What the runtime may allow and no search prices."""
    fixed = restriction.fixed
    method = METHODS[restriction.method]
    zero = fixed.get("zero", method.zero)
    if method.zero not in (None, zero):
        return f"zero={zero} is not of method {restriction.method!r}, which has zero={method.zero}"
    if not space.has_host_memory and (fixed.get("offload") or fixed.get("moments") == HOST):
        axis = "offload" if fixed.get("offload") else "moments"
        value = "+".join(fixed[axis]) if axis == "offload" else fixed[axis]
        return f"{axis}={value} needs a GPU and train.offload_to='host': nothing else has a memory that is priced"
    return ""


def _single_axis_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """What stands against the mappings that are legal without one fixed value, once they have it.

    Of several faults the one that names most of the fixed keys, then the one that is found most often.
    """
    keys = [AXIS_KEYS[axis] for axis in restriction.fixed if axis in AXIS_KEYS]
    ranked: dict[str, tuple[int, float]] = {}
    for axis, value in restriction.fixed.items():
        if axis not in AXIS_KEYS:
            continue
        tried = [
            _validation_errors(constraints.config_of({**v, axis: value}))
            for v in _legal_samples_without(constraints, restriction, axis)
        ]
        # What the runtime takes anyway is kept out by the restriction, not by its rules.
        refused = tried if all(tried) else []
        for fault, count in Counter(fault for faults in refused for fault in faults).items():
            rank = sum(f"{section}.{key}" in fault for section, key in keys), count / len(tried)
            ranked[fault] = max(rank, ranked.get(fault, rank))
    return max(ranked, key=lambda fault: ranked[fault], default="")


def _legal_samples_without(
    constraints: MappingConstraints, restriction: Restriction, axis: str
) -> Iterator[Mapping[str, Any]]:
    """Mappings of some folds that are legal where an axis is free."""
    space = MappingSpace(constraints, _drop_axis(restriction, axis))
    for fold, view in space.folds[:: 1 + len(space.folds) // MAX_SAMPLED_FOLDS]:
        yield from space.sample_mappings(fold, view)


def _drop_axis(restriction: Restriction, axis: str) -> Restriction:
    return replace(restriction, fixed={name: value for name, value in restriction.fixed.items() if name != axis})


def _fixed_axes_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Of what stands against the fixed axes alone, the fault that most of the mappings with one more degree have."""
    values = _fixed_axes_only(restriction)
    world = constraints.base_config.parallel.world_size
    others = [{**values, axis: world} for axis in ("pp", "tp", "cp") if axis not in restriction.fixed]
    found = Counter(fault for degrees in others for fault in _validation_errors(constraints.config_of(degrees)))
    return max(_validation_errors(constraints.config_of(values)), key=lambda fault: found[fault], default="")


def _fixed_axes_only(restriction: Restriction) -> dict[str, Any]:
    """The fixed axes, and 1 for all other degrees."""
    values: dict[str, Any] = dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "mbs"), 1)
    values |= {axis: value for axis, value in restriction.fixed.items() if axis in AXIS_KEYS}
    if values.get("vpp", 1) > 1 and "schedule" not in values:
        values["schedule"] = "interleaved"
    return values


def _derived_degree_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """What is wrong with degrees that follow from others."""
    for axis in ("dp", "edp"):
        folds = MappingSpace(constraints, _drop_axis(restriction, axis)).folds if axis in restriction.fixed else ()
        if folds:
            may_be = " or ".join(map(str, sorted({getattr(fold, axis) for fold, _ in folds})))
            return (
                f"{axis}={may_be} follows from the other degrees on {constraints.base_config.parallel.world_size} GPUs, not "
                f"{restriction.fixed[axis]}"
            )
    return ""


def _validation_errors(cfg: Config) -> list[str]:
    """What the runtime finds; empty if there is nothing."""
    try:
        check_config(cfg)
    except ConfigError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        # Several faults come one a line, under a line that counts them.
        return lines[1:] or lines
    return []
