"""What is to be known of a pipeline schedule before any rank starts: its stages, where they stand. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from moefold.config.schema import ParallelConfig

Placement = Literal["loop", "v", "file"]


@dataclass(frozen=True)
class ScheduleKind:
    """The traits of a schedule."""

    virtual_stage_bounds: tuple[int, int | None]
    """Fewest and most virtual stages."""
    placement: Placement
    """loop: stage s on pipeline rank s mod pp. v: rank r has stages r and 2*pp-1-r. file: the CSV file says."""
    splits_backward: bool
    """Weight gradients are computed apart from, and later than, those of the inputs."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind((1, 1), "loop", False),
    "1f1b": ScheduleKind((1, 1), "loop", False),
    "interleaved": ScheduleKind((2, None), "loop", False),
    "zero-bubble": ScheduleKind((1, None), "loop", True),
    "zbv": ScheduleKind((2, 2), "v", True),
    "dualpipev": ScheduleKind((2, 2), "v", True),
    "csv": ScheduleKind((1, None), "file", True),
}


def stage_ranks(p: ParallelConfig) -> tuple[int, ...]:
    """The pipeline rank of each stage, in the order of the model.

    Raises:
        ConfigError: the schedule is read from a file, which cannot be read.
    """
    placement = SCHEDULES[p.schedule].placement
    if p.pp == 1 and placement != "file":
        return (0,) * p.virtual_stages
    if placement == "v":
        return (*range(p.pp), *reversed(range(p.pp)))
    if placement == "file":
        from moefold.config.schedule_file import read_schedule

        return read_schedule(p.schedule_csv, p.pp, p.virtual_stages).stage_to_rank
    return tuple(stage % p.pp for stage in range(p.pp * p.virtual_stages))
