"""Refusals of the oracle: a kind or a part without a formula cannot be judged.

The oracle has no default branch over kinds. `unknown_kind` ends each `match` over a `Literal`: mypy reports a value of
the schema that has no `case`, and a run with it ends in `NoFormulaError`.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Never, NoReturn

from moefold.config.base.part import Part, describe_part, parts_in
from moefold.config.base.part_registry import is_built_in
from moefold.config.model import ModelConfig
from moefold.errors import NoFormulaError
from moefold.message_text import format_list


def unknown_kind(key: str, value: Never) -> NoReturn:
    """Raise NoFormulaError for a value of a key, or of an argument of a loss, that no case of the oracle names."""
    no_formula(f"{key}={value!r}")


def formula_of(part: Part) -> Any:
    """Return the formula of a part.

    Raises:
        NoFormulaError: the part has no formula, or the formula is a method of the part that the trainer also calls.
    """
    formula = part.formula() or _no_formula_of(part)
    for part_formula in formula if isinstance(formula, tuple) else (formula,):
        method: Any = getattr(part_formula, "func", part_formula)
        if getattr(method, "__self__", None) is part:
            raise NoFormulaError(
                f"formula() of {describe_part(part)} returns its method {method.__name__}, so that the code would be "
                "compared with itself; write the maths a second time (docs/extending.md#the-oracle)"
            )
    return formula


def no_formula_of_weights(name: str, names: Sequence[str], model: ModelConfig) -> NoReturn:
    """Refuse parameters that no formula reads. The message names the parts from outside in the model."""
    name = f"{name} {format_list(names)}"
    outside = [part for part in parts_in(model) if not is_built_in(type(part))]
    if outside:
        _no_formula_of(max(outside, key=lambda part: part.group in names[0]), f"{name} of ")
    no_formula(name)


def _no_formula_of(part: Part, name: str = "") -> NoReturn:
    inner = (getattr(part, field.name) for field in fields(part))
    part = next((entry for entry in inner if isinstance(entry, Part) and entry.formula() is None), part)
    raise NoFormulaError(
        f"the oracle has no formula for {name}{describe_part(part)}, so this recipe cannot be judged; leave it "
        f"out, write formula() of {type(part).__qualname__} (docs/extending.md#the-oracle), or compare this mapping "
        "with one rank of the same code: --against one-rank"
    )


def no_formula(name: str, file: str = "verify/oracle*.py") -> NoReturn:
    """Raise NoFormulaError for a key, parameter or buffer that has no formula in some files of the oracle."""
    raise NoFormulaError(
        f"the oracle has no formula for {name}, so this recipe cannot be judged; leave it out, or write its formula in "
        f"moefold/{file} (docs/extending.md)"
    )
