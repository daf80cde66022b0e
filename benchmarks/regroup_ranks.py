"""Measure how long gloo ranks need to regroup after one is killed, without a model.

    PYTHONPATH=. python benchmarks/regroup_ranks.py 8 32

Prints, for each number of ranks, the seconds from the failed collective to the agreement, and to the process groups of
the smaller job: the longest over the survivors.
"""

import argparse
import gc
import json
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from moefold.comm.flight_recorder import group_timeout
from moefold.comm.groups import ParallelGroups
from moefold.comm.private_torch import forget_process_groups
from moefold.comm.trainer_sampler_link import JobSplit
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import init_process_group, init_split_job, spawn_ranks
from moefold.launch.regroup import Regroup
from moefold.launch.watchdog import Watchdog
from moefold.topology.layout import fold

TIMEOUT_S = 60.0


def _create_groups(size: int, watchdog: Watchdog) -> None:
    layout = fold(world_size=size, tp=1, cp=1, pp=1, ep=2, etp=1)
    groups = ParallelGroups.create(layout, torch.device("cpu"), watchdog.flight_recorder)
    dist.all_reduce(torch.ones(1))
    groups.release()


def _rank(folder: Path, rank_env: RankEnv, device_type: str) -> int:
    watchdog = Watchdog(rank_env, TIMEOUT_S, regroups=True)
    recorder = watchdog.flight_recorder
    find_lost = (watchdog.gone_ranks, watchdog.silent_ranks)
    regroup = Regroup(rank_env, device_type, TIMEOUT_S, *find_lost, watchdog.kill, recorder.note_progress)
    split = JobSplit(rank_env.world_size, 0)
    joined = init_split_job(rank_env, split, device_type, TIMEOUT_S, watchdog.start, regroup.open_first_store)
    with joined, watchdog:
        _create_groups(rank_env.world_size, watchdog)
        if rank_env.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(1))
        started_s = time.monotonic()
        forget_process_groups()
        gc.collect()
        count = rank_env.world_size - 2
        generation = regroup.agree_on_next(None, lambda facts, lost: (sorted(facts)[:count], None))
        agreed_s = time.monotonic() - started_s
        if not regroup.is_spare:
            recorder.start_generation(generation.members)
            init_process_group(
                regroup.group_store(), regroup.rank, count, torch.device("cpu"), group_timeout(TIMEOUT_S)
            )
            _create_groups(count, watchdog)
        times = [agreed_s, time.monotonic() - started_s]
        (folder / str(rank_env.rank)).write_text(json.dumps(times))
    return 0


def main() -> None:
    """Print one line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="+", help="numbers of ranks, even")
    for count in parser.parse_args().ranks:
        with TemporaryDirectory() as folder:
            assert spawn_ranks(partial(_rank, Path(folder)), count, "cpu", regroups=True) == 0
            times = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
        agreed_s, connected_s = (max(rank_times[number] for rank_times in times) for number in (0, 1))
        print(f"{count} ranks: agreed after {agreed_s:.2f} s, process groups after {connected_s:.2f} s", flush=True)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
