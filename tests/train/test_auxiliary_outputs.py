"""Test that a run trains on and saves if its metrics, trace, faults and output cannot be written any more."""

import os
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.find_checkpoint import complete_checkpoints
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.train.tiny_runs import recipe, records, train_rank

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full"),
]

OUTPUTS = ("metrics.jsonl", "expert_counts.bin", "routing", "faults.jsonl")


class _DiskFull(Callback):
    """After a step, every file that is open for the log is on a full disk, and the run folder is a file."""

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        if context.log is None or step.number != 2:
            return
        full = os.open("/dev/full", os.O_WRONLY)
        counts = context.log._counts
        assert counts is not None
        for file in (context.log.writer._file, counts._file):
            os.dup2(full, file.fileno())
        folder = context.folder
        folder.rename(folder.with_name("kept"))
        folder.touch()
        for _ in range(2):
            context.log.log_fault({"step": 2, "kind": "spike"})


def _train_on_a_full_disk(cfg: Config) -> tuple[int, str]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    printed = Path(cfg.checkpoint.dir).with_name(f"printed-{groups.rank}")
    with printed.open("w") as stream, redirect_stdout(stream):
        status = Trainer(cfg, groups, callbacks=[_DiskFull()]).run(StopSignals())
    return status, printed.read_text()


def _recipe(folder: Path) -> Config:
    cfg = recipe(folder / "run", 4, every=2, world_size=2, pp=2)
    cfg = replace(cfg, moe=replace(cfg.moe, trace_every=1), metrics=replace(cfg.metrics, expert_counts_every=1))
    return replace(cfg, checkpoint=replace(cfg.checkpoint, dir=str(folder / "saved")))


def test_a_run_without_a_place_for_its_outputs_saves_the_same_model(pool, tmp_path):
    cfg = _recipe(tmp_path)
    (status, printed), _ = pool.run(2, _train_on_a_full_disk, cfg)
    assert status == 0
    for name in OUTPUTS:
        assert printed.count(f"warning: {name} cannot be written any more (") == 1, printed
    assert printed.count("warning: ") - printed.count("warning: loss.png ") == len(OUTPUTS)
    assert "No space left on device" in printed
    assert f"model in {tmp_path}/saved/step-000004" in printed
    assert [record["step"] for record in records(tmp_path / "kept")] == [1, 2]
    # The next start writes everything again.
    (tmp_path / "run").unlink()
    (tmp_path / "kept").rename(tmp_path / "run")
    cfg = replace(cfg, run=replace(cfg.run, steps=6))
    pool.run(2, train_rank, cfg)
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 5, 6]
    whole = _recipe(tmp_path / "whole")
    pool.run(2, train_rank, replace(whole, run=replace(whole.run, steps=6)))
    saved = [complete_checkpoints(folder / "saved")[-1] for folder in (tmp_path, tmp_path / "whole")]
    assert differing_tensors(*saved) == []
