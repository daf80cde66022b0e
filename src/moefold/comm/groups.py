"""Process groups and device meshes of a layout.

No other module creates any. On the meta device they are groups of a fake world.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from moefold.comm.comm_timer import CommTimer
from moefold.comm.flight_recorder import WATCHED_TIMEOUT, FlightRecorder
from moefold.comm.private_torch import (
    FakeStore,
    fsdp_group_size,
    fsdp_param_group,
    gloo_backend,
    nccl_options,
    register_shared_loop,
    release_mesh_groups,
)
from moefold.comm.resumable import BackwardOverlap
from moefold.config.sections.parallel import ParallelConfig
from moefold.errors import ConfigError
from moefold.topology.communicators import Communicator, communicator_names, communicators
from moefold.topology.layout import Layout, fold_mapping

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """A process group and this rank's index in it. A group of one rank is a real group.

    `ranks` ascend, so member i of the process group is `ranks[i]`. `recorder` logs collectives under `group_id`.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup
    recorder: FlightRecorder = field(compare=False, repr=False)
    group_id: int = field(compare=False, repr=False)

    comm_timer: CommTimer = field(default_factory=CommTimer, compare=False, repr=False)
    """Measures the time that this rank spends in collectives."""
    backward_overlap: BackwardOverlap = field(default_factory=BackwardOverlap, compare=False, repr=False)
    """Forward pass that is resumed while a collective of a backward pass is in flight."""

    def record_collective(self, collective: str, x: torch.Tensor) -> None:
        """Record in the flight recorder that a collective starts with the local tensor `x`."""
        self.recorder.record_collective(collective, self.group_id, x.shape)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


@dataclass(frozen=True)
class AttentionGroups:
    """Groups of the attention view.

    `sequence` is cp x tp: the ranks that share one micro-batch. `stage` is dp x cp x tp: the ranks of one pipeline
    stage.
    """

    tp: Group
    cp: Group
    dp: Group
    dp_cp: Group
    sequence: Group
    stage: Group


@dataclass(frozen=True)
class MoEGroups:
    """Groups of the MoE view. `experts` is ep x etp: the ranks that together hold one replica of all experts."""

    etp: Group
    ep: Group
    edp: Group
    experts: Group
    expert_coordinates: tuple[tuple[int, int], ...]
    """(ep, etp) coordinate of each member of `experts`, in the order of its ranks."""


@dataclass(frozen=True)
class ParallelGroups:
    """Every communicator of one rank, and the two device meshes of its pipeline stage.

    `dense_mesh` has the axes (dp_cp, one, tp), `expert_mesh` (edp, one, ep, etp). Both contain the ranks of this
    pipeline stage. The axis "one" has one rank: it is the shard axis where data parallelism replicates.
    """

    layout: Layout
    rank: int
    device: torch.device
    attn: AttentionGroups
    moe: MoEGroups
    pp: Group
    world: Group
    dense_mesh: DeviceMesh
    expert_mesh: DeviceMesh
    recorder: FlightRecorder
    """Flight recorder of this rank, shared by all groups."""
    backward_overlap: BackwardOverlap
    """Forward pass that is resumed while collectives of a backward pass are in flight."""

    @classmethod
    def create(
        cls,
        layout: Layout,
        device: torch.device,
        recorder: FlightRecorder | None = None,
        separates_purposes: bool | None = None,
    ) -> "ParallelGroups":
        """Create the communicators of this rank. Collective: every rank of the world calls it.

        `topology.communicators` determines which groups share a communicator.

        Args:
            recorder: flight recorder that a watchdog reads, or None for a new recorder.
            separates_purposes: whether model, experts and FSDP have separate communicators. None means on CUDA only.

        Raises:
            ValueError: the default process group is missing or has another size than the layout.
        """
        if not dist.is_initialized() or dist.get_world_size() != layout.world_size:
            raise ValueError(f"ParallelGroups.create needs a process group of {layout.world_size} ranks")
        rank = dist.get_rank()
        recorder = recorder or FlightRecorder()
        recorder.set_phase("creating the process groups")
        is_cuda = device.type == "cuda"
        separates = is_cuda if separates_purposes is None else separates_purposes
        comm_timer = CommTimer(is_cuda=is_cuda, host_clock=recorder.clock)
        backward_overlap = BackwardOverlap()
        by_name = communicators(layout, rank, separates_purposes=separates)
        created: dict[Communicator, Group] = {}
        for communicator, name in communicator_names(layout, by_name).items():
            ranks = communicator.ranks
            handle = _process_group(communicator, recorder.hang_timeout_s, is_cuda=is_cuda)
            number = recorder.add_group(name, ranks)
            created[communicator] = Group(
                ranks, ranks.index(rank), handle, recorder, number, comm_timer, backward_overlap
            )
        groups = {name: created[communicator] for name, communicator in by_name.items()}
        coordinates = [
            (layout.moe.coordinate(r, "ep"), layout.moe.coordinate(r, "etp")) for r in groups["experts"].ranks
        ]
        everyone = tuple(range(layout.world_size))
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        world = Group(everyone, rank, dist.group.WORLD, recorder, recorder.add_group("world", everyone), comm_timer)
        return cls(
            layout=layout,
            rank=rank,
            device=device,
            attn=AttentionGroups(**{axes.name: groups[axes.name] for axes in fields(AttentionGroups)}),
            moe=MoEGroups(
                **{name: groups[name] for name in ("etp", "ep", "edp", "experts")},
                expert_coordinates=tuple(coordinates),
            ),
            pp=groups["pp"],
            world=world,
            dense_mesh=_dense_mesh(layout, groups, device),
            expert_mesh=_expert_mesh(layout, groups, device),
            recorder=recorder,
            backward_overlap=backward_overlap,
        )

    def release(self) -> None:
        """Drop the process groups that the meshes hold, before they are destroyed."""
        release_mesh_groups(self.dense_mesh)
        release_mesh_groups(self.expert_mesh)

    def create_background_group(self) -> Group:
        """Create a gloo group of all ranks for a thread that communicates concurrently with training. It is collective.

        Collectives of two threads must not share a group, as their order would differ between ranks.
        """
        ranks = self.world.ranks
        handle = dist.new_group(list(ranks), backend="gloo", timeout=collective_timeout(self.recorder.hang_timeout_s))
        # Its own recorder, as the order of the two threads' collectives differs between ranks.
        recorder = FlightRecorder()
        return Group(ranks, self.rank, handle, recorder, recorder.add_group("background thread", ranks))


def collective_timeout(hang_timeout_s: float) -> timedelta:
    """Return the time limit of a collective: very long where the watchdog names the ranks that are late."""
    return WATCHED_TIMEOUT if hang_timeout_s else default_pg_timeout


def _process_group(communicator: Communicator, hang_timeout_s: float, *, is_cuda: bool) -> dist.ProcessGroup:
    ranks = communicator.ranks
    if len(ranks) == dist.get_world_size() and communicator.purpose == "model":
        handle = dist.group.WORLD
    else:
        timeout = collective_timeout(hang_timeout_s)
        is_nccl = "nccl" in dist.get_backend_config()
        options = nccl_options(timeout, is_high_priority=communicator.purpose == "experts") if is_nccl else None
        is_gloo = not is_cuda and gloo_backend(dist.group.WORLD) is not None
        # Only the members synchronise: other ranks need not create groups that they are not in.
        handle = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=register_shared_loop() if is_gloo else None,
            pg_options=options,
            use_local_synchronization=True,
        )
    assert isinstance(handle, dist.ProcessGroup)
    return handle


def _dense_mesh(layout: Layout, groups: Mapping[str, Group], device: torch.device) -> DeviceMesh:
    """Return the mesh of dense parameters: FSDP communicates over dp_cp, and nothing over the other axes."""
    ranks = [[layout.attention.group(r, "tp")] for r in groups["dp_cp"].ranks]
    return DeviceMesh.from_group(
        [groups[name].handle for name in ("fsdp_dense", "one", "tp")],
        device.type,
        ranks,
        mesh_dim_names=("dp_cp", "one", "tp"),
    )


def _expert_mesh(layout: Layout, groups: Mapping[str, Group], device: torch.device) -> DeviceMesh:
    """Return the mesh of the experts' parameters: FSDP communicates over edp, and nothing over the other axes."""
    view = layout.moe
    ranks = [[[view.group(r, "etp") for r in view.group(s, "ep")]] for s in groups["edp"].ranks]
    return DeviceMesh.from_group(
        [groups[name].handle for name in ("fsdp_experts", "one", "ep", "etp")],
        device.type,
        ranks,
        mesh_dim_names=("edp", "one", "ep", "etp"),
    )


@dataclass(frozen=True)
class World:
    """Rank and world size of this process, or rank 0 of 1 if torch.distributed is not initialised."""

    rank: int = 0
    size: int = 1

    @property
    def is_rank0(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather the objects of all processes, in rank order. It is collective. Values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def merge(self, table: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of the tables of all processes. It is collective."""
        return {name: value for of_rank in self.all_gather_object(dict(table)) for name, value in of_rank.items()}

    def broadcast_object(self, value: Any) -> Any:
        """Return the picklable object of rank 0 on all processes. It is collective."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]


def current_world() -> World:
    """Return the world of the default process group, or without a group a world of one rank."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()


def raise_on_all_ranks(world: World, reason: str) -> None:
    """Raise the error of any process on all of them. It is collective.

    Raises:
        ConfigError: a process passed a non-empty reason.
    """
    reasons = [text for text in world.all_gather_object(reason) if text]
    if reasons:
        raise ConfigError(reasons[0])


@contextmanager
def errors_on_all_ranks(world: World) -> Iterator[None]:
    """Raise a ConfigError of the block on all processes. The end of the block is collective."""
    reason = ""
    try:
        yield
    except ConfigError as error:
        reason = str(error)
    raise_on_all_ranks(world, reason)


@contextmanager
def fake_rank(parallel: ParallelConfig, rank: int) -> Iterator[ParallelGroups]:
    """Create the groups of one rank of a recipe on the meta device. No other process group may exist meanwhile.

    Collectives return immediately and transfer nothing.
    """
    layout = fold_mapping(parallel)
    dist.init_process_group("fake", rank=rank, world_size=parallel.world_size, store=FakeStore())
    try:
        # Device meshes do not support the meta device, but tensors sharded along them may be on it.
        yield replace(ParallelGroups.create(layout, torch.device("cpu")), device=torch.device("meta"))
    finally:
        dist.destroy_process_group()


def sharded_bytes(stages: Sequence[nn.Module]) -> tuple[int, int]:
    """Return the bytes of the padded FSDP shards, and of all gathered weights in their compute types."""
    weights = gathered = 0
    for stage in stages:
        for module in stage.modules():
            group = fsdp_param_group(module)
            if group is None:
                continue
            for param in group.fsdp_params:
                param.init_dtype_attrs(group.mp_policy)
                padded = param.padded_sharded_param_size.numel()
                degree = fsdp_group_size(group)
                weights += padded * param.sharded_param.element_size()
                gathered += padded * degree * (param.param_dtype or param.orig_dtype).itemsize
    return weights, gathered
