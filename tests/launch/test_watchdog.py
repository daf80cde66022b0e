"""Real ranks with an odd one: the message of the job, and its delay."""

import os
import re
import signal
import socket
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from moefold.comm.collectives import all_gather, all_reduce_sum
from moefold.comm.groups import ParallelGroups
from moefold.host.rank_env import RankEnv
from moefold.launch.local_job import EXIT_GRACE_S
from moefold.launch.rank_errors import RankErrorHandler
from moefold.launch.ranks import init_distributed, spawn_ranks
from moefold.launch.rendezvous import join_rendezvous
from moefold.launch.watchdog import Watchdog
from moefold.topology.layout import fold
from tests.launch.blocked import block

RANKS = 3
LIMIT_S = 3.0
ODD_STEP = 4
DAWDLE_S = 60.0
"""So long a job without a watchdog would take."""
KERNEL_S = 9
"""So long a rank hangs inside the kernel: the child that does it holds the launcher's pipe open."""


def _dawdle(place: RankEnv) -> None:
    time.sleep(DAWDLE_S)


def _hang_in_the_kernel(place: RankEnv) -> None:
    block(KERNEL_S)


def _stop(place: RankEnv) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _stop_all(folder: Path, place: RankEnv) -> None:
    """Let another process stop all ranks for longer than the limit, and continue them."""
    ranks = [int((folder / f"rank-{rank}").read_text()) for rank in range(RANKS)]
    if os.fork():
        time.sleep(0.5)
        return
    for sent, pause_s in ((signal.SIGSTOP, LIMIT_S + 1.0), (signal.SIGCONT, 0.0)):
        for rank in ranks:
            os.kill(rank, sent)
        time.sleep(pause_s)
    os._exit(0)


def _die(place: RankEnv) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(place: RankEnv) -> None:
    raise ZeroDivisionError("a bug")


def _rank(odd: object, file: Path, place: RankEnv, device_type: str, odd_rank: int = 1) -> int:
    """Run steps with two collectives. The odd rank fails in one of them."""
    (file.parent / f"rank-{place.rank}").write_text(str(os.getpid()))
    watchdog = Watchdog(place, LIMIT_S)
    failing = RankErrorHandler(place, lambda: False, watchdog)
    with failing, init_distributed(place, device_type, LIMIT_S, watchdog.start) as device, watchdog:
        groups = ParallelGroups.create(fold(world_size=RANKS, cp=RANKS), device, watchdog.flight_recorder)
        for step in range(1, 8):
            watchdog.flight_recorder.begin_step(step, "loading data")
            if step == ODD_STEP and place.rank == odd_rank:
                file.write_text(str(time.time()))
                odd(place)
            watchdog.flight_recorder.set_phase("forward of micro-batch 0")
            x = all_gather(torch.ones(2, 4), groups.attn.cp)
            watchdog.flight_recorder.set_phase("optimizer")
            all_reduce_sum(x, groups.world)
    return 0


def _run(odd: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[list[str], float]:
    """The lines on stderr of a job, which must fail, and the seconds from the odd thing to its end."""
    assert spawn_ranks(partial(_rank, odd, tmp_path / "when"), RANKS, "cpu") == 1
    took_s = time.time() - float((tmp_path / "when").read_text())
    return capfd.readouterr().err.splitlines(), took_s


def test_a_rank_that_is_late_is_named_with_the_collective_of_the_others(tmp_path, capfd):
    lines, took_s = _run(_dawdle, tmp_path, capfd)
    assert lines[0].startswith("moefold: rank 1 on ")
    assert lines[0].endswith(" is late")
    assert lines[1].startswith(
        f"  rank 1: step {ODD_STEP}, loading data; last collective all_reduce over world (ranks 0-2)"
    )
    assert "; now at launch/test_watchdog.py:" in lines[1]
    assert lines[1].endswith(" _dawdle")
    assert lines[2].startswith(
        f"  ranks 0, 2: step {ODD_STEP}, forward of micro-batch 0; last collective all_gather over cp"
    )
    assert "shape [2, 4]" in lines[2]
    assert lines[3:] == ["  the run ends: no progress for 3 s (faults.timeout_s); see docs/failures.md"]
    assert LIMIT_S < took_s < DAWDLE_S


def test_hang_inside_the_kernel_is_distinguished_from_a_late_rank(tmp_path, capfd):
    lines, took_s = _run(_hang_in_the_kernel, tmp_path, capfd)
    assert lines[0].startswith("moefold: rank 1 on ")
    assert lines[0].endswith(" hangs inside the kernel, as in a disk or network folder that does not answer")
    assert f"  rank 1: step {ODD_STEP}, loading data; " in lines[1]
    assert "; now at launch/blocked.py:" in lines[1]
    assert took_s > LIMIT_S


def test_a_rank_that_is_stopped_is_named_and_ended(tmp_path, capfd):
    lines, took_s = _run(_stop, tmp_path, capfd)
    assert lines[0].endswith(" is stopped, as by SIGSTOP or a debugger")
    assert lines[1].startswith(f"  rank 1: step {ODD_STEP}, loading data; last collective all_reduce")
    assert lines[2].startswith(f"  ranks 0, 2: step {ODD_STEP}, forward of micro-batch 0; last collective all_gather")
    assert len(lines) == 4
    # A launcher waits so long for a process that no signal reaches; the other ranks end it before.
    assert took_s < LIMIT_S + EXIT_GRACE_S


def test_a_rank_that_is_killed_is_named_at_once_by_the_launcher(tmp_path, capfd):
    lines, took_s = _run(_die, tmp_path, capfd)
    assert len(lines) == 1
    assert lines[0].startswith("moefold: rank 1 was killed by SIGKILL (as happens when memory runs out) on ")
    assert (
        f" in step {ODD_STEP}, loading data; last collective all_reduce over world (ranks 0-2), shape [6, 4]"
        in lines[0]
    )
    assert lines[0].endswith(", and the others were ended")
    # Not by the watchdog of another rank, and without a wait for them.
    assert took_s < EXIT_GRACE_S


def test_rank_that_fails_itself_reports_the_error(tmp_path, capfd):
    lines, _ = _run(_raise, tmp_path, capfd)
    assert lines[0] == (
        f"moefold: rank 1 on {socket.gethostname()} failed in step {ODD_STEP}, loading data; "
        "last collective all_reduce over world (ranks 0-2), shape [6, 4]:"
    )
    assert lines[-1] == "ZeroDivisionError: a bug"
    assert sum("moefold: " in line for line in lines) == 1


def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path, capfd):
    started_s = time.monotonic()
    assert spawn_ranks(partial(_rank, partial(_stop_all, tmp_path), tmp_path / "when"), RANKS, "cpu") == 0
    assert time.monotonic() - started_s > LIMIT_S + 1
    assert capfd.readouterr().err == ""


def test_ranks_that_finish_say_nothing(tmp_path, capfd):
    assert spawn_ranks(partial(_rank, _nothing, tmp_path / "when"), RANKS, "cpu") == 0
    assert capfd.readouterr().err == ""


def _nothing(place: RankEnv) -> None:
    pass


def _meet_late(place: RankEnv, device_type: str) -> int:
    if place.rank == 1:
        time.sleep(30)
    with RankErrorHandler(place, lambda: False), init_distributed(place, device_type, 2.0):
        return 0


def test_a_rank_that_does_not_join_is_named(capfd):
    assert spawn_ranks(_meet_late, RANKS, "cpu") == 1
    err = capfd.readouterr().err
    assert err.startswith(f"moefold: error: rank 1 of {RANKS} did not come to ")
    assert "within 2 s; start them, or set faults.timeout_s higher\n" in err
    assert err.count("\n") == 1


def _meet_and_hang(place: RankEnv, device_type: str) -> int:
    if place.rank == 1:
        _, session = join_rendezvous(place, LIMIT_S)
        # Its threads run and its main thread has not come to the collective of the others.
        Watchdog(place, DAWDLE_S).start(session)
        time.sleep(DAWDLE_S)
    watchdog = Watchdog(place, LIMIT_S)
    failing = RankErrorHandler(place, lambda: False, watchdog)
    with failing, init_distributed(place, device_type, LIMIT_S, watchdog.start), watchdog:
        return 0


def test_a_rank_that_met_the_others_and_does_not_connect_is_named(capfd):
    started_s = time.monotonic()
    assert spawn_ranks(_meet_and_hang, RANKS, "cpu") == 1
    took_s = time.monotonic() - started_s
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("moefold: rank 1 on ")
    assert lines[0].endswith(" is late")
    assert lines[1].startswith("  rank 1: connecting to the other ranks, ")
    assert " _meet_and_hang" in lines[1]
    assert lines[2].startswith("  ranks 0, 2: connecting to the other ranks, ")
    assert lines[3:] == ["  the run ends: no progress for 3 s (faults.timeout_s); see docs/failures.md"]
    assert took_s < DAWDLE_S


def _connect_to_nobody(place: RankEnv, device_type: str) -> int:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    watchdog = Watchdog(place, LIMIT_S)
    failing = RankErrorHandler(place, lambda: False, watchdog)
    with failing, init_distributed(place, device_type, LIMIT_S, watchdog.start), watchdog:
        return 0


def test_ranks_that_cannot_connect_say_it_in_one_message(capfd):
    assert spawn_ranks(_connect_to_nobody, RANKS, "cpu") == 1
    err = capfd.readouterr().err
    assert err.count("moefold: ") == 1
    assert "met the others and did not connect to all of them: " in err
    assert "nosuch0" in err
    assert "Traceback" not in err


def _rank_without_agent(odd: object, file: Path, place: RankEnv) -> None:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]

    os._exit(_rank(odd, file, place, "cpu", odd_rank=0))


@pytest.mark.parametrize(("odd", "state"), [(_stop, "stopped"), (_die, "gone")])
def test_where_rank_0_keeps_the_store_its_loss_is_said(tmp_path, capfd, odd, state):
    """As under srun, where no agent keeps it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("fork")
    places = [RankEnv(rank, rank, RANKS, "127.0.0.1", port) for rank in range(RANKS)]
    ranks = [context.Process(target=_rank_without_agent, args=(odd, tmp_path / "when", place)) for place in places]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(40)
        assert [process.exitcode for process in ranks] == [-signal.SIGKILL, 1, 1]
    finally:
        for process in ranks:
            process.kill()
    err = capfd.readouterr().err
    # Whichever of the two comes to it first.
    assert re.search(rf"^moefold: the store at 127\.0\.0\.1:{port} does not answer rank [12] on ", err, re.M)
    assert re.search(
        rf"^  rank [12]: step {ODD_STEP}, forward of micro-batch 0; last collective all_gather ", err, re.M
    )
    assert f"  rank 0 of this machine is {state}\n" in err
    assert err.count("docs/failures.md") == err.count("moefold: ") == 1


class _Losses:
    """Store reporter of a job in which another rank has recorded the loss of rank 2."""

    def __init__(self) -> None:
        self.num_timeouts = 0

    def drop_silent_ranks(self) -> set[int]:
        self.num_timeouts += 1
        return {2}

    def request_diagnosis(self, reason: str, *, is_lost_peer: bool) -> None:
        raise EOFError(reason)


@pytest.mark.parametrize(("members", "num_timeouts"), [(None, 2), ((0, 2), 2), ((0, 1), 1)])
def test_a_loss_that_another_rank_recorded_gives_time_to_regroup_once(members, num_timeouts):
    losses = _Losses()
    watchdog = Watchdog(RankEnv(0, 0, 3, "127.0.0.1", 1), 0.05, regroups=True)
    watchdog._store_reporter = losses  # type: ignore[assignment]
    watchdog.flight_recorder.members = members
    with pytest.raises(EOFError, match="no progress"):
        watchdog._watch()
    watchdog.close()
    assert losses.num_timeouts == num_timeouts
