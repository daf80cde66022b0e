"""Snapshots of a rank's state in its own host memory and in a peer's, and their restore under another mapping.

After every `checkpoint.peer_every` steps each rank copies its shards to host memory, and sends shards without a copy on
another node to one peer. After a loss of ranks the other ranks still have every shard. They fill a new mapping of fewer
ranks from memory, with the box arithmetic of `parallel/reshard.py`, from snapshots instead of a model. See
docs/design/048-peer-snapshots.md.
"""

import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moefold.checkpoint.checkpoint_meta import TrainState
from moefold.comm.box_exchange import MAX_SCRATCH_BYTES, exchange_boxes
from moefold.comm.collectives import all_gather_objects, all_reduce_sum, all_to_all
from moefold.comm.groups import Group, ParallelGroups
from moefold.comm.reshard_plan import BoxTransfer, pack_buckets, plan_box_transfers
from moefold.comm.sharded_tensor import local_slice
from moefold.cost.shard_boxes import Box
from moefold.errors import RunError
from moefold.model.local_param import local_tensor
from moefold.ops.tensor_hash import TensorHasher
from moefold.topology.layout import Layout

BoxKey = tuple[str, Box]
"""Part of a logical tensor: its checkpoint name and its box."""
Digest = tuple[int, int]
"""Two hashes of the values of a box, see `TensorHasher`."""


@dataclass(frozen=True)
class SnapshotLayout:
    """Layout of a snapshot: the boxes of each rank. The same on every rank.

    `shards` has an entry for each set of ranks that own equal boxes: its owners, and the owner whose peer has a copy of
    the boxes. There is no copy (None) in two cases:

    * The owners are on several nodes: a lost node loses no box.
    * All ranks are on one node, and the set has several owners: a lost rank loses no box.
    """

    peers: tuple[int, ...]
    """Peer of each rank."""
    shards: tuple[tuple[tuple[int, ...], int | None], ...]

    def is_complete(self, holders: Iterable[tuple[int, Iterable[int]]]) -> bool:
        """Return whether the given processes together have every box.

        Args:
            holders: for each process, its rank and the ranks whose state it has, including itself.
        """
        replicas = set()
        copied = set()
        for rank, ranks in holders:
            replicas |= {rank} & set(ranks)
            copied |= set(ranks) - {rank}
        return all(not replicas.isdisjoint(owners) or sender in copied for owners, sender in self.shards)


HeldSteps = Mapping[int, frozenset[int]]
"""Ranks whose state a process has, by step: itself, and the ranks whose peer it is."""


def choose_step(held_by_survivor: Mapping[int, HeldSteps], old_layout: SnapshotLayout) -> int | None:
    """Return the newest step for which the survivors together have every shard, or None if there is no such step.

    Args:
        held_by_survivor: `SnapshotGeneration.held` of each process, by its rank in the generation.
    """
    steps = {step for owners_by_step in held_by_survivor.values() for step in owners_by_step}
    for step in sorted(steps, reverse=True):
        # A process without any snapshot was a spare, or joins. A process with other snapshots lacks the newest.
        holders = [(rank, owners.get(step)) for rank, owners in held_by_survivor.items() if owners]
        has_all = all(ranks is not None for _, ranks in holders)
        if has_all and old_layout.is_complete((rank, ranks) for rank, ranks in holders if ranks is not None):
            return step
    return None


def choose_members(
    held_by_survivor: Mapping[int, HeldSteps], old_layout: SnapshotLayout, count: int
) -> tuple[int, ...] | None:
    """Return `count` survivors that together have every shard of the newest possible step, or None if there are none.

    Ranks of high numbers are left out first. A survivor with the only copy of a shard stays.
    """
    step = choose_step(held_by_survivor, old_layout)
    if step is None:
        return None
    members = dict(held_by_survivor)
    for rank in sorted(members, reverse=True):
        other_members = {other: owners for other, owners in members.items() if other != rank}
        if len(members) > count and choose_step(other_members, old_layout) == step:
            members = other_members
    return tuple(sorted(members)) if len(members) == count else None


def choose_peers(layout: Layout, nodes: Sequence[str]) -> tuple[int, ...]:
    """Return the peer of each rank: the next rank along dp (at least 2), on another node if possible."""
    world = range(layout.world_size)
    groups = [layout.attention.group(rank, "dp") for rank in world]
    index = [group.index(rank) for rank, group in zip(world, groups, strict=True)]
    shifted = [
        tuple(group[(i + shift) % layout.dp] for group, i in zip(groups, index, strict=True))
        for shift in range(1, layout.dp)
    ]
    if len(set(nodes)) == 1:
        return shifted[0]
    # A permutation gives each rank the copy of one other rank.
    shifted += [tuple((rank + shift) % len(world) for rank in world) for shift in range(1, len(world))]
    for peers in shifted:
        if all(nodes[rank] != nodes[peer] for rank, peer in enumerate(peers)):
            return peers
    # Nodes of unequal sizes: choose the rank of another node with the fewest copies so far.
    copies = [0] * len(world)
    peer_ranks = []
    for rank in world:
        peer = min((other for other in world if nodes[other] != nodes[rank]), key=lambda other: (copies[other], other))
        copies[peer] += 1
        peer_ranks.append(peer)
    return tuple(peer_ranks)


def plan_copies(
    boxes: Sequence[Mapping[str, Box]], peers: Sequence[int], nodes: Sequence[str]
) -> tuple[SnapshotLayout, list[BoxTransfer]]:
    """Plan the copies from each rank to its peer: the boxes that no rank of another node has.

    With one node, a box on two ranks needs no copy.

    Args:
        boxes: for each rank, the box of each entry of its state.
    """
    owners: defaultdict[BoxKey, list[int]] = defaultdict(list)
    for rank, rank_boxes in enumerate(boxes):
        for name, box in rank_boxes.items():
            owners[name, box].append(rank)
    is_one_node = len(set(nodes)) == 1
    shards: dict[tuple[tuple[int, ...], int | None], None] = {}
    transfers = []
    for (name, box), ranks in owners.items():
        is_safe = len(ranks) > 1 if is_one_node else len({nodes[rank] for rank in ranks}) > 1
        sender = None if is_safe else ranks[0]
        if sender is not None:
            transfers.append(BoxTransfer(name, box, sender, peers[sender]))
        shards[tuple(ranks), sender] = None
    return SnapshotLayout(tuple(peers), tuple(shards)), transfers


@dataclass
class Snapshot:
    """State of one step in host memory. `step` is None while it is written."""

    step: int | None = None
    train_state: TrainState | None = None
    local: dict[BoxKey, Tensor] = field(default_factory=dict)
    """Parts of tensors that this rank holds itself."""
    copies: dict[int, dict[BoxKey, Tensor]] = field(default_factory=dict)
    """Boxes of the ranks whose peer this rank is."""
    digests: dict[tuple[int, BoxKey], Digest] = field(default_factory=dict)
    """Hashes of the received boxes, computed by their senders, by the rank of the sender."""

    def boxes(self) -> Iterator[tuple[BoxKey, Tensor]]:
        """Yield each own and copied box once."""
        yield from self.local.items()
        for copy in self.copies.values():
            yield from ((key, values) for key, values in copy.items() if key not in self.local)

    @property
    def num_bytes(self) -> int:
        """Bytes of all boxes in host memory."""
        return sum(values.nbytes for values in self.local.values()) + sum(
            values.nbytes for copy in self.copies.values() for values in copy.values()
        )


@dataclass
class SnapshotGeneration:
    """Snapshots of this process under one mapping, for the last two steps, so that one is always complete."""

    number: int = 0
    """Mappings up to this one for which every rank had a snapshot."""
    rank: int | None = None
    """Rank of this process in the mapping, or None before the first snapshot, like `layout`."""
    layout: SnapshotLayout | None = None
    slots: list[Snapshot] = field(default_factory=lambda: [Snapshot(), Snapshot()])

    def held(self) -> dict[int, frozenset[int]]:
        """Return the ranks whose state this process has, by step."""
        return {
            slot.step: frozenset({self.rank, *slot.copies})
            for slot in self.slots
            if slot.step is not None and self.rank is not None
        }


@dataclass(frozen=True)
class _Plan:
    """Transfers of a snapshot to the peers under one mapping, grouped into buckets."""

    groups: ParallelGroups
    layout: SnapshotLayout
    buckets: tuple[tuple[BoxTransfer, ...], ...]
    dtypes: Mapping[str, torch.dtype]
    boxes: tuple[BoxKey, ...]
    """Boxes of this rank, kept because finding them takes longer than copying small boxes."""
    sent: tuple[BoxKey, ...]
    """Boxes that this rank sends."""
    copied: tuple[tuple[int, BoxKey], ...]
    """Boxes that this rank receives, by the rank of the sender."""
    hasher: TensorHasher


class PeerSnapshots:
    """Snapshots of this process as long as it runs, over several mappings.

    It refers to process groups only by the plan of the current mapping, which `forget_groups` drops. The previous
    generation is kept until every rank has the first snapshot of the new generation.

    After a loss of ranks, the survivors first agree on a generation: each sends the others the number of its
    `generation`, and calls `keep_generation` with the largest.

    Args:
        max_scratch_bytes: maximum memory on the device for the buffers of a bucket of an exchange.
    """

    def __init__(self, node: str | None = None, max_scratch_bytes: int = MAX_SCRATCH_BYTES) -> None:
        self._node = node or socket.gethostname()
        self._max_bucket_bytes = max_scratch_bytes // 2
        self._plan: _Plan | None = None
        self.generation = SnapshotGeneration()
        """The generation whose first snapshot every rank has. Before that there are no snapshots."""
        self._unconfirmed: SnapshotGeneration | None = None
        """The next generation, while this rank does not know whether all ranks have completed its first snapshot."""
        self.restored_parts: tuple[BoxTransfer, ...] = ()
        """Parts of every new shard in the last `restore`, and the rank that each came from."""
        self._restored: _SnapshotIndex | None = None
        self.old_ranks: list[int | None] = []
        """Rank in the old mapping of each rank that took part in the last `restore`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the snapshots in host memory."""
        return sum(slot.num_bytes for slot in self.generation.slots)

    def forget_groups(self) -> None:
        """Drop the references to process groups before they are destroyed. The next snapshot begins a generation.

        Also call it after a rollback: discarded steps are then not restored once every rank has the new snapshot.
        """
        self._plan = None

    def generations(self) -> list[SnapshotGeneration]:
        """Return the confirmed generation, and the next one if it has begun. It does not communicate."""
        return [self.generation] if self._unconfirmed is None else [self.generation, self._unconfirmed]

    def keep_generation(self, number: int) -> None:
        """Keep only the snapshots of one generation. It does not communicate.

        Args:
            number: the largest confirmed one of the survivors. If any survivor has confirmed a generation, every rank
                has completed its first snapshot, confirmed or not.
        """
        if number > self.generation.number:
            # A process without its snapshots was a spare of that mapping.
            kept = (held for held in self.generations() if held.number == number)
            self.generation = next(kept, SnapshotGeneration(number))
        self._unconfirmed = None

    def read_part(self, transfer: BoxTransfer) -> Tensor:
        """Return the values of a restored part that came from this process."""
        assert self._restored is not None
        return self._restored.read(transfer.name, transfer.box)

    def share_progress(self, step: int, world: Group) -> None:
        """Give former spares of the lost mapping an empty snapshot of a step. It is collective over the new mapping.

        Args:
            step: a step that every member of the lost mapping holds.
        """
        slots = self.generation.slots
        has_step = any(slot.step == step for slot in slots)
        states = all_gather_objects(self.snapshot(step).train_state if has_step else None, world)
        if not has_step:
            slots[0] = Snapshot(step, next(progress for progress in states if progress is not None))

    def snapshot(self, step: int) -> Snapshot:
        """Return the snapshot of a step, which the generation must have."""
        return next(slot for slot in self.generation.slots if slot.step == step)

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor], train_state: TrainState, groups: ParallelGroups) -> None:
        """Copy this rank's state to host memory, and exchange the copies of peers. It is collective over all ranks.

        The copy replaces the older of two snapshots. Call it after a step in which all ranks have communicated.

        Args:
            state: this rank's shards, see `checkpoint_state`. The same entries at every call under one mapping.
        """
        if groups.layout.dp == 1:
            # A job without other replicas cannot lose another rank.
            return
        self.restored_parts, self._restored = (), None
        if self._plan is not None and self._plan.groups is groups:
            shards = {(name, box): local_tensor(state[name]) for name, box in self._plan.boxes}
            slot = min(self.generation.slots, key=lambda slot: -1 if slot.step is None else slot.step)
            self._fill(slot, self._plan, shards, train_state)
            return
        self._unconfirmed = None
        # The last snapshot of the previous generation is complete on every rank. The older would be a third one.
        last = max(self.generation.slots, key=lambda slot: -1 if slot.step is None else slot.step)
        self.generation.slots = [last, Snapshot()]
        shards = local_boxes(state)
        plan = self._make_plan(shards, groups)
        slot = Snapshot()
        self._fill(slot, plan, shards, train_state)
        new = SnapshotGeneration(self.generation.number + 1, groups.rank, plan.layout, [slot, Snapshot()])
        self._unconfirmed = new
        all_reduce_sum(torch.ones(1, device=groups.device), groups.world)
        self.generation, self._unconfirmed = new, None
        self._plan = plan

    def _fill(self, slot: Snapshot, plan: _Plan, shards: Mapping[BoxKey, Tensor], train_state: TrainState) -> None:
        groups = plan.groups
        slot.step = None
        device = groups.device
        if not slot.local and not slot.copies:
            slot.local = {key: _host_tensor(values.shape, values.dtype, device) for key, values in shards.items()}
            slot.copies = {}
            for rank, (name, box) in plan.copied:
                copy = slot.copies.setdefault(rank, {})
                copy[name, box] = _host_tensor(box.size, plan.dtypes[name], device)
        for key, values in shards.items():
            slot.local[key].copy_(values, non_blocking=device.type == "cuda")
        by_name = {key[0]: key for key in shards}

        def read(transfer: BoxTransfer) -> Tensor:
            key = by_name[transfer.name]
            return shards[key][transfer.box.index_in(key[1])]

        received = {(rank, name): box for rank, (name, box) in plan.copied}

        def write(transfer: BoxTransfer, values: Tensor) -> None:
            box = received[transfer.source, transfer.name]
            slot.copies[transfer.source][transfer.name, box][transfer.box.index_in(box)].copy_(values)

        for transfers in plan.buckets:
            exchange_boxes(transfers, groups.world, device, plan.dtypes, read, write)
        slot.digests = self._exchange_digests(plan, shards)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slot.train_state = train_state
        slot.step = train_state.step

    def _exchange_digests(self, plan: _Plan, shards: Mapping[BoxKey, Tensor]) -> dict[tuple[int, BoxKey], Digest]:
        """Return the hashes of the boxes that this rank sent and received, computed by the sender. It is collective."""
        groups = plan.groups
        rows = torch.stack([plan.hasher.digest(shards[key]) for key in plan.sent]) if plan.sent else None
        local_rows = [] if rows is None else [tuple(row) for row in rows.cpu().tolist()]
        rank = groups.rank
        counts = [0] * groups.world.size
        for source, _ in plan.copied:
            counts[source] += 1
        send_counts = [0] * groups.world.size
        send_counts[plan.layout.peers[rank]] = len(plan.sent)
        buffer = torch.zeros(0, 2, dtype=torch.int64, device=groups.device) if rows is None else rows
        received = all_to_all(buffer, groups.world, send_counts, counts).cpu().tolist()
        digests: dict[tuple[int, BoxKey], Digest] = {
            (rank, key): (row[0], row[1]) for key, row in zip(plan.sent, local_rows, strict=True)
        }
        # Rows arrive in the order of their senders, like `copied`.
        digests |= {key: (row[0], row[1]) for key, row in zip(plan.copied, received, strict=True)}
        return digests

    def _make_plan(self, shards: Mapping[BoxKey, Tensor], groups: ParallelGroups) -> _Plan:
        """Exchange the boxes of all ranks, and plan the copies. It is collective."""
        local = [(name, box, values.dtype) for (name, box), values in shards.items()]
        gathered = all_gather_objects((local, self._node), groups.world)
        nodes = [node for _, node in gathered]
        dtypes = {name: dtype for entries, _ in gathered for name, _, dtype in entries}
        boxes = [{name: box for name, box, _ in entries} for entries, _ in gathered]
        layout, transfers = plan_copies(boxes, choose_peers(groups.layout, nodes), nodes)
        itemsize = {name: dtype.itemsize for name, dtype in dtypes.items()}
        buckets = pack_buckets(transfers, itemsize, self._max_bucket_bytes)
        rank = groups.rank
        sent_boxes = tuple((t.name, t.box) for t in transfers if t.source == rank)
        # The order of the sender follows its own list of transfers.
        copied = sorted((t for t in transfers if t.target == rank), key=lambda t: t.source)
        received = tuple((t.source, (t.name, t.box)) for t in copied)
        return _Plan(groups, layout, buckets, dtypes, tuple(shards), sent_boxes, received, TensorHasher(groups.device))

    @torch.no_grad()
    def restore(self, step: int, state: Mapping[str, Tensor], world: Group, device: torch.device) -> TrainState:
        """Fill the tensors of a new mapping from the snapshots of a step, and return its progress. It is collective.

        Args:
            step: a step that every rank of the new mapping holds.
            state: shards of the new mapping, see `checkpoint_state`. They are overwritten.
            device: device that `world` communicates from.

        Raises:
            RunError: no rank has a part of a tensor. Raised on every rank.
        """
        slot = self.snapshot(step)
        assert slot.train_state is not None
        local, buckets, dtypes = plan_restore(slot, state, world, self._max_bucket_bytes)
        boxes = _SnapshotIndex(slot)
        targets = {name: (values, box) for (name, box), values in local_boxes(state).items()}

        def write(transfer: BoxTransfer, values: Tensor) -> None:
            target, box = targets[transfer.name]
            target[transfer.box.index_in(box)].copy_(values)

        for transfer in local:
            if transfer.target == world.rank:
                write(transfer, boxes.read(transfer.name, transfer.box))
        for transfers in buckets:
            exchange_boxes(transfers, world, device, dtypes, lambda t: boxes.read(t.name, t.box), write)
        self.restored_parts = (*local, *(transfer for transfers in buckets for transfer in transfers))
        self._restored = boxes
        # If another rank is lost before the first snapshot of this mapping, this step is restored again.
        self.generation.slots = [slot, Snapshot()]
        self.old_ranks = all_gather_objects(self.generation.rank, world)
        return slot.train_state


class _SnapshotIndex:
    """Access to the boxes of a snapshot by a part of a tensor."""

    def __init__(self, slot: Snapshot) -> None:
        self._boxes_by_name: defaultdict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
        for (name, box), values in slot.boxes():
            self._boxes_by_name[name].append((box, values))

    def read(self, name: str, region: Box) -> Tensor:
        """Return the values of a part of a tensor that lies in one of the boxes."""
        for box, values in self._boxes_by_name[name]:
            if box.intersect(region) == region:
                return values[region.index_in(box)]
        raise AssertionError((name, region))


def plan_restore(
    slot: Snapshot, state: Mapping[str, Tensor], world: Group, max_bucket_bytes: int
) -> tuple[tuple[BoxTransfer, ...], tuple[tuple[BoxTransfer, ...], ...], dict[str, torch.dtype]]:
    """Plan the transfers from the snapshots of all ranks to the tensors of a new mapping. It is collective.

    Returns:
        The parts that a rank already has, the buckets of transfers for the other parts, and the type of each tensor.

    Raises:
        RunError: no rank has a part of a tensor. Raised on every rank.
    """
    has = [(name, box, values.dtype) for (name, box), values in slot.boxes()]
    gathered = all_gather_objects((has, list(local_boxes(state))), world)
    holders: defaultdict[str, dict[Box, list[int]]] = defaultdict(dict)
    wanted_boxes: defaultdict[str, list[tuple[int, Box]]] = defaultdict(list)
    dtypes: dict[str, torch.dtype] = {}
    for rank, (entries, keys) in enumerate(gathered):
        for name, box, dtype in entries:
            holders[name].setdefault(box, []).append(rank)
            dtypes[name] = dtype
        for name, box in keys:
            wanted_boxes[name].append((rank, box))
    for name, boxes in wanted_boxes.items():
        for rank, box in boxes:
            overlaps = [box.intersect(held_box) for held_box in holders[name]]
            if sum(overlap.numel for overlap in overlaps if overlap is not None) != box.numel:
                raise RunError(
                    f"the snapshot of step {slot.step} lacks a part of {name} that rank {rank} needs: it was on lost "
                    "ranks alone"
                )
    itemsize = {name: dtype.itemsize for name, dtype in dtypes.items()}
    local, buckets = plan_box_transfers(holders, wanted_boxes, itemsize, max_bucket_bytes, world.size)
    return local, buckets, dtypes


def local_boxes(state: Mapping[str, Tensor]) -> dict[BoxKey, Tensor]:
    """Return the non-empty local shards of a state with their boxes."""
    boxes = {}
    for name, tensor in state.items():
        values, start = local_slice(tensor)
        if values.numel():
            boxes[name, Box(start, tuple(values.shape))] = values.detach()
    return boxes


def _host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
