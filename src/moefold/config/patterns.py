"""Patterns of letters that say which kind each layer of a model is: "D3M2", "WF". Torch-free."""

LAYER_KINDS = "DM"
ATTENTION_KINDS = "FWCL"
INDEX_KINDS = "FS"
ROPE_KINDS = "RN"
PATTERNS = {
    "layer_pattern": LAYER_KINDS,
    "attention_pattern": ATTENTION_KINDS,
    "rope_pattern": ROPE_KINDS,
    "index_pattern": INDEX_KINDS,
}
"""Letters of each key of [model] that is a pattern."""
MAX_LAYERS = 10_000
"""Upper bound of each count and of the expanded pattern, so that untrusted patterns need little memory."""


def expand_layer_pattern(pattern: str, kinds: str = LAYER_KINDS) -> str:
    """Spell a layer pattern out: "D3M2" -> "DDDMM".

    Raises:
        ValueError: the pattern is empty or holds anything but the `kinds`, each with an optional positive count.
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


def spell(pattern: str, kinds: str, num_layers: int) -> str:
    """Return the letter of each layer, in order: the pattern repeated to the number of layers."""
    unit = expand_layer_pattern(pattern, kinds)
    return "".join(unit[i % len(unit)] for i in range(num_layers))


def _usage_hint(kinds: str) -> str:
    first = kinds[0]
    second = kinds[1]
    letters = f"{', '.join(kinds[:-1])} and {kinds[-1]}"
    return f"use {letters}, with counts: {second}, {first}{second}, {first}3{second}58"
