"""Test that a checkpoint gets its name after its files are on the disk, and before the save returns."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.train.tiny_runs import recipe

pytestmark = pytest.mark.parity


def _events_of_a_save(cfg: Config) -> list[tuple[str, str]]:
    """Train one step and save it. Return each flushed path and each renamed one, in order."""
    events: list[tuple[str, str]] = []

    def flushed(handle: int, flush=os.fsync) -> None:
        flush(handle)
        events.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))

    def renamed(source, target, rename=os.rename, **folders) -> None:
        rename(source, target, **folders)
        events.append(("rename", str(target)))

    with mock.patch.object(os, "fsync", flushed), mock.patch.object(os, "rename", renamed):
        groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
        Trainer(cfg, groups).run(StopSignals())
    return events


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not name the file of a handle")
@pytest.mark.parametrize("async_save", [False, True])
def test_files_are_flushed_then_renamed_then_their_folder_is_flushed(pool, tmp_path, async_save):
    cfg = recipe(tmp_path, 1, every=1)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, async_save=async_save))
    (events,) = pool.run(1, _events_of_a_save, cfg)
    final = str(tmp_path / "checkpoints" / "step-000001")
    renamed = events.index(("rename", final))
    files = {path.name for path in Path(final).iterdir()}
    flushed = [path for kind, path in events[:renamed] if kind == "fsync"]
    # The folder comes last: it lists files whose content is on the disk.
    draft = Path(flushed[-1])
    assert draft.parent == tmp_path / "checkpoints"
    assert {str(draft / name) for name in files} <= set(flushed)
    assert ("fsync", str(tmp_path / "checkpoints")) in events[renamed:]
