"""The pipeline schedules by name: row generators, and the facts that rules, formulas and the planner ask. Torch-free.

The runtime, the memory formulas, the simulator and the planner read the rows of one generator. To add a schedule see
docs/extending.md.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from moefold.config.schema import Config, ParallelConfig, has_moe_layers
from moefold.topology.pipeline_action import SlotRow, one_per_slot, split_pairs
from moefold.topology.schedule_csv import read_schedule
from moefold.topology.schedule_rows import (
    RowGenerator,
    dualpipev_row,
    gpipe_row,
    interleaved_row,
    one_f_one_b_row,
    overlapped_interleaved_row,
    zbv_row,
    zero_bubble_row,
)


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """One pipeline schedule. The defaults describe one stage per rank and whole backward passes."""

    name: str
    """As in `parallel.schedule`."""
    row: RowGenerator
    """The slots of a pipeline rank. Pairs share a slot; without overlap their passes run one after the other."""
    overlapped_row: RowGenerator | None = None
    """The slots of a pipeline rank with `parallel.overlap_experts`; None: there is no phase of one forward and one
    backward pass, so that it is rejected."""
    reads_file: bool = False
    """Whether rows and placement come from `parallel.schedule_csv`; then the planner assumes the ones given here."""
    placement: Literal["loop", "v"] = "loop"
    """loop: stage s on pipeline rank s mod pp. v: rank r has stages r and 2*pp-1-r."""
    virtual_stage_bounds: tuple[int, int | None] = (1, 1)
    """Minimum and maximum number of virtual stages."""
    with_other_virtual_stages: str = "zero-bubble"
    """The schedule that error messages suggest for other numbers of virtual stages."""
    splits_backward: bool = False
    """Weight gradients are computed separately from, and later than, the input gradients."""

    # Micro-batches.
    min_micro_batches_per_rank: int = 0
    """Minimum number of micro-batches, as a multiple of pp."""
    with_fewer_micro_batches: str = ""
    """Of a schedule with a minimum: the schedule that error messages suggest instead."""
    runs_equal_rounds: bool = False
    """Whether the micro-batches run in equal rounds of about pp."""
    repeats_steady_phase: bool = False
    """Whether more micro-batches only repeat the steady phase, and change no memory peak."""

    def allows_virtual_stages(self, count: int) -> bool:
        """Return whether a rank may have this number of stages."""
        minimum, maximum = self.virtual_stage_bounds
        return minimum <= count and (maximum is None or count <= maximum)

    def stage_ranks(self, pp: int, virtual_stages: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage, in model order."""
        if pp > 1 and self.placement == "v":
            return (*range(pp), *reversed(range(pp)))
        return tuple(stage % pp for stage in range(pp * virtual_stages))


ONE_F_ONE_B = ScheduleSpec(
    name="1f1b",
    row=one_f_one_b_row,
    with_other_virtual_stages="interleaved",
    overlapped_row=overlapped_interleaved_row,
    min_micro_batches_per_rank=1,
    with_fewer_micro_batches="gpipe",
    repeats_steady_phase=True,
)

SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name: spec
    for spec in (
        ScheduleSpec(name="gpipe", row=gpipe_row, with_other_virtual_stages="interleaved"),
        ONE_F_ONE_B,
        ScheduleSpec(
            name="interleaved",
            row=interleaved_row,
            overlapped_row=overlapped_interleaved_row,
            virtual_stage_bounds=(2, None),
            with_other_virtual_stages="1f1b",
            runs_equal_rounds=True,
            repeats_steady_phase=True,
        ),
        ScheduleSpec(
            name="zero-bubble",
            row=zero_bubble_row,
            virtual_stage_bounds=(1, None),
            splits_backward=True,
            runs_equal_rounds=True,
            repeats_steady_phase=True,
        ),
        ScheduleSpec(
            name="zbv",
            row=zbv_row,
            placement="v",
            virtual_stage_bounds=(2, 2),
            splits_backward=True,
            repeats_steady_phase=True,
        ),
        ScheduleSpec(
            name="dualpipev",
            row=dualpipev_row,
            overlapped_row=dualpipev_row,
            placement="v",
            virtual_stage_bounds=(2, 2),
            splits_backward=True,
            min_micro_batches_per_rank=2,
            with_fewer_micro_batches="zbv",
            repeats_steady_phase=True,
        ),
        ScheduleSpec(
            name="csv", row=interleaved_row, reads_file=True, virtual_stage_bounds=(1, None), splits_backward=True
        ),
    )
}
"""Every schedule by its name in a recipe."""

DEFAULT_SCHEDULE = ONE_F_ONE_B.name
"""The schedule of recipes that name none."""


def schedule_of(cfg: Config) -> ScheduleSpec:
    """Return the schedule of a recipe."""
    return SCHEDULES[cfg.parallel.schedule]


def overlapped_schedules() -> tuple[str, ...]:
    """Return the names of the schedules that `parallel.overlap_experts` may use."""
    return tuple(name for name, spec in SCHEDULES.items() if spec.overlapped_row)


@lru_cache(maxsize=16384)
def schedule_row(
    name: str, rank: int, pp: int, virtual_stages: int, num_micro_batches: int, *, overlap: bool = False
) -> SlotRow:
    """Return the slots of one pipeline rank; with pp=1, micro-batches follow each other under every schedule.

    Args:
        name: a key of `SCHEDULES`.
        rank: pipeline rank.
        pp: pipeline ranks.
        virtual_stages: stages per rank.
        num_micro_batches: a number that the schedule accepts.
        overlap: whether the slots are for `overlap_experts`.
    """
    spec = ONE_F_ONE_B if pp == 1 else SCHEDULES[name]
    row = spec.overlapped_row if overlap else spec.row
    assert row is not None, "validate_expert_overlap"
    return row(rank, pp, virtual_stages, num_micro_batches)


def schedule_rows(
    name: str, pp: int, virtual_stages: int, num_micro_batches: int, *, overlap: bool = False
) -> tuple[SlotRow, ...]:
    """Return the slots of every pipeline rank; see `schedule_row`."""
    return tuple(schedule_row(name, rank, pp, virtual_stages, num_micro_batches, overlap=overlap) for rank in range(pp))


def runtime_slots(cfg: Config) -> tuple[SlotRow, ...]:
    """Return the slots of each pipeline rank in a step, as the runtime executes them.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    p = cfg.parallel
    count = cfg.num_micro_batches
    if schedule_of(cfg).reads_file:
        return tuple(map(one_per_slot, read_schedule(p.schedule_csv, p.pp, p.virtual_stages, count).rows))
    return schedule_rows(p.schedule, p.pp, p.virtual_stages, count, overlap=overlaps_micro_batches(cfg))


def schedule_slots(cfg: Config) -> tuple[SlotRow, ...]:
    """Return `runtime_slots` for counting memory: only with overlap are two micro-batches in one slot.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    rows = runtime_slots(cfg)
    return rows if overlaps_micro_batches(cfg) else tuple(map(split_pairs, rows))


def overlaps_micro_batches(cfg: Config) -> bool:
    """Return whether the passes of a pair overlap: `parallel.overlap_experts` of a model with experts."""
    return cfg.parallel.overlap_experts and has_moe_layers(cfg.model)


def stage_ranks(p: ParallelConfig) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, in model order.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    spec = SCHEDULES[p.schedule]
    if spec.reads_file:
        return read_schedule(p.schedule_csv, p.pp, p.virtual_stages).stage_to_rank
    return spec.stage_ranks(p.pp, p.virtual_stages)
