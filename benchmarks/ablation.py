"""The ablations of arXiv:2504.14960 sec. 4.3 on paper: what a MoE layer spends its time on, by mapping.

    python benchmarks/ablation.py                                     tables
    python benchmarks/ablation.py --png docs/images/ablations.png     and the picture of docs/planner-ablations.md

One MoE layer, forward and backward, of one micro-batch with 4,096 tokens on each rank, on nodes of 8 GPUs, priced by
the planner's cost model in bfloat16 with balanced experts. Experts: all ways to share a product of 8 or 16 ranks
between ETP and EP. Context: sequences of 4,096 * CP tokens, with EP over the ranks of CP (folded) or beside them
(coupled: EP neighbours are CP ranks apart, so that the exchange leaves the node once CP * EP exceeds it).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.cost.hardware import load_device
from moefold.planner.cost_model.layer import LayerCostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.model_spec import ModelSpec, model_spec_from_config
from moefold.planner.svg_chart import FAINT, INK, PALETTE
from moefold.recipe import load_config

MODELS = {"mixtral-8x22b": "Mixtral-8x22B", "mixtral-8x22b-g8t8": "Mixtral-8x22B-G8T8, 64 experts, top 8"}
TOKENS = 4096
PARTS = {
    "experts": "experts",
    "router": "router and norm",
    "permute": "permutation",
    "ep_comm": "exchange over EP",
    "etp_comm": "gathers over ETP",
}
COLOURS = dict(zip(PARTS, (PALETTE[0], PALETTE[9], PALETTE[5], PALETTE[3], PALETTE[1]), strict=True))


@dataclass(frozen=True)
class Bar:
    """One mapping of one layer."""

    name: str
    milliseconds: dict[str, float]

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.milliseconds.values())


def price(shape: ModelSpec, gpu: str, degrees: dict[str, int], *, coupled: bool = False) -> dict[str, float]:
    """Milliseconds of each part of the layer."""
    cp = degrees.get("cp", 1)
    workload = TrainingWorkload(seq_len=TOKENS * cp, global_batch_size=1, is_coupled=coupled)
    times = LayerCostModel(shape, load_device(gpu), workload)
    block = times.feed_forward(shape.layers[-1], 1, cp, 1, degrees["ep"], degrees.get("etp", 1), "alltoall")
    found = dict.fromkeys(PARTS, 0.0)
    for work in (*block.forward, *block.backward):
        found[work.part] += 1e3 * work.seconds
    return found


def expert_bars(shape: ModelSpec, gpu: str, product: int) -> Iterator[Bar]:
    """ETP x EP with a fixed product."""
    num_experts = next(kind.feed_forward.num_experts for kind in shape.kinds if kind.feed_forward is not None)
    etp = 1
    while etp <= product:
        ep = product // etp
        if ep <= num_experts:
            yield Bar(f"ETP{etp} EP{ep}", price(shape, gpu, {"ep": ep, "etp": etp}))
        etp *= 2


def context_bars(shape: ModelSpec, gpu: str) -> Iterator[Bar]:
    """CP x EP, coupled and folded."""
    for cp in (1, 2, 4, 8):
        for ep in (4, 8):
            for coupled in (True, False):
                name = f"CP{cp} EP{ep} {'coupled' if coupled else 'folded'}"
                yield Bar(name, price(shape, gpu, {"cp": cp, "ep": ep}, coupled=coupled))


def sections(gpu: str) -> Iterator[tuple[str, str, list[Bar]]]:
    """Model, heading and bars of every chart."""
    for preset, name in MODELS.items():
        shape = model_spec_from_config(load_config(None, [f"model.preset={preset}"]).model)
        for product in (8, 16):
            yield name, f"ETP x EP = {product}", list(expert_bars(shape, gpu, product))
        yield name, "CP x EP", list(context_bars(shape, gpu))


def print_tables(charts: list[tuple[str, str, list[Bar]]]) -> None:
    """As markdown, in milliseconds."""
    for model, heading, bars in charts:
        print(f"\n### {model}, {heading}\n")
        print(f"| mapping | {' | '.join(PARTS.values())} | all, ms |")
        print(f"| --- |{' --- |' * (len(PARTS) + 1)}")
        for bar in bars:
            cells = " | ".join(f"{bar.milliseconds[part]:.2f}" for part in PARTS)
            print(f"| {bar.name} | {cells} | {bar.total:.2f} |")


def draw(charts: list[tuple[str, str, list[Bar]]], gpu: str, path: Path) -> None:
    """A row of charts for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8.6), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(len(MODELS), 3, squeeze=False, width_ratios=[1, 1.1, 2.6])
    for axes, (model, heading, bars) in zip(grid.flat, charts, strict=True):
        below = [0.0] * len(bars)
        for part, name in PARTS.items():
            heights = [bar.milliseconds[part] for bar in bars]
            axes.bar(range(len(bars)), heights, bottom=below, color=COLOURS[part], label=name, width=0.72)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        for i, total in enumerate(below):
            axes.text(i, total, f"{total:.1f}", ha="center", va="bottom", fontsize=8, color=INK)
        axes.set_xticks(range(len(bars)), [bar.name.replace(" ", "\n") for bar in bars], fontsize=8)
        axes.set_title(heading, fontsize=10.5, color=INK)
        axes.tick_params(colors=FAINT, length=0, labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        label = f"{model}\nms, forward and backward" if axes in grid[:, 0] else ""
        axes.set_ylabel(label, fontsize=9, color=INK)
    grid.flat[0].legend(fontsize=8.5, frameon=False, loc="upper left")
    # Room for the legend.
    grid.flat[0].set_ylim(0, 1.6 * max(bar.total for bar in charts[0][2]))
    figure.suptitle(f"One MoE layer with {TOKENS:,} tokens a rank on {gpu} nodes, as priced", fontsize=12, color=INK)
    figure.savefig(path)


def main() -> None:
    """Price, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100", help="a device of the planner or FILE.toml (default h100)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the charts")
    options = parser.parse_args()
    charts = list(sections(options.gpu))
    print_tables(charts)
    if options.png is not None:
        draw(charts, options.gpu, options.png)


if __name__ == "__main__":
    main()
