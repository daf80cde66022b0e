"""Bytes of weights, gradients and moments of each unit of a model, by the runtime's formula. Torch-free.

A unit is the embedding, a layer of a kind, the head, or a layer of multi-token prediction. Its dense weights depend on
tp and on the ranks that data parallelism cuts them over, its experts on ep, etp and edp: each is counted once.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import Config
from moefold.metrics.moments_away import sizes_away
from moefold.metrics.state_memory import (
    Holding,
    alone_bytes,
    compute_bytes,
    expert_buffer_bytes,
    holding_of,
    rotation_bytes,
    unit_weights,
)
from moefold.metrics.weight_shapes import WeightShape
from moefold.plan.columns import Columns
from moefold.plan.flop_count import expert_parameters, layer_parameters
from moefold.plan.mapping import Mapping
from moefold.plan.shape import ModelShape
from moefold.plan.workload import Workload

STATE_PARTS = ("weights", "gathered", "gradients", "optimizer", "buffers")
Prices = NDArray[np.float64]


class HeldStates:
    """The states of the units of one model.

    Args:
        shape: the model.
        workload: whose types of gradients and moments count, where they are not those of the recipe.
        cfg: the recipe; of its mapping nothing counts.
    """

    def __init__(self, shape: ModelShape, workload: Workload, cfg: Config, columns: Columns) -> None:
        self.shape, self.workload, self.cfg, self.columns = shape, workload, cfg, columns
        self._units: dict[tuple[object, ...], tuple[int, int, int, int]] = {}
        self._prices: dict[tuple[object, ...], Prices] = {}
        self._rotations: dict[int, int] = {}
        self._totals: dict[tuple[object, ...], Prices] = {}
        self._weights: dict[tuple[str | int, int], tuple[WeightShape, ...]] = {}

    def prices(self, m: Mapping, *, sums: bool) -> Prices:
        """Bytes of one of each state column, [parts, columns].

        Args:
            m: the mapping.
            sums: whether it has several micro-batches, whose gradients are added up.
        """
        key = self._key(m, sums)
        if key not in self._prices:
            self._prices[key] = self._table(m, self.degrees(m), key[0], "optimizer" in m.offload)
        return self._prices[key]

    def totals(self, m: Mapping, *, sums: bool) -> Prices:
        """The same without parts, [columns]."""
        key = self._key(m, sums)
        if key not in self._totals:
            self._totals[key] = self.prices(m, sums=sums).sum(axis=0)
        return self._totals[key]

    def units(self) -> list[tuple[int, str | int]]:
        """(column, name) of each unit: kinds of layers, both ends, and layers of multi-token prediction."""
        kinds, columns = range(self.columns.kinds), self.columns
        names = ("embedding", "head", *(("further",) if self.shape.mtp_layers else ()))
        return [*((kind, kind) for kind in kinds), *((columns.state(name), name) for name in names)]

    def sizes_away(self, name: str | int, m: Mapping) -> list[int]:
        """Bytes of the moments of each weight of a unit that leave memory where moments do."""
        degrees = self.degrees(m)
        weights = (weight.cut(m.tp, m.ep, m.etp) for weight in self.weights(name, m.tp))
        return list(sizes_away(self._holding(degrees, sums=False), weights, self.cfg.train.offload_min_kib))

    def _key(self, m: Mapping, sums: bool) -> tuple[bool, *tuple[object, ...]]:
        sums = sums and m.zero < 2 and m.world_size > 1
        cut = self.degrees(m)
        return (sums, m.tp, m.cp, m.ep, m.etp, *cut, m.zero, m.world_size == 1, "optimizer" in m.offload)

    def degrees(self, m: Mapping) -> tuple[int, int]:
        """Ranks that share the states of dense weights and of experts."""
        if m.zero == 0 or m.world_size == 1:
            return 1, 1
        if self.workload.shards_over_dp_alone:
            return m.dp, max(1, m.edp // m.cp)
        return m.dp * m.cp, m.edp

    def _table(self, m: Mapping, degrees: tuple[int, int], sums: bool, is_away: bool) -> Prices:
        columns, gathered = self.columns, {}
        table = np.zeros((len(STATE_PARTS), columns.state_size))
        for column, name in self.units():
            weights, copies, summed, moments, buffers = self._unit(name, m, degrees, sums=sums, away=is_away)
            table[:, column] = weights, copies, summed, moments, buffers
            gathered[name] = copies
        if self.shape.embeds_twice:
            for name in ("second_embedding", "following_embedding"):
                table[:, columns.state(name)] = table[:, columns.state("embedding")]
            table[STATE_PARTS.index("optimizer"), columns.state("following_embedding")] = 0
        table[STATE_PARTS.index("buffers"), columns.state("stage")] = self._rotation(m)
        if is_away and self.workload.is_megatron:
            # Megatron-Core updates on the host, where the master weights are too.
            table[STATE_PARTS.index("weights")] = table[STATE_PARTS.index("optimizer")] = 0
        if m.zero == 3 and m.world_size > 1:
            self._free_layers(table, gathered)
        return table

    def _free_layers(self, table: Prices, gathered: dict[str | int, int]) -> None:
        """With ZeRO-3 the layers of a stage are there one after another: the largest of them counts."""
        row, columns = table[STATE_PARTS.index("gathered")], self.columns
        layers = [*range(columns.kinds), "further"]
        for kind, name in enumerate(layers):
            row[kind if name != "further" else columns.state("further")] = 0
            size = gathered.get(name, 0)
            for bits in range(2 ** len(layers)):
                if bits >> kind & 1:
                    row[columns.sets + bits] = max(row[columns.sets + bits], size)

    def _unit(
        self, name: str | int, m: Mapping, degrees: tuple[int, int], *, sums: bool, away: bool
    ) -> tuple[int, ...]:
        if m.world_size == 1:
            return self._alone(name, away=away)
        holding = self._holding(degrees, sums)
        total = (0, 0, 0, 0)
        for is_expert, cut in ((False, (m.tp, degrees[0])), (True, (m.ep, m.etp, degrees[1]))):
            key = (name, is_expert, *cut, sums, away)
            if key not in self._units:
                weights = [w.cut(m.tp, m.ep, m.etp) for w in self.weights(name, m.tp) if w.is_expert == is_expert]
                self._units[key] = self._counted(holding, weights, holding.gathered(weights), away=away)
            total = _sum(total, self._units[key])
        return (*total, self._buffers(name))

    def _alone(self, name: str | int, *, away: bool) -> tuple[int, ...]:
        weights = self.weights(name, 1)
        if self.shape.config is not None:
            copies = alone_bytes(self.cfg, [self._unit_name(name)])
        else:
            copies = compute_bytes(self.cfg) * sum(w.numel for w in weights)
        counted = self._counted(self._holding((1, 1), sums=False), weights, copies, away=away)
        return (*counted, self._buffers(name))

    def _counted(
        self, holding: Holding, weights: Sequence[WeightShape], copies: int, *, away: bool
    ) -> tuple[int, int, int, int]:
        states = holding.states(weights)
        optimizer = states.optimizer
        if away:
            optimizer -= sum(sizes_away(holding, weights, self.cfg.train.offload_min_kib))
        return states.weights, copies, max(states.gradients, states.gradient_sums), optimizer

    def _holding(self, degrees: tuple[int, int], sums: bool) -> Holding:
        holding, states = holding_of(self.cfg, degrees, sums=sums), self.workload.states
        if states is None:
            return holding
        return replace(holding, master=states.master, moment=states.moment, gradient=states.gradient)

    def _unit_name(self, name: str | int) -> str:
        return name if isinstance(name, str) else letter_of(self.shape, name)

    def _buffers(self, name: str | int) -> int:
        if self.shape.config is None:
            return 0
        letter = self._unit_name(name)
        has_experts = letter == "M" or (letter == "further" and self.cfg.model.layer_kinds[-1] == "M")
        return expert_buffer_bytes(self.cfg) if has_experts else 0

    def _rotation(self, m: Mapping) -> int:
        if self.shape.config is None:
            return 0
        if m.cp not in self._rotations:
            cfg = replace(self.cfg, parallel=replace(self.cfg.parallel, cp=m.cp))
            self._rotations[m.cp] = rotation_bytes(cfg)
        return self._rotations[m.cp]

    def weights(self, name: str | int, tp: int) -> tuple[WeightShape, ...]:
        """The whole weights of a unit: a kind of layers, or "embedding", "head", "further"."""
        key = (name, tp)
        if key not in self._weights:
            if self.shape.config is not None:
                cfg = replace(self.cfg, parallel=replace(self.cfg.parallel, tp=tp))
                self._weights[key] = unit_weights(cfg, self._unit_name(name))
            else:
                self._weights[key] = _foreign_weights(self.shape, name)
        return self._weights[key]


def letter_of(shape: ModelShape, kind: int) -> str:
    """The runtime's name of a kind of layers."""
    layer = shape.kinds[kind].feed_forward
    return "M" if layer is not None and layer.kind == "moe" else "D"


def _sum(left: tuple[int, int, int, int], right: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2], left[3] + right[3]


def _foreign_weights(shape: ModelShape, name: str | int) -> tuple[WeightShape, ...]:
    """Those of a model that the runtime does not know: one matrix for all that is cut alike."""
    hidden = shape.hidden_size
    if name in ("embedding", "head"):
        return (WeightShape("embedding", (shape.vocab_size, hidden), tp_dim=0),)
    kind = shape.further_kind if isinstance(name, str) else name
    dense, experts = layer_parameters(shape, kind)
    found = [WeightShape("attention", (dense // hidden, hidden), tp_dim=0)]
    layer = shape.kinds[kind].feed_forward
    if experts and layer is not None:
        rows = expert_parameters(layer, hidden)
        found.append(WeightShape("experts", (layer.num_experts, rows), etp_dim=1))
    if name == "further":
        found.append(WeightShape("mtp", (hidden, 2 * hidden)))
    return tuple(found)
