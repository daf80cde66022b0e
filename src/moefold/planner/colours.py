"""Colours of the planner's pictures."""

from moefold.planner.cost_model.step import TIME_PARTS
from moefold.planner.memory.budget import MEMORY_PARTS

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
"""Any two are at least 0.07 apart in OKLab, also with protanopia or deuteranopia (tests/planner/test_colours.py)."""
TIME_COLOURS = dict(zip(TIME_PARTS, PALETTE, strict=True))
"""Colours of the parts of a step: compute is blue, communication yellow to brown, the rest between."""
MEMORY_COLOURS = dict(zip(MEMORY_PARTS, (PALETTE[i] for i in (0, 2, 5, 17, 4, 13, 10, 12, 15, 8)), strict=True))
INK = "#1c2430"
FAINT = "#6b7685"
PASS_NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
PASS_COLOURS = {"F": "#7fa8d9", "B": "#8fbf8f", "I": "#a9d3a0", "W": "#e3b778"}
STEP_TAIL_NAMES = {"dp_comm": "gradients over dp", "optimizer": "optimizer"}
STEP_TAIL_COLOURS = {"dp_comm": "#c9a0c9", "optimizer": "#9a9aa8"}
EXPOSED_COLOUR = "#d0574f"
