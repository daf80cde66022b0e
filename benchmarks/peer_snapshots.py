"""Measure snapshots in the memory of peers against training steps, a copy of the same bytes, and a checkpoint.

    python benchmarks/peer_snapshots.py                            2.6 M parameters, 4 ranks
    python benchmarks/peer_snapshots.py --large                    about 100 M parameters

The model is taken from recipes/quickstart.toml, under DP4, EP2 with ZeRO 2 (`--mapping`). These alternate: a training
step; a snapshot with its exchange; only a copy of this rank's state to host memory; only the hashes of its boxes; a
checkpoint on disk. Then the state is restored under DP3, EP1, on three of the ranks, and certified.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rank_trainer import RECIPE

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.peer_snapshot import PeerSnapshots, local_boxes
from moefold.checkpoint.transition_certificate import RestoredRun, certify
from moefold.checkpoint.write_checkpoint import write_checkpoint
from moefold.comm.groups import ParallelGroups
from moefold.comm.private_torch import without_process_groups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.launch.rank_pool import WorkerPool
from moefold.ops.tensor_hash import TensorHasher
from moefold.parallel.parallelize import parallelize
from moefold.recipe import load_config
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from moefold.verify import PRELOAD

COMMON = ["data.kind=synthetic", "run.device=cpu", "train.micro_batch_size=1", "train.global_batch_size=12"]
LARGE = ["model.hidden_size=512", "model.layers=8", "model.ffn.moe.intermediate_size=1024"]
MEMBERS = (0, 1, 3)


def _seconds(do: Callable[[], Any]) -> float:
    dist.barrier()
    started_s = time.perf_counter()
    do()
    dist.barrier()
    return time.perf_counter() - started_s


def _measure(cfg: Config, after: Config, rounds: int, folder: str) -> tuple[dict[str, list[float]], int, int]:
    """Return the seconds of each part, the bytes of this rank's state, and of its snapshots."""
    cfg = replace(cfg, run=replace(cfg.run, dir=folder))
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    training = TrainingStep(parallelize(cfg, groups), cfg)
    data = DataRequest.of(cfg).open()
    batch = BatchSharder(data.train, cfg.batch_shape, groups, training.model.positions).batch(0)
    state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
    boxes = local_boxes(state)
    snapshots = PeerSnapshots()
    hasher = TensorHasher(groups.device)
    host = {key: torch.empty_like(values) for key, values in boxes.items()}
    times: dict[str, list[float]] = {}
    for number in range(1, rounds + 2):
        progress = TrainState(
            states=counted(step=number) | {"weights": {"moment_updates": training.moment_updates + 1}}
        )
        parts: dict[str, Callable[[], Any]] = {
            "step": lambda number=number: training.run(batch, number),
            "snapshot": lambda progress=progress: snapshots.take(state, progress, groups),
            "copy": lambda: [host[key].copy_(values) for key, values in boxes.items()],
            "hashes": lambda: [hasher.digest(values) for values in boxes.values()],
            "checkpoint": lambda progress=progress: write_checkpoint(cfg, state, progress),
        }
        for name, do in parts.items():
            times.setdefault(name if number > 1 else f"first {name}", []).append(_seconds(do))
    snapshots.forget_groups()
    rank = dist.get_rank()
    if rank in MEMBERS:
        with without_process_groups():
            store = dist.FileStore(f"{folder}/store", len(MEMBERS))
            dist.init_process_group("gloo", store=store, rank=MEMBERS.index(rank), world_size=len(MEMBERS))
            groups = ParallelGroups.create(check_config(after), torch.device("cpu"))
            training = TrainingStep(parallelize(after, groups), after)
            state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
            step = rounds + 1
            times["restore"] = [_seconds(lambda: snapshots.restore(step, state, groups.world, groups.device))]
            share = range(groups.rank * 4, groups.rank * 4 + 4)
            restored = RestoredRun((snapshots.snapshot(step).train_state or progress).states, {}, share, 12)
            times["certificate"] = [_seconds(lambda: certify(snapshots, step, state, restored, groups))]
            dist.destroy_process_group()
    return times, sum(values.nbytes for values in boxes.values()), snapshots.num_bytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="about 100 M parameters")
    parser.add_argument("--rounds", type=int, default=7, help="repeats of each part")
    parser.add_argument("--mapping", default="world_size=4 tp=1 cp=1 pp=1 ep=2 zero=2", help="keys of [parallel]")
    args = parser.parse_args()
    sizes = LARGE if args.large else []
    cfg, after = (
        load_config(RECIPE, [*COMMON, *sizes, *(f"parallel.{word}" for word in mapping.split())])
        for mapping in (args.mapping, f"{args.mapping} world_size=3 ep=1")
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds, state_bytes, snapshot_bytes = WorkerPool(PRELOAD).run(
            cfg.parallel.world_size, _measure, cfg, after, args.rounds, folder, timeout_s=600
        )[0]
    print(f"rank 0: state {state_bytes / 1e6:.2f} MB, snapshots {snapshot_bytes / 1e6:.2f} MB in host memory")
    step_s = statistics.median(seconds["step"])
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:18} {median * 1e3:8.1f} ms (least {min(times) * 1e3:.1f}), {median / step_s:.3f} of a step")


if __name__ == "__main__":
    main()
