"""Snapshots in the memory of peers: every pair of mappings, by bits; lost ranks; the certificate of a transition."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.peer_snapshot import (
    PeerSnapshots,
    SnapshotLayout,
    choose_members,
    choose_peers,
    choose_step,
    plan_copies,
)
from moefold.checkpoint.transition_certificate import RestoredRun, certify
from moefold.comm.groups import ParallelGroups, current_world
from moefold.comm.private_torch import without_process_groups
from moefold.comm.sharded_tensor import local_slice
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.cost.peer_snapshot_memory import snapshot_bytes
from moefold.cost.shard_boxes import Box
from moefold.errors import RunError
from moefold.parallel.parallelize import parallelize
from moefold.topology.layout import fold
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.slow import slow
from tests.verify.recipes import tiny


def _numbered(training: TrainingStep, step: int) -> dict[str, torch.Tensor]:
    """The state with the value of each element set to its global index, the name and the step."""
    state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
    for name, tensor in state.items():
        values, start = local_slice(tensor)
        if values.numel():
            values.copy_(_expected(name, tuple(tensor.shape), step)[_index(start, values.shape)])
    return state


def _index(start: Any, shape: Any) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def _expected(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + sum(name.encode()) / 64 + step


def _build(cfg: Config, groups: ParallelGroups) -> TrainingStep:
    return TrainingStep(parallelize(cfg, groups), cfg)


def _restore_after_loss(
    old: Config, new: Config, lost: tuple[int, ...], damages: tuple[str, ...], folder: Path
) -> dict[str, Any]:
    """Take three snapshots under one mapping, and restore the last under another mapping of the ranks that are left."""
    rank = dist.get_rank()
    groups = ParallelGroups.create(check_config(old), torch.device("cpu"))
    snapshots = PeerSnapshots(max_scratch_bytes=20_000)
    training = _build(old, groups)
    for step in (1, 2, 3):
        snapshots.take(
            _numbered(training, step),
            TrainState(
                states=counted(step=step, samples=step * 8, tokens=step * 100) | {"weights": {"moment_updates": 7}}
            ),
            groups,
        )
    snapshots.forget_groups()
    taken = snapshots.generation
    every = current_world().all_gather_object((rank, taken.held()))
    survivors = {number: held for number, held in every if number not in lost}
    assert taken.layout is not None
    step = choose_step(survivors, taken.layout)
    members = choose_members(survivors, taken.layout, new.parallel.world_size)
    found = {
        "step": step,
        "members": members,
        "held": taken.held(),
        "wrong": [],
        "bytes": snapshots.num_bytes,
    }
    if members is not None and rank in members:
        assert step is not None
        with without_process_groups():
            store = dist.FileStore(str(folder / "store"), len(members))
            dist.init_process_group("gloo", store=store, rank=members.index(rank), world_size=len(members))
            found |= _restore(new, snapshots, step, damages)
            dist.destroy_process_group()
    return found


def _restore(cfg: Config, snapshots: PeerSnapshots, step: int, damages: tuple[str, ...]) -> dict[str, Any]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    training = _build(cfg, groups)
    state = _numbered(training, 77)
    progress = snapshots.restore(step, state, groups.world, groups.device)
    counts = dict.fromkeys(training.parameters, 7.0)
    share = 24 // groups.attn.dp.size
    first = groups.attn.dp.rank * share
    restored = RestoredRun(progress.states, counts, range(first, first + share), 24)
    messages = {name: _certify(snapshots, step, state, restored, groups, name) for name in damages}
    wrong = []
    for name, tensor in state.items():
        values, start = local_slice(tensor)
        expected = _expected(name, tuple(tensor.shape), step)
        if values.numel() and not torch.equal(values, expected[_index(start, values.shape)].to(values.dtype)):
            wrong.append(name)
    groups.release()
    return {"messages": messages, "wrong": wrong, "samples": progress.samples, "count": len(state)}


def _certify(
    snapshots: PeerSnapshots,
    step: int,
    state: dict[str, torch.Tensor],
    restored: RestoredRun,
    groups: ParallelGroups,
    damage: str,
) -> str:
    """Damage the shards of one rank, and return the error of the certificate; the damage is undone."""
    slot = snapshots.snapshot(step)
    is_here = groups.rank == 1
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def change(target: torch.Tensor, values: torch.Tensor) -> None:
        changed.append((target, target.clone()))
        target.copy_(values)

    weight = "optimizer.layers.0.attention.wq"
    if damage == "flipped bit" and is_here:
        key, values = next((key, values) for key, values in slot.local.items() if key[0] == "model.embedding.weight")
        words = values.view(torch.int64)
        change(words, words.clone().flatten().index_put_((torch.tensor(1),), words.flatten()[1] ^ 4).view(words.shape))
    if damage == "stale shard":
        for key, values in slot.copies.get(3, {}).items():
            if key[0] == "model.embedding.weight":
                change(values, values - 1)
    if damage == "swapped moments" and is_here:
        first, second = (local_slice(state[f"{weight}.{moment}"])[0] for moment in ("exp_avg", "exp_avg_sq"))
        values = first.clone()
        change(first, second)
        change(second, values)
    if damage == "wrong weight" and is_here:
        local = local_slice(state["model.embedding.weight"])[0]
        change(local, local + 1e-9)
    if damage == "wrong step count" and is_here:
        restored = replace(restored, step_counts=dict(restored.step_counts) | {"embedding.weight": 8.0})
    if damage == "wrong position" and is_here:
        restored = replace(
            restored, states=counted(step=3, samples=25, tokens=300) | {"weights": {"moment_updates": 7}}
        )
    if damage == "sample twice" and is_here:
        restored = replace(restored, samples=range(restored.samples.start - 1, restored.samples.stop))
    message = ""
    try:
        certify(snapshots, step, state, restored, groups)
    except RunError as error:
        message = str(error)
    for target, values in reversed(changed):
        target.copy_(values)
    return message


DAMAGES = {
    "nothing": "",
    "flipped bit": "model.embedding.weight in the memory of rank 2, which had it, has changed since the snapshot",
    "stale shard": "the copy of model.embedding.weight of rank 3 in the memory of rank 0 is not what was sent",
    "swapped moments": "optimizer.layers.0.attention.wq.exp_avg on rank 1 differs from its value on rank",
    "wrong weight": "model.embedding.weight on rank 1 differs from its value on rank",
    "wrong step count": "the optimizer has counted 8 updates of embedding.weight on rank 1, and 7 in the snapshot",
    "wrong position": "samples of 'position' is 25 on rank 1, and 24 in the snapshot",
    "sample twice": "sample 11 of the next batch, and its random numbers, belong to 2 replicas",
}


def _recipe(world_size: int, **changes: Any) -> Config:
    return tiny(
        model={
            "layers": 2,
            "vocab_size": 25,
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.expert_bias": True,
            "tie_embeddings": True,
        },
        moe={"bias_update_rate": 0.1},
        train={"global_batch_size": 24},
        world_size=world_size,
        **changes,
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "expert parallelism": ({"world_size": 4, "ep": 2, "zero": 2}, {"world_size": 2, "ep": 2, "zero": 1}, (3,)),
    "pipeline": (
        {"world_size": 8, "pp": 2, "ep": 2, "zero": 1},
        {"world_size": 4, "tp": 2, "etp": 2, "zero": 3},
        (7, 5),
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", ["expert parallelism", *slow([("pipeline",)])])
def test_the_others_restore_every_byte_of_lost_ranks_under_another_mapping(pool, tmp_path: Path, name: str):
    old, new, lost = CASES[name]
    damages = tuple(DAMAGES) if name == "expert parallelism" else ("nothing",)
    found = pool.run(old["world_size"], _restore_after_loss, _recipe(**old), _recipe(**new), lost, damages, tmp_path)
    assert {one["step"] for one in found} == {3}
    assert sorted(found[0]["held"]) == [2, 3]
    with_snapshots = replace(_recipe(**old), checkpoint=CheckpointConfig(peer_every=1))
    # The bound counts the padding of uneven shards.
    assert found[0]["bytes"] <= snapshot_bytes(with_snapshots)[0] <= 1.1 * found[0]["bytes"]
    members = found[0]["members"]
    assert len(members) == new["world_size"]
    assert not set(members) & set(lost)
    for rank in members:
        assert found[rank]["wrong"] == []
        assert found[rank]["samples"] == 24
        assert found[rank]["count"] > 40
    for damage in damages:
        (message,) = {found[rank]["messages"][damage] for rank in members}
        assert DAMAGES[damage] in message
        assert bool(message) == bool(DAMAGES[damage])


def test_a_step_whose_shard_is_lost_with_its_peer_cannot_be_resumed():
    layout = SnapshotLayout((1, 2, 3, 0), tuple(((rank,), rank) for rank in range(4)))
    held = {rank: {4: frozenset({rank, (rank - 1) % 4})} for rank in range(4)}

    def left(*lost: int) -> dict[int, Any]:
        return {rank: steps for rank, steps in held.items() if rank not in lost}

    assert choose_step(left(1), layout) == 4
    assert choose_step(left(1, 3), layout) == 4
    assert choose_step(left(1, 2), layout) is None
    # Only rank 2 has the shards of rank 1: it stays, and rank 3 may wait.
    assert choose_members(left(1), layout, 2) == (0, 2)
    assert choose_members(left(1), layout, 1) is None
    # A rank that was lost while it took a newer snapshot: all go back to the step that all have.
    held[0] |= {5: frozenset({0, 3})}
    assert choose_step(left(1), layout) == 4
    # Boxes that two ranks own need no copy.
    assert choose_step({3: {4: frozenset({3})}}, SnapshotLayout((1, 0, 3, 2), (((0, 1, 2, 3), None),))) == 4


@pytest.mark.parametrize(
    ("nodes", "peers"),
    [
        ("aaaa", (1, 2, 3, 0)),
        ("aabb", (2, 3, 0, 1)),
        ("abab", (1, 2, 3, 0)),
        ("aaab", (3, 3, 3, 0)),
    ],
)
def test_a_peer_is_on_another_node_where_there_is_one(nodes: str, peers: tuple[int, ...]):
    assert choose_peers(fold(world_size=4), nodes) == peers


def test_copies_are_of_boxes_that_no_other_node_has():
    whole, first, second = Box((0,), (4,)), Box((0,), (2,)), Box((2,), (2,))
    boxes = [{"norm": whole, "weight": first}, {"norm": whole, "weight": second}]
    layout, copies = plan_copies(boxes, (1, 0), ("a", "a"))
    assert [(copy.name, copy.box, copy.source, copy.target) for copy in copies] == [
        ("weight", first, 0, 1),
        ("weight", second, 1, 0),
    ]
    assert layout.shards == (((0, 1), None), ((0,), 0), ((1,), 1))
    # Both owners of the norm are lost with their node: one of them sends a copy to the other node.
    layout, copies = plan_copies([*boxes, {"other": whole}], (2, 2, 0), ("a", "a", "b"))
    assert [(copy.name, copy.source, copy.target) for copy in copies] == [
        ("norm", 0, 2),
        ("weight", 0, 2),
        ("weight", 1, 2),
        ("other", 2, 0),
    ]
