"""Test that folders, data, packages and memory are checked before ranks start."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.data.routing_trace import RoutingTraceWriter, trace_shape
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.train.machine_checks import (
    check_packages,
    check_replay,
    check_replay_content,
    check_resume,
    check_writable,
)

NOBODY = 65534
"""A user without rights."""


def config(*overrides: str) -> Config:
    return load_config(None, overrides)


def make_checkpoints(folder: Path) -> Path:
    for step in (100, 200):
        (folder / f"step-{step:06d}").mkdir(parents=True)
    return folder


def test_a_folder_that_is_there_or_can_be_made_is_writable(tmp_path):
    cfg = config(f"run.dir={tmp_path}")
    check_writable(cfg.run, cfg.checkpoint)
    recipe = config(f"run.dir={tmp_path / 'a' / 'b'}")
    check_writable(recipe.run, recipe.checkpoint)
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    cfg = config(f"run.dir={tmp_path / 'file'}")
    with pytest.raises(ConfigError, match=r"run\.dir=.*file' is a file; choose a folder"):
        check_writable(cfg.run, cfg.checkpoint)
    recipe = config(f"run.dir={tmp_path / 'file' / 'inner'}")
    with pytest.raises(ConfigError, match=r"run\.dir=.*inner' lies below .*file', which is a file; choose a folder"):
        check_writable(recipe.run, recipe.checkpoint)


def test_a_folder_without_permission_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        # Root may write everywhere: it becomes another user, who can read this folder.
        os.chmod(folder, 0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(NOBODY)
        try:
            cfg = config(f"run.dir={folder}/run")
            with pytest.raises(ConfigError, match=f"run.dir='{folder}/run' cannot be written: Permission denied"):
                check_writable(cfg.run, cfg.checkpoint)
        finally:
            if is_root:
                os.seteuid(0)
            os.chmod(folder, 0o700)


def test_the_checkpoint_folder_is_tried_when_something_is_saved_there(tmp_path):
    (tmp_path / "file").write_text("")
    words = [f"run.dir={tmp_path}", f"checkpoint.dir={tmp_path / 'file'}"]
    cfg = config(*words, "checkpoint.every=0", "checkpoint.at_end=false")
    check_writable(cfg.run, cfg.checkpoint)
    for word in ("checkpoint.every=0", "checkpoint.at_end=false"):
        recipe = config(*words, word)
        with pytest.raises(ConfigError, match=r"checkpoint\.dir=.*file' is a file"):
            check_writable(recipe.run, recipe.checkpoint)


def test_auto_and_never_name_no_checkpoint():
    check_resume(config("checkpoint.resume=auto").checkpoint)
    check_resume(config("checkpoint.resume=never").checkpoint)


def test_a_checkpoint_that_exists_is_accepted(tmp_path):
    check_resume(config(f"checkpoint.resume={make_checkpoints(tmp_path) / 'step-000100'}").checkpoint)


def test_a_missing_checkpoint_names_those_beside_it(tmp_path):
    folder = make_checkpoints(tmp_path)
    with pytest.raises(ConfigError) as error:
        check_resume(config(f"checkpoint.resume={folder / 'step-000300'}").checkpoint)
    assert f"does not exist; the checkpoints there are {folder / 'step-000100'}, {folder / 'step-000200'}" in str(
        error.value
    )


def test_a_missing_checkpoint_is_refused_if_the_folder_has_none(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; set 'auto' for the newest one, if any"):
        check_resume(config(f"checkpoint.resume={tmp_path / 'none' / 'step-000300'}").checkpoint)


def test_a_folder_of_checkpoints_and_a_file_are_not_checkpoints(tmp_path):
    folder = make_checkpoints(tmp_path)
    with pytest.raises(ConfigError, match=r"is a folder of checkpoints; name one, such as '.*step-000200'"):
        check_resume(config(f"checkpoint.resume={folder}").checkpoint)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; a checkpoint is a folder"):
        check_resume(config(f"checkpoint.resume={tmp_path / 'file'}").checkpoint)


def test_data_that_is_missing_is_refused(tmp_path):
    cfg = config("data.kind=tokens", f"data.path={tmp_path / 'none.bin'}")
    with pytest.raises(ConfigError, match=r"data\.path"):
        check_data(DataRequest.of(cfg))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    cfg = config("model.vocab_size=100")
    with pytest.raises(ConfigError, match="vocab_size"):
        check_data(DataRequest.of(cfg))


def test_the_default_data_is_there():
    cfg = config()
    check_data(DataRequest.of(cfg))


def test_trackers_that_nobody_asks_for_need_no_package():
    cfg = config()
    check_packages(cfg.model, cfg.parallel, cfg.metrics)


REPLAY = ("model.layers=2", "train.seq_len=8", "train.global_batch_size=2", "run.steps=2")


def make_trace(run_dir: Path, *overrides: str, steps: int = 2) -> None:
    cfg = config(*REPLAY, *overrides)
    shape = trace_shape(cfg.model, cfg.train)
    writer = RoutingTraceWriter(run_dir, shape)
    for step in range(1, steps + 1):
        writer.write(step, iter(np.broadcast_to(np.arange(shape.top_k, dtype=shape.dtype), shape.file_shape)))


def check_replay_of(cfg: Config) -> None:
    check_replay(cfg.run, cfg.model, cfg.moe, cfg.train)


def test_a_trace_of_this_recipe_can_be_replayed(tmp_path):
    make_trace(tmp_path)
    check_replay_of(config(*REPLAY))
    check_replay_of(config(*REPLAY, f"moe.replay={tmp_path}"))
    check_replay_of(config(*REPLAY, f"moe.replay={tmp_path / 'routing'}"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.seq_len=16", r"moe\.replay='.*' was traced with train\.seq_len=8, and this run has 16"),
        ("model.layers=dense, moe", r"traced with the MoE layers=\[0, 1\], and this run has \[1\]"),
        ("model.ffn.moe.num_experts=16", "traced with model.ffn.moe.num_experts=8, and this run has 16"),
        ("run.steps=3", r"must hold every step from 1 to run\.steps=3, and step 3 is missing"),
    ],
)
def test_a_trace_of_another_recipe_is_refused(tmp_path, word, message):
    make_trace(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_replay_of(config(*REPLAY, f"moe.replay={tmp_path}", word))


def test_a_trace_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"moe\.replay='.*absent' does not exist"):
        check_replay_of(config(*REPLAY, f"moe.replay={tmp_path / 'absent'}"))


def test_the_choices_of_a_trace_are_read_before_the_run(tmp_path):
    make_trace(tmp_path)
    cfg = config(*REPLAY, f"moe.replay={tmp_path}")
    recipe = config(*REPLAY)
    check_replay_content(recipe.run, recipe.moe)
    check_replay_content(cfg.run, cfg.moe)
    path = tmp_path / "routing" / "step-000001.npy"
    choices = np.load(path)
    choices[..., 0] = choices[..., 1]
    np.save(path, choices)
    check_replay_of(cfg)
    with pytest.raises(
        ConfigError, match=r"moe\.replay='.*' sends position 0 of sample 0 twice to one expert in step 1"
    ):
        check_replay_content(cfg.run, cfg.moe)


def test_a_run_cannot_replay_itself(tmp_path):
    make_trace(tmp_path)
    with pytest.raises(ConfigError, match=r"moe\.replay='.*' is the trace of this very run"):
        check_replay_of(config(*REPLAY, f"moe.replay={tmp_path}", f"run.dir={tmp_path}"))
