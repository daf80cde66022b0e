"""Pipeline-stage panel of the layout picture: a row per stage, a box per layer, bars for the cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.cli.layout_table import compact_count, describe_stage
from moefold.config.schema import Config
from moefold.cost.stage_partition import StageCost, stage_cost
from moefold.topology.stages import Stage, StagePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGE_ROW_HEIGHT = 0.42
STAGES_HEAD_HEIGHT = 1.45
STAGES_MARGIN = 0.3
NAMES_WIDTH = 1.75
UNITS_WIDTH = 3.6
BARS_WIDTH = 2.05
BAR_TEXT_WIDTH = 0.62
COLUMN_GAP = 0.35
MAX_UNIT_WIDTH = 0.34
MIN_NUMBERED_UNIT_WIDTH = 0.2
MIN_COLUMN_STAGES = 8
"""Stages per column before another column is added where it fits."""
MAX_COLUMN_STAGES = 48
MAX_LAYOUT_CHARS = 110
INK = "#1c2430"
FAINT = "#7a8594"
TRAY = "#eef1f5"
FLOPS_BAR_COLOR = "#5b7fb5"
WEIGHT_BAR_COLOR = "#8a9a5b"
UNIT_COLORS = {
    "E": ("#cfe0f7", "embedding"),
    "t": ("#e3e6eb", "layer"),
    "D": ("#dcebd3", "dense layer"),
    "M": ("#fbe0c3", "MoE layer"),
    "m": ("#e3d3f2", "multi-token prediction"),
    "L": ("#f7cfd2", "head and loss"),
}


@dataclass(frozen=True)
class StagePanel:
    """Panel with the stages of a plan.

    Args:
        plan: the stages.
        cfg: the recipe, for the kind and the cost of each layer; None draws neither.
        width: inches of the picture; stages are drawn in as many columns as fit.
    """

    plan: StagePlan
    cfg: Config | None
    width: float

    @property
    def height(self) -> float:
        """Height of the panel in inches."""
        return STAGES_HEAD_HEIGHT + self._num_rows * STAGE_ROW_HEIGHT + STAGES_MARGIN

    @property
    def min_width(self) -> float:
        """Width in inches that the columns need."""
        return 2 * STAGES_MARGIN + self._num_columns * (self._column_width + COLUMN_GAP) - COLUMN_GAP

    def draw(self, axes: "Axes") -> None:
        """Draw into axes of the panel's size in inches, with the origin in the upper left corner."""
        costs = None if self.cfg is None else [stage_cost(self.cfg, stage.parts) for stage in self.plan.stages]
        text = self.plan.layout
        shown = text if len(text) <= MAX_LAYOUT_CHARS else f"{text[:MAX_LAYOUT_CHARS]}..."
        axes.text(STAGES_MARGIN, 0.36, "pipeline stages", fontsize=17, fontweight="bold", color=INK, va="center")
        axes.text(STAGES_MARGIN, 0.72, shown, fontsize=10, color=INK, va="center", family="monospace")
        self._draw_legend(axes)
        max_cost = StageCost(1, 1)
        if costs is not None:
            max_cost = StageCost(
                max(1, *(cost.flops for cost in costs)), max(1, *(cost.num_parameters for cost in costs))
            )
        for i, stage in enumerate(self.plan.stages):
            column, row = divmod(i, self._num_rows)
            corner = (
                STAGES_MARGIN + column * (self._column_width + COLUMN_GAP),
                STAGES_HEAD_HEIGHT + row * STAGE_ROW_HEIGHT,
            )
            self._draw_stage(axes, stage, corner)
            if costs is not None:
                self._draw_bars(axes, corner, costs[i], max_cost)

    @property
    def _column_width(self) -> float:
        return NAMES_WIDTH + UNITS_WIDTH + (0 if self.cfg is None else 2 * BARS_WIDTH)

    @property
    def _num_rows(self) -> int:
        return -(-len(self.plan.stages) // self._num_columns)

    @property
    def _num_columns(self) -> int:
        """Number of columns: those that fit and are worthwhile, or more if one column would be too tall."""
        count = len(self.plan.stages)
        fitting = int((self.width - 2 * STAGES_MARGIN + COLUMN_GAP) / (self._column_width + COLUMN_GAP))
        return max(1, min(fitting, -(-count // MIN_COLUMN_STAGES)), -(-count // MAX_COLUMN_STAGES))

    def _draw_legend(self, axes: "Axes") -> None:
        left = STAGES_MARGIN
        used = {kind for stage in self.plan.stages for kind, _ in self._units(stage)}
        for kind, (fill, meaning) in UNIT_COLORS.items():
            if kind not in used:
                continue
            _draw_rectangle(axes, (left, 0.99, 0.18, 0.18), fill)
            axes.text(left + 0.26, 1.08, meaning, fontsize=9.5, color=FAINT, va="center")
            left += 0.5 + 0.082 * len(meaning)
        if self.cfg is not None:
            left = STAGES_MARGIN + NAMES_WIDTH + UNITS_WIDTH
            axes.text(left, STAGES_HEAD_HEIGHT - 0.14, "FLOPs, of the busiest", fontsize=8.5, color=FAINT, va="center")
            axes.text(
                left + BARS_WIDTH,
                STAGES_HEAD_HEIGHT - 0.14,
                "weights per rank",
                fontsize=8.5,
                color=FAINT,
                va="center",
            )

    def _draw_stage(self, axes: "Axes", stage: Stage, corner: tuple[float, float]) -> None:
        left, top = corner
        middle = top + STAGE_ROW_HEIGHT / 2
        width = self._column_width - 0.1
        _draw_rectangle(
            axes,
            (left - 0.08, top + 0.03, width, STAGE_ROW_HEIGHT - 0.06),
            TRAY if stage.pp_rank % 2 == 0 else "#f8f9fb",
        )
        axes.text(left, middle, f"stage {stage.number}", fontsize=10, fontweight="bold", color=INK, va="center")
        axes.text(left + 0.86, middle, f"pp rank {stage.pp_rank}", fontsize=9, color=FAINT, va="center")
        units = list(self._units(stage))
        if not units:
            axes.text(left + NAMES_WIDTH, middle, describe_stage(stage.parts), fontsize=9, color=FAINT, va="center")
            return
        size = min(MAX_UNIT_WIDTH, (UNITS_WIDTH - 0.2) / len(units))
        for i, (kind, label) in enumerate(units):
            box = (left + NAMES_WIDTH + i * size, top + 0.07, size - min(0.04, size / 5), STAGE_ROW_HEIGHT - 0.14)
            _draw_rectangle(axes, box, UNIT_COLORS[kind][0])
            is_end = i in (0, len(units) - 1) and size > MIN_NUMBERED_UNIT_WIDTH / 2
            if size >= MIN_NUMBERED_UNIT_WIDTH or is_end:
                centre = box[0] + box[2] / 2
                axes.text(centre, middle, label, fontsize=7.5, color=INK, va="center", ha="center")

    def _draw_bars(self, axes: "Axes", corner: tuple[float, float], cost: StageCost, max_cost: StageCost) -> None:
        left = corner[0] + NAMES_WIDTH + UNITS_WIDTH
        top = corner[1]
        bars = (
            (cost.flops / max_cost.flops, f"{cost.flops / max_cost.flops:.0%}", FLOPS_BAR_COLOR),
            (cost.num_parameters / max_cost.num_parameters, compact_count(cost.num_parameters), WEIGHT_BAR_COLOR),
        )
        for i, (share, label, fill) in enumerate(bars):
            start = left + i * BARS_WIDTH
            axes.text(
                start + BAR_TEXT_WIDTH - 0.08,
                top + STAGE_ROW_HEIGHT / 2,
                label,
                fontsize=9,
                color=INK,
                va="center",
                ha="right",
            )
            if share > 0:
                _draw_rectangle(
                    axes,
                    (
                        start + BAR_TEXT_WIDTH,
                        top + 0.12,
                        share * (BARS_WIDTH - BAR_TEXT_WIDTH - 0.25),
                        STAGE_ROW_HEIGHT - 0.24,
                    ),
                    fill,
                )

    def _units(self, stage: Stage) -> Iterator[tuple[str, str]]:
        """Yield the kind and the label of each box of a stage."""
        if stage.parts.has_embedding:
            yield "E", "E"
        for number in stage.parts.layers:
            yield "t" if self.cfg is None else self.cfg.model.layer_kinds[number], str(number)
        for _ in range(stage.parts.num_mtp_layers):
            yield "m", "m"
        if stage.parts.has_loss:
            yield "L", "L"


def _draw_rectangle(axes: "Axes", box: tuple[float, float, float, float], fill: str) -> None:
    from matplotlib.patches import Rectangle

    left, top, width, height = box
    axes.add_patch(Rectangle((left, top), width, height, facecolor=fill, edgecolor="none"))
