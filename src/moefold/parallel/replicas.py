"""Do the ranks that should hold the same bytes hold the same bytes? And do data-parallel replicas go along?

Replicas that drift apart without an error are a known way to lose a run: a flipped bit, a collective that gave another
result on one rank, a kernel that is not deterministic where another rank's is.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moefold.launch.crew import joined_crew
from moefold.metrics.replicas import ReplicaMetrics
from moefold.parallel.accumulate import Batch
from moefold.parallel.collectives import all_gather, all_reduce_sum
from moefold.parallel.fsdp_comms import FSDPComms
from moefold.parallel.groups import Group
from moefold.parallel.parallelize import ParallelModel

CHUNK = 1 << 20
"""So many values are widened to int64 at a time."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C1


@dataclass(frozen=True)
class Divergence:
    """Something that ranks should hold alike and do not."""

    what: str
    """Its name: a parameter, a moment (`NAME.exp_avg`), gathered weights, a buffer, the batch, or the position."""
    axis: str
    ranks: tuple[int, ...]
    """Those that differ from the majority; all of the group where there is none."""
    members: tuple[int, ...]
    """All that hold it."""

    def words(self) -> str:
        """For a message."""
        which = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        if len(self.ranks) == len(self.members):
            return f"{self.what} differs between {which} ({self.axis}), and which of them is right cannot be told"
        others = len(self.members) - len(self.ranks)
        return f"{self.what} on {which} differs from the {others} other ranks that hold it ({self.axis})"


@dataclass(frozen=True)
class _Held:
    """Some bytes of this rank, and the axes along which other ranks hold the same."""

    what: str
    digest: Tensor
    axes: tuple[str, ...]


class Replicas:
    """Compares what replicas hold and compute, on the steps that ask for it.

    Args:
        model: of this rank.
        moments: of the optimizer, by name.
        zero: the ZeRO level; from 1 on, the weights that ranks gather to compute with are compared too.
        comms: the watches of the model's FSDP modules.
    """

    def __init__(self, model: ParallelModel, moments: Mapping[str, Tensor], zero: int, comms: FSDPComms) -> None:
        groups = model.groups
        self._model = model
        self._moments = moments
        self._zero = zero
        self._comms = comms
        self._groups: dict[str, Group] = {
            "tp": groups.attn.tp,
            "dp_cp": groups.attn.dp_cp,
            "edp": groups.moe.edp,
            "stage": groups.attn.stage,
            "pp": groups.pp,
            "world": groups.world,
        }

    def arm(self) -> None:
        """Look at the gradients of the backward passes that follow, until `metrics`."""
        self._comms.arm()

    def metrics(self, loss: Tensor) -> ReplicaMetrics:
        """How the replicas' losses and gradients since `arm` differ; one all-reduce over the world.

        Args:
            loss: this rank's part of the loss of the global batch, 0-dim; 0 on ranks that another one speaks for.
        """
        groups = self._model.groups
        layout, device = groups.layout, groups.device
        dp, edp = layout.dp, layout.edp
        losses = torch.zeros(dp, dtype=torch.float64, device=device)
        losses[groups.attn.dp.rank] = loss.double()
        members = torch.zeros(groups.attn.dp_cp.size, dp, dtype=torch.float64, device=device)
        for member, rank in enumerate(groups.attn.dp_cp.ranks):
            # The gradient of a dp replica is the sum of those of its cp shards.
            members[member, layout.attention.coordinate(rank, "dp")] = 1
        dense = members.T @ self._comms.dense.take(device) @ members
        parts = (losses, dense.flatten(), self._comms.experts.take(device).flatten())
        total = all_reduce_sum(torch.cat(parts), groups.world).cpu().split([part.numel() for part in parts])
        return ReplicaMetrics.from_products(
            total[0].numpy(), total[1].view(dp, dp).numpy(), total[2].view(edp, edp).numpy()
        )

    @torch.no_grad()
    def divergences(self, batch: Batch, position: str) -> tuple[Divergence, ...]:
        """What is not alike where it should be, the same list on every rank; collective over all ranks.

        Args:
            batch: this rank's part of the batch of the step.
            position: all that ranks decide by, in words; it should be the same everywhere.
        """
        held = list(self._held(batch, position))
        found = [one for axis in self._groups for one in self._compare(axis, [h for h in held if axis in h.axes])]
        world = self._groups["world"]
        count = torch.tensor(len(found), dtype=torch.int64, device=self._model.groups.device)
        if int(all_reduce_sum(count, world)) == 0:
            return ()
        return tuple(dict.fromkeys(one for of_rank in joined_crew().gather(found) for one in of_rank))

    def _compare(self, axis: str, held: list[_Held]) -> list[Divergence]:
        group = self._groups[axis]
        if group.size == 1 or not held:
            return []
        mine = torch.stack([one.digest for one in held])
        of_members = all_gather(mine, group).view(group.size, len(held), 2).tolist()
        found = []
        for i, one in enumerate(held):
            members = {rank: tuple(rows[i]) for rank, rows in zip(group.ranks, of_members, strict=True)}
            # A pipeline rank that holds no copy of the embedding says so with zeros.
            holders = {rank: digest for rank, digest in members.items() if axis != "pp" or any(digest)}
            if odd := _odd_ones(holders):
                found.append(Divergence(one.what, axis, odd, tuple(holders)))
        return found

    def _held(self, batch: Batch, position: str) -> Iterator[_Held]:
        """Everything that other ranks hold too; the same names in the same order on all members of a group."""
        model = self._model
        device = model.groups.device
        tensors = {name: p.data for name, p in model.named_parameters.items()} | dict(self._moments)
        for name, tensor in tensors.items():
            if axes := _replicated_axes(tensor):
                yield _Held(name, digest(tensor), axes)
        for name, buffer in model.named_buffers.items():
            yield _Held(name, digest(buffer), ("stage",))
        if self._zero > 0:
            yield from self._gathered_weights()
        if model.stages[0].cfg.model.embeds_twice:
            # The first and the last pipeline rank hold the embedding, with the same shards of it.
            for name in ("embedding.weight", *(n for n in self._moments if n.startswith("embedding.weight."))):
                none = torch.zeros(2, dtype=torch.int64, device=device)
                yield _Held(name, digest(tensors[name]) if name in tensors else none, ("pp",))
        tokens = torch.cat([batch.tokens.flatten(), batch.labels.flatten()])
        yield _Held("the batch", digest(tokens), ("tp", "pp"))
        number = int.from_bytes(hashlib.sha256(position.encode()).digest()[:8], "little", signed=True)
        yield _Held("the position of the run", torch.tensor([number, 1], device=device), ("world",))

    def _gathered_weights(self) -> Iterator[_Held]:
        """What ranks compute with, gathered once more, one FSDP module at a time."""
        for stage in self._model.stages:
            for prefix, module in stage.named_modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
                    yield from self._gathered(stage.get_submodule(prefix), prefix)
                    module.reshard()

    @staticmethod
    def _gathered(module: nn.Module, prefix: str) -> Iterator[_Held]:
        for name, parameter in _own_parameters(module, prefix):
            axis = "edp" if ".experts." in name else "dp_cp"
            yield _Held(f"the gathered {name}", digest(parameter), (axis,))


def digest(tensor: Tensor) -> Tensor:
    """Two sums of the bits of this rank's part of a tensor, int64 [2]; no communication, no host sync.

    The bits of each value are an integer x_i; the sums are of x_i and of x_i times an odd number drawn from i, modulo
    2**64. Integers add up alike in any order, so equal bytes give equal sums on any device; a change of one value
    always changes the first sum, and values that change places the second.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.detach().contiguous().flatten().view(_BITS[local.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        values = bits[start : start + CHUNK].long()
        factors = torch.arange(start, start + len(values), device=bits.device).mul_(_ODD).bitwise_or_(1)
        total += torch.stack([values.sum(), (values * factors).sum()])
    return total


def _replicated_axes(tensor: Tensor) -> tuple[str, ...]:
    """Axes of more than one rank along which a tensor is held whole."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None
    placed = enumerate(tensor.placements)
    return tuple(names[dim] for dim, placement in placed if placement.is_replicate() and mesh.size(dim) > 1)


def _own_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that an FSDP module gathers itself: not those of FSDP modules within."""
    for name, parameter in module.named_parameters(prefix, recurse=False):
        yield name, parameter
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child, f"{prefix}.{name}" if prefix else name)


def _odd_ones(digests: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks that differ from more than half of all; all of them where no such majority exists; none if equal."""
    counts = Counter(digests.values())
    if len(counts) < 2:
        return ()
    common, count = counts.most_common(1)[0]
    return tuple(rank for rank, one in digests.items() if 2 * count <= len(digests) or one != common)
