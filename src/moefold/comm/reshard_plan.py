"""Plan of a transfer of weights between two mappings: the boxes that each rank sends to each other rank.

The mappings have the same ranks or disjoint ranks. If they are disjoint, the ranks of the target have higher numbers.

Under one mapping, two shards of a tensor are equal or disjoint boxes. So the boxes of the source mapping cut the box
that a rank needs into parts, and each part comes from one rank. That is the rank itself if it holds the part, otherwise
a holder on the same node, otherwise any holder. Among several holders, the holder that sends least so far is chosen.
Parts that are sent are cut further and collected into buckets, so that no rank sends or receives more than a number of
bytes in one bucket. The plan is a function of integers: every rank computes the same plan.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from moefold.cost.shard_boxes import Box, WeightSharding


@dataclass(frozen=True, slots=True)
class BoxTransfer:
    """A box of a tensor that one rank sends to another. Within a rank it is a copy."""

    name: str
    box: Box
    source: int
    target: int


@dataclass(frozen=True)
class ReshardPlan:
    """All transfers from one mapping to another."""

    local: tuple[BoxTransfer, ...]
    """Parts that a rank holds already."""
    buckets: tuple[tuple[BoxTransfer, ...], ...]
    """Parts that are sent. All tensors of a bucket have elements of the same number of bytes."""
    coinciding: tuple[frozenset[str], ...]
    """Per rank, the tensors whose boxes are equal under both mappings."""

    @property
    def moved(self) -> Iterator[BoxTransfer]:
        """The transfers between different ranks."""
        return (transfer for transfers in self.buckets for transfer in transfers)


def plan_reshard(
    source: WeightSharding,
    target: WeightSharding,
    itemsize: Mapping[str, int],
    max_bucket_bytes: int,
    ranks_per_node: int | None = None,
    *,
    first_target: int = 0,
) -> ReshardPlan:
    """Plan how every rank gets its boxes of the target mapping.

    Args:
        source: the mapping that holds the weights.
        target: the mapping that needs them. It may lack layers of multi-token prediction.
        itemsize: bytes of an element in a message, by tensor of the target.
        max_bucket_bytes: bytes that a rank sends, and bytes that it receives, in one bucket of at least one element.
        ranks_per_node: consecutive ranks that share a node, or None if all do.
        first_target: number of the first rank of the target mapping, where rank 0 is the first of the source mapping.
            0: both have the same ranks. Otherwise it is at least the number of ranks of the source mapping.

    Raises:
        ValueError: the mappings share some ranks but not all, or the models have different tensors.
    """
    num_sources = source.layout.world_size
    if first_target < num_sources and (first_target or target.layout.world_size != num_sources):
        raise ValueError(
            f"the target mapping has {target.layout.world_size} ranks from rank {first_target} on, the source mapping "
            f"{num_sources} from rank 0 on: they must be the same ranks, or disjoint"
        )
    target_ranks = range(first_target, first_target + target.layout.world_size)
    world_size = target_ranks.stop
    for name, shape in target.shapes.items():
        if source.shapes.get(name) != shape:
            raise ValueError(f"the target needs {name} of shape {shape}, the source has {source.shapes.get(name)}")
    if max_bucket_bytes < max(itemsize[name] for name in target.shapes):
        raise ValueError(f"max_bucket_bytes={max_bucket_bytes} is less than one element")
    own_boxes = [source.boxes(rank) if rank < num_sources else {} for rank in range(world_size)]
    holders = _holders(source, target.shapes)
    wanted_boxes: dict[str, list[tuple[int, Box]]] = {name: [] for name in target.shapes}
    coinciding: list[set[str]] = [set() for _ in range(world_size)]
    for rank in target_ranks:
        for name, box in target.boxes(rank - first_target).items():
            wanted_boxes[name].append((rank, box))
            if own_boxes[rank].get(name) == box:
                coinciding[rank].add(name)
    local, buckets = plan_box_transfers(holders, wanted_boxes, itemsize, max_bucket_bytes, ranks_per_node or world_size)
    return ReshardPlan(local, buckets, tuple(frozenset(names) for names in coinciding))


def plan_box_transfers(
    holders: Mapping[str, Mapping[Box, Sequence[int]]],
    wanted_boxes: Mapping[str, Sequence[tuple[int, Box]]],
    itemsize: Mapping[str, int],
    max_bucket_bytes: int,
    ranks_per_node: int,
) -> tuple[tuple[BoxTransfer, ...], tuple[tuple[BoxTransfer, ...], ...]]:
    """Plan how ranks get boxes from the ranks that hold the tensors.

    Args:
        holders: the ranks that hold each box, by tensor. The boxes of a tensor do not overlap.
        wanted_boxes: the ranks, and the box that each needs, by tensor. A part that no rank holds is left out.
        itemsize: bytes of an element in a message, by tensor.
        max_bucket_bytes: bytes that a rank sends, and bytes that it receives, in one bucket.
        ranks_per_node: consecutive ranks that share a node.

    Returns:
        The parts that a rank holds already, and the buckets of parts that are sent.
    """
    local: list[BoxTransfer] = []
    moved: list[BoxTransfer] = []
    sent_bytes: defaultdict[int, int] = defaultdict(int)
    for name, boxes in wanted_boxes.items():
        parts_of: dict[Box, list[tuple[Box, Sequence[int]]]] = {}
        for rank, box in boxes:
            if rank in holders[name].get(box, ()):
                local.append(BoxTransfer(name, box, rank, rank))
                continue
            if box not in parts_of:
                parts_of[box] = _cut(box, holders[name])
            for overlap, ranks in parts_of[box]:
                sender = _choose_sender(rank, ranks, ranks_per_node, sent_bytes)
                transfer = BoxTransfer(name, overlap, sender, rank)
                if sender == rank:
                    local.append(transfer)
                else:
                    sent_bytes[sender] += overlap.numel * itemsize[name]
                    moved.append(transfer)
    return tuple(local), pack_buckets(moved, itemsize, max_bucket_bytes)


def _holders(source: WeightSharding, names: Iterable[str]) -> dict[str, dict[Box, list[int]]]:
    """Return the boxes of each tensor under a mapping, and the ranks that hold each box."""
    holders: dict[str, dict[Box, list[int]]] = {name: {} for name in names}
    for rank in range(source.layout.world_size):
        for name, box in source.boxes(rank).items():
            if name in holders:
                holders[name].setdefault(box, []).append(rank)
    return holders


def _cut(box: Box, holders: Mapping[Box, Sequence[int]]) -> list[tuple[Box, Sequence[int]]]:
    """Cut a box by the boxes of the source mapping, and return the parts, and the ranks that hold each part."""
    overlaps = ((box.intersect(held_box), ranks) for held_box, ranks in holders.items())
    return [(overlap, ranks) for overlap, ranks in overlaps if overlap is not None]


def _choose_sender(rank: int, holders: Sequence[int], node_size: int, sent_bytes: Mapping[int, int]) -> int:
    if rank in holders:
        return rank
    if len(holders) == 1:
        return holders[0]
    near = [holder for holder in holders if holder // node_size == rank // node_size]
    return min(near or holders, key=lambda holder: (sent_bytes[holder], holder))


def pack_buckets(
    moved: Sequence[BoxTransfer], itemsize: Mapping[str, int], max_bytes: int
) -> tuple[tuple[BoxTransfer, ...], ...]:
    """Cut transfers to at most `max_bytes`, and put each into the first bucket where both ranks have room.

    Tensors of different element sizes never share a bucket.
    """
    buckets: list[list[BoxTransfer]] = []
    for element in sorted({itemsize[transfer.name] for transfer in moved}, reverse=True):
        cut = [
            (box, transfer)
            for transfer in moved
            if itemsize[transfer.name] == element
            for box in split_box(transfer.box, max_bytes // element)
        ]
        sizes = sorted({box.numel * element for box, _ in cut}, reverse=True)
        index_of = {size: index for index, size in enumerate(sizes)}
        new_room = partial(_BucketRoom, sizes, max_bytes)
        senders: defaultdict[int, _BucketRoom] = defaultdict(new_room)
        receivers: defaultdict[int, _BucketRoom] = defaultdict(new_room)
        filled: list[list[BoxTransfer]] = []
        for box, transfer in cut:
            size = box.numel * element
            sender = senders[transfer.source]
            receiver = receivers[transfer.target]
            number = _lowest_zero_bit(sender.full[index_of[size]] | receiver.full[index_of[size]])
            sender.fill(number, size)
            receiver.fill(number, size)
            filled.extend([] for _ in range(number + 1 - len(filled)))
            filled[number].append(
                transfer if box is transfer.box else BoxTransfer(transfer.name, box, transfer.source, transfer.target)
            )
        buckets += filled
    return tuple(tuple(transfers) for transfers in buckets)


class _BucketRoom:
    """Index of the buckets where a rank has room for a transfer, which finds the first such bucket without a search.

    Args:
        sizes: bytes of the transfers that occur, largest first.
        max_bytes: bytes that the rank may send, or receive, in a bucket.
    """

    def __init__(self, sizes: Sequence[int], max_bytes: int) -> None:
        self.full = [0] * len(sizes)
        """For each size, the buckets without room for it, as the bits of an integer."""
        self._sizes = sizes
        self._max_bytes = max_bytes
        self._filled: list[int] = []
        self._largest_fitting: list[int] = []
        """For each bucket, the index of the largest size that it has room for."""

    def fill(self, number: int, size: int) -> None:
        """Add bytes to a bucket."""
        missing = number + 1 - len(self._filled)
        self._filled.extend([0] * missing)
        self._largest_fitting.extend([0] * missing)
        self._filled[number] += size
        room = self._max_bytes - self._filled[number]
        index = self._largest_fitting[number]
        while index < len(self._sizes) and self._sizes[index] > room:
            self.full[index] |= 1 << number
            index += 1
        self._largest_fitting[number] = index


def _lowest_zero_bit(bits: int) -> int:
    return (~bits & (bits + 1)).bit_length() - 1


def split_box(box: Box, max_numel: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `max_numel` elements: along the first dims as far as they suffice."""
    if box.numel <= max_numel:
        yield box
        return
    dim = next(i for i, size in enumerate(box.size) if size > 1)
    per_row = box.numel // box.size[dim]
    rows = max(1, max_numel // per_row)
    for first in range(0, box.size[dim], rows):
        start = list(box.start)
        size = list(box.size)
        start[dim] += first
        size[dim] = min(rows, box.size[dim] - first)
        yield from split_box(Box(tuple(start), tuple(size)), max_numel)
