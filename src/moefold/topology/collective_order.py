"""In which order each rank begins the exchanges of its experts, known before any rank starts. Torch-free.

Ranks of a group wait for each other for ever when they begin its collectives in different orders. What a rank does
between two exchanges communicates too (over tp, cp and dp), always at the same place between the same two. So it is
enough that the ranks of every group, but those of the pipeline, begin the same exchanges in the same order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from moefold.config.schema import Config
from moefold.topology.dispatchers import dispatcher_of
from moefold.topology.layout import Layout
from moefold.topology.pipeline_action import Action
from moefold.topology.schedule_tables import ForwardBackward, ScheduleItemRow
from moefold.topology.stages import Stage

RECOMPUTED_WITH_COMM = ("moe", "layer")
"""Parts of `train.recompute` whose exchanges run again."""


@dataclass(frozen=True)
class CollectiveStart:
    """One exchange that a rank begins."""

    stage: int
    micro_batch: int
    layer: int
    """Number in the whole model."""
    phase: str
    """F of the forward pass, B of the gradients, R of what runs again before them."""
    op: str
    """dispatch or combine, and the axis."""

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.micro_batch} layer {self.layer} {self.op}"


CollectiveSequence = tuple[CollectiveStart, ...]


def stage_collectives(cfg: Config, stage: Stage, kind: str, micro_batch: int) -> Iterator[CollectiveStart]:
    """The exchanges of one pass of a stage, F or the gradients, in order."""
    first = cfg.model.num_layers
    numbers = [*stage.parts.layers, *range(first, first + stage.parts.num_mtp_layers)]
    layers = [number for number in numbers if cfg.model.all_layer_kinds[number] == "M"]
    over = dispatcher_of(cfg).collectives(cfg.parallel.ep, cfg.parallel.etp)
    runs_again = any(part in cfg.train.recompute for part in RECOMPUTED_WITH_COMM)
    for layer in layers if kind == "F" else reversed(layers):
        for way in ("F",) if kind == "F" else ("R", "B") if runs_again else ("B",):
            for exchange in reversed(over) if way == "B" else over:
                yield CollectiveStart(stage.number, micro_batch, layer, way, exchange)


def collective_sequence(cfg: Config, stages: Mapping[int, Stage], row: ScheduleItemRow) -> CollectiveSequence:
    """The exchanges of a rank in one step.

    Args:
        cfg: the recipe.
        stages: of the rank, by number.
        row: its work.
    """

    def of(action: Action) -> Iterator[CollectiveStart]:
        # What is left of a backward pass for later exchanges nothing.
        if action.kind == "W":
            return iter(())
        return stage_collectives(cfg, stages[action.stage], action.kind, action.micro_batch)

    begun: list[CollectiveStart] = []
    for work in row:
        if not isinstance(work, ForwardBackward):
            begun += of(work)
            continue
        forward = of(work.forward)
        # Each exchange of the backward pass lets the forward pass go on to its next one.
        for exchange in of(work.backward):
            begun.append(exchange)
            begun += [following for following in (next(forward, None),) if following is not None]
        begun += forward
    return tuple(begun)


def order_mismatches(sequences: Sequence[CollectiveSequence], layout: Layout) -> Iterator[str]:
    """Ranks of a group that do not begin the same exchanges in the same order, one phrase each.

    Args:
        sequences: of every rank of the world.
        layout: the folding.
    """
    attention, moe = layout.attention, layout.moe
    groups = chain(attention.groups("dp", "cp", "tp"), moe.groups("edp", "ep", "etp"))
    for group in dict.fromkeys(tuple(sorted(group)) for group in groups):
        mine = sequences[group[0]]
        for rank in group[1:]:
            if sequences[rank] != mine:
                both = zip(mine, sequences[rank], strict=False)
                place = next((i for i, (a, b) in enumerate(both) if a != b), min(len(mine), len(sequences[rank])))
                words = [str(found[place]) if place < len(found) else "nothing" for found in (mine, sequences[rank])]
                yield f"ranks {group[0]} and {rank} share a group, and exchange {place} is {words[0]} and {words[1]}"
