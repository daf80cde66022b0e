"""Layer patterns such as "D3M2": letters with counts, expanded to the number of layers."""

LAYER_KINDS = "DM"
ATTENTION_KINDS = "FW"
MAX_LAYERS = 10_000
"""Upper bound of each count and of the expanded pattern, so that untrusted patterns need little memory."""


def expand_layer_pattern(pattern: str, kinds: str = LAYER_KINDS) -> str:
    """Spell a layer pattern out: "D3M2" -> "DDDMM".

    Raises:
        ValueError: the pattern is empty or holds anything but the two `kinds`, each with an optional positive count.
    """
    spelled = ""
    digits = ""
    for char in pattern + "\0":
        if char.isdigit() and spelled:
            digits += char
            continue
        if digits:
            if len(digits) > len(str(MAX_LAYERS)) or not 0 < int(digits) <= MAX_LAYERS:
                raise ValueError(f"a count of {digits} in layer pattern {pattern!r}")
            spelled += spelled[-1] * (int(digits) - 1)
            if len(spelled) > MAX_LAYERS:
                raise ValueError(f"more than {MAX_LAYERS} layers in layer pattern {pattern!r}")
            digits = ""
        if char == "\0":
            break
        if char not in kinds:
            raise ValueError(f"unexpected {char!r} in layer pattern {pattern!r}; {_usage_hint(kinds)}")
        spelled += char
    if not spelled:
        raise ValueError(f"an empty layer pattern; {_usage_hint(kinds)}")
    return spelled


def layer_windows(attention_pattern: str, sliding_window: int, num_layers: int) -> tuple[int, ...]:
    """Return the sliding window of each layer in tokens, in order; 0: full attention."""
    unit = expand_layer_pattern(attention_pattern, ATTENTION_KINDS)
    return tuple(sliding_window if unit[i % len(unit)] == "W" else 0 for i in range(num_layers))


def _usage_hint(kinds: str) -> str:
    first = kinds[0]
    second = kinds[1]
    return f"use {first} and {second}, with counts: {second}, {first}{second}, {first}3{second}58"
