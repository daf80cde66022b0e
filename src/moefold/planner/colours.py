"""Colours of the planner's pictures."""

PALETTE = (
    "#1e4ba5",
    "#e1873c",
    "#00b4a5",
    "#872d0f",
    "#69b4ff",
    "#e1b42d",
    "#5a69c3",
    "#96c387",
    "#b45a00",
    "#4b96b4",
    "#8787f0",
    "#968769",
    "#005a5a",
    "#e1c3c3",
    "#5a5a87",
    "#b4e178",
    "#5a7878",
    "#00e1ff",
)
"""Any two are at least 0.07 apart in OKLab, also with protanopia or deuteranopia (tests/planner/test_colours.py)."""
TIME_COLOURS = {
    "attention": PALETTE[0],
    "dense_mlp": PALETTE[10],
    "experts": PALETTE[4],
    "shared_experts": PALETTE[9],
    "router": PALETTE[14],
    "permute": PALETTE[2],
    "head": PALETTE[17],
    "recompute": PALETTE[6],
    "launch": PALETTE[11],
    "offload": PALETTE[13],
    "tp_comm": PALETTE[5],
    "cp_comm": PALETTE[15],
    "etp_comm": PALETTE[7],
    "ep_comm": PALETTE[1],
    "pp_comm": PALETTE[8],
    "dp_comm": PALETTE[3],
    "bubble": PALETTE[16],
    "optimizer": PALETTE[12],
}
"""Colours of the parts of a step: compute is blue, communication yellow to brown, the rest between."""
MEMORY_COLOURS = {
    "weights": PALETTE[0],
    "gathered": PALETTE[4],
    "gradients": PALETTE[2],
    "optimizer": PALETTE[12],
    "buffers": PALETTE[14],
    "activations": PALETTE[1],
    "dispatch": PALETTE[5],
    "logits": PALETTE[7],
    "pipeline": PALETTE[3],
    "workspace": PALETTE[11],
}
INK = "#1c2430"
FAINT = "#6b7685"
PASS_NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
PASS_COLOURS = {"F": "#7fa8d9", "B": "#8fbf8f", "I": "#a9d3a0", "W": "#e3b778"}
STEP_TAIL_NAMES = {"dp_comm": "gradients over dp", "optimizer": "optimizer"}
STEP_TAIL_COLOURS = {"dp_comm": "#c9a0c9", "optimizer": "#9a9aa8"}
EXPOSED_COLOUR = "#d0574f"
