"""The pipeline stages of a recipe as text: what stands where, and what it costs."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moefold.config.pipeline_layout import StageParts
from moefold.config.schema import Config
from moefold.parallel.stage_balance import stage_cost
from moefold.parallel.stage_plan import StagePlan

BAR = "█"
BAR_WIDTH = 20


def print_stages(console: Console, plan: StagePlan, cfg: Config | None) -> None:
    """Print the layout as a string, and a row for each stage: its rank, its parts, its operations and weights.

    The operations are those of the forward pass, against the busiest stage; the weights are those of one rank. Without
    a recipe nothing is known of either.
    """
    table = Table(
        title=f"stages, {plan.layout}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    for name in ("stage", "pp rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("holds")
    loads = None if cfg is None else [stage_cost(cfg, stage.parts) for stage in plan.stages]
    if loads is not None:
        table.add_column("weights", justify="right", no_wrap=True)
        table.add_column("operations", no_wrap=True)
    for stage in plan.stages:
        cells = [str(stage.number), str(stage.pp_rank), describe_stage(stage.parts)]
        if loads is not None:
            load, most = loads[stage.number], max(1, *(load.flops for load in loads))
            share = load.flops / most
            cells += [
                compact_count(load.num_parameters),
                f"{share:4.0%} {BAR * round(BAR_WIDTH * share)}",
            ]
        table.add_row(*cells)
    console.print()
    console.print(table)


def describe_stage(parts: StageParts) -> str:
    """What a stage holds, in words."""
    words = ["embedding"] if parts.has_embedding else []
    layers = parts.layers
    if len(layers) == 1:
        words.append(f"layer {layers[0]}")
    elif layers:
        words.append(f"layers {layers[0]}-{layers[-1]}")
    if parts.num_mtp_layers:
        words.append(f"{parts.num_mtp_layers} further")
    if parts.has_loss:
        words.append("loss")
    return ", ".join(words) or "nothing"


def compact_count(weights: int) -> str:
    """A number of parameters, short."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if weights >= size:
            return f"{weights / size:.1f} {unit}"
    return str(weights)
