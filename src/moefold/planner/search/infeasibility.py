"""Explanation of why no mapping is legal: the runtime's error for the nearest legal mapping. Torch-free."""

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
"""Folds on which a fixed value is tried, evenly spaced over those that are legal without it."""


def explain_illegal(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Explain in one line why a part of the space is empty.

    A mapping that is legal without one of the fixed axes is given that axis's value; the runtime's error is the reason.
    If
    no single axis is the cause, the fixed axes are tried with few other degrees.

    Args:
        constraints: the runtime's rules for the recipe.
        restriction: a part of the space without a legal mapping.
    """
    return (
        _unsearchable_reason(MappingSpace(constraints, restriction), restriction)
        or _single_axis_reason(constraints, restriction)
        or _fixed_axes_reason(constraints, restriction)
        or _derived_degree_reason(constraints, restriction)
        or f"no such mapping is of method {restriction.method!r}, or it needs other axes than those given"
    )


def _unsearchable_reason(space: MappingSpace, restriction: Restriction) -> str:
    """Return why the search prices no such mapping, although the runtime may allow it."""
    fixed = restriction.fixed
    method = METHODS[restriction.method]
    zero = fixed.get("zero", method.zero)
    if method.zero not in (None, zero):
        return f"zero={zero} is not of method {restriction.method!r}, which has zero={method.zero}"
    if not space.has_host_memory and (fixed.get("offload") or fixed.get("moments") == HOST):
        axis = "offload" if fixed.get("offload") else "moments"
        value = "+".join(fixed[axis]) if axis == "offload" else fixed[axis]
        return f"{axis}={value} needs a GPU and train.offload_to='host': no other memory is priced"
    return ""


def _single_axis_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Return the error of mappings that are legal without one fixed value and illegal with it.

    Of several errors, the one that names most of the fixed keys, then the most frequent one.
    """
    keys = [AXIS_KEYS[axis] for axis in restriction.fixed if axis in AXIS_KEYS]
    ranked: dict[str, tuple[int, float]] = {}
    for axis, value in restriction.fixed.items():
        if axis not in AXIS_KEYS:
            continue
        tried = [
            _validation_errors(constraints.config_with({**v, axis: value}))
            for v in _legal_samples_without(constraints, restriction, axis)
        ]
        # If the runtime accepts one of them, the restriction excludes it, and not a rule.
        refused = tried if all(tried) else []
        for error, count in Counter(error for errors in refused for error in errors).items():
            rank = sum(f"{section}.{key}" in error for section, key in keys), count / len(tried)
            ranked[error] = max(rank, ranked.get(error, rank))
    return max(ranked, key=lambda error: ranked[error], default="")


def _legal_samples_without(
    constraints: MappingConstraints, restriction: Restriction, axis: str
) -> Iterator[Mapping[str, Any]]:
    """Yield mappings of some folds that are legal if an axis is free."""
    space = MappingSpace(constraints, _drop_axis(restriction, axis))
    for fold, view in space.folds[:: 1 + len(space.folds) // MAX_SAMPLED_FOLDS]:
        yield from space.sample_mappings(fold, view)


def _drop_axis(restriction: Restriction, axis: str) -> Restriction:
    return replace(restriction, fixed={name: value for name, value in restriction.fixed.items() if name != axis})


def _fixed_axes_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Return the error of the fixed axes alone that recurs most often with one more degree."""
    values = _fixed_axes_only(restriction)
    world = constraints.base_config.parallel.world_size
    others = [{**values, axis: world} for axis in ("pp", "tp", "cp") if axis not in restriction.fixed]
    found = Counter(error for degrees in others for error in _validation_errors(constraints.config_with(degrees)))
    return max(_validation_errors(constraints.config_with(values)), key=lambda error: found[error], default="")


def _fixed_axes_only(restriction: Restriction) -> dict[str, Any]:
    """Return the fixed axes, with 1 for all other degrees."""
    values: dict[str, Any] = dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "mbs"), 1)
    values |= {axis: value for axis, value in restriction.fixed.items() if axis in AXIS_KEYS}
    if values.get("vpp", 1) > 1 and "schedule" not in values:
        values["schedule"] = "interleaved"
    return values


def _derived_degree_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Return why a fixed dp or edp contradicts the other degrees."""
    for axis in ("dp", "edp"):
        folds = MappingSpace(constraints, _drop_axis(restriction, axis)).folds if axis in restriction.fixed else ()
        if folds:
            may_be = " or ".join(map(str, sorted({getattr(fold, axis) for fold, _ in folds})))
            return (
                f"{axis}={may_be} follows from the other degrees on {constraints.base_config.parallel.world_size} "
                f"GPUs, not {restriction.fixed[axis]}"
            )
    return ""


def _validation_errors(cfg: Config) -> list[str]:
    """Return the errors of the runtime's checks."""
    try:
        check_config(cfg)
    except ConfigError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        # Several errors are listed one a line, after a line that counts them.
        return lines[1:] or lines
    return []
