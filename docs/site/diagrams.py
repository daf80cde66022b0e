"""Draw the diagrams of the pages: `python docs/site/diagrams.py [FOLDER]` (default docs/images)."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

IMAGES = Path(__file__).parents[1] / "images"
COLORS = {"blue": "#4c78c8", "orange": "#e08a3c", "green": "#4f9d69", "purple": "#8a63b0", "red": "#c8554d"}
TINTS = {"blue": "#dce6f7", "orange": "#fae6d3", "green": "#dcefe2", "purple": "#e9e0f3", "grey": "#eeeeee"}
# Colours of a picture on a dark page, by those on a light one; the lines of COLORS are readable on both.
DARK = {
    "#222222": "#e8eaee",
    "#666666": "#a0a6b2",
    "#cccccc": "#4a4f5a",
    "#ffffff": "#1e2127",
    "#f7f7f7": "#23262d",
    "#eeeeee": "#2b2f37",
    "#dce6f7": "#25344f",
    "#fae6d3": "#4a3520",
    "#dcefe2": "#22402d",
    "#e9e0f3": "#382b4a",
}
INK = "#222222"
MUTED = "#666666"


def box(ax: Axes, x: float, y: float, width: float, height: float, text: str = "", **style: object) -> None:
    """Draw a rounded box with centred text, of the style `fill`, `edge`, `size` and `weight`."""
    ax.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=style.get("fill", "white"),
            edgecolor=style.get("edge", INK),
            linewidth=style.get("line", 1.2),
        )
    )
    label(ax, x + width / 2, y + height / 2, text, **style)


def label(ax: Axes, x: float, y: float, text: str, **style: object) -> None:
    """Write text centred at a point."""
    ax.text(
        x,
        y,
        text,
        ha=style.get("align", "center"),
        va="center",
        fontsize=style.get("size", 9),
        fontweight=style.get("weight", "normal"),
        color=style.get("ink", INK),
        linespacing=1.35,
    )


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    """Draw an arrow between two points, of the style `color` and `bend`."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            linewidth=1.1,
            color=style.get("color", MUTED),
            connectionstyle=f"arc3,rad={style.get('bend', 0.0)}",
            shrinkA=1,
            shrinkB=1,
        )
    )


def canvas(width: float, height: float) -> tuple[plt.Figure, Axes]:
    """Return a figure whose units are the same in both directions, without axes."""
    figure, ax = plt.subplots(figsize=(width, height))
    ax.set_xlim(0, width)
    ax.set_ylim(0, height)
    ax.set_aspect("equal")
    ax.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, ax


def two_views() -> plt.Figure:
    """Draw the four ranks of a pipeline stage in the view of attention and in the view of the experts."""
    figure, ax = canvas(8.0, 4.5)
    for left, title, color in ((0.15, "attention: cp2 x tp2", "blue"), (4.15, "experts: ep4", "orange")):
        box(ax, left, 0.55, 3.7, 3.8, fill=TINTS["grey"], edge="#cccccc")
        label(ax, left + 1.85, 4.1, title, size=12, weight="bold", ink=COLORS[color])
    for rank in range(4):
        column, row = rank % 2, rank // 2
        y = 2.3 - 1.55 * row
        x = 0.35 + 1.7 * column
        box(ax, x, y, 1.6, 1.35, fill="white", edge=COLORS["blue"])
        label(ax, x + 0.8, y + 1.12, f"rank {rank}", size=10, weight="bold")
        half = "left" if column == 0 else "right"
        label(ax, x + 0.8, y + 0.52, f"tokens: part {row}\nmatrices:\n{half} half", size=9)
        x += 4.0
        box(ax, x, y, 1.6, 1.35, fill="white", edge=COLORS["orange"])
        label(ax, x + 0.8, y + 1.12, f"rank {rank}", size=10, weight="bold")
        for number in range(2):
            box(
                ax,
                x + 0.13 + 0.7 * number,
                y + 0.18,
                0.64,
                0.66,
                f"expert\n{2 * rank + number}",
                fill=TINTS["orange"],
                edge=COLORS["orange"],
                size=8,
            )
    label(
        ax, 4.0, 0.28, "the same four ranks of one pipeline stage: sharded attention, whole experts", size=10, ink=MUTED
    )
    return figure


def moe_layer() -> plt.Figure:
    """Draw the way of four tokens through a MoE layer on two ranks, top 1."""
    figure, ax = canvas(8.0, 4.6)
    phases = ("route", "permute", "dispatch", "experts", "combine", "unpermute")
    for number, phase in enumerate(phases):
        label(ax, 0.95 + 1.28 * number, 4.35, phase, size=10.5, weight="bold")
    for number, kind in ((2, "all-to-all"), (4, "all-to-all")):
        label(ax, 0.95 + 1.28 * number, 4.08, kind, size=8.5, ink=COLORS["red"])
    experts = {0: 2, 1: 0, 2: 1, 3: 2}
    colors = ("blue", "green", "orange", "purple")
    for rank in range(2):
        y = 2.2 - 1.85 * rank
        box(ax, 0.1, y, 7.8, 1.65, fill="#f7f7f7", edge="#cccccc")
        label(
            ax,
            0.18,
            y + 1.5,
            f"rank {rank}: experts {2 * rank} and {2 * rank + 1}",
            size=9,
            weight="bold",
            align="left",
        )
    places: dict[tuple[int, int], tuple[float, float]] = {}
    order = {0: sorted((0, 1), key=experts.__getitem__), 1: sorted((2, 3), key=experts.__getitem__)}
    received = {0: [1, 2], 1: [0, 3]}
    for rank in range(2):
        for phase in range(6):
            tokens = {0: [2 * rank, 2 * rank + 1], 1: order[rank], 2: received[rank], 3: received[rank]}
            tokens |= {4: order[rank], 5: [2 * rank, 2 * rank + 1]}
            for place, token in enumerate(tokens[phase]):
                x = 0.95 + 1.28 * phase
                y = 2.2 - 1.85 * rank + 0.86 - 0.56 * place
                places[token, phase] = (x, y)
                is_done = phase >= 3
                color = colors[token]
                text = f"t{token}" if phase != 0 else f"t{token} > e{experts[token]}"
                text = f"e{experts[token]}(t{token})" if is_done else text
                fill = COLORS[color] if is_done else TINTS[color]
                box(
                    ax,
                    x - 0.42,
                    y - 0.2,
                    0.84,
                    0.4,
                    text,
                    fill=fill,
                    edge=COLORS[color],
                    ink="white" if is_done else INK,
                    size=8.5,
                )
    for token in range(4):
        for phase in range(5):
            start, end = places[token, phase], places[token, phase + 1]
            arrow(ax, (start[0] + 0.42, start[1]), (end[0] - 0.42, end[1]), color=COLORS[colors[token]])
    label(
        ax,
        4.0,
        0.17,
        "four tokens t, four experts e, each token chooses one: tokens move, experts stay",
        size=9,
        ink=MUTED,
    )
    return figure


def step() -> plt.Figure:
    """Draw one step of two pipeline stages with four micro-batches under 1F1B."""
    figure, ax = canvas(8.0, 3.5)
    unit = 0.385
    # A backward pass takes two units, a forward pass one; stage 1 starts as soon as its input has come.
    rows = {
        0: [("F", 0, 0), ("F", 1, 1), ("B", 0, 4), ("F", 2, 6), ("B", 1, 7), ("F", 3, 9), ("B", 2, 10), ("B", 3, 13)],
        1: [("F", 0, 1), ("B", 0, 2), ("F", 1, 4), ("B", 1, 5), ("F", 2, 7), ("B", 2, 8), ("F", 3, 10), ("B", 3, 11)],
    }
    for stage, actions in rows.items():
        y = 2.2 - 0.75 * stage
        label(ax, 0.5, y + 0.25, f"stage {stage}", size=10, weight="bold")
        for kind, number, start in actions:
            color = "blue" if kind == "F" else "green"
            width = unit * (1 if kind == "F" else 2)
            box(ax, 1.0 + unit * start, y, width, 0.5, f"{kind}{number}", fill=TINTS[color], edge=COLORS[color], size=9)
        end = 1.0 + unit * 15
        box(ax, end, y, 0.34, 0.5, "", fill=TINTS["orange"], edge=COLORS["orange"])
        box(ax, end + 0.34, y, 0.2, 0.5, "", fill=TINTS["grey"], edge=MUTED)
        box(ax, end + 0.54, y, 0.34, 0.5, "", fill=TINTS["purple"], edge=COLORS["purple"])
    legend = (
        ("blue", "F: forward of a micro-batch"),
        ("green", "B: backward"),
        ("orange", "sum of gradients over dp, edp"),
    )
    x = 1.0
    for color, text in legend:
        box(ax, x, 0.75, 0.22, 0.22, fill=TINTS[color], edge=COLORS[color])
        label(ax, x + 0.32, 0.86, text, size=9, align="left")
        x += 2.35 if color == "blue" else 1.3
    for x, fill, edge, text in (
        (1.0, TINTS["grey"], MUTED, "all-reduce: loss, norm; judgement"),
        (4.1, TINTS["purple"], COLORS["purple"], "optimizer"),
    ):
        box(ax, x, 0.33, 0.22, 0.22, fill=fill, edge=edge)
        label(ax, x + 0.32, 0.44, text, size=9, align="left")
    label(ax, 5.6, 0.44, "empty: bubble", size=9, align="left")
    arrow(ax, (1.0, 3.05), (7.9, 3.05))
    label(ax, 4.4, 3.25, "time", size=9, ink=MUTED)
    return figure


def floors() -> plt.Figure:
    """Draw the floors of the code, the lowest at the bottom, from the tables of docs/architecture.md."""
    text = (IMAGES.parent / "architecture.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^\| (\w*) ?\| `([\w./]+)` \|.*\| (.*?) ?\|$", text.partition("## Floors")[2].partition("## ")[0], re.M
    )
    rows: dict[str, list[tuple[str, str]]] = {}
    for floor, name, is_free in found:
        rows.setdefault(floor or list(rows)[-1], []).append((name, is_free))
    figure, ax = canvas(9.0, 0.46 * len(rows) + 0.85)
    for height, (floor, folders) in enumerate(rows.items()):
        y = 0.55 + 0.46 * height
        label(ax, 1.28, y + 0.18, floor, size=9.5, weight="bold", align="right")
        for number, (name, is_free) in enumerate(folders):
            color = "green" if is_free else "blue"
            box(ax, 1.4 + 1.07 * number, y, 1.0, 0.36, name, fill=TINTS[color], edge=COLORS[color], size=9)
    arrow(ax, (0.25, 0.46 * len(rows) + 0.45), (0.25, 0.55))
    for x, color, words in ((1.4, "green", "without torch"), (3.0, "blue", "with torch")):
        box(ax, x, 0.12, 0.22, 0.22, fill=TINTS[color], edge=COLORS[color])
        label(ax, x + 0.32, 0.23, words, size=9, align="left")
    label(ax, 4.5, 0.23, "imports point down, and to the left in a row", size=9, ink=MUTED, align="left")
    return figure


def chat_loss() -> plt.Figure:
    """Draw a sample of two packed conversations: which tokens have a loss, and what they see."""
    figure, ax = canvas(8.0, 2.6)
    words = (
        ("user", "What comes after zero?"),
        ("assistant", "One comes after zero. <end>"),
        ("user", "And after one?"),
        ("assistant", "Two. <end>"),
    )
    x = 0.2
    for number, (role, text) in enumerate(words):
        width = 0.42 + 0.071 * len(text)
        color = "orange" if role == "assistant" else "grey"
        edge = COLORS["orange"] if role == "assistant" else "#cccccc"
        box(ax, x, 1.35, width, 0.6, text, fill=TINTS[color], edge=edge, size=8.5)
        label(ax, x + width / 2, 2.15, role, size=9, weight="bold")
        if role == "assistant":
            label(ax, x + width / 2, 1.12, "loss", size=9, weight="bold", ink=COLORS["orange"])
        x += width + (0.3 if number == 1 else 0.05)
        if number == 1:
            ax.plot([x - 0.17, x - 0.17], [0.65, 2.35], linestyle="--", color=MUTED, linewidth=1)
    label(ax, 2.3, 0.7, "conversation 1", size=9, ink=MUTED)
    label(ax, 6.2, 0.7, "conversation 2", size=9, ink=MUTED)
    label(ax, 4.0, 0.25, "one sample: no token sees the other conversation; user turns have no loss", size=9, ink=MUTED)
    return figure


def grpo() -> plt.Figure:
    """Draw a group of four answers to one prompt: rewards, advantages, and the direction of the update."""
    figure, ax = canvas(8.0, 3.1)
    for x, text in ((1.0, "prompt"), (3.15, "answers of the model"), (5.05, "reward"), (6.7, "reward - mean")):
        label(ax, x, 2.85, text, size=10, weight="bold")
    box(ax, 0.15, 1.25, 1.7, 0.6, "sort 3 1 2", fill=TINTS["blue"], edge=COLORS["blue"], size=10)
    answers = (("1 2 3", 1), ("1 3 2", 0), ("3 2 1", 0), ("1 2 3", 1))
    for number, (text, reward) in enumerate(answers):
        y = 2.15 - 0.57 * number
        color = "green" if reward else "orange"
        arrow(ax, (1.87, 1.55), (2.45, y + 0.2))
        box(ax, 2.5, y, 1.3, 0.4, text, fill=TINTS["grey"], edge=MUTED, size=9.5)
        arrow(ax, (3.85, y + 0.2), (4.6, y + 0.2))
        box(ax, 4.65, y, 0.8, 0.4, str(reward), fill=TINTS[color], edge=COLORS[color], size=9.5)
        arrow(ax, (5.5, y + 0.2), (6.0, y + 0.2))
        words = "+0.5: more probable" if reward else "-0.5: less probable"
        label(ax, 6.08, y + 0.2, words, size=9.5, align="left", ink=COLORS["green" if reward else "red"])
    label(ax, 4.0, 0.15, "a group whose answers all score the same teaches nothing, and is left out", size=9, ink=MUTED)
    return figure


def hang() -> plt.Figure:
    """Draw four ranks over time: one stops, the others wait in a collective until the watchdog ends the run."""
    figure, ax = canvas(8.0, 3.0)
    for rank in range(4):
        y = 2.3 - 0.5 * rank
        label(ax, 0.5, y + 0.18, f"rank {rank}", size=10, weight="bold")
        for number in range(2):
            box(ax, 1.0 + 1.0 * number, y, 0.75, 0.36, "", fill=TINTS["blue"], edge=COLORS["blue"])
            box(ax, 1.77 + 1.0 * number, y, 0.2, 0.36, "", fill=TINTS["green"], edge=COLORS["green"])
        if rank == 2:
            box(ax, 3.0, y, 0.3, 0.36, "", fill=TINTS["blue"], edge=COLORS["blue"])
            label(ax, 3.4, y + 0.18, "stopped: the rank that is named", size=9.5, align="left", ink=COLORS["red"])
        else:
            box(ax, 3.0, y, 0.75, 0.36, "", fill=TINTS["blue"], edge=COLORS["blue"])
            box(ax, 3.77, y, 3.2, 0.36, "waits in all_to_all", fill=TINTS["grey"], edge=MUTED, size=9)
    ax.plot([7.0, 7.0], [0.6, 2.8], color=COLORS["red"], linewidth=1.4)
    label(ax, 7.1, 1.7, "no progress\nfor 20 s:\nthe run ends", size=9, align="left", ink=COLORS["red"])
    for x, color, words in ((1.0, "blue", "computes"), (2.3, "green", "collective")):
        box(ax, x, 0.2, 0.22, 0.22, fill=TINTS[color], edge=COLORS[color])
        label(ax, x + 0.32, 0.31, words, size=9, align="left")
    arrow(ax, (4.0, 0.31), (7.8, 0.31))
    label(ax, 5.9, 0.45, "time", size=9, ink=MUTED)
    return figure


def checkpoint() -> plt.Figure:
    """Draw what a checkpoint has: logical tensors, written under one mapping and read under any other."""
    figure, ax = canvas(8.0, 2.9)
    groups = ((0.2, "8 ranks: tp2 cp2 pp2, ep4", 8, "blue"), (5.3, "4 ranks: tp2 pp2, ep2", 4, "orange"))
    for left, title, number, color in groups:
        label(ax, left + 1.25, 2.65, title, size=10, weight="bold", ink=COLORS[color])
        for rank in range(number):
            width = 2.5 / (number / 2)
            x = left + width * (rank % (number // 2))
            y = 1.75 - 0.65 * (rank // (number // 2))
            box(ax, x + 0.04, y, width - 0.08, 0.55, str(rank), fill=TINTS[color], edge=COLORS[color], size=9.5)
    box(
        ax,
        3.2,
        1.0,
        1.6,
        1.4,
        "checkpoint\none entry for each\nlogical tensor",
        fill=TINTS["green"],
        edge=COLORS["green"],
    )
    arrow(ax, (2.75, 1.7), (3.18, 1.7))
    arrow(ax, (4.77, 1.7), (5.28, 1.7))
    box(ax, 2.9, 0.12, 2.2, 0.42, "Hugging Face folder", fill=TINTS["purple"], edge=COLORS["purple"])
    arrow(ax, (3.7, 0.98), (3.7, 0.56))
    arrow(ax, (4.3, 0.56), (4.3, 0.98))
    label(ax, 3.6, 0.77, "export", size=9, align="right", ink=MUTED)
    label(ax, 4.4, 0.77, "import", size=9, align="left", ink=MUTED)
    label(ax, 2.97, 1.88, "save", size=9, ink=MUTED)
    label(ax, 5.04, 1.88, "resume", size=9, ink=MUTED)
    return figure


DIAGRAMS: dict[str, Callable[[], plt.Figure]] = {
    "two-views": two_views,
    "moe-layer": moe_layer,
    "step": step,
    "floors": floors,
    "chat-loss": chat_loss,
    "grpo": grpo,
    "hang": hang,
    "checkpoint": checkpoint,
}


def add_dark_colors(path: Path) -> None:
    """Add a style to a picture that changes its colours on a dark page."""
    rules = [
        f'[style*="{name}: {light}"] {{ {name}: {dark} !important }}'
        for light, dark in DARK.items()
        for name in ("fill", "stroke")
    ]
    style = "<style>@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>\n"
    head, defs, rest = path.read_text(encoding="utf-8").partition(" <defs>\n")
    path.write_text(head + style + defs + rest, encoding="utf-8")


def main(folder: Path) -> None:
    """Write every diagram as SVG into a folder."""
    plt.rcParams.update({"svg.hashsalt": "moefold", "font.family": "DejaVu Sans", "svg.fonttype": "path"})
    for name, draw in DIAGRAMS.items():
        figure = draw()
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None}, transparent=True)
        plt.close(figure)
        add_dark_colors(path)
        print(f"wrote {folder / name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
