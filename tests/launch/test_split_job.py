"""A job of ranks that train and ranks that sample: long waits for each other, and a rank that is stopped."""

import os
import signal
import time
from functools import partial

import torch.distributed as dist

from moefold.comm.trainer_sampler_link import JobSplit
from moefold.host.rank_env import RankEnv
from moefold.launch.rank_errors import RankErrorHandler
from moefold.launch.ranks import init_split_job, spawn_ranks
from moefold.launch.watchdog import Watchdog

LIMIT_S = 3.0
SPLIT = JobSplit(2, 1)


def _rank(is_stopped: bool, place: RankEnv, device_type: str) -> int:
    """The sampling rank works for longer than the limit, and each training rank waits for its message."""
    watchdog = Watchdog(place, LIMIT_S)
    failing = RankErrorHandler(place, lambda: False, watchdog)
    with failing, init_split_job(place, SPLIT, device_type, LIMIT_S, watchdog.start) as (_, link), watchdog:
        assert link is not None
        link.recorder = watchdog.flight_recorder
        sampling = SPLIT.sampling_ranks[0]
        assert dist.get_world_size() == (1 if place.rank == sampling else 2)
        if place.rank != sampling:
            watchdog.flight_recorder.set_phase("waiting for rollouts")
            assert link.receive_object(sampling, 1) == f"for rank {place.rank}"
            return 0
        watchdog.flight_recorder.set_phase("sampling rollouts")
        end_s = time.monotonic() + 1.5 * LIMIT_S
        while time.monotonic() < end_s:
            watchdog.flight_recorder.note_progress()
            time.sleep(0.1)
            if is_stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
        for send in [link.send_object(f"for rank {rank}", rank, 1) for rank in SPLIT.training_ranks]:
            send.wait()
    return 0


def test_a_wait_for_a_rank_that_makes_progress_is_not_a_hang(capfd):
    assert spawn_ranks(partial(_rank, False), SPLIT.num_ranks, "cpu") == 0
    assert capfd.readouterr().err == ""


def test_a_sampling_rank_that_is_stopped_is_named(capfd):
    assert spawn_ranks(partial(_rank, True), SPLIT.num_ranks, "cpu") == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("moefold: rank 2 on ")
    assert lines[0].endswith(" is stopped, as by SIGSTOP or a debugger")
    assert lines[2].startswith("  ranks 0, 1: waiting for rollouts")
