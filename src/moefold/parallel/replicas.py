"""Do the ranks that should hold the same bytes hold the same bytes? And do data-parallel replicas go along?

Replicas that drift apart without an error are a known way to lose a run: a flipped bit, a collective that gave another
result on one rank, a kernel that is not deterministic where another rank's is.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moefold.launch.crew import joined_crew
from moefold.metrics.replicas import ReplicaMetrics
from moefold.model.parameter import local_values
from moefold.parallel.accumulate import Batch
from moefold.parallel.collectives import all_gather, all_reduce_sum
from moefold.parallel.fsdp_comms import FSDPComms
from moefold.parallel.groups import Group
from moefold.parallel.parallelize import ParallelModel

CHUNK = 1 << 18
"""So many integers are multiplied at a time."""
_WORD_BYTES = 8
_SEED = 0
_STRIDE = 0x2545F4914F6CDD1C


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
class Said:
    """Something that ranks decide or draw by, in words, which should be the same on others."""

    what: str
    words: str
    axes: tuple[str, ...]
    """Along which it should: of tp, cp, pp, stage and world."""


@dataclass(frozen=True)
class _Held:
    """Some bytes of this rank, and the axes along which other ranks hold the same."""

    what: str
    digest: Tensor
    axes: tuple[str, ...]
    is_everywhere: bool = True
    """False if some of those ranks have no copy, and zeros for a digest."""


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
        self._digester = Digester(groups.device)
        self._none = torch.zeros(2, dtype=torch.int64, device=groups.device)
        self._groups: dict[str, Group] = {
            "tp": groups.attn.tp,
            "dp_cp": groups.attn.dp_cp,
            "edp": groups.moe.edp,
            "stage": groups.attn.stage,
            "cp": groups.attn.cp,
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
    def divergences(self, batch: Batch, said: Sequence[Said]) -> tuple[Divergence, ...]:
        """What is not alike where it should be, the same list on every rank; collective over all ranks.

        Where all is alike, each rank sends two numbers for each axis, once.

        Args:
            batch: this rank's part of the batch of the step.
            said: what else should be alike; the same names in the same order on all ranks.
        """
        held = list(self._held(batch, said))
        of_axes = {axis: [one for one in held if axis in one.axes] for axis in self._groups}
        if self._is_alike(of_axes):
            return ()
        found = [one for axis, those in of_axes.items() for one in self._compare(axis, those)]
        return tuple(dict.fromkeys(one for of_rank in joined_crew().gather(found) for one in of_rank))

    def _is_alike(self, of_axes: Mapping[str, list[_Held]]) -> bool:
        """Whether all members of all groups hold the same; every rank sees it of every group."""
        world = self._groups["world"]
        sums = []
        for those in of_axes.values():
            # What some ranks of a group have no copy of is told apart from what all have.
            for digests in ([one.digest for one in those if one.is_everywhere == everywhere] for everywhere in (0, 1)):
                sums.append(self._digester.of(torch.stack(digests)) if digests else self._none)
        told = all_gather(torch.stack(sums)[None], world).view(world.size, len(of_axes), 2, 2).tolist()
        for i, axis in enumerate(of_axes):
            for ranks in self._partition(axis):
                some, everywhere = ({tuple(told[rank][i][kind]) for rank in ranks} for kind in (0, 1))
                if len(some - {(0, 0)}) > 1 or len(everywhere) > 1:
                    return False
        return True

    def _partition(self, axis: str) -> Sequence[Sequence[int]]:
        """The ranks of every group of an axis."""
        layout = self._model.groups.layout
        if axis == "world":
            return [range(layout.world_size)]
        names = {"dp_cp": ("dp", "cp"), "stage": ("dp", "cp", "tp")}.get(axis, (axis,))
        return (layout.moe if axis == "edp" else layout.attention).groups(*names)

    def _compare(self, axis: str, held: list[_Held]) -> list[Divergence]:
        group = self._groups[axis]
        if group.size == 1 or not held:
            return []
        mine = torch.stack([one.digest for one in held])
        of_members = all_gather(mine, group).view(group.size, len(held), 2).tolist()
        found = []
        for i, one in enumerate(held):
            members = {rank: tuple(rows[i]) for rank, rows in zip(group.ranks, of_members, strict=True)}
            holders = {rank: digest for rank, digest in members.items() if one.is_everywhere or any(digest)}
            if odd := _odd_ones(holders):
                found.append(Divergence(one.what, axis, odd, tuple(holders)))
        return found

    def _held(self, batch: Batch, said: Sequence[Said]) -> Iterator[_Held]:
        """Everything that other ranks hold too; the same names in the same order on all members of a group."""
        model, digest = self._model, self._digester.of
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
                copy = digest(tensors[name]) if name in tensors else self._none
                yield _Held(name, copy, ("pp",), is_everywhere=False)
        tokens = torch.cat([batch.tokens.flatten(), batch.labels.flatten()])
        yield _Held("the batch", digest(tokens), ("tp", "pp"))
        for one in said:
            number = int.from_bytes(hashlib.sha256(one.words.encode()).digest()[:8], "little", signed=True)
            yield _Held(one.what, torch.tensor([number, 1], device=device), one.axes)

    def _gathered_weights(self) -> Iterator[_Held]:
        """What ranks compute with, gathered once more, one FSDP module at a time."""
        for stage in self._model.stages:
            for prefix, module in stage.named_modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
                    yield from self._gathered(stage.get_submodule(prefix), prefix)
                    module.reshard()

    def _gathered(self, module: nn.Module, prefix: str) -> Iterator[_Held]:
        for name, parameter in _own_parameters(module, prefix):
            axis = "edp" if ".experts." in name else "dp_cp"
            yield _Held(f"the gathered {name}", self._digester.of(parameter), (axis,))


class Digester:
    """Sums of the bits of tensors, by which ranks compare them without sending them; no communication, no host sync.

    The bytes are read as integers of 64 bits x_i; the sums are of x_i and of y_i = x_i xor (x_i >> 31) times an odd
    number drawn from i, modulo 2**64. Integers add up alike in any order, so equal bytes give equal sums on any device;
    a change of one integer always changes both sums, and integers that change places the second. A product with an odd
    number leaves the highest bit, the sign of a weight, where it is, and two of them would cancel: y_i, from which x_i
    follows, has it lower down as well.
    """

    def __init__(self, device: torch.device) -> None:
        drawn = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=torch.Generator().manual_seed(_SEED))
        self._factors = drawn.bitwise_or_(1).to(device)

    def of(self, tensor: Tensor) -> Tensor:
        """The sums of this rank's part of a tensor, int64 [2]."""
        # Moments may be on the host.
        words = _words(local_values(tensor).to(self._factors.device))
        parts = words.split(CHUNK)
        # The same place in another chunk has another factor: the product of two odd numbers, which is odd.
        weighted = [self._weighted(part) * _odd(i) for i, part in enumerate(parts)]
        return torch.stack([words.sum(), torch.stack(weighted).sum()])

    def _weighted(self, words: Tensor) -> Tensor:
        mixed = words >> 31
        mixed ^= words
        mixed *= self._factors[: len(words)]
        return mixed.sum()


def _odd(chunk: int) -> int:
    """A factor for all of a chunk that fits into 63 bits."""
    return (chunk * _STRIDE | 1) % 2**63


def _words(local: Tensor) -> Tensor:
    """The bytes of a tensor in the order of its values, as int64; copied only where memory does not lie so."""
    flat = local.detach().contiguous().flatten()
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % _WORD_BYTES == 0 and flat.data_ptr() % _WORD_BYTES == 0:
        return flat.view(torch.int64)
    return nn.functional.pad(flat.view(torch.uint8), (0, -num_bytes % _WORD_BYTES)).view(torch.int64)


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
