"""Routing replay of rollouts (R3, arXiv:2510.11370): training sends each token to the experts that sampling chose.

The ranks that sampled hold the choices. Each training rank needs the choices of its own rows, positions and layers. All
ranks know the packing, so one all-to-all of bytes moves exactly these choices, for any two mappings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.comm.collectives import all_to_all
from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.model import ModelConfig
from moefold.data.routing_trace import expert_index_dtype
from moefold.model.moe.router_replay import ReplayedRouting
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.tensor_parallel import local_positions

ExpertIds = NDArray[np.integer]


@dataclass(frozen=True)
class PackedTokens:
    """The rollout of each token of the packed samples of a step, the same on every rank."""

    rollout_NS: NDArray[np.int64]
    """Index of the rollout, [samples of the global batch, S], or -1 for padding."""
    offset_NS: NDArray[np.int64]
    """Position in the rollout, prompt included, [samples, S]."""
    last_R: NDArray[np.int64]
    """Position of the last token of each rollout, which sampling never routed, [rollouts]."""
    shard_R: NDArray[np.int64]
    """Data-parallel rank of sampling that made each rollout, [rollouts]."""


@dataclass(frozen=True)
class BatchRouting:
    """Choices to replay for this rank's shard of a batch."""

    first_sample: int
    """Index of this rank's first sample in the global batch."""
    ids_of_layer: Mapping[int, Tensor]
    """Experts by number of the MoE layer, [N, S/(cp*tp), K]."""
    is_replayed_NS: Tensor
    """Tokens that have choices, bool [N, S/(cp*tp)]: all except padding and the last token of each rollout."""


@dataclass(frozen=True)
class _Member:
    """Roles of a rank in training and in sampling."""

    dp_rank: int
    positions: NDArray[np.int64]
    """Positions in a sample that this rank routes in training, [S/(cp*tp)]."""
    layers: tuple[int, ...]
    """MoE layers that this rank trains."""
    shard: int
    """Data-parallel rank of sampling. cp counts as dp there."""
    tp_rank: int
    """Tensor-parallel rank of sampling, and the number of them."""
    tp_size: int
    sampled_layers: tuple[int, ...]
    """MoE layers of this rank in sampling."""

    def sends_to(self, rank: int) -> bool:
        """Return whether this rank is the sender to a rank among its tensor-parallel ranks."""
        return rank % self.tp_size == self.tp_rank


class RolloutReplay:
    """Connects the routers of a model in training to the experts that were chosen in sampling.

    Args:
        model: the model in training. Its routers replay the choices that `use` sets.
        sampling: the process groups of the mapping that samples.
        sampled_layers: MoE layers of this rank under that mapping.

    The constructor is collective over all ranks.
    """

    def __init__(
        self, model: ParallelModel, sampling: ParallelGroups, sampled_layers: Sequence[int], sizes: ModelConfig
    ) -> None:
        self._groups = model.groups
        self._top_k = sizes.experts.top_k
        self._dtype = expert_index_dtype(sizes.experts.num_choices)
        tp = sampling.attn.tp
        member = _Member(
            dp_rank=self._groups.attn.dp.rank,
            positions=local_positions(model.positions, self._groups.attn.tp).cpu().numpy(),
            layers=tuple(model.moe_layers()),
            shard=sampling.attn.dp_cp.rank,
            tp_rank=tp.rank,
            tp_size=tp.size,
            sampled_layers=tuple(sampled_layers),
        )
        self._members: list[_Member] = current_world().all_gather_object(member)
        self._member = member
        self._layer_routing = {number: ReplayedRouting(0) for number in model.moe_layers()}
        for number, layer in model.moe_layers().items():
            layer.router.override = self._layer_routing[number]

    def fetch(self, tokens: PackedTokens, recorded: Mapping[int, ExpertIds]) -> BatchRouting:
        """Get the choices of this rank's shard of a batch from the ranks that sampled it. It is collective.

        Args:
            recorded: choices of the rollouts that this rank sampled, by index of the rollout, [`sampled_layers`, tokens
                without the last, K].
        """
        world = self._groups.world
        rank = world.rank
        rows, starts = _concatenate(recorded, len(tokens.last_R), len(self._member.sampled_layers), self._top_k)
        sent_rows: list[NDArray[np.uint8]] = []
        for member, receiver in enumerate(self._members):
            layers = self._common_layers(self._member, receiver, member)
            is_mine = self._is_from(tokens, receiver, self._member.shard)
            index = self._rows_of_receiver(tokens.rollout_NS, receiver)[is_mine]
            index = starts[index] + self._rows_of_receiver(tokens.offset_NS, receiver)[is_mine]
            columns = np.array([self._member.sampled_layers.index(layer) for layer in layers], np.int64)
            block = rows[np.ix_(columns, index)]
            sent_rows.append(np.ascontiguousarray(block, self._dtype).reshape(-1).view(np.uint8))
        masks = [self._is_from(tokens, self._member, member.shard) for member in self._members]
        item = self._top_k * self._dtype.itemsize
        layers_from = [self._common_layers(member, self._member, rank) for member in self._members]
        counts = [len(layers) * int(mask.sum()) * item for layers, mask in zip(layers_from, masks, strict=True)]
        buffer = torch.from_numpy(np.concatenate(sent_rows)).to(self._groups.device)
        received = all_to_all(buffer, world, [len(block) for block in sent_rows], counts).cpu().numpy()
        ids = np.zeros((len(self._member.layers), *masks[0].shape, self._top_k), self._dtype)
        for block, layers, mask in zip(np.split(received, np.cumsum(counts)[:-1]), layers_from, masks, strict=True):
            shape = len(layers), int(mask.sum()), self._top_k
            values = np.ascontiguousarray(block).view(self._dtype).reshape(shape)
            for layer, layer_ids in zip(layers, values, strict=True):
                ids[self._member.layers.index(layer)][mask] = layer_ids
        is_replayed = np.logical_or.reduce(masks)
        device = self._groups.device
        return BatchRouting(
            first_sample=self._member.dp_rank * len(is_replayed),
            ids_of_layer={
                layer: torch.from_numpy(layer_ids).to(device)
                for layer, layer_ids in zip(self._member.layers, ids, strict=True)
            },
            is_replayed_NS=torch.from_numpy(is_replayed).to(device),
        )

    def use(self, routing: BatchRouting, *, in_evaluation: bool = False) -> None:
        """Replay the choices of a batch in the next forward passes.

        Args:
            in_evaluation: also in evaluation mode, for log-probabilities of the same batch.
        """
        for number, override in self._layer_routing.items():
            override.first_sample = routing.first_sample
            override.replayed_NSK = routing.ids_of_layer[number]
            override.is_replayed_NS = routing.is_replayed_NS
            override.in_evaluation = in_evaluation

    def _common_layers(self, sender: _Member, receiver: _Member, receiver_rank: int) -> list[int]:
        """Return the layers whose choices one rank sends to another, ascending."""
        if not sender.sends_to(receiver_rank):
            return []
        return sorted(set(sender.sampled_layers) & set(receiver.layers))

    def _rows_of_receiver(self, values_NS: NDArray[np.int64], receiver: _Member) -> NDArray[np.int64]:
        """Return the part of a rank's rows and positions, [N, S/(cp*tp)]."""
        per_rank = len(values_NS) // self._groups.attn.dp.size
        rows = values_NS[receiver.dp_rank * per_rank : (receiver.dp_rank + 1) * per_rank]
        return rows[:, receiver.positions]

    def _is_from(self, tokens: PackedTokens, receiver: _Member, shard: int) -> NDArray[np.bool_]:
        """Return the mask of a rank's tokens that a data-parallel rank of sampling routed, bool [N, S/(cp*tp)]."""
        rollout = self._rows_of_receiver(tokens.rollout_NS, receiver)
        is_routed = (rollout >= 0) & (self._rows_of_receiver(tokens.offset_NS, receiver) < tokens.last_R[rollout])
        return is_routed & (tokens.shard_R[rollout] == shard)


def _concatenate(
    recorded: Mapping[int, ExpertIds], num_rollouts: int, num_layers: int, top_k: int
) -> tuple[ExpertIds, NDArray[np.int64]]:
    """Return the choices of all rollouts as [layers, tokens, K], and the first token of each rollout, [rollouts]."""
    starts = np.zeros(num_rollouts, np.int64)
    total = 0
    for number, ids in recorded.items():
        starts[number] = total
        total += ids.shape[1]
    if not recorded:
        return np.zeros((num_layers, 0, top_k), np.int64), starts
    return np.concatenate(list(recorded.values()), axis=1), starts
