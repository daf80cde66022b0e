"""Certificate of a transition: the state of the new mapping's ranks equals the state of the old mapping's ranks.

Training continues after a restore from snapshots only if all of this is true: No snapshot has changed in memory. Ranks
with the same box have the same bytes. Each part of a parameter or moment has the hash of its old owner. Every element
has an owner, and owners of one box agree. Step counts, progress of the run and random numbers continue at the same
values. Known bugs of all these kinds are listed in docs/design/048-peer-snapshots.md.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.checkpoint_meta import States
from moefold.checkpoint.peer_snapshot import BoxKey, Digest, PeerSnapshots, Snapshot, local_boxes
from moefold.comm.collectives import all_gather_objects, all_to_all
from moefold.comm.groups import ParallelGroups
from moefold.errors import RunError
from moefold.message_text import format_list
from moefold.ops.tensor_hash import TensorHasher


@dataclass(frozen=True)
class RestoredRun:
    """State of a rank of the new mapping except its tensors."""

    states: States
    """States for the next checkpoint: `RunStates.restored_state_dict`."""
    step_counts: Mapping[str, float]
    """Updates that the optimizer has counted, by parameter."""
    samples: range
    """Samples of the next global batch that this data-parallel rank trains on, from 0."""
    num_samples: int
    """Samples of the next global batch."""


@torch.no_grad()
def certify(
    snapshots: PeerSnapshots, step: int, state: Mapping[str, Tensor], restored: RestoredRun, groups: ParallelGroups
) -> None:
    """Compare the state of a new mapping with the snapshots that it was restored from. It is collective over all ranks.

    Call it after `PeerSnapshots.restore`, before the first step.

    Raises:
        RunError: the states differ. Raised on every rank, with tensors and ranks.
    """
    slot = snapshots.snapshot(step)
    hasher = TensorHasher(groups.device)
    digests = {key: _digest(hasher, values) for key, values in slot.boxes()}
    copies = {
        (rank, key): digests[key] if key not in slot.local else _digest(hasher, values)
        for rank, copy in slot.copies.items()
        for key, values in copy.items()
    }
    faults = list(_changed_snapshots(slot, snapshots.generation.rank, digests, copies))
    shards = local_boxes(state)
    faults += _differing_parts(snapshots, shards, hasher, groups)
    faults += _restored_faults(slot, restored, groups)
    new_boxes = {key: _digest(hasher, values) for key, values in shards.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    report = (faults, digests, new_boxes, shapes, restored.samples, groups.attn.dp.rank)
    gathered = all_gather_objects(report, groups.world)
    all_faults = [fault for report, *_ in gathered for fault in report]
    all_faults += _disagreements("the snapshots", [report[1] for report in gathered])
    all_faults += _disagreements("the restored shards", [report[2] for report in gathered])
    all_faults += _without_owner([report[2] for report in gathered], [report[3] for report in gathered])
    all_faults += _sample_faults([(report[5], report[4]) for report in gathered], restored.num_samples)
    if all_faults:
        raise RunError(
            f"the state that was restored from the snapshots of step {step} is not the state of that step: "
            f"{format_list(list(dict.fromkeys(all_faults)))}; the same command resumes from the last checkpoint, "
            "if there is one"
        )


def _digest(hasher: TensorHasher, values: Tensor) -> Digest:
    first, second = hasher.digest(values).tolist()
    return first, second


def _changed_snapshots(
    slot: Snapshot,
    rank: int | None,
    digests: Mapping[BoxKey, Digest],
    copies: Mapping[tuple[int, BoxKey], Digest],
) -> Iterator[str]:
    """Yield the boxes whose hash has changed since the snapshot."""
    for (owner, key), digest in slot.digests.items():
        if owner == rank and digests[key] != digest:
            yield f"{key[0]} in the memory of rank {rank}, which had it, has changed since the snapshot"
        elif owner != rank and copies[owner, key] != digest:
            yield f"the copy of {key[0]} of rank {owner} in the memory of rank {rank} is not what was sent"


def _differing_parts(
    snapshots: PeerSnapshots, shards: Mapping[BoxKey, Tensor], hasher: TensorHasher, groups: ParallelGroups
) -> list[str]:
    """Return the parts of this rank whose bytes differ from the bytes on their source rank. It is collective."""
    world = groups.world
    transfers = snapshots.restored_parts
    targets = {name: (box, values) for (name, box), values in shards.items()}
    sent_transfers = sorted((t for t in transfers if t.source == world.rank), key=lambda t: t.target)
    received = sorted((t for t in transfers if t.target == world.rank), key=lambda t: t.source)
    rows = [hasher.digest(snapshots.read_part(t)) for t in sent_transfers]
    buffer = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.int64, device=groups.device)
    sends = Counter(t.target for t in sent_transfers)
    receives = Counter(t.source for t in received)
    ranks = range(world.size)
    expected = all_to_all(buffer, world, [sends[rank] for rank in ranks], [receives[rank] for rank in ranks]).tolist()
    faults = []
    for transfer, digest in zip(received, expected, strict=True):
        box, values = targets[transfer.name]
        if list(_digest(hasher, values[transfer.box.index_in(box)])) != digest:
            old = snapshots.old_ranks[transfer.source]
            faults.append(
                f"{transfer.name} on rank {world.rank} differs from its value on rank {old} of the old mapping"
            )
    return faults


def _restored_faults(slot: Snapshot, restored: RestoredRun, groups: ParallelGroups) -> Iterator[str]:
    """Yield the differences of progress and step counts from the snapshot."""
    assert slot.train_state is not None
    for name, state in restored.states.items():
        saved = slot.train_state.state_of(name)
        for key in sorted(state.keys() | saved.keys()):
            values = [json.dumps(entry.get(key), sort_keys=True) for entry in (state, saved)]
            if values[0] != values[1]:
                yield f"{key} of {name!r} is {values[0]} on rank {groups.rank}, and {values[1]} in the snapshot"
    updates = slot.train_state.state_of("weights").get("moment_updates")
    for name, count in restored.step_counts.items():
        if updates is not None and count != updates:
            yield (
                f"the optimizer has counted {count:g} updates of {name} on rank {groups.rank}, and {updates} in the "
                "snapshot"
            )


def _disagreements(what: str, digests_of_ranks: list[Mapping[BoxKey, Digest]]) -> Iterator[str]:
    """Yield the boxes whose bytes differ between ranks."""
    holders: defaultdict[BoxKey, dict[int, Digest]] = defaultdict(dict)
    for rank, digests in enumerate(digests_of_ranks):
        for key, digest in digests.items():
            holders[key][rank] = digest
    for key, by_rank in holders.items():
        if len(set(by_rank.values())) > 1:
            common = Counter(by_rank.values()).most_common(1)[0][0]
            different = [rank for rank, digest in by_rank.items() if digest != common]
            yield f"{key[0]} differs in {what} of ranks {', '.join(map(str, by_rank))}, on rank {different[0]} first"


def _without_owner(
    digests_of_ranks: list[Mapping[BoxKey, Digest]], shapes: list[Mapping[str, tuple[int, ...]]]
) -> Iterator[str]:
    """Yield the tensors with elements that have no owner, or owners of different boxes."""
    boxes: defaultdict[str, set[Any]] = defaultdict(set)
    for digests in digests_of_ranks:
        for name, box in digests:
            boxes[name].add(box)
    full_shapes = {name: shape for rank_shapes in shapes for name, shape in rank_shapes.items()}
    for name, shape in full_shapes.items():
        owned = sum(box.numel for box in boxes[name])
        if owned != torch.Size(shape).numel():
            yield f"{owned} of the {torch.Size(shape).numel()} elements of {name} have an owner"


def _sample_faults(samples_of_ranks: list[tuple[int, range]], num_samples: int) -> Iterator[str]:
    """Yield the samples of the next batch, which determine all random numbers, that do not have exactly one dp rank."""
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for dp_rank, samples in samples_of_ranks:
        for sample in samples:
            owners[sample].add(dp_rank)
    for sample in range(num_samples):
        if len(owners[sample]) != 1:
            yield f"sample {sample} of the next batch, and its random numbers, belong to {len(owners[sample])} replicas"
