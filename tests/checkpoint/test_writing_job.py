"""Two jobs and one folder of checkpoints: a lock that saves do not drop, and names that hold without a lock."""

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from moefold.checkpoint import write_checkpoint as module
from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.find_checkpoint import (
    checkpoint_folder,
    complete_checkpoints,
    named_checkpoints,
    step_of,
    unfinished_checkpoints,
)
from moefold.checkpoint.integrity import validate_files
from moefold.checkpoint.load import load_entries
from moefold.checkpoint.resume import resolve_resume
from moefold.checkpoint.safe_metadata import SafeReader
from moefold.checkpoint.saver import BackgroundSaver, CheckpointSaver
from moefold.checkpoint.writing_job import WRITER_FILE, tmp_checkpoint_path
from moefold.comm.groups import ParallelGroups, World, current_world
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.host.folder_lock import FolderLock, is_in_use
from moefold.hub import files_to_push
from moefold.validate.config import check_config
from tests.train.tiny_runs import recipe

pytestmark = pytest.mark.parity


def _position(step: int) -> TrainState:
    return TrainState(states=counted(step=step, samples=0, tokens=0))


def _saver(cfg: Config) -> CheckpointSaver:
    if not cfg.checkpoint.async_save:
        return CheckpointSaver(cfg)
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    return BackgroundSaver(cfg, groups.create_background_group().handle, is_on_gpu=False)


def _save_under_a_lock(cfg: Config) -> dict[str, bool]:
    """Return whether the folder, which is the run's folder too, is locked after each of these actions."""
    folder = Path(cfg.run.dir)
    held = {}
    with FolderLock(folder, "run.dir", 0):
        saver = _saver(cfg)
        for step in (1, 2):
            saver.save({"model.w": torch.ones(4)}, _position(step))
            held[f"save {step}"] = is_in_use(folder)
        saver.finish()
        held["all saves"] = is_in_use(folder)
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        held["a fork"] = is_in_use(folder)
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
        held["a program"] = is_in_use(folder)
        other = CheckpointSaver(cfg)
        other.save({"model.w": torch.ones(4)}, _position(3))
        held["another saver"] = is_in_use(folder)
    held["the end"] = not is_in_use(folder)
    return held


@pytest.mark.parametrize("async_save", [False, True])
def test_a_lock_outlives_saves_forks_and_programs(pool, tmp_path, async_save):
    cfg = recipe(tmp_path, 1)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, dir=str(tmp_path), async_save=async_save))
    (held,) = pool.run(1, _save_under_a_lock, cfg)
    assert [moment for moment, is_held in held.items() if not is_held] == []
    assert len(held) == 7


def _save(saver: CheckpointSaver, step: int, value: float) -> str:
    """Save, and return the error."""
    try:
        saver.save({"model.w": torch.full((4,), value)}, _position(step))
    except ConfigError as error:
        return str(error)
    return ""


def _two_jobs_without_a_lock(cfg: Config) -> list[str]:
    """Two jobs save into one folder by turns; return the error of each save."""
    first, second = CheckpointSaver(cfg), CheckpointSaver(cfg)
    folder = checkpoint_folder(cfg.run, cfg.checkpoint)
    first.open_folder()
    said = [_save(first, 1, 1.0)]
    second.open_folder()
    # The second is the slower one: the first has saved step 2 when it comes there.
    said += [_save(first, 2, 1.0), _save(second, 2, 2.0), _save(second, 3, 2.0), _save(first, 3, 1.0)]
    # The first is in the middle of a save while the third starts, and goes on.
    draft = tmp_checkpoint_path(folder, 4, "first")
    draft.mkdir()
    (draft / WRITER_FILE).write_bytes((folder / "step-000003" / WRITER_FILE).read_bytes())
    third = CheckpointSaver(cfg)
    third.open_folder()
    (draft / "__0_0.distcp").write_bytes(b"half")
    said += [_save(third, 4, 3.0), str(draft.exists())]
    # It does not go on: its job is gone.
    fourth = CheckpointSaver(cfg)
    fourth.open_folder()
    said += [_save(fourth, 4, 4.0), str(draft.exists())]
    return said


@pytest.mark.parametrize("kind", ["a file system", "a remote folder"])
def test_the_second_job_is_refused_without_a_lock_too(pool, tmp_path, kind):
    cfg = recipe(tmp_path / "run", 1)
    folder = str(tmp_path / "saved")
    cfg = replace(
        cfg, checkpoint=replace(cfg.checkpoint, dir=folder if kind == "a file system" else f"file://{folder}")
    )
    if kind == "a remote folder":
        (said,) = pool.run(1, _two_remote_jobs, cfg)
        refused = [False, False, True, False]
    else:
        (said,) = pool.run(1, _two_jobs_without_a_lock, cfg)
        refused = [False, False, True, True, False, True]
        assert said[6:] == ["True", "", "False"]
    assert [bool(text) for text in said[: len(refused)]] == refused
    text = said[2]
    assert text.startswith(
        f"checkpoint.dir={str(checkpoint_folder(cfg.run, cfg.checkpoint))!r} is in use by another job (process "
    )
    assert "which wrote 'step-000002' since this one started: nothing of it is replaced" in text
    assert "\n" not in text
    for path in complete_checkpoints(Path(folder)):
        state = {"model.w": torch.zeros(4)}
        dcp.load(state, storage_reader=SafeReader(path), no_dist=True)
        assert state["model.w"].tolist() == [4.0 if step_of(path) == 4 else 1.0] * 4
        assert WRITER_FILE not in files_to_push(path), "the name of the host is not uploaded"


def _two_remote_jobs(cfg: Config) -> list[str]:
    first, second = CheckpointSaver(cfg), CheckpointSaver(cfg)
    first.open_folder()
    said = [_save(first, 1, 1.0)]
    second.open_folder()
    return [*said, _save(first, 2, 1.0), _save(second, 2, 2.0), _save(first, 3, 1.0)]


def _save_while_another_is_suspended(cfg: Config) -> list[str]:
    """A job is suspended in its first save, goes on while another that took its place writes, and both end theirs."""
    first, second = CheckpointSaver(cfg), CheckpointSaver(cfg)
    first.open_folder()
    save, said, begun = dcp.save, [], []
    done: list[Metadata] = []

    def save_in_between(*args: Any, **kwargs: Any) -> Metadata:
        begun.append((args, kwargs))
        if len(begun) == 1:
            second.open_folder()
            said.append(_save(second, 1, 2.0))
            return save(*args, **kwargs) if not done else done.pop()
        result = save(*args, **kwargs)
        with suppress(OSError, CheckpointException):
            done.append(save(*begun[0][0], **begun[0][1]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.dcp, "save", save_in_between)
        said.append(_save(first, 1, 1.0))
    return [*said, _save(second, 2, 2.0), _save(first, 3, 1.0)]


def test_a_job_that_was_suspended_writes_nothing_into_the_checkpoint_of_another(pool, tmp_path):
    cfg = recipe(tmp_path, 1)
    (said,) = pool.run(1, _save_while_another_is_suspended, cfg)
    assert [bool(text) for text in said] == [False, True, False, True]
    assert "was removed while it was written, by hand or by another job that saves into run.dir=" in said[1]
    for path in complete_checkpoints(tmp_path / "checkpoints"):
        state = {"model.w": torch.zeros(4)}
        dcp.load(state, storage_reader=SafeReader(path), no_dist=True)
        assert state["model.w"].tolist() == [2.0] * 4
        assert validate_files(path, World(0, 1), checks_hashes=True) == []
    assert unfinished_checkpoints(tmp_path / "checkpoints") == []


def _replace_own(cfg: Config) -> list[str]:
    """Save steps again: after a rollback, and over damaged checkpoints of the run before."""
    saver = CheckpointSaver(cfg)
    saver.open_folder()
    return [_save(saver, step, 1.0) for step in (1, 2, 1)]


def test_a_job_replaces_files_that_it_wrote_or_found(pool, tmp_path):
    cfg = recipe(tmp_path, 1)
    for _ in range(2):
        assert pool.run(1, _replace_own, cfg) == [["", "", ""]]
    for path in complete_checkpoints(tmp_path / "checkpoints"):
        # Checkpoints of earlier versions name no job.
        (path / WRITER_FILE).unlink()
    assert pool.run(1, _replace_own, cfg) == [["", "", ""]]


REFUSED = "refused: "
SIZE = 20_000
TENSORS = 4


def _weights(step: int) -> torch.Tensor:
    """The weights after a step, whoever trained it."""
    return torch.full((SIZE,), float(step % 251))


def _train_for_ever(cfg: Config, number: int, locks: bool, printed: Path) -> None:
    """Resume and save step after step, until this process is killed or refused."""
    # Nobody kills this process if the test itself is killed.
    signal.alarm(300)
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = checkpoint_folder(cfg.run, cfg.checkpoint)
    try:
        if locks:
            FolderLock(folder, "checkpoint.dir", 0).__enter__()
        saver = _saver(cfg)
        saver.open_folder()
        found = resolve_resume(cfg, current_world()).path
        step = 0 if found is None else step_of(found)
        weights = [torch.zeros(SIZE) for _ in range(TENSORS)]
        if found is not None:
            load_entries(found, {f"model.{i}": weight for i, weight in enumerate(weights)})
            assert all(torch.equal(weight, _weights(step)) for weight in weights)
        while True:
            step += 1
            state = {f"model.{i}": _weights(step) for i in range(TENSORS)}
            saver.save(state | {f"job.{i}": torch.full((9,), number) for i in range(TENSORS)}, _position(step))
            saver.check()
    except ConfigError as error:
        print(f"{REFUSED}{error}", file=sys.stderr, flush=True)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(0)


def _assert_folder(folder: Path) -> int:
    """Check that each checkpoint is sound and of one job; return the newest step."""
    for path in named_checkpoints(folder):
        assert validate_files(path, World(0, 1), checks_hashes=True) == [], path
        state = {f"model.{i}": torch.zeros(SIZE) for i in range(TENSORS)}
        state |= {f"job.{i}": torch.zeros(9, dtype=torch.int64) for i in range(TENSORS)}
        dcp.load(state, storage_reader=SafeReader(path), no_dist=True)
        assert all(torch.equal(state[f"model.{i}"], _weights(step_of(path))) for i in range(TENSORS)), path
        assert len({int(x) for i in range(TENSORS) for x in state[f"job.{i}"]}) == 1, path
    return max(map(step_of, complete_checkpoints(folder)), default=0)


def _start(context: BaseContext, cfg: Config, number: int, locks: bool, printed: Path) -> BaseProcess:
    process = context.Process(target=_train_for_ever, args=(cfg, number, locks, printed))
    process.start()
    return process


def _kill_two_jobs(tmp_path: Path, kills: int, *, locks: bool) -> dict[str, int]:
    """Kill two jobs that share a folder of checkpoints, again and again; check it after each pair of deaths."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["moefold.verify.preload"])
    chance = random.Random(kills + locks)
    folder = tmp_path / "saved"
    printed = tmp_path / "printed"
    newest = in_saves = number = 0
    for round_number in range(kills // 2):
        jobs = []
        for own in ("a", "b"):
            number += 1
            cfg = recipe(tmp_path / own, 10**9, every=1)
            saves = replace(cfg.checkpoint, dir=str(folder), keep=3, async_save=round_number % 2 == 1)
            jobs.append(_start(context, replace(cfg, checkpoint=saves), number, locks, printed))
            time.sleep(chance.uniform(0, 0.05))
        # A pair that has saved nothing shows nothing; one of the two comes to a save, however slow it is.
        while max(map(step_of, complete_checkpoints(folder)), default=0) == newest:
            assert any(job.is_alive() for job in jobs), printed.read_text()
            time.sleep(0.005)
        for job in chance.sample(jobs, 2):
            time.sleep(chance.uniform(0, 0.1))
            job.kill()
        for job in jobs:
            job.join()
        in_saves += any(folder.glob(".step-*.partial"))
        before = newest
        newest = _assert_folder(folder)
        assert newest >= before, "a model was lost"
        if locks:
            assert len(list(folder.glob(".step-*.partial"))) <= 1
    lines = printed.read_text().splitlines()
    # Without a lock, a folder may also vanish between two looks at it: the save or the resume is refused.
    known = "is in use by another job" if locks else ""
    assert [line for line in lines if not (line.startswith(REFUSED) and known in line)] == []
    return {"newest": newest, "refused": len(lines), "in saves": in_saves}


@pytest.mark.parametrize("locks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kills_of_two_jobs_lose_and_mix_nothing(tmp_path, locks):
    found = _kill_two_jobs(tmp_path, 10, locks=locks)
    assert found["refused"] or not locks


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("locks", [True, False])
def test_two_hundred_kills_of_two_jobs_lose_and_mix_nothing(tmp_path, locks):
    found = _kill_two_jobs(tmp_path, 200, locks=locks)
    print(found)
    assert found["refused"]
    assert found["in saves"] > 10
