"""Predict the ablations of arXiv:2504.14960 sec. 4.3: time of an MoE layer by part, for many mappings.

    python -m benchmarks.mapping_ablation                                      tables
    python -m benchmarks.mapping_ablation --picture docs/images/ablations.png  and the charts of docs/folding.md

One MoE layer, forward and backward, of one micro-batch with 4,096 tokens on each rank, on nodes of 8 GPUs, priced by
the planner's cost model in bfloat16 with balanced experts. Experts: all factorizations of 8 or 16 ranks into ETP x EP.
Context: sequences of 4,096 * CP tokens, with EP folded over the CP ranks, or coupled (EP is a factor of DP: neighbours
in the EP group are CP ranks apart, so the all-to-all leaves the node once CP * EP exceeds its GPUs).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.colours import FAINT, INK, PALETTE
from moefold.cost.hardware import load_device
from moefold.planner.cost_model.layer import LayerCostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import ModelSpec, model_spec_from_config
from moefold.recipe import load_config

MODELS = {"mixtral-8x22b": "Mixtral-8x22B", "mixtral-8x22b-g8t8": "Mixtral-8x22B-G8T8, 64 experts, top 8"}
TOKENS = 4096
PARTS = {
    "experts": "experts",
    "router": "router and norm",
    "permute": "permutation",
    "ep_comm": "all-to-all over EP",
    "etp_comm": "all-gathers over ETP",
}
COLOURS = dict(zip(PARTS, (PALETTE[0], PALETTE[3], PALETTE[10], PALETTE[15], PALETTE[13]), strict=True))


@dataclass(frozen=True)
class Bar:
    """Time of one layer under one mapping, one bar of a chart."""

    name: str
    milliseconds: dict[str, float]

    @property
    def total(self) -> float:
        """Sum of the parts, ms."""
        return sum(self.milliseconds.values())


def predict(model: ModelSpec, gpu: str, degrees: dict[str, int], *, coupled: bool = False) -> dict[str, float]:
    """Return the milliseconds of each part of the layer."""
    cp = degrees.get("cp", 1)
    workload = TrainingWorkload(seq_len=TOKENS * cp, global_batch_size=1, is_coupled=coupled)
    cost_model = LayerCostModel(model, load_device(gpu), workload)
    block = cost_model.feed_forward(model.layers[-1], ParallelMapping(**degrees))
    part_ms = dict.fromkeys(PARTS, 0.0)
    for item in (*block.forward, *block.backward):
        part_ms[item.part] += 1e3 * item.seconds
    return part_ms


def expert_bars(model: ModelSpec, gpu: str, num_ranks: int) -> Iterator[Bar]:
    """Yield the mappings ETP x EP of `num_ranks` ranks."""
    num_experts = model.config.experts.num_experts
    etp = 1
    while etp <= num_ranks:
        ep = num_ranks // etp
        if ep <= num_experts:
            yield Bar(f"ETP{etp} EP{ep}", predict(model, gpu, {"ep": ep, "etp": etp}))
        etp *= 2


def context_bars(model: ModelSpec, gpu: str) -> Iterator[Bar]:
    """Yield the mappings CP x EP, coupled and folded."""
    for cp in (1, 2, 4, 8):
        for ep in (4, 8):
            for coupled in (True, False):
                name = f"CP{cp} EP{ep} {'coupled' if coupled else 'folded'}"
                yield Bar(name, predict(model, gpu, {"cp": cp, "ep": ep}, coupled=coupled))


def sections(gpu: str) -> Iterator[tuple[str, str, list[Bar]]]:
    """Yield model, heading and bars of every chart."""
    for preset, name in MODELS.items():
        model = model_spec_from_config(load_config(None, [f"model.preset={preset}"]).model)
        for num_ranks in (8, 16):
            yield name, f"ETP x EP = {num_ranks}", list(expert_bars(model, gpu, num_ranks))
        yield name, "CP x EP", list(context_bars(model, gpu))


def print_tables(charts: list[tuple[str, str, list[Bar]]]) -> None:
    """Print the charts as Markdown tables, in milliseconds."""
    for model, heading, bars in charts:
        print(f"\n### {model}, {heading}\n")
        print(f"| mapping | {' | '.join(PARTS.values())} | total, ms |")
        print(f"| --- |{' --- |' * (len(PARTS) + 1)}")
        for bar in bars:
            cells = " | ".join(f"{bar.milliseconds[part]:.2f}" for part in PARTS)
            print(f"| {bar.name} | {cells} | {bar.total:.2f} |")


def draw(charts: list[tuple[str, str, list[Bar]]], gpu: str, path: Path) -> None:
    """Draw a row of charts for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8.6), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(len(MODELS), 3, squeeze=False, width_ratios=[1, 1.1, 2.6])
    for axes, (model, heading, bars) in zip(grid.flat, charts, strict=True):
        bottoms = [0.0] * len(bars)
        for part, name in PARTS.items():
            heights = [bar.milliseconds[part] for bar in bars]
            axes.bar(range(len(bars)), heights, bottom=bottoms, color=COLOURS[part], label=name, width=0.72)
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
        for i, total in enumerate(bottoms):
            axes.text(i, total, f"{total:.1f}", ha="center", va="bottom", fontsize=8, color=INK)
        axes.set_xticks(range(len(bars)), [bar.name.replace(" ", "\n") for bar in bars], fontsize=8)
        axes.set_title(heading, fontsize=10.5, color=INK)
        axes.tick_params(colors=FAINT, length=0, labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        label = f"{model}\nms, forward and backward" if axes in grid[:, 0] else ""
        axes.set_ylabel(label, fontsize=9, color=INK)
    grid.flat[0].legend(fontsize=8.5, frameon=False, loc="upper left")
    # Leave space for the legend.
    grid.flat[0].set_ylim(0, 1.6 * max(bar.total for bar in charts[0][2]))
    figure.suptitle(f"One MoE layer with {TOKENS:,} tokens a rank on {gpu} nodes, predicted", fontsize=12, color=INK)
    figure.savefig(path)


def main() -> None:
    """Predict, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100", help="device of the planner, or FILE.toml (default h100)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the charts")
    options = parser.parse_args()
    charts = list(sections(options.gpu))
    print_tables(charts)
    if options.picture is not None:
        draw(charts, options.gpu, options.picture)


if __name__ == "__main__":
    main()
