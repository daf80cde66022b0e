"""Training goes on from snapshots in memory with fewer ranks: equal to a restart from disk, and to one rank."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint.peer_snapshot import PeerSnapshots
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.comm.groups import ParallelGroups
from moefold.comm.private_torch import without_process_groups
from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.run import RunConfig
from moefold.errors import RunError
from moefold.train.callbacks.callback import Callback
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.slow import slow
from tests.train.poisoned_runs import farthest, poison, write_tokens
from tests.train.poisoned_runs import recipe as faulty_recipe
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity

LAST, STEPS = 2, 3
"""The step before the loss, and the last one."""


def recipe(run_dir: Path, world_size: int, steps: int, **settings: Any) -> Config:
    parallel = {"world_size": world_size, "elastic": True} | settings.pop("parallel", {})
    model = {"ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid"} | settings.pop("model", {})
    train = {"global_batch_size": 8, "lr_schedule": "constant"} | settings.pop("train", {})
    if train.get("offload_optimizer") == "ssd":
        train["offload_dir"] = str(run_dir.parent / "scratch")
    dtype = settings.pop("dtype", "float64")
    moe = {"bias_update_rate": 0.05, "aux_kind": "last_global_batch", "input_jitter": 0.1}
    cfg = tiny(model=model, moe=moe, train=train, **parallel, **settings)
    peer_every = 1 if cfg.parallel.dp > 1 else 0
    cfg = replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=3, steps=steps, device="cpu", dtype=dtype),
        checkpoint=CheckpointConfig(every=LAST, peer_every=peer_every),
    )
    check_config(cfg)
    return cfg


def _train(cfg: Config) -> None:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    assert Trainer(cfg, groups).run(StopSignals()) == 0


Damage = Callable[[PeerSnapshots, int], None]


def _lose_ranks(
    old: Config,
    new: Config,
    members: tuple[int, ...],
    folder: Path,
    damage: Damage | None = None,
    callbacks: Sequence[Callback] = (),
) -> str:
    """Train under one mapping, go on from memory under another one with some of the ranks; return the error."""
    rank = dist.get_rank()
    groups = ParallelGroups.create(check_config(old), torch.device("cpu"))
    trainer = Trainer(old, groups, callbacks=callbacks)
    assert trainer.run(StopSignals()) == 0
    snapshots = trainer.checkpointing.snapshots
    assert snapshots is not None
    assert sorted(snapshots.generation.held()) == [LAST - 1, LAST]
    snapshots.forget_groups()
    dist.barrier()
    if rank not in members:
        return ""
    if damage is not None:
        damage(snapshots, rank)
    error = ""
    with without_process_groups():
        store = dist.FileStore(str(folder / "store"), len(members))
        dist.init_process_group("gloo", store=store, rank=members.index(rank), world_size=len(members))
        after = Trainer(new, ParallelGroups.create(check_config(new), torch.device("cpu")), callbacks=callbacks)
        after.checkpointing.snapshots = snapshots
        after.checkpointing.restored_step = LAST
        try:
            assert after.run(StopSignals()) == 0
            if new.parallel.dp > 1:
                assert min(snapshots.generation.held()) >= STEPS - 1
        except RunError as failure:
            error = str(failure)
        dist.destroy_process_group()
    return error


def _last(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step-{STEPS:06}"


MUON = {"train": {"optimizer": "muon"}}
HOST, DISK = ({"train": {"offload_optimizer": place, "offload_min_kib": 0}} for place in ("host", "ssd"))
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "three of four": ({"zero": 2}, (0, 2, 3), {"zero": 2}, {}),
    "muon": ({"zero": 1, "ep": 2}, (0, 2), {"zero": 3}, MUON),
    "moments on the host": (
        {"zero": 3},
        (0, 2, 3),
        {"zero": 1},
        {"train": {"offload_optimizer": "host", "offload_min_kib": 0}},
    ),
    "moments on a disk": (
        {"zero": 1},
        (0, 2, 3),
        {"zero": 1},
        {"train": {"offload_optimizer": "ssd", "offload_min_kib": 0}},
    ),
    "replicas": ({"zero": 0, "tp": 2}, (0, 3), {"zero": 0, "tp": 2}, {}),
    "bfloat16 moments": (
        {"zero": 2},
        (0, 2, 3),
        {"zero": 2},
        {
            "dtype": "float32",
            "train": {"optimizer": make_part("optimizer", "adamw", moment_dtype="bfloat16", beta2=0.95)},
        },
    ),
    "adapters": ({"zero": 2}, (1, 2, 3), {"zero": 2}, {"lora": {"rank": 2}}),
}


@pytest.mark.parametrize("case", ["three of four", *slow((name,) for name in CASES if name != "three of four")])
def test_going_on_from_memory_equals_a_restart_from_disk_and_one_rank(pool, tmp_path: Path, case: str):
    mapping, members, new_mapping, settings = CASES[case]
    old = recipe(tmp_path / "run", 4, LAST, parallel=mapping, **_copy(settings))
    new = recipe(tmp_path / "run", len(members), STEPS, parallel=new_mapping, **_copy(settings))
    assert pool.run(4, _lose_ranks, old, new, members, tmp_path) == [""] * 4
    # From the checkpoint of the same step.
    from_disk = replace(new, run=replace(new.run, dir=str(tmp_path / "disk")))
    start = str(tmp_path / "run" / "checkpoints" / f"step-{LAST:06}")
    from_disk = replace(from_disk, checkpoint=replace(from_disk.checkpoint, resume=start))
    pool.run(len(members), _train, from_disk)
    assert differing_tensors(_last(tmp_path / "run"), _last(tmp_path / "disk")) == []
    if settings.get("dtype") is None:
        pool.run(1, _train, recipe(tmp_path / "one", 1, STEPS, **_copy(settings)))
        assert farthest(tmp_path / "run", tmp_path / "one") < 1e-9


class _Clock(Callback):
    """Counts only on rank 0, and has a state that moves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"time": time.monotonic_ns(), "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = state_dict["steps"]

    def after_step(self, run: Any, step: Any) -> None:
        if run.is_first_rank:
            self._steps.append(step.number)

    def on_end(self, run: Any, status: int) -> None:
        (self._folder / f"{run.groups.world.size}-{run.groups.rank}.json").write_text(json.dumps(self._steps))


def test_callbacks_go_on_with_the_state_of_rank_0_which_may_move(pool, tmp_path: Path):
    """Rank 0 is lost, and its callback has counted."""
    old = recipe(tmp_path / "run", 3, LAST, parallel={"zero": 2}, train={"global_batch_size": 6})
    new = recipe(tmp_path / "run", 2, STEPS, parallel={"zero": 2}, train={"global_batch_size": 6})
    clock = _Clock(tmp_path)
    assert pool.run(3, _lose_ranks, old, new, (1, 2), tmp_path, None, [clock]) == [""] * 3
    found = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*-*.json")}
    assert found == {"3-0": [1, 2], "3-1": [], "3-2": [], "2-0": [1, 2, 3], "2-1": [1, 2]}


def _copy(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}


def _roll_back(cfg: Config) -> tuple[int, dict[int, Any]]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    torch.nn.modules.module.register_module_forward_hook(poison)
    trainer = Trainer(cfg, groups)
    assert trainer.run(StopSignals()) == 0
    snapshots = trainer.checkpointing.snapshots
    assert snapshots is not None
    return snapshots.generation.number, snapshots.generation.held()


@pytest.mark.slow
def test_steps_that_a_rollback_discards_are_not_gone_back_to(fresh_pool, tmp_path: Path):
    """The fourth step of seven is not finite: the third one is discarded too, as every second one is saved."""
    data = write_tokens(tmp_path / "data.npy")
    cfg = faulty_recipe(tmp_path / "run", data, 3, {"nonfinite": "rollback"}, world_size=2)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, peer_every=1), run=replace(cfg.run, steps=5))
    for rank, (generation, held) in enumerate(fresh_pool.run(2, _roll_back, cfg)):
        assert generation == 2
        assert held == {4: frozenset({rank, 1 - rank}), 5: frozenset({rank, 1 - rank})}
