"""Text for pictures: what the font cannot draw is replaced, so that drawing warns of nothing."""

from functools import cache

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def drawable(text: str) -> str:
    """Return the text with each character that the font of pictures lacks replaced, and no formulas in it."""
    known = _characters()
    plain = "".join(character if ord(character) in known else REPLACEMENT for character in text)
    # A pair of dollar signs would be read as a formula.
    return plain.replace("$", r"\$")


@cache
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())
