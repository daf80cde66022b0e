"""Patterns of letters that say which kind each layer of a model is: "D3M2", "WF". Torch-free."""

LAYER_KINDS = "DM"
ATTENTION_KINDS = "FWCL"
INDEX_KINDS = "FS"
ROPE_KINDS = "RN"
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


def attention_letters(attention_pattern: str, num_layers: int) -> str:
    """Return the letter of `ATTENTION_KINDS` of each layer, in order."""
    return spell(attention_pattern, ATTENTION_KINDS, num_layers)


def layer_windows(attention_pattern: str, sliding_window: int, num_layers: int) -> tuple[int, ...]:
    """Return the sliding window of each layer in tokens, in order; 0: no window."""
    letters = attention_letters(attention_pattern, num_layers)
    return tuple(sliding_window if letter == "W" else 0 for letter in letters)


def layer_chunks(attention_pattern: str, attention_chunk_size: int, num_layers: int) -> tuple[int, ...]:
    """Return the attention chunk of each layer in tokens, in order; 0: no chunks."""
    letters = attention_letters(attention_pattern, num_layers)
    return tuple(attention_chunk_size if letter == "C" else 0 for letter in letters)


def layers_with_rope(rope_pattern: str, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer, in order, applies RoPE."""
    return tuple(letter == "R" for letter in spell(rope_pattern, ROPE_KINDS, num_layers))


def linear_layers(letters: str) -> list[int]:
    """Return the numbers of the layers of linear attention, given the letter of `ATTENTION_KINDS` of each layer."""
    return [i for i, letter in enumerate(letters) if letter == "L"]


def shared_selections(index_pattern: str, letters: str) -> tuple[int, ...]:
    """Return the layers of sparse attention that attend to the keys which an earlier layer selected.

    Args:
        index_pattern: of `INDEX_KINDS`.
        letters: letter of `ATTENTION_KINDS` of each layer.
    """
    unit = expand_layer_pattern(index_pattern, INDEX_KINDS)
    return tuple(i for i, letter in enumerate(letters) if letter != "L" and unit[i % len(unit)] == "S")


def _usage_hint(kinds: str) -> str:
    first = kinds[0]
    second = kinds[1]
    letters = f"{', '.join(kinds[:-1])} and {kinds[-1]}"
    return f"use {letters}, with counts: {second}, {first}{second}, {first}3{second}58"
