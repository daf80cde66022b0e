"""What a forward and a backward pass that take turns at exchanges have in memory, as counts. Torch-free.

The runtime's formula (`metrics/pass_memory.py`) adds up bytes on the same course (`metrics/pass_turns.py`). Which
moment is the fullest depends on sizes; here all stay that may be.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moefold.metrics.pass_turns import MOMENTS, WITH_SPLITS, LayerPieces, StagePieces, run_backward, run_forward, turns
from moefold.plan.columns import Columns, Counts, undominated
from moefold.plan.stage_split import Chunk


@dataclass(frozen=True)
class Pairing:
    """How the passes of a pair run."""

    columns: Columns
    splits: bool
    """Whether the schedule splits backward passes."""
    pauses_again: bool
    """Whether exchanges run again before the gradients."""
    sends: bool
    """Whether what a backward pass has sent stays."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    most: Counts
    """All that may be most, [moments, columns]."""
    rests: Counts
    """[1, columns]"""


class _Drawn:
    """A pass under construction."""

    def __init__(self) -> None:
        self.stretches: list[_Stretch] = []
        self._moments: list[Counts] = []

    def reach(self, now: Counts) -> None:
        self._moments.append(now)

    def pause(self, rests: Counts) -> None:
        self.stretches.append(_Stretch(np.array(self._moments), rests[None]))
        self._moments = []


@lru_cache(maxsize=4096)
def pair_rows(pairing: Pairing, ahead: Chunk, behind: Chunk) -> Counts:
    """The moments of a pair that no other one outdoes, [moments, columns].

    Args:
        pairing: how they run.
        ahead: what runs forward.
        behind: what runs backward.
    """
    columns = pairing.columns
    nothing = _Units(columns).row(in_transit=1.0)
    sent = nothing.copy()
    if pairing.sends:
        sent[columns.end("hidden")] += (not behind.has_embedding) + (not behind.has_loss)
    forward, backward = _forward(pairing, ahead), _backward(pairing, behind)
    found = [one + other for one, other in turns(forward, backward, nothing[None], sent[None])]
    return undominated(np.unique(np.concatenate(found), axis=0))


@lru_cache(maxsize=1024)
def _forward(pairing: Pairing, chunk: Chunk) -> tuple[_Stretch, ...]:
    drawn = _Drawn()
    run_forward(drawn, _pieces(pairing, chunk))
    return tuple(drawn.stretches)


@lru_cache(maxsize=1024)
def _backward(pairing: Pairing, chunk: Chunk) -> tuple[_Stretch, ...]:
    drawn = _Drawn()
    run_backward(drawn, _pieces(pairing, chunk))
    return tuple(drawn.stretches)


class _Units:
    """Rows with one of something."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def row(self, **ends: float) -> Counts:
        """So many of some end columns."""
        found = np.zeros(self._columns.size)
        for name, count in ends.items():
            found[self._columns.end(name)] = count
        return found

    def layer(self, first: int, kind: int, in_transit: float = 0.0) -> Counts:
        """A layer of a kind in the columns from `first` on."""
        found = self.row(in_transit=in_transit)
        found[first + kind] = 1.0
        return found

    def pieces(self, kind: int, postponed: Counts) -> LayerPieces[Counts]:
        """A layer. At work it is there as a whole: of offloaded parts one run less is in transit, half of its two."""
        columns = self._columns
        at = {name: self.layer(columns.at(name), kind, 0.0 if name in WITH_SPLITS else -0.5) for name in MOMENTS}
        return LayerPieces(self.layer(columns.kept, kind), at, postponed, kind in columns.routed)


def _pieces(pairing: Pairing, chunk: Chunk) -> StagePieces[Counts]:
    columns, units = pairing.columns, _Units(pairing.columns)
    nothing, splits = units.row(), pairing.splits
    known = {
        kind: units.pieces(kind, units.layer(columns.postponed, kind) if splits else nothing)
        for kind in set(chunk.kinds)
    }
    further = []
    if chunk.num_further:
        postponed = units.row(postponed_further=1.0) if splits else nothing
        further = [units.pieces(chunk.further_kind, postponed)] * chunk.num_further
    postponed_heads = chunk.has_loss * splits * (1.0 + chunk.num_further)
    return StagePieces(
        before=units.row(embedding=float(chunk.has_embedding), in_transit=1.0),
        layers=[known[kind] for kind in chunk.kinds],
        further=further,
        further_kept=units.row(further=1.0),
        head=units.row(head=float(chunk.has_loss)),
        logits=units.row(logits=1.0),
        postponed_head=units.row(postponed_head=postponed_heads),
        is_last=chunk.has_loss,
        splits=splits,
        pauses_again=pairing.pauses_again,
    )
