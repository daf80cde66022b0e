"""Order in which each rank starts the expert collectives, checked before any rank starts.

Ranks of a group deadlock if they start its collectives in different orders. Collectives over tp, cp and dp always come
at the same place between the same two expert collectives. So it is enough that the ranks of a group, except of a
pipeline group, start the same expert collectives in the same order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from moefold.config.base.pipeline_actions import Action, SlotRow
from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.model import ModelConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.topology.layout import Layout
from moefold.topology.pipeline_layout import Stage

RECOMPUTED_WITH_COMM = ("moe", "layer")
"""Parts of `train.recompute` whose collectives are repeated in the backward pass."""


@dataclass(frozen=True)
class CollectiveStart:
    """One expert collective that a rank starts."""

    stage: int
    micro_batch: int
    layer: int
    """Layer number in the whole model."""
    phase: str
    """F forward pass, B backward pass, R recomputation before the backward pass."""
    op: str
    """dispatch or combine, with the axis."""

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.micro_batch} layer {self.layer} {self.op}"


CollectiveSequence = tuple[CollectiveStart, ...]


def stage_collectives(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    stage: Stage,
    kind: str,
    micro_batch: int,
) -> Iterator[CollectiveStart]:
    """Yield the expert collectives of one pass of a stage, in order. `kind` is F, B or I."""
    first = model.num_layers
    numbers = [*stage.parts.layers, *range(first, first + stage.parts.num_mtp_layers)]
    layers = [number for number in numbers if model.all_layers[number].ffn.is_routed]
    ops = chosen_in(parallel, DispatcherPart).collectives(parallel.ep, parallel.etp)
    phases: tuple[str, ...] = ("F",)
    if kind != "F":
        recomputes = any(part in train.recompute for part in RECOMPUTED_WITH_COMM)
        phases = ("R", "B") if recomputes else ("B",)
    for layer in layers if kind == "F" else reversed(layers):
        for phase in phases:
            for op in reversed(ops) if phase == "B" else ops:
                yield CollectiveStart(stage.index, micro_batch, layer, phase, op)


def collective_sequence(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    stages: Mapping[int, Stage],
    row: SlotRow,
) -> CollectiveSequence:
    """Return the expert collectives of a rank in one step, given its stages by number and its slots."""

    def collectives_of(action: Action) -> Iterator[CollectiveStart]:
        # A W action (weight gradients) starts no expert collective.
        if action.kind == "W":
            return iter(())
        return stage_collectives(model, parallel, train, stages[action.stage], action.kind, action.micro_batch)

    started: list[CollectiveStart] = []
    for slot in row:
        if len(slot) == 1:
            started += collectives_of(slot[0])
            continue
        forward, backward = map(collectives_of, slot)
        # After each collective of the backward pass, the overlapped forward pass runs up to its next one.
        for collective in backward:
            started.append(collective)
            started += [following for following in (next(forward, None),) if following is not None]
        started += forward
    return tuple(started)


def order_mismatches(sequences: Sequence[CollectiveSequence], layout: Layout) -> Iterator[str]:
    """Yield a phrase for each pair of ranks of a group that start expert collectives in different orders."""
    attention = layout.attention
    groups = chain(attention.groups("dp", "cp", "tp"), layout.moe.groups("edp", "ep", "etp"))
    for group in dict.fromkeys(tuple(sorted(group)) for group in groups):
        reference = sequences[group[0]]
        for rank in group[1:]:
            if sequences[rank] != reference:
                pairs = zip(reference, sequences[rank], strict=False)
                place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(sequences[rank])))
                names = [str(row[place]) if place < len(row) else "nothing" for row in (reference, sequences[rank])]
                yield f"ranks {group[0]} and {rank} share a group, and collective {place} is {names[0]} and {names[1]}"
