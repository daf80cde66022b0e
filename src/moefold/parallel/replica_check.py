"""Replica check: detect silent divergence by comparing replicated tensors by hash and DP gradients by cosine.

Replicas that diverge without an error are a known way to lose a run. Causes are a bit flip, a collective with a wrong
result on one rank, or a kernel that is not deterministic on one rank.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moefold.comm.collectives import all_gather, all_reduce_sum
from moefold.comm.groups import Group, current_world
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.metrics.replica_metrics import ReplicaMetrics
from moefold.ops.tensor_hash import TensorHasher
from moefold.parallel.batch import Batch
from moefold.parallel.fsdp_hooks import FSDPCommHooks
from moefold.parallel.parallel_model import ParallelModel
from moefold.topology.layout import Layout


@dataclass(frozen=True)
class Divergence:
    """A value that differs between ranks although it should be equal."""

    what: str
    """Name: a parameter, a moment (`NAME.exp_avg`), gathered weights, a buffer, the batch, or a host fact."""
    axis: str
    ranks: tuple[int, ...]
    """The ranks that differ from the majority, or all of the group if there is no majority."""
    members: tuple[int, ...]
    """All ranks that hold the value."""

    def describe(self) -> str:
        """Return a message about the divergence."""
        holders = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        if len(self.ranks) == len(self.members):
            return f"{self.what} differs between {holders} ({self.axis}), and no majority shows which is right"
        num_others = len(self.members) - len(self.ranks)
        return f"{self.what} on {holders} differs from the {num_others} other ranks that hold it ({self.axis})"


@dataclass(frozen=True)
class HostFact:
    """A named host-side value that must be equal across the given axes."""

    name: str
    value: str
    axes: tuple[str, ...]
    """Subset of tp, cp, pp, stage and world."""


@dataclass(frozen=True)
class _TensorDigest:
    """Digest of a tensor of this rank, and the axes along which other ranks should have the same digest."""

    name: str
    digest: Tensor
    axes: tuple[str, ...]
    is_on_every_rank: bool = True
    """False if some ranks of the axis lack the tensor and use a zero digest."""


class ReplicaGradients:
    """Compares losses and gradients of the replicas on the steps that ask for it.

    Args:
        comm_hooks: the communication hooks of the model's FSDP modules.
        samples: samples of each data-parallel replica in a step, without padding.
    """

    def __init__(self, model: ParallelModel, comm_hooks: FSDPCommHooks, samples: Sequence[int]) -> None:
        self._samples, self._expert_samples = _samples_of_replicas(model.groups.layout, samples)
        self._model = model
        self._comm_hooks = comm_hooks

    def enable(self) -> None:
        """Collect the dot products of the gradients of the next backward passes, until `metrics`."""
        self._comm_hooks.enable()

    def metrics(self, loss: Tensor) -> ReplicaMetrics:
        """Return metrics of the differences between replicas' losses and gradients, by one all-reduce over the world.

        Args:
            loss: this rank's part of the loss of the global batch, 0-dim, or 0 on duplicate ranks.
        """
        groups = self._model.groups
        layout = groups.layout
        device = groups.device
        dp = layout.dp
        edp = layout.edp
        losses = torch.zeros(dp, dtype=torch.float64, device=device)
        losses[groups.attn.dp.rank] = loss.double()
        members = torch.zeros(groups.attn.dp_cp.size, dp, dtype=torch.float64, device=device)
        for member, rank in enumerate(groups.attn.dp_cp.ranks):
            # The gradient of a dp replica is the sum of the gradients of its cp shards.
            members[member, layout.attention.coordinate(rank, "dp")] = 1
        dense = members.T @ self._comm_hooks.dense.pop(device) @ members
        vectors = (losses, dense.flatten(), self._comm_hooks.experts.pop(device).flatten())
        total = all_reduce_sum(torch.cat(vectors), groups.world).cpu().split([vector.numel() for vector in vectors])
        return ReplicaMetrics.from_dot_products(
            total[0].numpy(),
            total[1].view(dp, dp).numpy(),
            total[2].view(edp, edp).numpy(),
            self._samples,
            self._expert_samples,
        )


class ReplicaCheck:
    """Compares the replicated state of ranks.

    Args:
        moments: optimizer moments by name.
        zero: the ZeRO level. From 1 on, the gathered weights are compared too.
    """

    def __init__(self, model: ParallelModel, moments: Mapping[str, Tensor], zero: int) -> None:
        groups = model.groups
        self._model = model
        self._moments = moments
        self._zero = zero
        self._hasher = TensorHasher(groups.device)
        self._no_digest = torch.zeros(2, dtype=torch.int64, device=groups.device)
        self._groups: dict[str, Group] = {
            "tp": groups.attn.tp,
            "dp_cp": groups.attn.dp_cp,
            "edp": groups.moe.edp,
            "stage": groups.attn.stage,
            "cp": groups.attn.cp,
            "pp": groups.pp,
            "world": groups.world,
        }

    @torch.no_grad()
    def find_divergences(self, batch: Batch, host_facts: Sequence[HostFact]) -> tuple[Divergence, ...]:
        """Return the divergences between ranks, the same list on every rank. It is collective over all ranks.

        If all values are equal, each rank sends only two numbers per axis, once.

        Args:
            host_facts: further values that should be equal. The same names in the same order on all ranks.
        """
        digests = list(self._digests(batch, host_facts))
        by_axis = {axis: [d for d in digests if axis in d.axes] for axis in self._groups}
        if self._all_match(by_axis):
            return ()
        divergences = [d for axis, group_digests in by_axis.items() for d in self._compare(axis, group_digests)]
        return tuple(dict.fromkeys(d for of_rank in current_world().all_gather_object(divergences) for d in of_rank))

    def _all_match(self, digests_by_axis: Mapping[str, list[_TensorDigest]]) -> bool:
        """Return whether the members of every group have equal digests. Every rank checks all groups."""
        world = self._groups["world"]
        sums = []
        for axis_digests in digests_by_axis.values():
            # Tensors that some ranks of a group lack are combined separately.
            for digests in (
                [d.digest for d in axis_digests if d.is_on_every_rank == everywhere] for everywhere in (0, 1)
            ):
                sums.append(self._hasher.digest(torch.stack(digests)) if digests else self._no_digest)
        gathered = all_gather(torch.stack(sums)[None], world).view(world.size, len(digests_by_axis), 2, 2).tolist()
        for i, axis in enumerate(digests_by_axis):
            for ranks in self._axis_groups(axis):
                on_some, everywhere = ({tuple(gathered[rank][i][kind]) for rank in ranks} for kind in (0, 1))
                if len(on_some - {(0, 0)}) > 1 or len(everywhere) > 1:
                    return False
        return True

    def _axis_groups(self, axis: str) -> Sequence[Sequence[int]]:
        """Return the ranks of every group of an axis."""
        layout = self._model.groups.layout
        if axis == "world":
            return [range(layout.world_size)]
        names = {"dp_cp": ("dp", "cp"), "stage": ("dp", "cp", "tp")}.get(axis, (axis,))
        return (layout.moe if axis == "edp" else layout.attention).groups(*names)

    def _compare(self, axis: str, digests: list[_TensorDigest]) -> list[Divergence]:
        group = self._groups[axis]
        if group.size == 1 or not digests:
            return []
        own_digests = torch.stack([digest.digest for digest in digests])
        member_digests = all_gather(own_digests, group).view(group.size, len(digests), 2).tolist()
        divergences = []
        for i, digest in enumerate(digests):
            members = {rank: tuple(rows[i]) for rank, rows in zip(group.ranks, member_digests, strict=True)}
            holders = {rank: values for rank, values in members.items() if digest.is_on_every_rank or any(values)}
            if minority := _minority_ranks(holders):
                divergences.append(Divergence(digest.name, axis, minority, tuple(holders)))
        return divergences

    def _digests(self, batch: Batch, host_facts: Sequence[HostFact]) -> Iterator[_TensorDigest]:
        """Yield the digests of all replicated values. The same names in the same order on all members of a group."""
        model = self._model
        digest = self._hasher.digest
        device = model.groups.device
        tensors = {name: p.data for name, p in model.named_parameters.items()} | dict(self._moments)
        for name, tensor in tensors.items():
            if axes := _replicated_axes(tensor):
                yield _TensorDigest(name, digest(tensor), axes)
        for name, buffer in model.named_buffers.items():
            yield _TensorDigest(name, digest(buffer), ("stage",))
        if self._zero > 0:
            yield from self._digest_unsharded_weights()
        if model.stages[0].config.last_stage_needs_embedding:
            # The first and the last pipeline rank hold the tied embedding, with the same shards.
            for name in ("embedding.weight", *(n for n in self._moments if n.startswith("embedding.weight."))):
                copy = digest(tensors[name]) if name in tensors else self._no_digest
                yield _TensorDigest(name, copy, ("pp",), is_on_every_rank=False)
        tokens = torch.cat([batch.tokens.flatten(), batch.columns["labels"].flatten()])
        yield _TensorDigest("the batch", digest(tokens), ("tp", "pp"))
        for fact in host_facts:
            number = int.from_bytes(hashlib.sha256(fact.value.encode()).digest()[:8], "little", signed=True)
            yield _TensorDigest(fact.name, torch.tensor([number, 1], device=device), fact.axes)

    def _digest_unsharded_weights(self) -> Iterator[_TensorDigest]:
        """Yield the digests of the weights that ranks compute with, gathered one FSDP module at a time."""
        for stage in self._model.stages:
            for prefix, module in stage.named_modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
                    yield from self._digest_module(stage.get_submodule(prefix), prefix)
                    module.reshard()

    def _digest_module(self, module: nn.Module, prefix: str) -> Iterator[_TensorDigest]:
        for name, parameter in _own_parameters(module, prefix):
            axis = "edp" if ".experts." in name else "dp_cp"
            yield _TensorDigest(f"the gathered {name}", self._hasher.digest(parameter), (axis,))


def samples_by_replica(parallel: ParallelConfig, train: TrainConfig) -> tuple[int, ...]:
    """Return the samples of each data-parallel replica in a step, without padding."""
    count = train.num_micro_batches(parallel.dp) * train.micro_batch_size
    counts = (train.global_batch_size - number * count for number in range(parallel.dp))
    return tuple(min(max(samples, 0), count) for samples in counts)


def _samples_of_replicas(layout: Layout, samples: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the samples of each replica, [dp], and of each replica of the experts, [edp]. The units differ.

    A replica of the experts has the samples of all ranks with its edp coordinate, whose tokens are routed to it.
    """
    replica_samples = np.array(samples, dtype=np.float64)
    expert_samples = np.zeros(layout.edp)
    for rank in range(layout.world_size):
        expert_samples[layout.moe.coordinate(rank, "edp")] += replica_samples[layout.attention.coordinate(rank, "dp")]
    return replica_samples, expert_samples


def _replicated_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the mesh axes of more than one rank along which a tensor is replicated."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None
    placed = enumerate(tensor.placements)
    return tuple(names[dim] for dim, placement in placed if placement.is_replicate() and mesh.size(dim) > 1)


def _own_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that an FSDP module gathers itself, without the parameters of FSDP modules inside it."""
    for name, parameter in module.named_parameters(prefix, recurse=False):
        yield name, parameter
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child, f"{prefix}.{name}" if prefix else name)


def _minority_ranks(digests: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks that differ from the majority (more than half), all without a majority and none if all agree."""
    counts = Counter(digests.values())
    if len(counts) < 2:
        return ()
    common, count = counts.most_common(1)[0]
    return tuple(rank for rank, digest in digests.items() if 2 * count <= len(digests) or digest != common)
