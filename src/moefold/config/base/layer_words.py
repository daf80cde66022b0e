"""Layers of a model in words, `layers = "3 dense, 58 moe"`: parsing, writing and repeating."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import NamedTuple

from moefold.config.base.limits import MAX_LAYERS
from moefold.errors import ConfigError


class LayerWords(NamedTuple):
    """Words of one layer.

    A word is written if it is not the default, or if layers differ in it.
    """

    attention: str = "full"
    position: str = "rope"
    selection: str = "own"
    ffn: str = "moe"


WORDS = LayerWords("full window chunk linear", "rope nope", "own shared", "moe dense")
"""Words of each part of a layer, the default first."""
_COLUMN_OF = {word: column for column, words in WORDS._asdict().items() for word in words.split()}
_ENTRY = re.compile(
    r"\s*(?:(\d{1,5})\s*x\s*\(([^()]*)\)|(?:(\d{1,5})\s+)?([a-z]+(?:/[a-z]+)*))\s*(?:,(?=\s*\S)|$)", re.ASCII
)


def parse_layers(layers: int | str) -> tuple[LayerWords, ...]:
    """Return the words of each layer, in order.

    Args:
        layers: value of the recipe: COUNT, or entries "COUNT WORD/WORD" and "COUNT x (ENTRY, ...)" between commas.

    Raises:
        ValueError: the text is invalid, or there are no layers or more than `MAX_LAYERS`.
    """
    if isinstance(layers, int):
        if not 1 <= layers <= MAX_LAYERS:
            raise ValueError(f"must be 1 to {MAX_LAYERS} layers")
        return (LayerWords(),) * layers
    parsed: tuple[LayerWords, ...] = ()
    end = 0
    while end < len(layers) or not layers:
        entry = _ENTRY.match(layers, end)
        if entry is None:
            forms = '"3 dense, 5 moe" or "12 x (3 linear, full)", in lower case, with one level of brackets'
            raise ValueError(f"is not understood from {layers[end:]!r} on; write layers such as {forms}")
        end = entry.end()
        unit = (_words_of(entry[4]),) if entry[4] else parse_layers(entry[2])
        count = int(entry[1] or entry[3] or 1)
        if not 1 <= count * len(unit) <= MAX_LAYERS - len(parsed):
            raise ValueError(f"must be 1 to {MAX_LAYERS} layers, and each count at least 1")
        parsed += count * unit
    return parsed


def _words_of(text: str) -> LayerWords:
    row: dict[str, str] = {}
    for word in text.split("/"):
        column = _COLUMN_OF.get(word)
        if column is None:
            hint = "".join(f"; did you mean {guess!r}?" for guess in get_close_matches(word, _COLUMN_OF, 1))
            raise ValueError(f"names {word!r}; the names are {', '.join(_COLUMN_OF)}{hint}")
        if column in row:
            raise ValueError(f"has both {row[column]!r} and {word!r} in {text!r}, of which a layer has one")
        row[column] = word
    if row.get("attention") == "linear" and len(row) > 1 + ("ffn" in row):
        raise ValueError(f"has {text!r}, and linear attention has no RoPE and selects no keys")
    return LayerWords(**row)


def spell_layers(rows: Sequence[LayerWords]) -> int | str:
    """Return the layers as `parse_layers` reads them, in the shortest form: "12 x (3 linear, full)"."""
    rows = [row if row.attention != "linear" else LayerWords("linear", ffn=row.ffn) for row in rows]
    is_mixed = {column for column in ("attention", "ffn") if len({getattr(row, column) for row in rows}) > 1}
    default = LayerWords()
    if set(rows) == {default}:
        return len(rows)
    names = []
    for row in rows:
        kinds = [
            word for column, word in row._asdict().items() if word != getattr(default, column) or column in is_mixed
        ]
        names.append("/".join(kinds) or default.attention)
    spelled = ", ".join(_runs(names))
    for start in range(4):
        for size in range(2, 9):
            unit = names[start : start + size]
            count = 1
            while unit and names[start + count * size : start + (count + 1) * size] == unit:
                count += 1
            if count > 1:
                tail = names[start + count * size :]
                text = ", ".join([*_runs(names[:start]), f"{count} x ({', '.join(_runs(unit))})", *_runs(tail)])
                spelled = min(spelled, text, key=len)
    return spelled


def _runs(names: Sequence[str]) -> list[str]:
    """Return names with their counts in a row: "3 dense"."""
    runs = [(name, len(list(group))) for name, group in groupby(names)]
    return [f"{count} {name}" if count > 1 else name for name, count in runs]


def repeat_layers(rows: Sequence[LayerWords], count: int) -> tuple[LayerWords, ...]:
    """Return a number of layers in a repeated pattern: "2 x (window, full)" for 3 layers is window, full, window."""
    size = next(size for size in range(1, len(rows) + 1) if all(rows[i] == rows[i % size] for i in range(len(rows))))
    return tuple(rows[i % size] for i in range(count))


def counted_layers(layers: int | str | None, count: int) -> int | str:
    """Return a number of layers like the given layers, which must be equal.

    Args:
        layers: layers of a recipe or its preset, unchecked, or None for the default.
        count: number of the returned layers. An illegal number is refused later.

    Raises:
        ConfigError: the layers differ.
    """
    try:
        rows = parse_layers(count if layers is None else layers)
        spelled = spell_layers(repeat_layers(rows, len(parse_layers(count))))
    except ValueError:
        return count
    if len(set(rows)) > 1:
        raise ConfigError(
            f"model.layers={count} does not say which layers; write them by name, such as {str(spelled)!r}"
        )
    return spelled
