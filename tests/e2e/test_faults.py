"""Test lost nodes: the message, its delay, and that the job goes on from its checkpoint with the other nodes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.agents import (
    TORCHRUN,
    ForkedAgent,
    Job,
    agent_on_host,
    free_port,
    is_open,
    obstacle_to_namespaces,
    two_hosts,
    wait_for,
)
from tests.e2e.command import ROOT, checkpoints, child_ids, environment, interrupted, losses, small, train
from tests.e2e.forked import interrupt_forked, run_program

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")]

STEPS = 48
ELASTIC = (
    "train.global_batch_size=4",
    "parallel.elastic=true",
    "run.dtype=float64",
    "checkpoint.every=4",
    f"run.steps={STEPS}",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run on one rank."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(run_dir, "train.global_batch_size=4", "run.dtype=float64", f"run.steps={STEPS}")
    return losses(run_dir)


def _trains_on(num_ranks: int, run_dir: Path, steps: int) -> bool:
    """Return whether the run has come so far on all ranks."""
    file, config = run_dir / "metrics.jsonl", run_dir / "config.json"
    if not file.exists() or not config.exists():
        return False
    found = json.loads(config.read_text())["parallel"]["world_size"]
    return found == num_ranks and len(file.read_text().splitlines()) >= steps


def _lose_the_second(agents: Sequence[Job], run_dir: Path, lose: object, num_ranks: int = 2) -> tuple[float, float]:
    """Lose a node in mid-run and let the other one end it; seconds until the message, and until it trains again."""
    first = agents[0]
    wait_for(lambda: _trains_on(num_ranks, run_dir, 9), agents)
    lost_s = time.time()
    lose()
    message_s = wait_for(lambda: "docs/failures.md" in first.text(), agents, 60) - lost_s
    again_s = wait_for(lambda: "resumed from" in first.text(), agents, 90) - lost_s
    assert first.process.wait(120) == 0, first.text()
    print(f"message after {message_s:.1f} s, training again after {again_s:.1f} s")
    return message_s, again_s


def test_lost_node_is_named_and_the_other_resumes_from_checkpoint(uninterrupted, tmp_path):
    run_dir, meet_at = tmp_path / "run", f"127.0.0.1:{free_port()}"
    words = small(run_dir, *ELASTIC)
    agents = [ForkedAgent(words, tmp_path / "first.log", meet_at=meet_at)]
    try:
        wait_for(lambda: is_open(meet_at), agents)
        # At once: torchrun waits four seconds for it (QUICK), and an agent that comes later meets nobody.
        agents.append(ForkedAgent(words, tmp_path / "second.log", meet_at=meet_at))
        _lose_the_second(agents, run_dir, agents[1].kill)
    finally:
        for agent in agents:
            agent.kill()
    said = agents[0].text()
    assert "moefold: rank 1 on " in said
    assert " is gone: its process ended without an error message" in said
    assert said.count("docs/failures.md") == 1
    assert json.loads((run_dir / "config.json").read_text())["parallel"]["world_size"] == 1
    assert losses(run_dir) == pytest.approx(uninterrupted, rel=1e-9)


@pytest.mark.slow
def test_nodes_of_two_ranks_go_on_where_one_is_lost(uninterrupted, tmp_path):
    """Those that start again are more than one, and must not look for each other at the addresses of those before."""
    run_dir, meet_at = tmp_path / "run", f"127.0.0.1:{free_port()}"
    words, agents = small(run_dir, *ELASTIC, "faults.timeout_s=20"), []
    try:
        agents.append(ForkedAgent(words, tmp_path / "first.log", meet_at=meet_at, num_ranks=2))
        # The first one to come keeps the rendezvous, and must live.
        wait_for(lambda: is_open(meet_at), agents)
        agents.append(ForkedAgent(words, tmp_path / "second.log", meet_at=meet_at, num_ranks=2))
        _lose_the_second(agents, run_dir, agents[1].kill, num_ranks=4)
    finally:
        for agent in agents:
            agent.kill()
    assert json.loads((run_dir / "config.json").read_text())["parallel"]["world_size"] == 2
    assert losses(run_dir) == pytest.approx(uninterrupted, rel=1e-9)


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_on_both_sides(uninterrupted, tmp_path):
    if obstacle := obstacle_to_namespaces():
        pytest.skip(obstacle)
    run_dir, agents = tmp_path / "run", []
    words = small(run_dir, *ELASTIC, "faults.timeout_s=20")
    with two_hosts() as names:
        try:
            agents += [agent_on_host(name, number, words, tmp_path) for number, name in enumerate(names, 1)]
            cut = ["ip", "-n", names[1], "link", "set", "cable0", "down"]
            message_s, _ = _lose_the_second(agents, run_dir, lambda: subprocess.run(cut, check=True))
            wait_for(lambda: "does not answer rank" in agents[1].text(), agents, 30)
        finally:
            for agent in agents:
                agent.kill()
    said = [agent.text() for agent in agents]
    assert "moefold: rank 1 on node2 is unreachable: its host, or the network to it, is down\n" in said[0]
    assert "  rank 0: step " in said[0]
    assert "the run ends: no progress for 20 s (faults.timeout_s)" in said[0]
    assert "moefold: the store at 10.213.0.1:" in said[1]
    assert " does not answer rank 1 on node2, last heard " in said[1]
    assert message_s >= 20
    assert losses(run_dir) == pytest.approx(uninterrupted, rel=1e-9)


def _after_torchrun(run_dir: Path, *words: str, num_ranks: int = 2) -> list[str]:
    agent = ["--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=1", "-m", "moefold"]
    return [*agent, *small(run_dir, *words)]


def _torchrun(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *_after_torchrun(run_dir, *words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )


@pytest.mark.slow
def test_killed_rank_under_torchrun_restarts_with_the_others(uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    process = _torchrun(run_dir, *ELASTIC, "faults.timeout_s=20")
    try:
        deadline = time.monotonic() + 120
        while not _trains_on(2, run_dir, 9):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(child_ids(process.pid)[1], signal.SIGKILL)
        killed_s = time.time()
        assert process.stdout is not None
        line = next((line for line in process.stdout if "resumed from" in line), None)
        again_s = time.time() - killed_s
        output, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    print(f"training again after {again_s:.1f} s")
    assert process.returncode == 0, output + errors
    assert line is not None
    assert "resumed from" not in output
    assert losses(run_dir) == pytest.approx(uninterrupted, rel=1e-9)


def test_sigterm_to_torchrun_saves_before_torchrun_kills_the_rank(tmp_path):
    run_dir = tmp_path / "run"

    def stop(agent: int) -> None:
        os.kill(agent, signal.SIGTERM)

    # That several ranks agree on the step at which they stop: test_interrupt.py.
    long = ("parallel.elastic=true", "checkpoint.every=5000", "run.steps=5000")
    words = _after_torchrun(run_dir, *long, num_ranks=1)
    done, _ = interrupt_forked(words, lambda _: _trains_on(1, run_dir, 3), stop, ROOT, environment(), TORCHRUN)
    assert f"stopped by SIGTERM after step {len(losses(run_dir))} of 5000" in done.stdout
    assert checkpoints(run_dir) == [f"step-{len(losses(run_dir)):06d}"]


def test_a_number_of_ranks_that_does_not_fit_is_refused_and_not_tried_for_ever(tmp_path):
    words = _after_torchrun(tmp_path / "run", "parallel.elastic=true", "train.global_batch_size=1")
    done = run_program(TORCHRUN, *words, timeout_s=120, environment=environment())
    assert done.returncode == 1
    # Once for the first try, and once for the restart that --max-restarts=1 allows.
    assert done.stderr.count("moefold: error: parallel.elastic=true: the launcher started 2 processes") == 2
    assert "fits 1: " in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 32 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(disk)]
    if os.geteuid() or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs of limited size needs root and mount")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**16)):
            pass


def test_a_disk_that_fills_under_the_checkpoints_is_one_message(small_disk, tmp_path):
    """Metrics on a full disk end no run: train/test_auxiliary_outputs.py."""
    words = ("checkpoint.every=1", "checkpoint.keep=1", f"checkpoint.dir={small_disk / 'saved'}")
    done = interrupted(tmp_path / "run", 3, lambda _: _fill(small_disk), "run.steps=100000", *words)
    assert done.returncode in (1, 2)
    said = done.stderr.splitlines()
    assert len(said) == 1, done.stderr
    assert said[0].startswith("moefold: error: the checkpoint of step ")
    assert "No space left on device" in said[0] or "the disk is full" in said[0]
