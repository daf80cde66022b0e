"""Colours and dashes of runs: one for each run of a board, whatever is chosen. Torch-free."""

from collections.abc import Collection

NUM_COLORS = 16
NUM_DASHES = 3
NUM_STYLES = NUM_COLORS * NUM_DASHES
"""A style is dash * NUM_COLORS + colour; dash 0 is a solid line."""
_STRIDE = 5
"""Distance to the next colour that is tried; it has no factor of 16."""


def free_style(key: str, taken: Collection[int]) -> int:
    """Return the style of a run: the colour of its key, or the next one that no other run has or is close to.

    Solid lines are used up first; beyond `NUM_STYLES` runs, styles come again.

    Args:
        key: hexadecimal key of the run.
        taken: styles of the other runs.
    """
    wanted = int(key, 16)
    colors = [(wanted + _STRIDE * i) % NUM_COLORS for i in range(NUM_COLORS)]
    for dash in range(NUM_DASHES):
        ring = [dash * NUM_COLORS + color for color in colors]
        # Neighbours in the palette are similar.
        apart = [style for style in ring if not {_next(style, -1), style, _next(style, 1)} & set(taken)]
        free = [style for style in ring if style not in taken]
        if free:
            return (apart or free)[0]
    return wanted % NUM_STYLES


def _next(style: int, distance: int) -> int:
    dash, color = divmod(style, NUM_COLORS)
    return dash * NUM_COLORS + (color + distance) % NUM_COLORS
