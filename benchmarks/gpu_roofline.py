"""Estimate the time of a MoE layer on one H200 from the trace of its CUDA step. Nothing is run on a GPU.

    python -m benchmarks.gpu_roofline                 rates, the layers of docs/kernels-cuda.md, their losses
    python -m benchmarks.gpu_roofline --part block    the same with attention and norms
    python -m benchmarks.gpu_roofline --operations    bytes, FLOPs, rate and time of each operation of the layers
    python -m benchmarks.gpu_roofline --write         save the tables of the layers in docs/kernels-cuda.md

Forward and backward pass. Each traced operator or kernel takes the time of its FLOPs or of its bytes at an assumed
rate, whichever is longer, and at least the time of an empty kernel. The further bytes of a GEMM's epilogue add to it.
Collectives and host waits are added without overlap. The autotuner takes the candidate with the smallest estimate. The
rates are assumptions, each with its source in `RATES`: an estimate shows the share of each part, and does not predict a
measurement.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.cuda_layers import LayerPart, layer_config, trace_layer
from benchmarks.cuda_trace import GATHERING_OPS, Event
from moefold.config.schema import Config
from moefold.cost.flops import TRAIN_TO_FORWARD, train_flops_per_token


class Rate(NamedTuple):
    """An assumed rate and where it comes from."""

    value: float
    source: str


SHAPE_SOURCE = (
    "assumption: CUTLASS grouped GEMM with tiles of 128x256, whose prologue and epilogue cost more the shorter the sums"
)
RATES = {
    "gemm": Rate(790e12, "80 % of the 989 TFLOP/s of the data sheet, dense bf16; the unit of all shares"),
    "float32 gemm": Rate(45e12, "assumption: 67 % of the 67 TFLOP/s of the data sheet, float32 without tensor cores"),
    "grouped gemm, 768 terms": Rate(470e12, SHAPE_SOURCE),
    "grouped gemm, 2048 terms": Rate(540e12, SHAPE_SOURCE),
    "grouped gemm, 6144 terms": Rate(620e12, SHAPE_SOURCE),
    "weight gradient, 768 wide": Rate(500e12, SHAPE_SOURCE),
    "weight gradient, 6144 wide": Rate(600e12, SHAPE_SOURCE),
    "triton grouped gemm": Rate(0.83, "assumption: share of the rates above, as loads are not multicast: 520 of 620"),
    "attention": Rate(575e12, "assumption: cuDNN, causal, heads of 128, as in figure 5 of arXiv:2407.08608"),
    "attention backward": Rate(480e12, "assumption: cuDNN, causal, heads of 128, as in figure 6 of arXiv:2407.08608"),
    "flash": Rate(375e12, "assumption: FlashAttention-2 on Hopper, as in figure 5 of arXiv:2407.08608"),
    "flash backward": Rate(310e12, "assumption: FlashAttention-2 on Hopper, as in figure 6 of arXiv:2407.08608"),
    "memory": Rate(3.9e12, "assumption: 81 % of the 4.8 TB/s of the data sheet"),
    "link": Rate(350e9, "assumption: 78 % of the 450 GB/s that NVLink sends each way by the data sheet"),
    "kernel": Rate(3e-6, "assumption: shortest time of a kernel and the gap to the next, s"),
    "sort": Rate(25e-6, "assumption: radix sort of 16-bit keys in two passes, s"),
    "host wait": Rate(60e-6, "assumption: the device is idle until the host has read a number and launched more, s"),
}
"""Assumed rates per second of an H200: FLOPs, bytes; times in s; one share."""
DEPTHS = {768: "grouped gemm, 768 terms", 2048: "grouped gemm, 2048 terms", 6144: "grouped gemm, 6144 terms"}
WIDTHS = {768: "weight gradient, 768 wide", 6144: "weight gradient, 6144 wide"}
FUSED_ATTENTION = {
    "sdpa": "attention",
    "sdpa backward": "attention backward",
    "_scaled_dot_product_cudnn_attention": "attention",
    "_scaled_dot_product_cudnn_attention_backward": "attention backward",
    "_flash_attention_forward": "flash",
    "_flash_attention_backward": "flash backward",
}
GROUPED_GEMMS = ("_grouped_mm", "_grouped_gemm_kernel", "_fc1_kernel", "_weight_grad_kernel")
PAGE = Path(__file__).parents[1] / "docs" / "kernels-cuda.md"
BEGIN = "<!-- tables of benchmarks/gpu_roofline.py -->"
END = "<!-- end of the tables -->"
SHORTEST_LISTED = 0.003
"""Minimum share of a layer's time for an operation in `operations_table`."""


@dataclass(frozen=True)
class Layer:
    """A layer to estimate.

    Attributes:
        goal: share of the ideal rate to reach; None: no goal.
    """

    preset: str
    tokens: int
    ep: int = 1
    goal: float | None = None
    dispatcher: str = "alltoall"

    @property
    def name(self) -> str:
        """Model, tokens of a rank, expert parallelism and its dispatcher unless it is the all-to-all."""
        words = [self.preset, f"{self.tokens:,}"]
        if self.ep > 1:
            words.append(f"EP {self.ep}")
        return ", ".join(words) + ("" if self.dispatcher == "alltoall" else f" {self.dispatcher}")

    def config(self) -> Config:
        """Build the recipe."""
        parallel = {"world_size": self.ep, "ep": self.ep, "dispatcher": self.dispatcher} if self.ep > 1 else {}
        return layer_config(self.preset, self.tokens, parallel=parallel)


LAYERS = (
    Layer("mixtral-8x22b", 4096),
    Layer("mixtral-8x22b", 16384, goal=0.78),
    Layer("qwen3-30b-a3b", 4096),
    Layer("qwen3-30b-a3b", 16384, goal=0.57),
    Layer("qwen3-30b-a3b", 4096, ep=8),
    Layer("qwen3-30b-a3b", 16384, ep=8, goal=0.33),
    Layer("qwen3-30b-a3b", 4096, ep=8, dispatcher="dedup_alltoall"),
    Layer("qwen3-30b-a3b", 16384, ep=8, goal=0.33, dispatcher="dedup_alltoall"),
    Layer("mixtral-8x22b", 16384, ep=8),
    Layer("mixtral-8x22b", 16384, ep=8, dispatcher="dedup_alltoall"),
)


@dataclass(frozen=True)
class Estimate:
    """Estimated times of a layer, forward and backward, in s.

    Attributes:
        ideal: time of the model's FLOPs at the rate of a large GEMM.
        seconds: time by part of the layer.
        losses: by part: time beyond the time of its FLOPs at the rate of a large GEMM.
    """

    ideal: float
    seconds: Counter[str]
    losses: Counter[str]

    @property
    def total(self) -> float:
        """Time of the layer."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Share of the rate of a large GEMM that the layer reaches."""
        return self.ideal / self.total

    @property
    def share_without_collectives(self) -> float:
        """The same if collectives took no time."""
        return self.ideal / (self.total - self.seconds["collectives"])


def interpolated(anchors: dict[int, str], size: int) -> float:
    """Return a rate between the rates of two sizes, linear in the logarithm of the size; constant outside."""
    sizes = sorted(anchors)
    size = min(max(size, sizes[0]), sizes[-1])
    upper = next(bound for bound in sizes if size <= bound)
    lower = max((bound for bound in sizes if bound <= size), default=upper)
    low, high = (RATES[anchors[bound]].value for bound in (lower, upper))
    return low if lower == upper else low + (high - low) * math.log(size / lower) / math.log(upper / lower)


def flops_rate(event: Event) -> float:
    """Return the assumed FLOPs per second of a matrix product."""
    if event.name in FUSED_ATTENTION:
        return RATES[FUSED_ATTENTION[event.name]].value
    if event.is_float32:
        return RATES["float32 gemm"].value
    if event.name not in GROUPED_GEMMS:
        return RATES["gemm"].value
    is_wgrad = event.is_weight_gradient
    rate = interpolated(WIDTHS, event.width) if is_wgrad else interpolated(DEPTHS, event.contraction)
    return rate * (RATES["triton grouped gemm"].value if event.kind == "kernel" else 1.0)


def event_seconds(event: Event) -> float:
    """Return the estimated time of a traced event. Host work that the device hides takes none."""
    if event.kind == "wait":
        return RATES["host wait"].value
    if event.kind == "collective":
        return event.moved_bytes / RATES["link"].value
    if event.kind not in ("op", "kernel"):
        return 0.0
    if event.name == "sort":
        return RATES["sort"].value
    by_flops = event.flops / flops_rate(event) if event.flops else 0.0
    # A GEMM program uses all registers of a multiprocessor, so no other program computes there while it writes.
    epilogue = event.epilogue_bytes / RATES["memory"].value
    by_bytes = (event.moved_bytes - event.epilogue_bytes) / RATES["memory"].value
    return max(by_flops, by_bytes, RATES["kernel"].value) + epilogue


def part_of(event: Event) -> str:
    """Return the part of the layer that an event belongs to, by operator and file."""
    file = event.source.partition(":")[0]
    if event.kind == "collective":
        return "collectives"
    if event.kind == "wait":
        return "host waits"
    if event.name in GROUPED_GEMMS:
        return "weight gradients of experts" if event.is_weight_gradient else "GEMMs of experts"
    if event.name in FUSED_ATTENTION:
        return "attention core"
    if file in ("ops/split_gemm.py", "ops/triton/router.py", "model/moe/router.py"):
        return "router"
    if event.flops:
        return "other GEMMs"
    if file == "ops/triton/swiglu.py":
        return "activation"
    if event.name in ("_combine_kernel", "_combine_backward_kernel"):
        return "combine"
    if event.name in GATHERING_OPS and file in ("ops/expert_ops.py", "ops/permute.py"):
        return "gathers of tokens"
    if event.name == "sort" or file == "model/moe/permute.py":
        return "permutation"
    if file == "autograd":
        return "sums of autograd"
    return "losses and counts" if file.startswith("model/moe/") else f"others in {file}"


def model_flops(cfg: Config, part: LayerPart) -> float:
    """Return the FLOPs of the experts for the tokens of a rank, or of the whole block with causal attention."""
    count = train_flops_per_token(cfg.model, cfg.train.seq_len, causal=True)
    experts = count.experts + count.shared_experts
    return TRAIN_TO_FORWARD * float(experts if part == "layer" else count.forward - count.head) * cfg.train.seq_len


def estimate(events: Sequence[Event], flops: float) -> Estimate:
    """Estimate the time of traced events.

    Args:
        events: events of a forward and a backward pass.
        flops: FLOPs of the model.
    """
    seconds: Counter[str] = Counter()
    losses: Counter[str] = Counter()
    for event in events:
        part = part_of(event)
        seconds[part] += event_seconds(event)
        # FLOPs of the split router GEMMs and of recomputation are not model FLOPs: their time is lost.
        needed = 0.0 if part == "router" else event.flops / RATES["gemm"].value
        losses[part] += event_seconds(event) - needed
    return Estimate(flops / RATES["gemm"].value, seconds, losses)


def estimate_layer(layer: Layer, part: LayerPart = "layer") -> Estimate:
    """Trace a layer and estimate its time."""
    cfg = layer.config()
    return estimate(trace_events(layer, part), model_flops(cfg, part))


def trace_events(layer: Layer, part: LayerPart = "layer") -> list[Event]:
    """Trace a layer whose autotuner takes the candidate with the smallest estimate."""
    return trace_layer(layer.config(), part, event_seconds=event_seconds).events


def operations_table(events: Sequence[Event]) -> str:
    """Return a table of Markdown, one row for each operation at each line, in the order of their first events."""
    rows: dict[tuple[str, str, int, int], list[Event]] = {}
    for event in events:
        rows.setdefault((event.name, event.source, event.contraction, event.width), []).append(event)
    total = sum(map(event_seconds, events))
    lines = ["| operation | line | times | GB | TFLOP | TFLOP/s | ms |", "| --- | --- | --- | --- | --- | --- | --- |"]
    other_s = 0.0
    for (name, source, contraction, width), group in rows.items():
        seconds = sum(map(event_seconds, group))
        if seconds < SHORTEST_LISTED * total:
            other_s += seconds
            continue
        flops = sum(event.flops for event in group)
        rate = f"{flops_rate(group[0]) / 1e12:.0f}" if flops else ""
        shape = f" K {contraction:,} N {width:,}" if flops else ""
        moved = f"{sum(event.moved_bytes for event in group) / 1e9:.3f} | {flops / 1e12:.3f}"
        lines.append(f"| {name}{shape} | {source} | {len(group)} | {moved} | {rate} | {seconds * 1e3:.3f} |")
    return "\n".join([*lines, f"| others | | | | | | {other_s * 1e3:.3f} |", f"| sum | | | | | | {total * 1e3:.3f} |"])


def table(estimates: dict[Layer, Estimate]) -> str:
    """Return a table of Markdown, one row for each layer, and the largest losses of each."""
    lines = [
        "| layer, tokens of a rank | ideal, ms | estimate, ms | share | without collectives | goal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for layer, cost in estimates.items():
        goal = "" if layer.goal is None else f"{layer.goal:.0%}"
        times = f"{cost.ideal * 1e3:.2f} | {cost.total * 1e3:.2f}"
        lines.append(f"| {layer.name} | {times} | {cost.share:.0%} | {cost.share_without_collectives:.0%} | {goal} |")
    lines += ["", "| layer, tokens of a rank | largest losses, ms and share of the time |", "| --- | --- |"]
    for layer, cost in estimates.items():
        losses = [f"{part} {lost * 1e3:.2f} ({lost / cost.total:.0%})" for part, lost in cost.losses.most_common(3)]
        lines.append(f"| {layer.name} | {', '.join(losses)} |")
    return "\n".join(lines)


def write_page(text: str) -> None:
    """Replace the text between the two marks of docs/kernels-cuda.md."""
    page = PAGE.read_text()
    before, _, tail = page.partition(BEGIN)
    _, _, after = tail.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def rates_table() -> str:
    """Return the assumed rates as a table of Markdown."""
    rows = [f"| {name} | {rate.value:.3g} | {rate.source} |" for name, rate in RATES.items()]
    return "\n".join(["| rate | value | source |", "| --- | --- | --- |", *rows])


def main() -> int:
    """Print the rates, the estimates and the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["layer", "block"], default="layer")
    parser.add_argument("--operations", action="store_true", help="print the operations of each layer")
    parser.add_argument("--write", action="store_true", help="save the tables of the layers in docs/kernels-cuda.md")
    args = parser.parse_args()
    if args.write:
        write_page(table({layer: estimate_layer(layer) for layer in LAYERS}))
        return 0
    if args.operations:
        for layer in LAYERS:
            print(f"{layer.name}\n\n{operations_table(trace_events(layer, args.part))}\n")
        return 0
    print(rates_table(), end="\n\n")
    layers = LAYERS if args.part == "layer" else [replace(layer, goal=None) for layer in LAYERS]
    print(table({layer: estimate_layer(layer, args.part) for layer in layers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
