"""Rules of the [align] section: method and data, threshold, template."""

import math
from collections.abc import Iterator
from string import Formatter

from moefold.config.align import AlignConfig
from moefold.config.chosen import chosen_in
from moefold.config.data import DataConfig
from moefold.config.find import find_part, kinds
from moefold.config.groups.alignment import AlignmentPart, PreferencePart


def validate_align_data(data: DataConfig, align: AlignConfig) -> Iterator[str]:
    """Yield a message if preference data have no loss; the methods check what they need themselves."""
    if data.kind == "preference" and not isinstance(chosen_in(align, AlignmentPart), PreferencePart):
        losses = [kind for kind in kinds("alignment") if issubclass(find_part("alignment", kind), PreferencePart)]
        yield (
            f'data.kind="preference" needs a loss for pairs, and align.method={align.method!r} is none; choose '
            f"{', '.join(losses)}"
        )


def validate_threshold(align: AlignConfig) -> Iterator[str]:
    """Yield a message if the threshold is no number, quantile or "best"."""
    try:
        parse_threshold(align)
    except ValueError:
        yield (
            f'align.threshold={align.threshold!r} must be a number, a quantile from "q0" to "q1" such as "q0.8", '
            'or "best"'
        )


def parse_threshold(align: AlignConfig) -> tuple[str, float]:
    """Return the kind of the threshold, "value", "quantile" or "best", and its number.

    Raises:
        ValueError: it is none of them.
    """
    threshold = align.threshold
    if threshold == "best":
        return "best", 0.0
    if isinstance(threshold, str) and threshold.startswith("q"):
        quantile = float(threshold[1:])
        if not 0 <= quantile <= 1:
            raise ValueError(threshold)
        return "quantile", quantile
    # On the command line a number may arrive as text.
    number = float(threshold)
    if not math.isfinite(number):
        raise ValueError(threshold)
    return "value", number


def validate_template(align: AlignConfig) -> Iterator[str]:
    """Yield a message if the template lacks a field, or has one that cannot be filled in."""
    template = align.template
    key = f"align.template={template!r}"
    try:
        fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        if missing := [name for name in ("prompt", "reward") if name not in fields]:
            yield f"{key} lacks {{{missing[0]}}}; write both {{prompt}} and {{reward}}, or {{reward:.2f}} for 2 digits"
        elif others := sorted(fields - {"prompt", "reward"}):
            yield f"{key} has the field {{{others[0]}}}; only {{prompt}} and {{reward}} are filled in"
        else:
            fill_template(template, "", 0.0)
    except (ValueError, IndexError, KeyError, AttributeError) as error:
        yield f"{key} cannot be filled in ({error}); write a brace of the text twice, as {{{{ or }}}}"


def fill_template(template: str, prompt: str, reward: float) -> str:
    """Return a prompt with its reward."""
    return template.format(prompt=prompt, reward=reward)


ALIGN_RULES = (validate_align_data, validate_threshold, validate_template)
