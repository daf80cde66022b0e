"""Checkpoints that lack something, and the files that a save leaves in the folder."""

import errno
import os
import pickle
import re
import resource
import shutil
import signal
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from traceback import StackSummary
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from moefold.checkpoint import write_checkpoint as module
from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.io_errors import translate_io_errors
from moefold.checkpoint.resume import resolve_resume
from moefold.checkpoint.write_checkpoint import write_checkpoint
from moefold.checkpoint.writing_job import commit, tmp_checkpoint_path
from moefold.comm.groups import current_world
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.errors import ConfigError
from tests.checkpoint.broken_checkpoints import load_error, recipe, save_broken, seal, training_step
from tests.models import edit_model
from tests.slow import slow

pytestmark = pytest.mark.parity

EXPERTS = "layers.1.ffn.experts.w_up"
PIPELINE = {"world_size": 2, "pp": 2}


def _save(cfg: Config, steps: list[int]) -> None:
    training = training_step(cfg)
    for step in steps:
        state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
        write_checkpoint(cfg, state, TrainState(states=counted(step=step, samples=4 * step, tokens=64 * step)))


def _save_with_slow_rename(cfg: Config) -> bool:
    """Return whether this rank finds the checkpoint when its save returns; the first rank takes long to rename it."""
    training = training_step(cfg)
    state = checkpoint_state(training.parameters, training.buffers, training.optimizer)

    def wait_and_commit(draft: Path, final: Path) -> None:
        # The other ranks have nothing left to do: they return within this time if they do not wait.
        time.sleep(0.5)
        commit(draft, final)

    with patch.object(module, "commit", wait_and_commit):
        saved = write_checkpoint(cfg, state, TrainState(states=counted(step=1, samples=4, tokens=64)))
    return saved.is_dir()


def test_no_rank_returns_before_the_checkpoint_has_its_name(pool, tmp_path):
    assert pool.run(2, _save_with_slow_rename, recipe(tmp_path, world_size=2)) == [True, True]


def test_a_missing_tensor_is_named_on_every_rank(pool, tmp_path):
    pool.run(1, save_broken, recipe(tmp_path), EXPERTS, "")
    errors = pool.run(2, load_error, recipe(tmp_path, **PIPELINE))
    assert errors[0] == errors[1]
    names = f"tensor model.{EXPERTS}, tensor optimizer.{EXPERTS}.exp_avg, tensor optimizer.{EXPERTS}.exp_avg_sq"
    assert f"is damaged, it lacks {names}; name another one" in errors[0]


def test_many_missing_tensors_are_counted(pool, tmp_path):
    pool.run(1, save_broken, recipe(tmp_path), "layers.", "")
    (error,) = pool.run(1, load_error, recipe(tmp_path))
    assert "tensor model.layers.0.attention.wk and " in error
    assert " more; name another one" in error


def test_the_moments_of_another_optimizer_are_refused_with_the_way_out(pool, tmp_path):
    pool.run(1, save_broken, recipe(tmp_path), "", "")
    cfg = recipe(tmp_path, **PIPELINE)
    errors = pool.run(2, load_error, replace(cfg, train=replace(cfg.train, optimizer="muon")))
    assert errors[0] == errors[1]
    assert f"is of another optimizer, it has other moments instead of momentum of optimizer.{'layers.0'}" in errors[0]
    assert "; set train.optimizer and train.optimizer.groups as they were, or begin a new run" in errors[0]


def test_the_sparse_stage_does_not_resume_the_warm_up_of_its_indexers(pool, tmp_path):
    cfg = recipe(tmp_path)
    cfg = replace(cfg, model=edit_model(cfg.model, {"attention.indexer.top_k": 4}))
    pool.run(1, save_broken, replace(cfg, train=replace(cfg.train, indexer_stage="warmup")), "", "")
    (error,) = pool.run(1, load_error, cfg)
    assert "is of a run with train.indexer_stage='warmup', which trained only the indexers; begin the sparse" in error
    assert f"checkpoint.init_from='{tmp_path}" in error


def test_a_missing_expert_is_named(pool, tmp_path):
    pool.run(1, save_broken, recipe(tmp_path), "", f"model.{EXPERTS}")
    errors = pool.run(2, load_error, recipe(tmp_path, world_size=2, ep=2))
    assert errors[0] == errors[1]
    assert f"it lacks model.{EXPERTS} of shape [8, 16, 8], it has [7, 16, 8]; name another one" in errors[0]


def _remove_file(file: Path) -> None:
    file.unlink()


def _cut_off(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def _flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "removed": (_remove_file, "file {name} is missing"),
    "cut off": (_cut_off, "file {name} has {half} of {size} bytes"),
    "flipped": (_flip_a_byte, "file {name} has other content than was written"),
}


FILES = ("__1_0.distcp", ".metadata", "moefold.json")
FAST = list(zip(DAMAGES, FILES, strict=True))
"""Each damage and each file once."""


@pytest.mark.parametrize(
    ("damage", "file"), [*FAST, *slow(pair for pair in product(DAMAGES, FILES) if pair not in FAST)]
)
def test_a_damaged_checkpoint_is_passed_over_and_named(pool, tmp_path, damage, file):
    cfg = recipe(tmp_path, **PIPELINE)
    pool.run(2, _save, cfg, [1, 2])
    path = tmp_path / "checkpoints" / "step-000002"
    size = (path / file).stat().st_size
    inflict, message = DAMAGES[damage]
    inflict(path / file)
    first, second = pool.run(2, _resume, cfg)
    assert first == second
    fault = message.format(name=file, size=size, half=size // 2)
    assert first == (str(path.with_name("step-000001")), (f"step-000002: {fault}",))


def _resume(cfg: Config) -> tuple[str, tuple[str, ...]]:
    found = resolve_resume(cfg, current_world())
    return str(found.path), found.skipped


def test_a_flipped_byte_goes_unseen_without_verify(pool, tmp_path):
    cfg = recipe(tmp_path)
    pool.run(1, _save, cfg, [1])
    path = tmp_path / "checkpoints" / "step-000001"
    _flip_a_byte(path / "__0_0.distcp")
    unverified = replace(cfg, checkpoint=replace(cfg.checkpoint, verify=False))
    assert pool.run(1, _resume, unverified) == [(str(path), ())]


@pytest.mark.parametrize(
    ("file", "damage"), [("__0_0.distcp", "flipped"), ("moefold.json", "removed")], ids=["flipped", "undescribed"]
)
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(pool, tmp_path, file, damage):
    cfg = recipe(tmp_path)
    pool.run(1, _save, cfg, [1, 2])
    inflict, message = DAMAGES[damage]
    for path in (tmp_path / "checkpoints").iterdir():
        inflict(path / file)
    (error,) = pool.run(1, load_error, cfg)
    assert f"can be used: step-000002: {message.format(name=file)}; step-000001: " in error
    assert error.endswith("move them away to start a new run, or set another run.dir")


def test_a_damaged_checkpoint_that_is_named_is_refused(pool, tmp_path):
    cfg = recipe(tmp_path)
    pool.run(1, _save, cfg, [1, 2])
    path = tmp_path / "checkpoints" / "step-000002"
    _cut_off(path / "__0_0.distcp")
    (error,) = pool.run(1, load_error, replace(cfg, checkpoint=CheckpointConfig(resume=str(path))))
    assert f"checkpoint {str(path)!r} is damaged: file __0_0.distcp has " in error
    assert error.endswith("name another one with checkpoint.resume, or move it away")


class _Runs:
    """A pickle of it runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self._command,)


def _error_of_sealed(pool, path: Path, trace: Path) -> str:
    """Return the one-line error of loading a strange checkpoint with right hashes, which leaves no trace of a run."""
    seal(path)
    (error,) = pool.run(1, load_error, recipe(path.parents[1]))
    assert "\n" not in error
    assert not trace.exists()
    return error


@pytest.mark.parametrize("kind", ["runs", "other class", "nonsense", "empty"])
def test_a_strange_index_runs_nothing_and_is_one_message(pool, tmp_path, kind):
    pool.run(1, _save, recipe(tmp_path), [1])
    path = tmp_path / "checkpoints" / "step-000001"
    trace = tmp_path / "it-ran"
    content = {
        "runs": pickle.dumps(_Runs(f"touch {trace}")),
        "other class": pickle.dumps(Path("x")),
        "nonsense": b"not a pickle",
        "empty": b"",
    }
    (path / ".metadata").write_bytes(content[kind])
    assert "cannot be read: .metadata is not an index of a checkpoint" in _error_of_sealed(pool, path, trace)


def test_a_strange_tensor_file_runs_nothing(pool, tmp_path):
    pool.run(1, _save, recipe(tmp_path), [1])
    path = tmp_path / "checkpoints" / "step-000001"
    trace = tmp_path / "it-ran"
    size = (path / "__0_0.distcp").stat().st_size
    (path / "__0_0.distcp").write_bytes(pickle.dumps(_Runs(f"touch {trace}")).ljust(size, b"\0"))
    assert "cannot be read: " in _error_of_sealed(pool, path, trace)


def test_an_index_cannot_lead_out_of_its_folder(pool, tmp_path):
    pool.run(1, _save, recipe(tmp_path), [1])
    path = tmp_path / "checkpoints" / "step-000001"
    index = pickle.loads((path / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../__0_0.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(index))
    seal(path)
    (error,) = pool.run(1, load_error, recipe(tmp_path))
    assert "cannot be read: file name '../__0_0.distcp' leads out of the folder" in error


def test_an_index_that_claims_more_bytes_than_there_are_is_refused(pool, tmp_path):
    pool.run(1, _save, recipe(tmp_path), [1])
    path = tmp_path / "checkpoints" / "step-000001"
    index = pickle.loads((path / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.length = 2**60
    (path / ".metadata").write_bytes(pickle.dumps(index))
    seal(path)
    (error,) = pool.run(1, load_error, recipe(tmp_path))
    assert "is damaged, it lacks the end of file __0_0.distcp; name another one" in error


def test_saves_keep_the_newest_and_replace_the_same_step(pool, tmp_path):
    pool.run(2, _save, recipe(tmp_path, world_size=2), [1, 2, 3, 3])
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000003"]
    assert pool.run(1, load_error, recipe(tmp_path)) == [""]


def _save_refused(cfg: Config) -> str:
    with pytest.raises(ConfigError) as error:
        _save(cfg, [1])
    return str(error.value)


def test_a_folder_that_cannot_be_written_is_one_message_on_every_rank(pool, tmp_path):
    (tmp_path / "checkpoints").touch()
    for error in pool.run(2, _save_refused, recipe(tmp_path, world_size=2)):
        assert error.startswith(f"the checkpoint of step 1 cannot be written to '{tmp_path}/checkpoints': ")
        assert "\n" not in error


def _save_over_a_draft(cfg: Config) -> bool:
    """Save where the first rank takes its time to delete the files of a run that died there.

    Returns:
        Whether this rank began to write while it still lay there.
    """
    left = tmp_checkpoint_path(Path(cfg.run.dir) / "checkpoints", 1, "job") / "left"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.touch()
    dist.barrier()
    delete, write, found = shutil.rmtree, dcp.save, []

    def delete_slowly(path: Path) -> None:
        time.sleep(0.5)
        delete(path)

    def note_and_save(*args: Any, **kwargs: Any) -> Metadata:
        found.append(left.exists())
        return write(*args, **kwargs)

    with patch.object(shutil, "rmtree", delete_slowly), patch.object(module.dcp, "save", note_and_save):
        _save(cfg, [1])
    return found[0]


def test_no_rank_writes_before_the_draft_of_a_dead_run_is_gone(pool, tmp_path):
    assert pool.run(2, _save_over_a_draft, recipe(tmp_path, world_size=2)) == [False, False]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000001"]


def _explained(causes: list[Exception], disk: Path | None) -> str:
    failures = {rank: (cause, StackSummary()) for rank, cause in enumerate(causes)}
    with pytest.raises(ConfigError) as error, translate_io_errors("it fails", disk=disk):
        raise CheckpointException("write", failures)
    return str(error.value)


def test_a_full_disk_is_reported_before_its_consequences(tmp_path):
    after, full = RuntimeError("unexpected pos 704 vs 598"), OSError(errno.ENOSPC, "No space left on device")
    draft = tmp_checkpoint_path(tmp_path, 1, "job")
    draft.mkdir()
    (draft / "__1_0.distcp").touch()
    rest = r"; ([\d,]+ MiB are free there|the disk is full)(; free disk space, then run the same command .*)?"
    error = _explained([after, full], tmp_path)
    assert re.fullmatch(r"it fails: file __1_0\.distcp .* to its end \(No space left on device\)" + rest, error)
    error = _explained([after, after], tmp_path / "gone" / "checkpoints")
    assert re.fullmatch("it fails: a file could not be written to its end" + rest, error)
    assert _explained([after], None) == "it fails: unexpected pos 704 vs 598"
    # An error that is not the disk's keeps its text.
    assert re.fullmatch("it fails: strange" + rest, _explained([RuntimeError("strange")], tmp_path))
    assert _explained([PermissionError(errno.EACCES, "Permission denied")], tmp_path) == "it fails: Permission denied"


def _save_on_a_full_disk(cfg: Config) -> str:
    """Save where no file may grow beyond some bytes, on the last rank only."""
    if dist.get_rank() == dist.get_world_size() - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with pytest.raises(ConfigError) as error:
        _save(cfg, [2])
    return str(error.value)


def test_a_full_disk_is_one_message_and_leaves_the_checkpoint_before(pool, fresh_pool, tmp_path):
    cfg = recipe(tmp_path, **PIPELINE)
    pool.run(2, _save, cfg, [1])
    for error in fresh_pool.run(2, _save_on_a_full_disk, cfg):
        assert error.startswith(f"the checkpoint of step 2 cannot be written to '{tmp_path}/checkpoints': ")
        assert re.search(
            r"file __1_\d+\.distcp could not be written to its end.*( MiB are free there|disk is full); ", error
        )
        assert error.endswith("; free disk space, then run the same command to resume from step-000001")
        assert "enforce fail" not in error
        assert "unexpected pos" not in error
        assert "\n" not in error
    assert pool.run(2, _resume, cfg) == [(str(tmp_path / "checkpoints" / "step-000001"), ())] * 2
    pool.run(2, _save, cfg, [2])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
