"""The pipeline stages as a panel of the layout picture: a row a stage, a box a layer, bars for what it costs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.cli.layout_stages import compact_count, holds
from moefold.config.schema import Config
from moefold.parallel.stage_balance import Load, stage_load
from moefold.parallel.stage_plan import Stage, StagePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.42
HEAD = 1.45
MARGIN = 0.3
NAMES = 1.75
UNITS = 3.6
BARS = 2.05
BAR_TEXT = 0.62
GAP = 0.35
UNIT = 0.34
SMALLEST_NUMBERED_UNIT = 0.2
LEAST_ROWS = 8
"""Stages of a column, before there is another one where it fits."""
MOST_ROWS = 48
LONGEST_LAYOUT = 110
INK, FAINT, TRAY, BAR, WEIGHT_BAR = "#1c2430", "#7a8594", "#eef1f5", "#5b7fb5", "#8a9a5b"
FILLS = {
    "E": ("#cfe0f7", "embedding"),
    "t": ("#e3e6eb", "layer"),
    "D": ("#dcebd3", "dense layer"),
    "M": ("#fbe0c3", "MoE layer"),
    "m": ("#e3d3f2", "multi-token prediction"),
    "L": ("#f7cfd2", "head and loss"),
}


@dataclass(frozen=True)
class StagePanel:
    """Draws the stages of a plan.

    Args:
        plan: the stages.
        cfg: the recipe, which says what kind each layer is and what it costs; without one neither is drawn.
        width: inches that the picture has; columns of stages stand side by side as far as they fit.
    """

    plan: StagePlan
    cfg: Config | None
    width: float

    @property
    def height(self) -> float:
        """Height of the panel in inches."""
        return HEAD + self._num_rows * ROW + MARGIN

    @property
    def least_width(self) -> float:
        """What the columns need."""
        return 2 * MARGIN + self._num_columns * (self._column_width + GAP) - GAP

    def draw(self, axes: "Axes") -> None:
        """Draw into axes of the panel's size, whose unit is an inch and whose origin is the upper left corner."""
        loads = None if self.cfg is None else [stage_load(self.cfg, stage.parts) for stage in self.plan.stages]
        text = self.plan.layout
        shown = text if len(text) <= LONGEST_LAYOUT else f"{text[:LONGEST_LAYOUT]}..."
        axes.text(MARGIN, 0.36, "pipeline stages", fontsize=17, fontweight="bold", color=INK, va="center")
        axes.text(MARGIN, 0.72, shown, fontsize=10, color=INK, va="center", family="monospace")
        self._draw_legend(axes)
        most = Load(1, 1)
        if loads is not None:
            most = Load(max(1, *(load.flops for load in loads)), max(1, *(load.weights for load in loads)))
        for i, stage in enumerate(self.plan.stages):
            column, row = divmod(i, self._num_rows)
            corner = MARGIN + column * (self._column_width + GAP), HEAD + row * ROW
            self._draw_stage(axes, stage, corner)
            if loads is not None:
                self._draw_bars(axes, corner, loads[i], most)

    @property
    def _column_width(self) -> float:
        return NAMES + UNITS + (0 if self.cfg is None else 2 * BARS)

    @property
    def _num_rows(self) -> int:
        return -(-len(self.plan.stages) // self._num_columns)

    @property
    def _num_columns(self) -> int:
        """As many as fit and are worth it, or more where one column would be a tower."""
        count = len(self.plan.stages)
        fitting = int((self.width - 2 * MARGIN + GAP) / (self._column_width + GAP))
        return max(1, min(fitting, -(-count // LEAST_ROWS)), -(-count // MOST_ROWS))

    def _draw_legend(self, axes: "Axes") -> None:
        left = MARGIN
        used = {kind for stage in self.plan.stages for kind, _ in self._units(stage)}
        for kind, (fill, meaning) in FILLS.items():
            if kind not in used:
                continue
            _box(axes, (left, 0.99, 0.18, 0.18), fill)
            axes.text(left + 0.26, 1.08, meaning, fontsize=9.5, color=FAINT, va="center")
            left += 0.5 + 0.082 * len(meaning)
        if self.cfg is not None:
            left = MARGIN + NAMES + UNITS
            axes.text(left, HEAD - 0.14, "operations, of the busiest", fontsize=8.5, color=FAINT, va="center")
            axes.text(left + BARS, HEAD - 0.14, "weights of a rank", fontsize=8.5, color=FAINT, va="center")

    def _draw_stage(self, axes: "Axes", stage: Stage, corner: tuple[float, float]) -> None:
        left, top = corner
        middle = top + ROW / 2
        width = self._column_width - 0.1
        _box(axes, (left - 0.08, top + 0.03, width, ROW - 0.06), TRAY if stage.pp_rank % 2 == 0 else "#f8f9fb")
        axes.text(left, middle, f"stage {stage.number}", fontsize=10, fontweight="bold", color=INK, va="center")
        axes.text(left + 0.86, middle, f"pp rank {stage.pp_rank}", fontsize=9, color=FAINT, va="center")
        units = list(self._units(stage))
        if not units:
            axes.text(left + NAMES, middle, holds(stage.parts), fontsize=9, color=FAINT, va="center")
            return
        size = min(UNIT, (UNITS - 0.2) / len(units))
        for i, (kind, label) in enumerate(units):
            box = (left + NAMES + i * size, top + 0.07, size - min(0.04, size / 5), ROW - 0.14)
            _box(axes, box, FILLS[kind][0])
            is_end = i in (0, len(units) - 1) and size > SMALLEST_NUMBERED_UNIT / 2
            if size >= SMALLEST_NUMBERED_UNIT or is_end:
                centre = box[0] + box[2] / 2
                axes.text(centre, middle, label, fontsize=7.5, color=INK, va="center", ha="center")

    def _draw_bars(self, axes: "Axes", corner: tuple[float, float], load: Load, most: Load) -> None:
        left, top = corner[0] + NAMES + UNITS, corner[1]
        bars = (
            (load.flops / most.flops, f"{load.flops / most.flops:.0%}", BAR),
            (load.weights / most.weights, compact_count(load.weights), WEIGHT_BAR),
        )
        for i, (share, label, fill) in enumerate(bars):
            start = left + i * BARS
            axes.text(start + BAR_TEXT - 0.08, top + ROW / 2, label, fontsize=9, color=INK, va="center", ha="right")
            if share > 0:
                _box(axes, (start + BAR_TEXT, top + 0.12, share * (BARS - BAR_TEXT - 0.25), ROW - 0.24), fill)

    def _units(self, stage: Stage) -> Iterator[tuple[str, str]]:
        """The kind and the label of each box of a stage."""
        if stage.parts.has_embedding:
            yield "E", "E"
        for number in stage.parts.layers:
            yield "t" if self.cfg is None else self.cfg.model.layer_kinds[number], str(number)
        for _ in range(stage.parts.num_further):
            yield "m", "m"
        if stage.parts.has_loss:
            yield "L", "L"


def _box(axes: "Axes", box: tuple[float, float, float, float], fill: str) -> None:
    from matplotlib.patches import Rectangle

    left, top, width, height = box
    axes.add_patch(Rectangle((left, top), width, height, facecolor=fill, edgecolor="none"))
