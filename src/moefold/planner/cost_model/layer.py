"""Cost model of one layer for one micro-batch, item by item in the order of execution.

Every method caches its results by the few integers it depends on, so that a search prices each part of a layer once.
Attention does not depend on the experts' degrees, and the experts depend on cp only through the tokens of a rank.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moefold.config.groups.dispatcher import DispatcherPart
from moefold.cost.hardware import Device
from moefold.cost.memoised import memoised
from moefold.planner.cost_model.attention_load import AttentionPeers
from moefold.planner.cost_model.block import BlockCost, BlockTime
from moefold.planner.cost_model.gemm import GemmCost
from moefold.planner.cost_model.mixer import MixerCost, projections_of
from moefold.planner.cost_model.network import DenseCost, MoECost
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import ModelSpec


class LayerCostModel:
    """Cost model of the layers of one model on one device."""

    def __init__(self, model_spec: ModelSpec, device: Device, workload: TrainingWorkload) -> None:
        self.model_spec = model_spec
        self.workload = workload
        self._hidden_size = model_spec.config.hidden_size
        self.gemm = GemmCost(device, workload)
        self._networks: dict[tuple[int, int, int, DispatcherPart], BlockTime] = {}
        """MoE blocks of a kind with `_token_places`, by ep, etp and dispatcher."""
        self._token_places: dict[tuple[float, ...], int] = {}

    @memoised(lambda self, kind, m, peers=None: (kind, m.tp, m.cp, m.mbs, peers))
    def mixer(self, kind: int, mapping: ParallelMapping, peers: AttentionPeers | None = None) -> BlockTime:
        """Return the time of the token mixer (attention or a recurrence) of one layer kind.

        With documents (`TrainingWorkload.attention`), `peers` are the ranks that wait for each other. None gives the
        mean work to each rank.
        """
        layer = self.model_spec.kinds[kind]
        if not projections_of(layer).output_width:
            return BlockTime()
        loads = self.workload.attention
        load = None
        if loads is not None and not layer.attention.is_recurrent:
            load = loads.mean_load(layer.window) if peers is None else loads.load(peers, layer.window)
        is_moefold = self.model_spec.is_trainable and not self.workload.is_megatron
        return MixerCost(self.gemm, layer, mapping, load, is_moefold=is_moefold).block_time()

    def token_key(self, m: ParallelMapping) -> tuple[float, ...]:
        """Return the values that decide the tokens of a feed-forward network and the places of its ranks."""
        # cp matters only by the tokens of a rank, unless the ranks of cp lie between the ranks of ep.
        return m.tp, m.mbs / m.cp, m.cp if self.workload.is_coupled else 1

    def _feed_forward_key(self, kind: int, m: ParallelMapping) -> tuple[object, ...]:
        experts = (m.ep, m.etp, m.dispatcher) if self.model_spec.kinds[kind].ffn.is_routed else ()
        return (kind, *self.token_key(m), *experts)

    @memoised(_feed_forward_key)
    def feed_forward(self, kind: int, mapping: ParallelMapping) -> BlockTime:
        """Return the time of the dense MLP or the MoE block of one layer kind."""
        part = self.model_spec.kinds[kind].ffn
        if part.routed:
            known = self._networks.get((kind, mapping.ep, mapping.etp, mapping.dispatcher))
            place = self._token_places.get(self.token_key(mapping))
            if known is not None and place is not None:
                return known.at(place)
            block = BlockCost(self.gemm, self._hidden_size, mapping)
            return MoECost(block, part.routed, mapping.ep, mapping.etp).block_time(mapping.dispatcher)
        width = part.tp_unit[1]
        return DenseCost(self.gemm, self._hidden_size, mapping).block_time(width) if width else BlockTime()

    def network_sums(
        self,
        kind: int,
        mappings: Sequence[ParallelMapping],
        degrees: Sequence[tuple[int, int, Sequence[DispatcherPart]]],
    ) -> dict[DispatcherPart, NDArray[np.float64]]:
        """Return `BlockTime.sums` of the networks of a kind for each dispatcher, [10, degrees, mappings].

        Args:
            mappings: mappings with all distinct `token_key`. Their expert degrees do not count.
            degrees: ep and etp, with the dispatchers to price.
        """
        part = self.model_spec.kinds[kind].ffn
        dispatchers = dict.fromkeys(one for _, _, own in degrees for one in own)
        if not part.routed:
            rows = np.array([self.feed_forward(kind, m).sums for m in mappings]).T
            return dict.fromkeys(dispatchers, np.repeat(rows[:, None], len(degrees), axis=1))
        self._token_places = {self.token_key(m): i for i, m in enumerate(mappings)}
        tp, cp, mbs = np.array([(m.tp, m.cp, m.mbs) for m in mappings]).T
        found = {one: np.full((10, len(degrees), len(mappings)), np.nan) for one in dispatchers}
        block = BlockCost(self.gemm, self._hidden_size, ParallelMapping(tp=tp, cp=cp, mbs=mbs))
        for i, (ep, etp, own) in enumerate(degrees):
            cost = MoECost(block, part.routed, ep, etp)
            for one in own:
                network = self._networks[kind, ep, etp, one] = cost.block_time(one)
                found[one][:, i] = network.sums
        return found
