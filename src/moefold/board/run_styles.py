"""Colours and dashes of runs: one for each run of a board, whatever is chosen. Torch-free."""

from collections.abc import Collection

NUM_COLORS = 16
NUM_DASHES = 3
NUM_STYLES = NUM_COLORS * NUM_DASHES
"""A style is dash * NUM_COLORS + colour; dash 0 is a solid line."""
_STRIDE = 5
"""Distance to the next colour that is tried: neighbours in the palette are similar. It has no factor of 16."""


def free_style(key: str, taken: Collection[int]) -> int:
    """Return the style of a run: the colour of its key, or the next one that no other run has.

    Solid lines are used up first; beyond `NUM_STYLES` runs, styles come again.

    Args:
        key: hexadecimal key of the run.
        taken: styles of the other runs.
    """
    wanted = int(key, 16)
    for dash in range(NUM_DASHES):
        for i in range(NUM_COLORS):
            style = dash * NUM_COLORS + (wanted + _STRIDE * i) % NUM_COLORS
            if style not in taken:
                return style
    return wanted % NUM_STYLES
