"""Compare reading token files by system calls and by mmap, and measure the cost of data.corrupt="skip", in one run.

    python benchmarks/token_file_reading.py         the quickstart's 8 ranks, a few minutes on a CPU
    python benchmarks/token_file_reading.py parallel.world_size=1 parallel.tp=1 parallel.cp=1 parallel.pp=1 \
        parallel.ep=1                               one rank

Every round trains one step of each kind on the same token files, in random order, so other load on the machine affects
all kinds equally. Times are relative to the baseline step of the same round (system calls, data.corrupt="fatal").
Finally the samples of one rank are read without training, by both methods.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rank_trainer import RankTrainer, build_parser, run_recipe

from moefold.config.schema import Config
from moefold.data.shard_reader import ShardReader, TokenArraySpec
from moefold.train.data_loader import DataLoader
from moefold.train.position import Position

BASELINE = "system calls"
MMAP = "mmap"
SKIP = 'data.corrupt="skip"'
WARM_UP = 2
NUM_FILES = 16
FILE_TOKENS = 2**22
NUM_SAMPLES = 2000


@lru_cache(maxsize=64)
def _open_mmap(ids: TokenArraySpec) -> NDArray[Any]:
    return np.memmap(ids.path, ids.dtype, mode="r", offset=ids.offset_bytes, shape=(ids.count,))


def _read_mmap(reader: ShardReader, start: int, stop: int) -> NDArray[Any]:
    return _open_mmap(reader._ids)[start:stop]


@contextmanager
def _patch_reader(uses_mmap: bool) -> Iterator[None]:
    read = ShardReader.read
    ShardReader.read = _read_mmap if uses_mmap else read  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardReader.read = read  # type: ignore[method-assign]


def _measure(cfg: Config, trainer: RankTrainer, args: argparse.Namespace) -> None:
    loaders = {}
    for corrupt in ("fatal", "skip"):
        loaders[corrupt] = DataLoader(
            replace(cfg, data=replace(cfg.data, corrupt=corrupt)),
            trainer.training.model,
            Position(),
        )
        loaders[corrupt].open(None)

    def step(kind: str) -> float:
        started_s = time.perf_counter()
        trainer.num_steps += 1
        trainer.groups.recorder.begin_step(trainer.num_steps, "loading data")
        with trainer.training.meter.loading(), _patch_reader(kind == MMAP):
            first_sample = trainer.num_steps * cfg.train.global_batch_size
            batch, _ = loaders["skip" if kind == SKIP else "fatal"].next_batch(first_sample, ())
        trainer.training.run(batch, trainer.num_steps)
        return time.perf_counter() - started_s

    kinds = [BASELINE, MMAP, SKIP]
    times_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds * WARM_UP:
        step(kind)
    order = random.Random(0)
    for _ in range(args.rounds):
        order.shuffle(kinds)
        for kind in kinds:
            times_s[kind].append(step(kind))
    if not trainer.is_first:
        return
    print(f"{args.rounds} rounds; {BASELINE}: {statistics.median(times_s[BASELINE]) * 1e3:.0f} ms a step")
    for kind in (MMAP, SKIP):
        ratios = [time_s / baseline_s for time_s, baseline_s in zip(times_s[kind], times_s[BASELINE], strict=True)]
        low, middle, high = (100 * (ratio - 1) for ratio in statistics.quantiles(ratios, n=4))
        print(f"{kind}: {middle:+.1f} % ({low:+.1f} to {high:+.1f})")
    for uses_mmap in (False, True):
        with _patch_reader(uses_mmap):
            sample_us = _sample_us(loaders["fatal"].train_sampler.sample)
            print(f"{MMAP if uses_mmap else BASELINE}: {sample_us:.1f} us a sample without training")


def _sample_us(sample: Callable[[int], Any]) -> float:
    """Return the median time of reading a sample, in the order of the data, in us."""
    times = []
    for number in range(NUM_SAMPLES):
        started_s = time.perf_counter()
        sample(number)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times) * 1e6


def main() -> None:
    """Write the files, measure and print."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each kind (default 20)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_FILES):
            ids = np.random.default_rng(number).integers(0, 256, FILE_TOKENS).astype(np.uint16)
            np.save(Path(folder) / f"{number:02}.npy", ids)
        run_recipe(_measure, args, ["data.kind=tokens", f"data.path={folder}"])


if __name__ == "__main__":
    main()
