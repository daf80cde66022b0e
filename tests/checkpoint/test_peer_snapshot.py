"""Snapshots in the memory of peers: every pair of mappings, by bits; lost ranks; the certificate of a transition."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint.checkpoint_dir import TrainState
from moefold.checkpoint.peer_snapshot import PeerSnapshots, choose_members, choose_step
from moefold.checkpoint.save_load import checkpoint_state
from moefold.comm.groups import ParallelGroups, current_world
from moefold.comm.torch_compat import set_aside_process_groups
from moefold.config.schema import Config
from moefold.model.init import local_slice
from moefold.parallel.parallelize import parallelize
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
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
    old: Config, new: Config, lost: tuple[int, ...], nodes: tuple[str, ...], folder: Path
) -> dict[str, Any]:
    """Take three snapshots under one mapping, and restore the last under another mapping of the ranks that are left."""
    rank = dist.get_rank()
    groups = ParallelGroups.create(check_config(old), torch.device("cpu"))
    snapshots = PeerSnapshots(nodes[rank], max_scratch_bytes=2000)
    training = _build(old, groups)
    for step in (1, 2, 3):
        snapshots.take(_numbered(training, step), TrainState(step=step, samples=step * 8, tokens=step * 100), groups)
    snapshots.forget_groups()
    every = current_world().all_gather_object((rank, snapshots.held()))
    survivors = {number: held for number, held in every if number not in lost}
    assert snapshots.layout is not None
    step = choose_step(survivors, snapshots.layout)
    members = choose_members(survivors, snapshots.layout, new.parallel.world_size)
    found = {"step": step, "members": members, "held": snapshots.held(), "wrong": [], "bytes": snapshots.num_bytes}
    if members is not None and rank in members:
        assert step is not None
        with set_aside_process_groups():
            store = dist.FileStore(str(folder / "store"), len(members))
            dist.init_process_group("gloo", store=store, rank=members.index(rank), world_size=len(members))
            found |= _restore(new, snapshots, step)
            dist.destroy_process_group()
    return found


def _restore(cfg: Config, snapshots: PeerSnapshots, step: int) -> dict[str, Any]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    training = _build(cfg, groups)
    state = _numbered(training, 77)
    progress = snapshots.restore(step, state, groups.world, groups.device)
    wrong = []
    for name, tensor in state.items():
        values, start = local_slice(tensor)
        expected = _expected(name, tuple(tensor.shape), step)
        if values.numel() and not torch.equal(values, expected[_index(start, values.shape)].to(values.dtype)):
            wrong.append(name)
    groups.release()
    return {"wrong": wrong, "samples": progress.samples, "count": len(state)}


def _recipe(world_size: int, **changes: Any) -> Config:
    return tiny(
        model={"num_layers": 2, "router_score": "sigmoid", "expert_bias": True, "tie_embeddings": True},
        moe={"bias_update_rate": 0.1},
        train={"global_batch_size": 24},
        world_size=world_size,
        **changes,
    )


ONE_NODE = ("a",) * 8
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "expert parallelism": ({"world_size": 8, "ep": 2, "zero": 2}, {"world_size": 6, "ep": 2, "zero": 2}, (3,)),
    "pipeline": (
        {"world_size": 8, "pp": 2, "ep": 2, "zero": 1},
        {"world_size": 4, "tp": 2, "etp": 2, "zero": 3},
        (7, 5),
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_the_others_restore_every_byte_of_lost_ranks_under_another_mapping(pool, tmp_path: Path, name: str):
    old, new, lost = CASES[name]
    found = pool.run(8, _restore_after_loss, _recipe(**old), _recipe(**new), lost, ONE_NODE, tmp_path)
    assert {one["step"] for one in found} == {3}
    assert sorted(found[0]["held"]) == [2, 3]
    members = found[0]["members"]
    assert len(members) == new["world_size"]
    assert not set(members) & set(lost)
    for rank in members:
        assert found[rank]["wrong"] == []
        assert found[rank]["samples"] == 24
        assert found[rank]["count"] > 40
