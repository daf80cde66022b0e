"""Runs with changed or damaged data files."""

import contextlib
import io
import json
import os
import re
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from moefold.checkpoint.checkpoint_meta import META_FILE, read_meta
from moefold.checkpoint.manifest import digest_file, read_manifest, write_manifest
from moefold.comm.groups import current_world
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.errors import ConfigError, RunError
from moefold.train.data_files import resolve_data_files
from tests.train.tiny_runs import losses, recipe, train_rank

pytestmark = pytest.mark.parity


def _tokens(folder: Path, seed: int = 0) -> Path:
    folder.mkdir()
    chance = np.random.default_rng(seed)
    for i in range(3):
        np.save(folder / f"{i}.npy", chance.integers(0, 32, 2000, dtype=np.uint16))
    return folder


def _recipe(
    run_dir: Path, steps: int, tokens: Path, *, resume: str = "auto", corrupt: Any = "skip", **parallel: object
) -> Config:
    cfg = recipe(run_dir, steps, **parallel)
    data = DataConfig(kind="tokens", path=str(tokens), validation_fraction=0.0, corrupt=corrupt)
    return replace(cfg, data=data, checkpoint=replace(cfg.checkpoint, resume=resume))


def _refused(cfg: Config) -> str:
    try:
        train_rank(cfg)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_file_that_changed_under_its_name_is_not_taken_for_the_same(pool, tmp_path):
    tokens = _tokens(tmp_path / "tokens")
    pool.run(1, train_rank, _recipe(tmp_path / "run", 2, tokens, corrupt="fatal"))
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    assert [name.rsplit("/", 1)[1] for name in read_meta(saved).data_files] == ["0.npy", "1.npy", "2.npy"]
    ids = np.load(tokens / "1.npy")
    np.save(tokens / "1.npy", ids[::-1].copy())
    (error,) = pool.run(1, _refused, _recipe(tmp_path / "run", 4, tokens, corrupt="fatal"))
    assert f"took its samples from other data: data file {tokens}/1.npy has other content than then;" in error
    assert "set data.corrupt='skip' to continue without the broken or missing files" in error
    assert f"or start the data from the beginning in another run.dir with checkpoint.init_from={str(saved)!r}" in error
    # Nor does it begin anew unasked where the checkpoint is named.
    (named,) = pool.run(1, _refused, _recipe(tmp_path / "run", 4, tokens, resume=str(saved), corrupt="fatal"))
    assert named == error


@pytest.mark.parametrize("corrupt", ["fatal", "skip"])
def test_a_lost_text_must_come_back_as_no_part_of_it_can_be_left_out(pool, tmp_path, corrupt):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text " * 400)
    data = DataConfig(kind="text", path=(f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"), corrupt=corrupt)
    cfg = recipe(tmp_path / "run", 2, every=2)
    first = replace(cfg, data=data, model=replace(cfg.model, vocab_size=256))
    later = replace(first, run=replace(first.run, steps=4))
    pool.run(1, train_rank, first)
    whole = (tmp_path / "b.txt").read_text()
    (tmp_path / "b.txt").write_bytes(b"\xff" + whole.encode())
    (error,) = pool.run(1, _refused, later)
    if corrupt == "skip":
        assert f"data file {tmp_path}/b.txt is left out as corrupt, and was not then; restore the files" in error
        assert "restore the files as they were (with data.kind='text' none can be left out later), set " in error
    else:
        assert f"{tmp_path}/b.txt" in error
    (tmp_path / "b.txt").write_text(whole)
    pool.run(1, train_rank, later)


def test_a_checkpoint_that_is_named_may_go_on_with_other_data_and_says_so(pool, tmp_path):
    pool.run(1, train_rank, _recipe(tmp_path / "run", 2, _tokens(tmp_path / "tokens")))
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    other = _recipe(tmp_path / "run", 4, _tokens(tmp_path / "other", seed=1))
    (error,) = pool.run(1, _refused, other)
    assert f"checkpoint.resume={str(saved)!r} to continue with the new data from its start" in error
    named = replace(other, checkpoint=replace(other.checkpoint, resume=str(saved)))
    ((said, _),) = pool.run(1, _train_and_listen, named)
    assert f"the data restarts at sample 0: path '{tmp_path}/tokens' there, '{tmp_path}/other' here" in said
    assert read_meta(tmp_path / "run" / "checkpoints" / "step-000004").samples == 2 * 4
    ((said, _),) = pool.run(
        1, _train_and_listen, replace(named, run=replace(named.run, steps=5), checkpoint=other.checkpoint)
    )
    assert "restarts at sample" not in said


@pytest.mark.parametrize("corrupt", [pytest.param("fatal", marks=pytest.mark.slow), "skip"])
def test_a_run_goes_on_with_the_same_data_at_another_path(pool, tmp_path, corrupt):
    tokens = _tokens(tmp_path / "tokens")
    straight = _recipe(tmp_path / "straight", 4, tokens, corrupt=corrupt)
    pool.run(1, train_rank, straight)
    pool.run(1, train_rank, _recipe(tmp_path / "run", 2, tokens, corrupt=corrupt))
    tokens.rename(tmp_path / "mount")
    moved = _recipe(tmp_path / "run", 4, tmp_path / "mount", corrupt=corrupt)
    ((said, error),) = pool.run(1, _train_and_listen, moved)
    assert not error
    assert f"data at '{tmp_path}/mount' has the same content as '{tokens}': continuing at sample 8" in said
    meta = read_meta(tmp_path / "run" / "checkpoints" / "step-000004")
    assert (meta.samples, list(meta.data_tokens)) == (16, [f"{tmp_path}/mount/{i}.npy" for i in range(3)])
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def _train_and_listen(cfg: Config) -> tuple[str, str]:
    """Return the output of a run, and the message of the error that ends it."""
    said, error = io.StringIO(), ""
    with contextlib.redirect_stdout(said):
        try:
            train_rank(cfg)
        except (ConfigError, RunError) as caught:
            error = str(caught)
    return said.getvalue(), error


def test_a_corrupt_file_that_is_skipped_stays_skipped_under_another_dp(pool, tmp_path):
    tokens = _tokens(tmp_path / "tokens")
    os.truncate(tokens / "1.npy", 1000)
    pool.run(1, train_rank, _recipe(tmp_path / "whole", 4, tokens))
    pool.run(1, train_rank, _recipe(tmp_path / "parts", 2, tokens))
    pool.run(2, train_rank, _recipe(tmp_path / "parts", 4, tokens, world_size=2))
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
    np.save(tokens / "1.npy", np.zeros(2000, dtype=np.uint16))
    (error,) = pool.run(1, _refused, _recipe(tmp_path / "parts", 6, tokens, corrupt="fatal"))
    assert f"data file {tokens}/1.npy was left out as corrupt then, and is not now" in error
    # Samples left out when the run began stay out, so that samples keep their numbers.
    for name in ("parts", "whole"):
        pool.run(1, train_rank, _recipe(tmp_path / name, 6, tokens))
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)


def _agree(folders: list[str]) -> str:
    data = DataConfig(kind="tokens", path="tokens")
    with chdir(folders[dist.get_rank()]):
        try:
            resolve_data_files(data, current_world())
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


def _outside(meta: dict[str, Any], data: str) -> None:
    meta["states"]["data"]["data_tokens"] = {f"{data}/../outside/0.npy": 2000}


def _outside_and_listed(meta: dict[str, Any], data: str) -> None:
    meta["states"]["data"]["data_tokens"] = {f"{data}/../outside/0.npy": 2000}
    meta["states"]["data"]["data_files"][f"{data}/../outside/0.npy"] = "1 0"


def _elsewhere(meta: dict[str, Any], data: str) -> None:
    meta["states"]["data"]["data_files"] = {f"{data}/x.npy": "1 0"}
    meta["states"]["data"]["data_tokens"] = {f"{data}/x.npy": 2000}


def _one_alone(meta: dict[str, Any], data: str) -> None:
    meta["states"]["data"]["data_tokens"] = {f"{data}/1.npy": 2000}


def _shorter(meta: dict[str, Any], data: str) -> None:
    meta["states"]["data"]["data_tokens"][f"{data}/1.npy"] = 1000


def _turned_round(meta: dict[str, Any], data: str) -> None:
    meta["states"]["data"]["data_tokens"] = dict(reversed(meta["states"]["data"]["data_tokens"].items()))


def _all_turned_round(meta: dict[str, Any], data: str) -> None:
    _turned_round(meta, data)
    meta["states"]["data"]["data_files"] = dict(reversed(meta["states"]["data"]["data_files"].items()))


def _strange_loss(meta: dict[str, Any], data: str) -> None:
    meta["states"]["data"]["data_lost"] = {"/etc/passwd": "gone"}


def _nameless(meta: dict[str, Any], data: str) -> None:
    meta["states"]["data"]["data_files"]["."] = "skipped"


_CHANGES: list[tuple[Callable[[dict[str, Any], str], None], str]] = [
    (_outside, "data_tokens names .*outside/0.npy', which is not among data_files"),
    (_outside_and_listed, "data_tokens names .*outside/0.npy', which is not below data.path"),
    (_elsewhere, "took its samples from other data: .*x.npy is gone"),
    (_one_alone, "the checkpoint names other token files than the recipe: .*0.npy is not in the checkpoint, .*2.npy"),
    (_shorter, "1.npy holds 2000 tokens, and 1000 in the checkpoint"),
    (_turned_round, "data_tokens has another order than data_files"),
    (_all_turned_round, "the checkpoint names other token files than the recipe: they are in another order"),
    (_strange_loss, "data_lost names '/etc/passwd', which is not among data_files"),
    (_nameless, r"data_files names no file: '\.'"),
]


def test_a_checkpoint_opens_no_file_that_the_recipe_does_not_name(pool, tmp_path):
    tokens = _tokens(tmp_path / "tokens")
    _tokens(tmp_path / "outside")
    pool.run(1, train_rank, _recipe(tmp_path / "run", 2, tokens))
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    sound = (saved / META_FILE).read_text()
    for change, words in _CHANGES:
        meta = json.loads(sound)
        change(meta, str(tokens))
        (saved / META_FILE).write_text(json.dumps(meta))
        write_manifest(saved, read_manifest(saved) | {META_FILE: digest_file(saved / META_FILE)})
        (error,) = pool.run(1, _refused, _recipe(tmp_path / "run", 3, tokens))
        assert re.search(words, error), f"{change}: {error}"
        assert "\n" not in error
    assert len(losses(tmp_path / "run")) == 2


def test_data_is_named_from_the_folder_above_too(pool, tmp_path):
    (tmp_path / "in").mkdir()
    _tokens(tmp_path / "tokens")
    for steps in (2, 3):
        pool.run(1, _train_in, str(tmp_path / "in"), _recipe(tmp_path / "run", steps, Path("../tokens")))
    assert list(read_meta(tmp_path / "run" / "checkpoints" / "step-000003").data_tokens)[0] == "../tokens/0.npy"
    assert len(losses(tmp_path / "run")) == 3


def _train_in(folder: str, cfg: Config) -> None:
    before = os.getcwd()
    os.chdir(folder)
    try:
        train_rank(cfg)
    finally:
        os.chdir(before)
