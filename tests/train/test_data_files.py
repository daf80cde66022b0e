"""Runs whose data files are not what they were, or are not all sound."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from moefold.checkpoint.folder import read_meta
from moefold.config.schema import Config, DataConfig
from moefold.errors import ConfigError
from moefold.launch.crew import joined_crew
from moefold.train.data_files import agree_on_files
from tests.train.test_trainer import _train, losses, recipe

pytestmark = pytest.mark.parity


def _tokens(folder: Path) -> Path:
    folder.mkdir()
    chance = np.random.default_rng(0)
    for i in range(3):
        np.save(folder / f"{i}.npy", chance.integers(0, 32, 2000, dtype=np.uint16))
    return folder


def _recipe(run_dir: Path, steps: int, tokens: Path, *, resume: str = "auto", **parallel: object) -> Config:
    cfg = recipe(run_dir, steps, **parallel)
    data = DataConfig(kind="tokens", path=str(tokens), validation_fraction=0.0, corrupt="skip")
    return replace(cfg, data=data, checkpoint=replace(cfg.checkpoint, resume=resume))


def _refused(cfg: Config) -> str:
    try:
        _train(cfg)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_file_that_changed_under_its_name_is_not_taken_for_the_same(pool, tmp_path):
    tokens = _tokens(tmp_path / "tokens")
    pool.run(1, _train, _recipe(tmp_path / "run", 2, tokens))
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    assert [name.rsplit("/", 1)[1] for name in read_meta(saved).data_files] == ["0.npy", "1.npy", "2.npy"]
    ids = np.load(tokens / "1.npy")
    np.save(tokens / "1.npy", ids[::-1].copy())
    (error,) = pool.run(1, _refused, _recipe(tmp_path / "run", 4, tokens))
    assert f"took its samples from other data: data file {tokens}/1.npy has other content than then;" in error
    assert f"set checkpoint.resume={str(saved)!r} to go on with the new data from its start" in error
    pool.run(1, _train, _recipe(tmp_path / "run", 4, tokens, resume=str(saved)))
    assert read_meta(tmp_path / "run" / "checkpoints" / "step-000004").samples == 2 * 4
    np.save(tokens / "1.npy", ids)


def test_a_corrupt_file_that_is_skipped_stays_skipped_under_another_dp(pool, tmp_path):
    tokens = _tokens(tmp_path / "tokens")
    os.truncate(tokens / "1.npy", 1000)
    pool.run(1, _train, _recipe(tmp_path / "whole", 6, tokens))
    pool.run(1, _train, _recipe(tmp_path / "parts", 2, tokens))
    pool.run(2, _train, _recipe(tmp_path / "parts", 4, tokens, world_size=2))
    pool.run(4, _train, _recipe(tmp_path / "parts", 6, tokens, world_size=4))
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
    np.save(tokens / "1.npy", np.zeros(2000, dtype=np.uint16))
    (error,) = pool.run(1, _refused, _recipe(tmp_path / "parts", 8, tokens))
    assert f"data file {tokens}/1.npy was left out as corrupt then, and is not now" in error


def _agree(folders: list[str]) -> str:
    data = DataConfig(kind="tokens", path="tokens")
    os.chdir(folders[dist.get_rank()])
    try:
        agree_on_files(data, joined_crew())
    except ConfigError as error:
        return str(error)
    return ""


def test_machines_with_other_files_are_found_out_on_every_rank(pool, tmp_path):
    folders = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        _tokens(tmp_path / name / "tokens")
        folders.append(str(tmp_path / name))
    assert pool.run(2, _agree, folders) == ["", ""]
    (tmp_path / "there" / "tokens" / "2.npy").unlink()
    errors = pool.run(2, _agree, folders)
    assert errors[0] == errors[1]
    assert errors[0].startswith("rank 1 sees other data than rank 0: tokens/2.npy is not there; give all machines")
