"""Pipeline schedules: the order in which a pipeline rank runs its forward and backward passes."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from moefold.config.base.part import Part
from moefold.config.base.pipeline_actions import SlotRow


@dataclass(frozen=True, kw_only=True)
class SchedulePart(Part):
    """Rows of slots, one for each pipeline rank, for the runtime, the memory formulas and the planner.

    The defaults describe one stage per rank and whole backward passes.
    """

    group: ClassVar[str] = "schedule"
    key: ClassVar[str] = "parallel.schedule"
    changes_maths: ClassVar[bool] = False

    is_for_one_mapping: ClassVar[bool] = False
    """True if the rows fit only one number of ranks, stages and micro-batches: searches do not try it, and the
    placement is only known at the start of a run."""
    placement: ClassVar[Literal["loop", "v"]] = "loop"
    """loop: stage s on pipeline rank s mod pp. v: rank r has stages r and 2*pp-1-r."""
    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (1, 1)
    """Minimum and maximum number of virtual stages."""
    with_other_virtual_stages: ClassVar[str] = "zero-bubble"
    """The schedule that error messages suggest for other numbers of virtual stages."""
    splits_backward: ClassVar[bool] = False
    """True if weight gradients are computed separately from the input gradients, and later."""

    # Micro-batches.
    min_micro_batches_per_rank: ClassVar[int] = 0
    """Minimum number of micro-batches, as a multiple of pp."""
    with_fewer_micro_batches: ClassVar[str] = "gpipe"
    """Schedule that error messages suggest for fewer micro-batches than the minimum."""
    runs_equal_rounds: ClassVar[bool] = False
    """True if the micro-batches run in equal rounds of about pp."""
    repeats_steady_phase: ClassVar[bool] = False
    """True if more micro-batches only repeat the steady phase, and change no memory peak."""

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the slots of a pipeline rank. Passes that share a slot run one after the other without overlap.

        Args:
            pp: pipeline ranks, 2 or more.
            num_stages: stages per rank, legal by `virtual_stage_bounds`.
            count: micro-batches of a step, legal by the facts above.
        """
        raise NotImplementedError

    def overlapped_row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the slots of a pipeline rank with `parallel.overlap_experts`, in the form of `row`.

        A schedule without it has no phase of one forward and one backward pass, and overlap is refused.
        """
        raise AssertionError("pairs_passes")

    @classmethod
    def pairs_passes(cls) -> bool:
        """Return whether a forward and a backward pass may overlap: the schedule has an `overlapped_row`."""
        return cls.overlapped_row is not SchedulePart.overlapped_row

    def rows(self, pp: int, num_stages: int, count: int, *, overlap: bool = False) -> tuple[SlotRow, ...]:
        """Return the slots of every pipeline rank, in the form of `row`.

        Raises:
            ConfigError: the file of a schedule cannot be read, or is wrong.
        """
        row = self.overlapped_row if overlap else self.row
        return tuple(row(rank, pp, num_stages, count) for rank in range(pp))

    def stage_ranks(self, pp: int, num_stages: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage, in model order.

        Raises:
            ConfigError: the file of a schedule cannot be read, or is wrong.
        """
        if pp > 1 and self.placement == "v":
            return (*range(pp), *reversed(range(pp)))
        return tuple(stage % pp for stage in range(pp * num_stages))

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return the idle seconds of a rank in one step, in closed form, or None to simulate the rows, which is slower.

        docs/pipeline.md has the formulas and measurements.

        Args:
            forward_s: forward pass of one micro-batch through all chunks of one rank. Like the other times and
                `num_stages` it is a number or an array.
            backward_s: its backward pass, including weight gradients.
            wgrad_s: the weight-gradient part of `backward_s`.
            pp: pipeline ranks, 2 or more.
            count: micro-batches of a step.
        """
        return None
