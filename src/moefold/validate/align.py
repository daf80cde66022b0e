"""Rules of the [align] section: method and data, threshold, template."""

import math
from collections.abc import Iterator
from string import Formatter

from moefold.config.align import PREFERENCE_METHODS, REWARD_METHODS, AlignConfig
from moefold.config.schema import Config


def validate_align_data(cfg: Config) -> Iterator[str]:
    """Yield a message if the method does not go with the data or the model."""
    method = cfg.align.method
    kind = cfg.data.kind
    if method in REWARD_METHODS and kind != "sft":
        yield f'align.method={method!r} needs data.kind="sft" with a reward in each row, and it is {kind!r}; set it'
    if method in PREFERENCE_METHODS and kind != "preference":
        yield f'align.method={method!r} needs data.kind="preference", and it is {kind!r}; set it'
    if kind == "preference" and method not in PREFERENCE_METHODS:
        yield (
            f'data.kind="preference" needs a loss for pairs, and align.method={method!r} is none; choose '
            f"{', '.join(PREFERENCE_METHODS)}"
        )
    if method != "none" and cfg.data.weights:
        yield (
            f"align.method={method!r} reads its rows as one data set; leave data.weights out, and name the files in "
            "data.path"
        )
    if method in PREFERENCE_METHODS and cfg.model.mtp_layers:
        yield (
            f"align.method={method!r} has no loss for the MTP layers, as they would learn the rejected completions "
            f"too, and model.mtp_layers={cfg.model.mtp_layers}; set it to 0"
        )


def validate_threshold(cfg: Config) -> Iterator[str]:
    """Yield a message if the threshold is no number, quantile or "best"."""
    try:
        parse_threshold(cfg.align)
    except ValueError:
        yield (
            f'align.threshold={cfg.align.threshold!r} must be a number, a quantile from "q0" to "q1" such as "q0.8", '
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


def validate_template(cfg: Config) -> Iterator[str]:
    """Yield a message if the template lacks a field, or has one that cannot be filled in."""
    template = cfg.align.template
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
