"""Colours of the pictures."""

PALETTE = (
    "#1e4ba5",
    "#8787f0",
    "#69b4ff",
    "#4b96b4",
    "#5a5a87",
    "#00b4a5",
    "#00e1ff",
    "#5a69c3",
    "#968769",
    "#e1c3c3",
    "#e1b42d",
    "#b4e178",
    "#96c387",
    "#e1873c",
    "#b45a00",
    "#872d0f",
    "#5a7878",
    "#005a5a",
)
"""Any two differ by at least 0.07 in OKLab, also with protanopia or deuteranopia (tests/benchmarks/test_colours.py)."""
INK = "#1c2430"
FAINT = "#6b7685"
