"""What a pass has in memory between two exchanges of experts, and two passes that take turns there. Torch-free.

With `parallel.overlap_experts` a forward pass goes on by one exchange wherever the backward pass of another micro-batch
has begun one. What is there at once follows from where both of them stand.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from moefold.metrics.activation_memory import ActivationFormula
from moefold.metrics.kept_parts import Parts
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

    def reach(self, parts: Parts) -> None:
        """So much is there at some moment."""
        if parts.total() > self._most.size:
            self._most = Amount(parts)

    def pause(self, parts: Parts) -> None:
        """So much is there while an exchange is under way, or when all is done."""
        self.reach(parts)
        self.stretches.append(Stretch(self._most, Amount(parts)))
        self._most = NOTHING


class PassFormula:
    """The passes of the stages of one config, with `parallel.overlap_experts`.

    Every exchange counts as one over all axes: what goes beside it has as many.

    Args:
        formula: of the layers.
        splits: whether the schedule splits backward passes, so that a whole one, too, computes the gradients of weights
            last.
    """

    def __init__(self, formula: ActivationFormula, *, splits: bool) -> None:
        self._formula, self._splits = formula, splits
        self._pauses_again = bool(formula.recompute.intersection(AGAIN))

    def forward(self, stage: Stage) -> Way:
        """The forward pass of a stage."""
        formula, drawn = self._formula, _Drawn()
        now = formula.before_layers(stage)
        drawn.reach(now)
        for kind in formula.kinds(stage):
            self._layer_forward(drawn, formula, kind, now)
            now = now + formula.layers[kind]
        if stage.is_last:
            transient = Parts(logits=formula.transient_logits)
            now = now + formula.head()
            drawn.reach(now + transient)
            for _ in range(stage.parts.num_further):
                self._layer_forward(drawn, formula, formula.further_kind, now)
                now = now + formula.further()
                drawn.reach(now + transient)
        drawn.pause(now)
        return tuple(drawn.stretches)

    def backward(self, stage: Stage) -> Way:
        """The backward pass of a stage, recomputation included."""
        formula, drawn = self._formula, _Drawn()
        kinds = formula.kinds(stage) + [formula.further_kind] * stage.parts.num_further
        now = formula.stage(stage)
        drawn.reach(now)
        if stage.is_last:
            now = now - formula.behind_layers(stage)
            for _ in range(stage.parts.num_further):
                now = now + formula.layers[formula.further_kind]
        left = Parts()
        if self._splits and stage.is_last:
            left["logits"] = (1 + stage.parts.num_further) * formula.postponed_head
        for kind in reversed(kinds):
            now = now - formula.layers[kind]
            self._layer_backward(drawn, kind, now + left)
            left = left + formula.postponed_layer(kind) if self._splits else left
        drawn.pause(now + left)
        return tuple(drawn.stretches)

    def _layer_forward(self, drawn: _Drawn, formula: ActivationFormula, kind: str, now: Parts) -> None:
        """A layer that runs for the first time or, with a formula that keeps everything, again."""
        passing_norm = formula.passing_norm
        if kind == "D":
            drawn.reach(now + formula.whole.layers[kind] + passing_norm)
            return
        whole, experts, output = formula.whole, formula.experts, Parts({"residual stream": formula.hidden})
        places, under_way = experts.places(), experts.rows_to_experts()
        ahead = now + whole.layers[kind] - output - whole.experts.kept() + places
        # The shared expert runs while the rows are under way.
        drawn.reach(ahead + under_way + passing_norm)
        keeps = not formula.recompute.intersection(AGAIN)
        held = now + (formula.layers[kind] - output - experts.kept() + places if keeps else self._held(formula))
        held["shared experts"] += formula.hidden if whole.layers[kind]["shared experts"] else 0
        drawn.pause(held + under_way)
        all_results = Parts(experts=experts.rows * experts.row)
        drawn.reach(held + whole.experts.worked_on() - places + all_results + experts.at_work())
        worked = experts.worked_on() - places if keeps else Parts()
        drawn.pause(held + worked + experts.rows_from_experts())
        drawn.reach(held + worked + experts.results() + experts.summing())

    def _held(self, formula: ActivationFormula) -> Parts:
        """What an MoE layer that will run again has at hand while rows travel, although it keeps none of it.

        The result of the norm, the choices and where the rows are; where all of the layer runs again, the residual
        stream too.
        """
        held = Parts(router=formula.whole.layers["M"]["router"])
        if "layer" in formula.recompute:
            return held + formula.experts.places() + Parts({"norms": formula.hidden, "residual stream": formula.hidden})
        return held + formula.layers["M"] - Parts({"residual stream": formula.hidden})

    def _layer_backward(self, drawn: _Drawn, kind: str, now: Parts) -> None:
        """A layer whose gradients come, on top of what is there of those before it."""
        formula, whole = self._formula, self._formula.whole
        if self._pauses_again:
            self._layer_forward(drawn, whole, kind, now)
        drawn.reach(now + whole.layers[kind] + formula.passing_norm)
        if kind == "D":
            return
        there = whole if self._pauses_again else formula
        full = now + there.layers[kind] - there.experts.results() - Parts({"residual stream": formula.hidden})
        drawn.pause(full)
        again = whole.experts.inner_values() - there.experts.inner_values()
        drawn.reach(full + again + (formula.postponed_beside(kind) if self._splits else Parts()))
        late = Parts(experts=formula.postponed_layer(kind)["experts"]) if self._splits else Parts()
        drawn.pause(full - there.experts.worked_on() + late)


def fullest_moment(forward: Way, backward: Way, sent: Amount) -> tuple[Amount, Amount]:
    """The moment of a pair at which most is there: what belongs to the forward pass, and to the backward pass.

    Args:
        forward: of one micro-batch; it begins at the first exchange of the other pass.
        backward: of another one; at each of its exchanges the forward pass goes on to its own next one.
        sent: what is left of the backward pass when it is over.
    """
    return max(_moments(forward, backward, sent), key=lambda both: both[0].size + both[1].size)


def _moments(forward: Way, backward: Way, sent: Amount) -> Iterator[tuple[Amount, Amount]]:
    ahead, coming = NOTHING, iter(forward)
    for stretch in backward[:-1]:
        yield ahead, stretch.most
        if following := next(coming, None):
            yield following.most, stretch.rests
            ahead = following.rests
    yield ahead, backward[-1].most
    for following in coming:
        yield following.most, sent
