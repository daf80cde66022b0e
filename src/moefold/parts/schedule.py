"""Pipeline schedules.

Overlapped schedules pair a forward pass with the backward pass of another micro-batch in the steady phase. Both passes
of a pair start when the inputs of both are available, and send their results when both have finished. A rank is
therefore one more forward pass ahead than in interleaved 1F1B: two for each later rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from moefold.config.base.pipeline_actions import RowBuilder, SlotRow
from moefold.config.groups.schedule import SchedulePart
from moefold.message_text import Problem, Setting
from moefold.remote_path import is_remote

if TYPE_CHECKING:
    from moefold.config.sections.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class _InterleavedOrder(SchedulePart):
    """Rows and bubble of interleaved 1F1B (arXiv:2104.04473)."""

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the slots of interleaved 1F1B."""
        forward, backward, per_round = _interleaved_stages(rank, pp, num_stages, count)
        ahead = min((num_stages - 1) * per_round + 2 * (pp - 1 - rank), len(forward))
        builder = RowBuilder()
        for stage in forward[:ahead]:
            builder.add(stage, "F")
        for next_forward, next_backward in zip(forward[ahead:], backward, strict=False):
            builder.add(next_forward, "F")
            builder.add(next_backward, "B")
        for stage in backward[len(forward) - ahead :]:
            builder.add(stage, "B")
        return builder.row

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return (pp-1)(f+b)/vpp, plus (pp-n)(f+b) if a chunk waits for the last rank of the previous chunk."""
        step_s = forward_s + backward_s
        if count >= pp:
            return (pp - 1) * step_s / num_stages
        return step_s * ((pp - count) + (count - 1) / num_stages)


@dataclass(frozen=True, kw_only=True)
class _PairedOrder(_InterleavedOrder):
    """Interleaved 1F1B whose steady phase may consist of pairs."""

    def overlapped_row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return slots whose steady phase consists of pairs."""
        forward, backward, per_round = _interleaved_stages(rank, pp, num_stages, count)
        ahead = min((num_stages - 1) * per_round + 2 * (pp - 1 - rank) + 1, len(forward))
        builder = RowBuilder()
        for stage in forward[:ahead]:
            builder.add(stage, "F")
        for next_forward, next_backward in zip(forward[ahead:], backward, strict=False):
            builder.add_pair(next_forward, next_backward)
        for stage in backward[len(forward) - ahead :]:
            builder.add(stage, "B")
        return builder.row


@dataclass(frozen=True, kw_only=True)
class GPipe(_InterleavedOrder, kind="gpipe"):
    """All forward passes, then all backward passes (arXiv:1811.06965)."""

    with_other_virtual_stages: ClassVar[str] = "interleaved"

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return all forward passes, then all backward passes."""
        builder = RowBuilder()
        builder.add(rank, "F" * count)
        builder.add(rank, "B" * count)
        return builder.row


@dataclass(frozen=True, kw_only=True)
class OneForwardOneBackward(_PairedOrder, kind="1f1b"):
    """Each rank alternates between one forward and one backward pass (arXiv:2006.09503)."""

    with_other_virtual_stages: ClassVar[str] = "interleaved"
    min_micro_batches_per_rank: ClassVar[int] = 1
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the slots of a rank. With several stages per rank, they are of interleaved 1F1B."""
        if num_stages > 1:
            return super().row(rank, pp, num_stages, count)
        ahead = min(count, pp - rank)
        builder = RowBuilder()
        builder.add(rank, "F" * ahead + "BF" * (count - ahead) + "B" * ahead)
        return builder.row


@dataclass(frozen=True, kw_only=True)
class InterleavedSchedule(_PairedOrder, kind="interleaved"):
    """1F1B with several stages on each rank (virtual_stages of 2 or more), so that a rank begins earlier."""

    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (2, None)
    with_other_virtual_stages: ClassVar[str] = "1f1b"
    runs_equal_rounds: ClassVar[bool] = True
    repeats_steady_phase: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ZeroBubble(SchedulePart, kind="zero-bubble"):
    """1F1B whose weight gradients fill the waits, interleaved if there are several stages per rank."""

    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (1, None)
    splits_backward: ClassVar[bool] = True
    runs_equal_rounds: ClassVar[bool] = True
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the slots of a rank, with a W action after each backward pass from its `rank`-th on."""
        forward, backward, per_round = _interleaved_stages(rank, pp, num_stages, count)
        ahead = min((num_stages - 1) * per_round + pp - 1 - rank, len(forward))
        builder = RowBuilder()
        for stage in forward[:ahead]:
            builder.add(stage, "F")
        for i, stage in enumerate(backward):
            if ahead + i < len(forward):
                builder.add(forward[ahead + i], "F")
            builder.add_input_grad(stage)
            if i >= rank:
                builder.add_weight_grads(1)
        builder.add_weight_grads()
        return builder.row

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return (pp-1)(f+b-2w)/vpp (ZB-H1, arXiv:2401.10241), at least a third of the bubble of interleaved 1F1B.

        A rank's wait is filled with weight gradients of earlier micro-batches. With fewer than pp micro-batches it is
        either (pp-n)w longer, or the sequential time through all chunks.
        """
        import numpy as np

        full = forward_s + backward_s
        num_active = min(count, pp)
        without_wgrad = full - wgrad_s
        sequential = pp * without_wgrad + ((num_active - 1) * without_wgrad + wgrad_s) / num_stages - num_active * full
        filled = (pp - 1) * np.maximum(full - 2 * wgrad_s, full / 3) / num_stages + (pp - num_active) * wgrad_s
        return np.maximum(sequential, filled)


@dataclass(frozen=True, kw_only=True)
class ZeroBubbleV(SchedulePart, kind="zbv"):
    """Zero-bubble with two stages on each rank (virtual_stages=2), placed as a V (arXiv:2401.10241)."""

    placement: ClassVar[Literal["loop", "v"]] = "v"
    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (2, 2)
    splits_backward: ClassVar[bool] = True
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the row for at least 2*pp-1 micro-batches, cut to `count`."""
        first = rank
        second = 2 * pp - 1 - rank
        drawn = max(2 * pp - 1, count)
        builder = RowBuilder()
        builder.add(first, "F" * (2 * (pp - rank) - 1))
        for _ in range(rank):
            builder.add(second, "F")
            builder.add(first, "F")
        builder.add(second, "FIW" * (pp - rank))
        started = 2 * pp - 1 - rank
        num_done = pp
        while num_done < started or started < drawn:
            if started < drawn:
                builder.add(first, "F")
                started += 1
            builder.add(first, "IW")
            builder.add(second, "FIW")
            num_done += 1
        for _ in range(rank):
            builder.add(first, "I")
            builder.add(second, "I")
        builder.add(first, "IW" * (pp - rank))
        builder.add(second, "W" * rank)
        builder.add(first, "W" * rank)
        return tuple(slot for slot in builder.row if slot[0].micro_batch < count)

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return half of the bubble of zero-bubble at both ends, for at least 2*pp-1 micro-batches."""
        import numpy as np

        step_s = forward_s + backward_s
        unfilled = (pp - 1) * (step_s - wgrad_s)
        filled = np.maximum(unfilled - (min(count, pp) - 1) * wgrad_s, (pp - 1) * step_s / 3)
        share = min(1.0, (count - 1) / (2 * pp - 2))
        return (1 - share) * unfilled + share * filled / 2


@dataclass(frozen=True, kw_only=True)
class DualPipeV(SchedulePart, kind="dualpipev"):
    """Pairs of forward and backward passes of two stages (virtual_stages=2), placed as a V (arXiv:2412.19437)."""

    placement: ClassVar[Literal["loop", "v"]] = "v"
    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (2, 2)
    splits_backward: ClassVar[bool] = True
    min_micro_batches_per_rank: ClassVar[int] = 2
    with_fewer_micro_batches: ClassVar[str] = "zbv"
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the eight phases of github.com/deepseek-ai/DualPipe and torch."""
        first = rank
        second = 2 * pp - 1 - rank
        num_later = pp - rank - 1
        builder = RowBuilder()
        builder.add(first, "F" * (2 * num_later))
        for _ in range(rank + 1):
            builder.add(first, "F")
            builder.add(second, "F")
        for _ in range(num_later):
            builder.add_input_grad(second)
            builder.add_weight_grads(1)
            builder.add(second, "F")
        for i in range(count - 2 * pp + rank + 1):
            if i == 0 and num_later == 0:
                # This rank has both stages at the bottom of the V: without an overlap they make a smaller bubble.
                builder.add(first, "F")
                builder.add(second, "B")
            else:
                builder.add_pair(first, second)
            builder.add_pair(second, first)
        for _ in range(num_later):
            builder.add(second, "B")
            builder.add_pair(second, first)
        # From the middle of the last backward passes on, W actions are deferred to fill the remaining bubble.
        splits_from = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
        for i, stage in enumerate((second, first) * (rank + 1)):
            if i < splits_from:
                builder.add(stage, "B")
            else:
                builder.add_input_grad(stage)
        for _ in range(num_later):
            builder.add_weight_grads(1)
            builder.add_input_grad(first)
        builder.add_weight_grads(rank + 1)
        return builder.row

    def overlapped_row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return `row`, whose pairs overlap."""
        return self.row(rank, pp, num_stages, count)

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return (pp-1)(f+2b-3w)/2."""
        import numpy as np

        return (pp - 1) * np.maximum(forward_s + 2 * backward_s - 3 * wgrad_s, 0.0) / 2


@dataclass(frozen=True, kw_only=True)
class CsvSchedule(_InterleavedOrder, kind="csv"):
    """Rows from a file. Without a file, as in a mapping of the planner, the rows of interleaved 1F1B."""

    path: str = ""
    """File with the actions of each pipeline rank, in order."""

    is_for_one_mapping: ClassVar[bool] = True
    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (1, None)
    splits_backward: ClassVar[bool] = True

    def check(self, parallel: "ParallelConfig") -> Iterator[Problem]:
        """Yield errors for a missing file name, and for missing ranks of the rows."""
        if not self.path:
            rule = f"needs {self.key}.path, its file"
            yield Problem(self.key, self.kind, rule, "or choose 'zero-bubble'")
        if is_remote(self.path):
            rule = "must be a path of this machine, not a URL"
            yield Problem(f"{self.key}.path", self.path, rule, "copy the file here")
        if parallel.pp == 1:
            rule = f"needs {Setting('parallel.pp')} of 2 or more, and it is 1"
            yield Problem(self.key, self.kind, rule, "choose schedule='1f1b', or pp=2")

    def rows(self, pp: int, num_stages: int, count: int, *, overlap: bool = False) -> tuple[SlotRow, ...]:
        """Read the rows of every pipeline rank. See the base class."""
        if not self.path:
            return super().rows(pp, num_stages, count, overlap=overlap)
        from moefold.topology.schedule_file import read_schedule

        return read_schedule(self.path, pp, num_stages, count)[0]

    def stage_ranks(self, pp: int, num_stages: int) -> tuple[int, ...]:
        """Read the pipeline rank of each stage. See the base class."""
        if not self.path:
            return super().stage_ranks(pp, num_stages)
        from moefold.topology.schedule_file import read_schedule

        return read_schedule(self.path, pp, num_stages)[1]


def _interleaved_stages(rank: int, pp: int, num_stages: int, count: int) -> tuple[list[int], list[int], int]:
    """Return the stages of the forward passes and of the backward passes, in order, and the micro-batches of a round.

    A rank runs a round of micro-batches through one stage, then through the next stage. All rounds have equal length.
    """
    per_round = count // max(1, count // pp)
    local = [step // per_round % num_stages for step in range(num_stages * count)]
    forward = [i * pp + rank for i in local]
    backward = [(num_stages - 1 - i) * pp + rank for i in local]
    return forward, backward, per_round
