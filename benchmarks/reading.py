"""What it costs to read token files by system calls rather than by a map, and to agree on broken ones, in one run.

    python benchmarks/reading.py                    the quickstart's 8 ranks, some minutes on a CPU
    python benchmarks/reading.py parallel.world_size=1 parallel.tp=1 parallel.cp=1 parallel.pp=1 parallel.ep=1

Every round trains one step of each kind on the same token files, in another order each time, so that what other work
does to the machine meets all kinds alike. Times are set against those of the round's plain step, as trained under
data.corrupt="fatal". Then the samples of one rank are read alone, by both ways.
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
from rank_run import RankRun, parser, run_recipe

from moefold.config.schema import Config
from moefold.data.shard_reader import ShardReader, TokenArraySpec
from moefold.train.data_loader import DataLoader

PLAIN, MAPPED, SKIP = "read by system calls", "mapped", 'data.corrupt="skip"'
WARM_UP = 2
FILES = 16
FILE_TOKENS = 2**22
SAMPLES_ALONE = 2000


@lru_cache(maxsize=64)
def _map(ids: TokenArraySpec) -> NDArray[Any]:
    return np.memmap(ids.path, ids.dtype, mode="r", offset=ids.offset_bytes, shape=(ids.count,))


def _read_mapped(reader: ShardReader, start: int, stop: int) -> NDArray[Any]:
    return _map(reader._ids)[start:stop]


@contextmanager
def _mapped(is_so: bool) -> Iterator[None]:
    read = ShardReader.read
    ShardReader.read = _read_mapped if is_so else read  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardReader.read = read  # type: ignore[method-assign]


def _measure(cfg: Config, run: RankRun, args: argparse.Namespace) -> None:
    data = {}
    for corrupt in ("fatal", "skip"):
        data[corrupt] = DataLoader(
            replace(cfg, data=replace(cfg.data, corrupt=corrupt)), run.groups, run.training.model.positions
        )
        data[corrupt].open(None)

    def step(kind: str) -> float:
        started_s = time.perf_counter()
        run.num_steps += 1
        run.groups.recorder.begin_step(run.num_steps, "loading data")
        run.training.start_clock()
        with _mapped(kind == MAPPED):
            first = run.num_steps * cfg.train.global_batch_size
            batch, _ = data["skip" if kind == SKIP else "fatal"].next_batch(first, ())
        run.training.run(batch, run.num_steps)
        return time.perf_counter() - started_s

    kinds = [PLAIN, MAPPED, SKIP]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds * WARM_UP:
        step(kind)
    order = random.Random(0)
    for _ in range(args.rounds):
        order.shuffle(kinds)
        for kind in kinds:
            found[kind].append(step(kind))
    if not run.is_first:
        return
    print(f"{args.rounds} rounds; plain: {statistics.median(found[PLAIN]) * 1e3:.0f} ms a step")
    for kind in (MAPPED, SKIP):
        ratios = [mine / plain for mine, plain in zip(found[kind], found[PLAIN], strict=True)]
        low, middle, high = (100 * (ratio - 1) for ratio in statistics.quantiles(ratios, n=4))
        print(f"{kind}: {middle:+.1f} % ({low:+.1f} to {high:+.1f})")
    for is_mapped in (False, True):
        with _mapped(is_mapped):
            print(f"{MAPPED if is_mapped else PLAIN}: {_alone_us(data['fatal'].row.sample):.1f} us a sample, alone")


def _alone_us(sample: Callable[[int], Any]) -> float:
    """Median time of a sample, read in the order of the data."""
    times = []
    for number in range(SAMPLES_ALONE):
        started_s = time.perf_counter()
        sample(number)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times) * 1e6


def main() -> None:
    """Write the files, measure and print."""
    words = parser(__doc__)
    words.add_argument("--rounds", type=int, default=20)
    args = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FILES):
            ids = np.random.default_rng(number).integers(0, 256, FILE_TOKENS).astype(np.uint16)
            np.save(Path(folder) / f"{number:02}.npy", ids)
        run_recipe(_measure, args, ["data.kind=tokens", f"data.path={folder}"])


if __name__ == "__main__":
    main()
