"""Experts that ranks read from each other's memory, without a collective (DWDP, arXiv:2604.01621).

Each ep rank of a machine holds its part of the experts in memory that all of them map. A rank routes its own tokens to
all experts, as if it held them, and reads the weights of its peers in place. Nothing is copied, and no rank waits for
another. The ranks wait for each other only when weights change, see `PeerExperts.writing`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moefold.comm.collectives import all_gather_objects
from moefold.comm.groups import ParallelGroups
from moefold.comm.sharded_tensor import local_slice
from moefold.comm.shared_memory import open_shared_memory
from moefold.model.local_param import parameter_over
from moefold.model.moe.dispatch.local import LocalDispatcher
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import Transformer
from moefold.topology.rollout_mapping import FETCH

ALIGNMENT_BYTES = 64
"""Tensors begin at multiples of this, a line of the cache."""


class PeerExperts:
    """Expert weights of a stage for inference, in memory that its ep ranks share.

    The parameters of the experts become views of this rank's part. The layers compute with the weights of all experts,
    and dispatch their tokens locally. It is collective over ep.

    Args:
        stage: sharded over ep, with tp = etp = 1, on the CPU.

    Raises:
        RunError: on all ranks of ep, one of them cannot map the memory.
    """

    def __init__(self, stage: Transformer, groups: ParallelGroups) -> None:
        self._ep = groups.moe.ep
        layers = {name: module for name, module in stage.named_modules() if isinstance(module, MoELayer)}
        self.names = frozenset(
            f"{name}.experts.{leaf}" for name, layer in layers.items() for leaf, _ in layer.experts.named_parameters()
        )
        """The parameters in shared memory, by their names in the full model."""
        if not layers:
            return
        tensors = [weight for layer in layers.values() for weight in layer.experts.weights]
        sizes = [_aligned(local_slice(weight)[0].nbytes * self._ep.size) for weight in tensors]
        memory = open_shared_memory(sum(sizes), self._ep, str(FETCH))
        buffers = iter(memory.split(sizes))
        for layer in layers.values():
            self._share(layer, buffers)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let the ranks change their parts of the weights inside this context. It is collective over ep.

        No rank enters before all have stopped reading, and no rank leaves before all have written.
        """
        all_gather_objects(None, self._ep)
        yield
        all_gather_objects(None, self._ep)

    def _share(self, layer: MoELayer, buffers: Iterator[torch.Tensor]) -> None:
        """Replace the parameters by views of the next parts of the shared memory. Let the layer read all of it."""
        experts = layer.experts
        peer_weights = []
        leaf_of = {id(weight): leaf for leaf, weight in experts.named_parameters()}
        for weight in experts.weights:
            values, (first, *_) = local_slice(weight)
            num_experts = len(values) * self._ep.size
            shape = (num_experts, *values.shape[1:])
            num_bytes = values.nbytes * self._ep.size
            full = next(buffers)[:num_bytes].view(values.dtype).view(shape)
            local = full[first : first + len(values)]
            experts.register_parameter(leaf_of[id(weight)], parameter_over(weight, local))
            peer_weights.append(full)
        experts.peer_weights = peer_weights
        dispatcher = LocalDispatcher(len(peer_weights[0]))
        dispatcher.use_permute_ops(layer.dispatcher.permute_ops)
        layer.dispatcher = dispatcher


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
