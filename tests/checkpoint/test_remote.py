"""Checkpoints in a remote folder: through fsspec's `file://`, which every rank sees and which takes the same path."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import chdir, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint import write_checkpoint
from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.find_checkpoint import checkpoint_folder, complete_checkpoints, named_checkpoints, step_of
from moefold.checkpoint.integrity import quick_validate
from moefold.checkpoint.manifest import MANIFEST_FILE
from moefold.checkpoint.retention import remove_checkpoint
from moefold.checkpoint.stored_tensors import differing_tensors, stored_tensors
from moefold.cli.main import main
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.launch.rank_pool import WorkerError
from moefold.remote_path import RemoteError, RemotePath
from moefold.train.run_folder import choose_run_folder
from tests.slow import slow
from tests.train.tiny_runs import losses, recipe, train_rank

pytestmark = pytest.mark.parity


def _remote(cfg: Config, folder: Path, *, async_save: bool = False) -> Config:
    checkpoint = replace(cfg.checkpoint, dir=f"file://{folder}", keep=2, async_save=async_save)
    return replace(cfg, checkpoint=checkpoint)


class _Ended(BaseException):
    """End of a run in the middle of a save, which nothing but the test catches."""


def _train_until_ended(cfg: Config, step: int, moment: str, is_killed: bool) -> None:
    """Train, and end this rank in the middle of the save of a step: by SIGKILL, or by an error."""

    def end(folder: Path, *rest: object) -> object:
        if step_of(folder) != step:
            return original(folder, *rest)
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise _Ended

    original = getattr(write_checkpoint, moment)
    with patch.object(write_checkpoint, moment, end), pytest.raises(_Ended):
        train_rank(cfg)


TWO = {"world_size": 2, "ep": 2}
ONE = {"world_size": 1}


@pytest.mark.parametrize(
    ("mappings", "async_save", "moment", "is_killed"),
    [
        ((ONE, TWO), False, "write_manifest", False),
        *slow(
            [
                ((TWO, ONE), True, "write_manifest", True),
                ((TWO, ONE), False, "write_manifest", True),
                ((TWO, TWO), False, "write_meta", True),
            ]
        ),
    ],
)
def test_an_end_between_upload_and_commit_costs_one_checkpoint(pool, tmp_path, mappings, async_save, moment, is_killed):
    """The rest is trained under another mapping, from the checkpoint before: losses and weights are as without it."""
    before, after = mappings
    whole = recipe(tmp_path / "whole", 4, every=4, **after)
    pool.run(after["world_size"], train_rank, whole)
    cfg = _remote(recipe(tmp_path / "run", 4, every=1, **before), tmp_path / "store", async_save=async_save)
    with pytest.raises(WorkerError) if is_killed else nullcontext():
        pool.run(before["world_size"], _train_until_ended, cfg, 3, moment, is_killed)
    store = checkpoint_folder(cfg.run, cfg.checkpoint)
    assert isinstance(store, RemotePath)
    left = tmp_path / "store" / "step-000003"
    assert (left / ".metadata").is_file()
    assert not (left / MANIFEST_FILE).exists()
    assert [step_of(path) for path in named_checkpoints(store)] == [1, 2]
    other = _remote(recipe(tmp_path / "run", 4, every=2, **after), tmp_path / "store", async_save=async_save)
    pool.run(after["world_size"], train_rank, other)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-9)
    assert [step_of(path) for path in named_checkpoints(store)] == [2, 4]
    assert not left.exists(), "the next save removes what was left"
    local = tmp_path / "whole" / "checkpoints" / "step-000004"
    differences = differing_tensors(store / "step-000004", local)
    assert all(found.max_abs is not None and found.max_abs < 1e-9 for found in differences), differences


@dataclass(frozen=True)
class RemoteRun:
    """A run of three steps whose folder went away after the second, and its checkpoints in a remote folder."""

    folder: Path
    """The remote folder as a folder of this machine."""
    store: RemotePath
    printed: str
    """Output of the third step, which a run in an empty folder took."""


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> RemoteRun:
    folder = tmp_path_factory.mktemp("remote")
    settings = ["data.kind=synthetic", "run.dir=run", "run.device=cpu", "train.seq_len=16", "train.global_batch_size=2"]
    settings += ["model.vocab_size=64", "train.eval_every=0", "model.layers=1", "model.hidden_size=32"]
    settings += [f"checkpoint.dir=file://{folder}/store", "checkpoint.every=1"]
    with chdir(folder):
        assert main(["train", *settings, "run.steps=2"]) == 0
        Path("run").rename("gone")
        with redirect_stdout(StringIO()) as printed:
            assert main(["train", *settings, "run.steps=3"]) == 0
    return RemoteRun(folder / "store", RemotePath(f"file://{folder}/store"), printed.getvalue())


@pytest.fixture
def remote(original, tmp_path) -> RemoteRun:
    """A copy of the remote folder, which a test may damage."""
    shutil.copytree(original.folder, tmp_path / "store")
    return RemoteRun(tmp_path / "store", RemotePath(f"file://{tmp_path}/store"), original.printed)


def test_another_machine_takes_over_with_the_remote_folder_alone(original):
    assert f"resumed from {original.store}/step-000002" in original.printed
    assert f"model in {original.store}/step-000003" in original.printed
    assert json.loads((original.store / "config.json").read_text())["run"]["steps"] == 3


def test_commands_read_remote_checkpoints(original, monkeypatch, capsys):
    monkeypatch.chdir(original.folder.parent)
    for words in (["list", str(original.store)], ["show", f"{original.store}/step-000003"], ["verify", "run"]):
        assert main(["checkpoint", *words]) == 0
    assert "step-000003: sound" in capsys.readouterr().out


def test_a_comparison_reads_each_shard_once(original, monkeypatch):
    path = original.store / "step-000003"
    ranges = _requested_ranges(monkeypatch)
    assert differing_tensors(path, path) == []
    assert len(ranges) == 2 * sum(tensor.num_chunks for tensor in stored_tensors(path))


def _requested_ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    ranges = []
    read_range = RemotePath.read_range

    def note(self: RemotePath, start: int, size: int) -> bytes:
        ranges.append((start, size))
        return read_range(self, start, size)

    monkeypatch.setattr(RemotePath, "read_range", note)
    return ranges


def test_a_forged_shard_is_named(remote, monkeypatch):
    path = remote.store / "step-000003"
    ranges = _requested_ranges(monkeypatch)
    assert differing_tensors(path, path) == []
    data = remote.folder / "step-000003" / "__0_0.distcp"
    start, size = min(ranges)
    forged = bytearray(data.read_bytes())
    forged[start + size - 60 : start + size] = bytes(60)
    data.write_bytes(forged)
    with pytest.raises(ConfigError, match=r"file __0_0.distcp holds something else where .* belongs: no archive"):
        differing_tensors(path, path)


def test_damaged_files_are_named(remote, capsys):
    data = remote.folder / "step-000003" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[5000] ^= 255
    data.write_bytes(content)
    assert main(["checkpoint", "verify", str(remote.store)]) == 1
    assert "file __0_0.distcp has other content than was written" in capsys.readouterr().out
    data.write_bytes(content[:-1])
    assert quick_validate(remote.store / "step-000003") == [
        f"file __0_0.distcp has {len(content) - 1} of {len(content)} bytes"
    ]
    data.unlink()
    assert quick_validate(remote.store / "step-000003") == ["file __0_0.distcp is missing"]


def test_a_checkpoint_is_removed_by_its_name(remote):
    assert main(["checkpoint", "rm", f"{remote.store}/step-000003"]) == 0
    assert [step_of(path) for path in complete_checkpoints(remote.store)] == [1, 2]


def test_the_manifest_of_a_removed_checkpoint_goes_first(monkeypatch):
    store = RemotePath("memory://removal")
    for name in ("__0_0.distcp", MANIFEST_FILE):
        (store / "step-000001" / name).write_text("x")
    gone = []
    for method in ("unlink", "delete_tree"):
        remove = getattr(RemotePath, method)

        def note(self: RemotePath, remove: Callable[..., None] = remove, **options: bool) -> None:
            gone.append(self.name)
            remove(self, **options)

        monkeypatch.setattr(RemotePath, method, note)
    remove_checkpoint(store / "step-000001")
    assert gone == [MANIFEST_FILE, "step-000001"]
    assert not (store / "step-000001").exists()


def test_a_new_run_folder_continues_from_the_remote_one(tmp_path):
    """It is not taken for another run's: nothing of the run but its checkpoints is left."""
    cfg = _remote(recipe(tmp_path / "run", 6, world_size=1), tmp_path / "store")
    assert choose_run_folder(cfg).cfg.run.dir == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.dir=s3://bucket/run", "run.dir='s3://bucket/run' must be a path of this machine, not a URL"),
        ("checkpoint.dir=hf://me/model", "checkpoint.dir='hf://me/model' must be a folder"),
        ("checkpoint.dir=nope://x/y", "has the protocol 'nope', which is none of"),
        ("checkpoint.dir=memory://x", "checkpoint.dir='memory://x' would end with the process"),
        ("checkpoint.init_from=memory://x/none", "checkpoint.init_from='memory://x/none': it does not exist"),
        ("checkpoint.resume=memory://x/step-000001", "checkpoint.resume='memory://x/step-000001' does not exist"),
        (f"checkpoint.dir=file://{__file__}/moefold", f"'file://{__file__}/moefold' cannot be used: Not a"),
    ],
)
def test_bad_names_are_refused_before_ranks_start(tmp_path, monkeypatch, capsys, override, message):
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text("")
    words = ["data.kind=synthetic", "run.dir=run", "run.device=cpu", "model.vocab_size=64", "run.steps=1", override]
    assert main(["train", "recipe.toml", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("run").exists()


def _failed_save(cfg: Config) -> str:
    """Save a checkpoint whose file of rank 1 cannot be sent; return the error of this rank."""
    original = RemotePath.open

    def fail(self, mode="r", *_, **__):
        if dist.get_rank() == 1 and mode == "wb":
            raise RemoteError(5, "the connection was reset", str(self))
        return original(self, mode)

    state = {f"model.{dist.get_rank()}": torch.ones(3)}
    with patch.object(RemotePath, "open", fail), pytest.raises(ConfigError) as caught:
        write_checkpoint.write_checkpoint(cfg, state, TrainState(states=counted(step=1, samples=1, tokens=1)))
    return str(caught.value)


def test_a_failed_upload_names_step_and_file_on_every_rank(pool, tmp_path):
    cfg = _remote(recipe(tmp_path / "run", 1, every=1, world_size=2), tmp_path / "store")
    for message in pool.run(2, _failed_save, cfg):
        assert message.startswith(f"the checkpoint of step 1 cannot be written to 'file://{tmp_path}/store': ")
        assert "step-000001/__1_0.distcp' cannot be used: the connection was reset" in message
    assert named_checkpoints(checkpoint_folder(cfg.run, cfg.checkpoint)) == []
