"""What a pass has in memory between two exchanges of experts, and two passes that take turns there. Torch-free.

With `parallel.overlap_experts` a forward pass goes on by one exchange wherever the backward pass of another micro-batch
has begun one. What is there at once follows from where both of them stand (`pass_turns.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from moefold.metrics.activation_memory import ActivationFormula
from moefold.metrics.kept_parts import Parts
from moefold.metrics.pass_turns import AGAIN as NAMES_AGAIN
from moefold.metrics.pass_turns import FORWARD, LayerPieces, StagePieces, run_backward, run_forward, turns
from moefold.parallel.exchange_order import AGAIN
from moefold.parallel.stage_plan import Stage


@dataclass(frozen=True, slots=True)
class Amount:
    """Parts with their sum, which is asked for often."""

    parts: Parts
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.parts.total())


NOTHING = Amount(Parts())


@dataclass(frozen=True, slots=True)
class Stretch:
    """A pass from one exchange to the next, or to its end."""

    most: Amount
    """At its fullest moment."""
    rests: Amount
    """While the exchange at its end is under way."""


Way = tuple[Stretch, ...]


class _Drawn:
    """A pass under construction."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self._most = NOTHING

    def reach(self, now: Parts) -> None:
        if now.total() > self._most.size:
            self._most = Amount(now)

    def pause(self, rests: Parts) -> None:
        self.stretches.append(Stretch(self._most, Amount(rests)))
        self._most = NOTHING


class PassFormula:
    """The passes of the stages of one config, with `parallel.overlap_experts`.

    Every exchange counts as one over all axes: what goes beside it has as many.

    Args:
        formula: of the layers.
        splits: whether the schedule splits backward passes.
    """

    def __init__(self, formula: ActivationFormula, *, splits: bool) -> None:
        self._formula, self._splits = formula, splits
        self._layer, self._pieces = cache(self._layer_pieces), cache(self._stage_pieces)

    def forward(self, stage: Stage) -> Way:
        """The forward pass of a stage."""
        drawn = _Drawn()
        run_forward(drawn, self._pieces(stage))
        return tuple(drawn.stretches)

    def backward(self, stage: Stage) -> Way:
        """The backward pass of a stage, recomputation included."""
        drawn = _Drawn()
        run_backward(drawn, self._pieces(stage))
        return tuple(drawn.stretches)

    def _layer_pieces(self, kind: str) -> LayerPieces[Parts]:
        formula = self._formula
        postponed = formula.postponed_layer(kind) if self._splits else Parts()
        return LayerPieces(formula.layers[kind], moments_of_layer(formula, kind), postponed, kind == "M")

    def _stage_pieces(self, stage: Stage) -> StagePieces[Parts]:
        formula, splits, count = self._formula, self._splits, stage.parts.num_further
        further = []
        if count:
            postponed = formula.postponed_further() if splits else Parts()
            further = [replace(self._layer(formula.further_kind), postponed=postponed)] * count
        return StagePieces(
            before=formula.before_layers(stage),
            layers=[self._layer(kind) for kind in formula.kinds(stage)],
            further=further,
            further_kept=formula.further() if count else Parts(),
            head=formula.head() if stage.is_last else Parts(),
            logits=Parts(logits=formula.transient_logits),
            postponed_head=Parts(logits=(1 + count) * formula.postponed_head if splits and stage.is_last else 0),
            is_last=stage.is_last,
            splits=splits,
            pauses_again=pauses_again(formula.recompute),
        )


def pauses_again(recompute: Iterable[str]) -> bool:
    """Whether exchanges of experts run again before the gradients, with these parts that do."""
    return not set(AGAIN).isdisjoint(recompute)


def moments_of_layer(formula: ActivationFormula, kind: str) -> dict[str, Parts]:
    """All that a layer of kind "D" or "M" has in memory at each of `pass_turns.MOMENTS`."""
    whole = formula.whole
    running = whole.layers[kind] + formula.passing_norm
    if kind == "D":
        return {"leaving": running, "gradients": running}
    found = _forward_moments(formula, FORWARD)
    there, gradients = formula, running
    if pauses_again(formula.recompute):
        there = whole
        again = _forward_moments(whole, (*NAMES_AGAIN, "sum"))
        gradients = _fuller(again.pop("sum"), running)
        found |= again
    full = there.layers[kind] - there.experts.results() - Parts({"residual stream": formula.hidden})
    return found | {
        "gradients": _fuller(gradients, full),
        "home_back": full,
        "experts_back": full + (whole.experts.inner_values() - there.experts.inner_values()),
        "out_back": full - there.experts.worked_on(),
        "beside": formula.postponed_beside(kind),
        "late": Parts(experts=formula.postponed_layer(kind)["experts"]),
    }


def _forward_moments(formula: ActivationFormula, names: tuple[str, ...]) -> dict[str, Parts]:
    """A layer with experts that runs for the first time or, with a formula that keeps everything, again."""
    whole, experts, output = formula.whole, formula.experts, Parts({"residual stream": formula.hidden})
    places, under_way = experts.places(), experts.rows_to_experts()
    # The shared expert runs while the rows are under way.
    ahead = whole.layers["M"] - output - whole.experts.kept() + places + under_way + formula.passing_norm
    keeps = not pauses_again(formula.recompute)
    held = formula.layers["M"] - output - experts.kept() + places if keeps else _held(formula)
    held["shared experts"] += formula.hidden if whole.layers["M"]["shared experts"] else 0
    all_results = Parts(experts=experts.rows * experts.row)
    worked = experts.worked_on() - places if keeps else Parts()
    out, home = held + under_way, held + worked + experts.rows_from_experts()
    at_work = held + whole.experts.worked_on() - places + all_results + experts.at_work()
    summing = held + worked + experts.results() + experts.summing()
    return dict(zip(names, (_fuller(ahead, out), out, _fuller(at_work, home), home, summing), strict=True))


def _held(formula: ActivationFormula) -> Parts:
    """What an MoE layer that will run again has at hand while rows travel, although it keeps none of it.

    The result of the norm, the choices and where the rows are; where all of the layer runs again, the residual stream
    too.
    """
    held = Parts(router=formula.whole.layers["M"]["router"])
    if "layer" in formula.recompute:
        return held + formula.experts.places() + Parts({"norms": formula.hidden, "residual stream": formula.hidden})
    return held + formula.layers["M"] - Parts({"residual stream": formula.hidden})


def _fuller(one: Parts, other: Parts) -> Parts:
    return one if one.total() >= other.total() else other


def fullest_moment(forward: Way, backward: Way, sent: Amount) -> tuple[Amount, Amount]:
    """The moment of a pair at which most is there: what belongs to the forward pass, and to the backward pass.

    Args:
        forward: of one micro-batch; it begins at the first exchange of the other pass.
        backward: of another one; at each of its exchanges the forward pass goes on to its own next one.
        sent: what is left of the backward pass when it is over.
    """
    return max(turns(forward, backward, NOTHING, sent), key=lambda both: both[0].size + both[1].size)
