"""Measure a transfer of weights between two mappings in memory against a checkpoint that is saved and loaded.

    python benchmarks/reshard.py                                   2.6 M parameters, 4 ranks
    python benchmarks/reshard.py --large                           about 100 M parameters

The model of recipes/quickstart.toml is trained under TP2 x DP2, EP2 x EDP2 with ZeRO 1 and sampled under
PP2 x DP2, EP2 (`--train` and `--sample` change the mappings, and `--train run.dtype=...` the dtype of both). Three ways
alternate: `WeightTransfer`; torch's checkpoint functions (DCP) with only the weights, to a temporary folder and back;
the checkpoint of a run, with only the weights, hashed and flushed, and loaded after its hashes were compared.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_trainer import RECIPE

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.load import load_weights
from moefold.checkpoint.write_checkpoint import write_checkpoint
from moefold.comm.box_exchange import MAX_SCRATCH_BYTES
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.launch.rank_pool import WorkerPool
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.parallelize import parallelize
from moefold.parallel.reshard import TransferStats, WeightTransfer
from moefold.recipe import load_config
from moefold.validate.config import check_config
from moefold.verify import PRELOAD

COMMON = ["data.kind=synthetic", "run.device=cpu", "train.micro_batch_size=1"]
TRAIN = "world_size=4 tp=2 cp=1 pp=1 ep=2 zero=1"
SAMPLE = "world_size=4 tp=1 cp=1 pp=2 ep=2 zero=0"
LARGE = ["model.hidden_size=512", "model.layers=8", "model.ffn.moe.intermediate_size=1024"]
SECONDS = dict[str, list[float]]


def _measure(
    train: Config, sample: Config, rounds: int, scratch_bytes: int, folder: str
) -> tuple[SECONDS, float, TransferStats, int]:
    """Return the times of each way, the time of the plan, the bytes of this rank, and the model's parameters."""
    source = parallelize(train, ParallelGroups.create(check_config(train), torch.device("cpu")))
    groups = ParallelGroups.create(check_config(sample, is_training=False), torch.device("cpu"))
    target = InferenceModel.build(sample, groups)
    loaded = InferenceModel.build(sample, groups)
    started_s = time.perf_counter()
    transfer = WeightTransfer(source, target, max_scratch_bytes=scratch_bytes)
    plan_s = time.perf_counter() - started_s
    stats = transfer.run()
    train = replace(train, run=replace(train.run, dir=folder))
    times: SECONDS = {"in memory": [], "DCP": [], "checkpoint": []}
    for number in range(rounds):
        for method, seconds in times.items():
            dist.barrier()
            started_s = time.perf_counter()
            if method == "in memory":
                transfer.run()
            else:
                state = {f"model.{name}": p.data for name, p in source.named_parameters.items()}
                state |= {f"model.{name}": buffer for name, buffer in source.named_buffers.items()}
                if method == "DCP":
                    path = Path(folder) / f"dcp-{number}"
                    dcp.save(state, checkpoint_id=path)
                    wanted = {f"model.{name}": p.data for name, p in loaded.named_parameters.items()}
                    dcp.load(wanted, checkpoint_id=path)
                else:
                    saved = write_checkpoint(train, state, TrainState(states=counted(step=number, samples=0, tokens=0)))
                    load_weights(saved, loaded.named_parameters, loaded.named_buffers)
            dist.barrier()
            seconds.append(time.perf_counter() - started_s)
    return times, plan_s, stats, sum(p.numel() for p in source.named_parameters.values())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="about 100 M parameters")
    parser.add_argument("--rounds", type=int, default=7, help="repeats of each way")
    parser.add_argument("--scratch-mib", type=int, default=MAX_SCRATCH_BYTES >> 20, help="max_scratch_bytes, in MiB")
    parser.add_argument("--train", default=TRAIN, help="training mapping, keys of [parallel]")
    parser.add_argument("--sample", default=SAMPLE, help="mapping of inference")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override recipe keys of both")
    args = parser.parse_args()
    sizes = LARGE if args.large else []
    train, sample = (
        load_config(RECIPE, [*COMMON, *sizes, *(f"parallel.{word}" for word in mapping.split()), *args.overrides])
        for mapping in (args.train, args.sample)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (train, sample, args.rounds, args.scratch_mib << 20, folder)
        results = WorkerPool(PRELOAD).run(train.parallel.world_size, _measure, *arguments, timeout_s=600)
    seconds, plan_s, stats, numel = results[0]
    print(f"{numel / 1e6:.1f} M parameters, {train.run.dtype}; plan {plan_s * 1e3:.0f} ms, {stats.buckets} buckets")
    for rank, (_, _, traffic, _) in enumerate(results):
        print(
            f"rank {rank}: sent {traffic.sent_bytes / 1e6:.2f} MB, received {traffic.received_bytes / 1e6:.2f}, copied "
            f"{traffic.copied_bytes / 1e6:.2f}, shared {traffic.shared_bytes / 1e6:.2f}, "
            f"scratch {traffic.scratch_bytes / 1e6:.2f}"
        )
    fastest = statistics.median(seconds["in memory"])
    for method, times in seconds.items():
        median = statistics.median(times)
        print(f"{method:10} {median * 1e3:8.1f} ms (least {min(times) * 1e3:.1f}), {median / fastest:.1f} x")


if __name__ == "__main__":
    main()
