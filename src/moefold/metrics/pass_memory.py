"""What a pass has in memory between two exchanges of experts, and two passes that take turns there. Torch-free.

With `parallel.overlap_experts` a forward pass goes on by one exchange wherever the backward pass of another micro-batch
has begun one. What is there at once follows from where both of them stand (`pass_turns.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from moefold.metrics.activation_memory import ActivationMemory
from moefold.metrics.kept_parts import BytesByPart
from moefold.metrics.pass_turns import (
    FORWARD_POINTS,
    LayerMemory,
    StageMemory,
    interleave,
    visit_backward,
    visit_forward,
)
from moefold.metrics.pass_turns import RECOMPUTE_POINTS as NAMES_AGAIN
from moefold.parallel.exchange_order import RECOMPUTED_WITH_COMM
from moefold.parallel.stage_plan import Stage


@dataclass(frozen=True, slots=True)
class SizedParts:
    """Parts with their sum, which is asked for often."""

    parts: BytesByPart
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.parts.total())


EMPTY = SizedParts(BytesByPart())


@dataclass(frozen=True, slots=True)
class CommInterval:
    """A pass from one exchange to the next, or to its end."""

    peak: SizedParts
    """At its fullest moment."""
    during_comm: SizedParts
    """While the exchange at its end is under way."""


PassIntervals = tuple[CommInterval, ...]


class _IntervalBuilder:
    """A pass under construction."""

    def __init__(self) -> None:
        self.intervals: list[CommInterval] = []
        self._peak = EMPTY

    def observe(self, live: BytesByPart) -> None:
        if live.total() > self._peak.size:
            self._peak = SizedParts(live)

    def close_interval(self, during_comm: BytesByPart) -> None:
        self.intervals.append(CommInterval(self._peak, SizedParts(during_comm)))
        self._peak = EMPTY


class OverlappedPassMemory:
    """The passes of the stages of one config, with `parallel.overlap_experts`.

    Every exchange counts as one over all axes: what goes beside it has as many.

    Args:
        activation_memory: of the layers.
        splits_backward: whether the schedule splits backward passes.
    """

    def __init__(self, activation_memory: ActivationMemory, *, splits_backward: bool) -> None:
        self._activation_memory, self._splits_backward = activation_memory, splits_backward
        self._cached_layer, self._cached_stage = cache(self._layer_memory), cache(self._stage_memory)

    def forward_intervals(self, stage: Stage) -> PassIntervals:
        """The forward pass of a stage."""
        drawn = _IntervalBuilder()
        visit_forward(drawn, self._cached_stage(stage))
        return tuple(drawn.intervals)

    def backward_intervals(self, stage: Stage) -> PassIntervals:
        """The backward pass of a stage, recomputation included."""
        drawn = _IntervalBuilder()
        visit_backward(drawn, self._cached_stage(stage))
        return tuple(drawn.intervals)

    def _layer_memory(self, kind: str) -> LayerMemory[BytesByPart]:
        formula = self._activation_memory
        postponed = formula.delayed_wgrad_layer(kind) if self._splits_backward else BytesByPart()
        return LayerMemory(formula.saved_by_kind[kind], layer_snapshots(formula, kind), postponed, kind == "M")

    def _stage_memory(self, stage: Stage) -> StageMemory[BytesByPart]:
        formula, splits, count = self._activation_memory, self._splits_backward, stage.parts.num_mtp_layers
        further = []
        if count:
            postponed = formula.delayed_wgrad_mtp() if splits else BytesByPart()
            further = [replace(self._cached_layer(formula.mtp_kind), delayed_wgrad=postponed)] * count
        return StageMemory(
            embedding=formula.embedding_part(stage),
            layers=[self._cached_layer(kind) for kind in formula.kinds(stage)],
            mtp_layers=further,
            mtp_layer_saved=formula.mtp_layer() if count else BytesByPart(),
            head=formula.head() if stage.is_last else BytesByPart(),
            logits=BytesByPart(logits=formula.transient_logits),
            delayed_wgrad_head=BytesByPart(
                logits=(1 + count) * formula.delayed_wgrad_head if splits and stage.is_last else 0
            ),
            is_last=stage.is_last,
            splits_backward=splits,
            recomputes_comm=recomputes_comm(formula.recompute),
        )


def recomputes_comm(recompute: Iterable[str]) -> bool:
    """Whether exchanges of experts run again before the gradients, with these parts that do."""
    return not set(RECOMPUTED_WITH_COMM).isdisjoint(recompute)


def layer_snapshots(activation_memory: ActivationMemory, kind: str) -> dict[str, BytesByPart]:
    """All that a layer of kind "D" or "M" has in memory at each of `pass_turns.MOMENTS`."""
    whole = activation_memory.without_recompute
    running = whole.saved_by_kind[kind] + activation_memory.transient_norm
    if kind == "D":
        return {"leaving": running, "gradients": running}
    found = _forward_snapshots(activation_memory, FORWARD_POINTS)
    there, gradients = activation_memory, running
    if recomputes_comm(activation_memory.recompute):
        there = whole
        again = _forward_snapshots(whole, (*NAMES_AGAIN, "sum"))
        gradients = _larger(again.pop("sum"), running)
        found |= again
    full = (
        there.saved_by_kind[kind]
        - there.experts.expert_outputs()
        - BytesByPart({"residual stream": activation_memory.hidden_bytes})
    )
    return found | {
        "gradients": _larger(gradients, full),
        "home_back": full,
        "experts_back": full + (whole.experts.fc1_outputs() - there.experts.fc1_outputs()),
        "out_back": full - there.experts.saved_by_experts(),
        "beside": activation_memory.delayed_wgrad_concurrent(kind),
        "late": BytesByPart(experts=activation_memory.delayed_wgrad_layer(kind)["experts"]),
    }


def _forward_snapshots(activation_memory: ActivationMemory, points: tuple[str, ...]) -> dict[str, BytesByPart]:
    """A layer with experts that runs for the first time or, with a formula that keeps everything, again."""
    whole, experts, output = (
        activation_memory.without_recompute,
        activation_memory.experts,
        BytesByPart({"residual stream": activation_memory.hidden_bytes}),
    )
    places, under_way = experts.permute_indices(), experts.dispatch_comm_buffers()
    # The shared expert runs while the rows are under way.
    ahead = (
        whole.saved_by_kind["M"]
        - output
        - whole.experts.saved()
        + places
        + under_way
        + activation_memory.transient_norm
    )
    keeps = not recomputes_comm(activation_memory.recompute)
    held = (
        activation_memory.saved_by_kind["M"] - output - experts.saved() + places
        if keeps
        else _live_during_dispatch(activation_memory)
    )
    held["shared experts"] += activation_memory.hidden_bytes if whole.saved_by_kind["M"]["shared experts"] else 0
    all_results = BytesByPart(experts=experts.expert_tokens * experts.token_bytes)
    worked = experts.saved_by_experts() - places if keeps else BytesByPart()
    out, home = held + under_way, held + worked + experts.combine_comm_buffers()
    at_work = held + whole.experts.saved_by_experts() - places + all_results + experts.expert_transient()
    summing = held + worked + experts.expert_outputs() + experts.combine_buffer()
    return dict(zip(points, (_larger(ahead, out), out, _larger(at_work, home), home, summing), strict=True))


def _live_during_dispatch(activation_memory: ActivationMemory) -> BytesByPart:
    """What an MoE layer that will run again has at hand while rows travel, although it keeps none of it.

    The result of the norm, the choices and where the rows are; where all of the layer runs again, the residual stream
    too.
    """
    held = BytesByPart(router=activation_memory.without_recompute.saved_by_kind["M"]["router"])
    if "layer" in activation_memory.recompute:
        return (
            held
            + activation_memory.experts.permute_indices()
            + BytesByPart({"norms": activation_memory.hidden_bytes, "residual stream": activation_memory.hidden_bytes})
        )
    return (
        held + activation_memory.saved_by_kind["M"] - BytesByPart({"residual stream": activation_memory.hidden_bytes})
    )


def _larger(one: BytesByPart, other: BytesByPart) -> BytesByPart:
    return one if one.total() >= other.total() else other


def overlapped_peak(forward: PassIntervals, backward: PassIntervals, sent: SizedParts) -> tuple[SizedParts, SizedParts]:
    """The moment of a pair at which most is there: what belongs to the forward pass, and to the backward pass.

    Args:
        forward_intervals: of one micro-batch; it begins at the first exchange of the other pass.
        backward_intervals: of another one; at each of its exchanges the forward pass goes on to its own next one.
        sent: what is left of the backward pass when it is over.
    """
    return max(interleave(forward, backward, EMPTY, sent), key=lambda both: both[0].size + both[1].size)
