"""The checkpoint that a run resumes from, and settings that may not change between two runs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_meta import META_FILE
from moefold.checkpoint.find_checkpoint import step_path
from moefold.checkpoint.integrity import quick_validate
from moefold.checkpoint.manifest import MANIFEST_FILE
from moefold.checkpoint.resume import find_resume
from moefold.checkpoint.retention import remove_older
from moefold.checkpoint.sample_order import data_order_change, sample_order
from moefold.config.sections.data import DataConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError
from tests.checkpoint.empty_checkpoints import MODEL, meta, names, recipe, write
from tests.models import edit_model


def test_auto_takes_the_newest_if_any(tmp_path):
    assert find_resume(recipe(tmp_path)) is None
    write(tmp_path, 5)
    newest = write(tmp_path, 10)
    (tmp_path / "step-000015").mkdir()
    assert find_resume(recipe(tmp_path)) == newest


def test_a_checkpoint_without_metadata_is_not_used_not_counted_and_not_deleted(tmp_path):
    for step in (5, 10, 15):
        write(tmp_path, step)
    (step_path(tmp_path, 10) / META_FILE).unlink()
    assert quick_validate(step_path(tmp_path, 10)) == [f"file {META_FILE} is missing"]
    remove_older(step_path(tmp_path, 15), 2)
    assert names(tmp_path) == ["step-000005", "step-000010", "step-000015"]
    shutil.rmtree(step_path(tmp_path, 15))
    with pytest.raises(ConfigError, match=r"starts after step 5, .*step-000010.*or set another checkpoint\.dir"):
        find_resume(recipe(tmp_path, resume=str(step_path(tmp_path, 5))))


@pytest.mark.parametrize("content", ["{", '{"format": 9}', None])
def test_auto_passes_over_a_checkpoint_whose_files_were_changed(tmp_path, content):
    sound = write(tmp_path, 5)
    damaged = write(tmp_path, 10) / META_FILE
    if content is None:
        (damaged.parent / MANIFEST_FILE).unlink()
    else:
        damaged.write_text(content.ljust(damaged.stat().st_size))
    assert find_resume(recipe(tmp_path)) == sound
    assert quick_validate(sound) == []
    (fault,) = quick_validate(damaged.parent)
    assert "has other content than was written" in fault or "its manifest.json cannot be read: No such file" in fault


def test_resume_never_or_from_a_named_checkpoint(tmp_path):
    first = write(tmp_path / "here", 5)
    other = tmp_path / "there"
    assert find_resume(recipe(other, resume="never")) is None
    assert find_resume(recipe(other, resume=str(first))) == first


@pytest.mark.parametrize("resume", ["never", "step-000005"])
def test_a_run_does_not_write_beside_later_checkpoints(tmp_path, resume):
    write(tmp_path, 5)
    write(tmp_path, 10)
    resume = resume if resume == "never" else str(tmp_path / resume)
    with pytest.raises(ConfigError, match=r"starts after step [05], .*step-000010.*; move them away"):
        find_resume(recipe(tmp_path, resume=resume))
    assert find_resume(recipe(tmp_path, resume=resume, every=0)) == (None if resume == "never" else Path(resume))
    assert find_resume(recipe(tmp_path, resume=str(tmp_path / "step-000010"))) == tmp_path / "step-000010"


@pytest.mark.parametrize("resume", ["auto", "step-000015"])
def test_a_renamed_one_is_refused(tmp_path, resume):
    """By its name it would stay the newest of the run, which would start from it again and again."""
    write(tmp_path, 5).rename(tmp_path / "step-000015")
    resume = resume if resume == "auto" else str(tmp_path / resume)
    with pytest.raises(ConfigError, match=r"step-000015' is of step 5; rename it to 'step-000005'"):
        find_resume(recipe(tmp_path, resume=resume))
    (tmp_path / "step-000015").rename(tmp_path / "kept")
    assert find_resume(recipe(tmp_path, resume=str(tmp_path / "kept"))) == tmp_path / "kept"


@pytest.mark.parametrize("resume", ["auto", "step-000010"])
def test_a_changed_number_of_updates_must_divide_the_step(tmp_path, resume):
    write(tmp_path, 10)
    cfg = recipe(tmp_path, resume=resume if resume == "auto" else str(tmp_path / resume))
    assert find_resume(replace(cfg, rl=RLConfig(group_size=4, updates=5))) == tmp_path / "step-000010"
    assert find_resume(replace(cfg, rl=RLConfig(updates=4))) == tmp_path / "step-000010"
    with pytest.raises(ConfigError) as error:
        find_resume(replace(cfg, rl=RLConfig(group_size=4, updates=4)))
    text = str(error.value)
    assert text.startswith("rl.updates=4 must divide step 10 of checkpoint ")
    assert "choose updates 1, 2, 5 or 10, or start a new run with checkpoint.init_from=" in text
    assert "\n" not in text


def test_another_model_is_refused_with_its_differences(tmp_path):
    write(tmp_path, 5)
    wrong = edit_model(MODEL, {"layers": 3, "ffn.moe.num_experts": 16})
    message = "is of another model: layers 2 there, 3 here; ffn.moe.num_experts 8 there, 16 here; give"
    with pytest.raises(ConfigError, match=message):
        find_resume(recipe(tmp_path, model=wrong))
    same = replace(MODEL, preset="anything", init_std=0.5)
    assert find_resume(recipe(tmp_path, model=same)) is not None


def test_later_checkpoints_that_a_resume_passed_over_count_for_nothing(tmp_path):
    for step in (5, 10, 15, 20):
        write(tmp_path, step)
    remove_older(step_path(tmp_path, 10), 1)
    assert names(tmp_path) == ["step-000010", "step-000015", "step-000020"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"run": RunConfig(seed=9)}, "took its samples from other data: seed 0 there, 9 here"),
        ({"train": TrainConfig(seq_len=64)}, "seq_len 256 there, 64 here"),
        ({"data": DataConfig(kind="synthetic")}, "kind 'python-docs' there, 'synthetic' here"),
    ],
)
def test_auto_refuses_other_data_and_a_named_checkpoint_takes_it(tmp_path, change, expected):
    path = write(tmp_path, 5)
    with pytest.raises(ConfigError, match=expected):
        find_resume(replace(recipe(tmp_path), **change))
    assert find_resume(replace(recipe(tmp_path, resume=str(path)), **change)) == path


def test_unread_sizes_and_other_spellings_are_the_same_model(tmp_path):
    path = write(tmp_path, 5)
    same = edit_model(MODEL, {"ffn.dense.intermediate_size": 64, "layers": "moe, 1 moe"})
    assert find_resume(recipe(tmp_path, model=same)) == path
    with pytest.raises(ConfigError, match="layers 2 there, 'dense, moe' here"):
        find_resume(recipe(tmp_path, model=edit_model(MODEL, {"layers": "dense, moe"})))


def test_windows_are_compared_by_layer_and_not_by_spelling(tmp_path):
    path = write(tmp_path, 5, edit_model(MODEL, {"layers": "window, full", "sliding_window": 8}))
    same = edit_model(MODEL, {"layers": "1 x (1 window, full)", "sliding_window": 8})
    assert find_resume(recipe(tmp_path, model=same)) == path
    with pytest.raises(ConfigError, match="layers 'window, full' there, '2 window' here"):
        find_resume(recipe(tmp_path, model=edit_model(same, {"layers": "2 window"})))


def test_another_batch_size_takes_the_same_samples(tmp_path):
    path = write(tmp_path, 5)
    assert find_resume(replace(recipe(tmp_path), train=TrainConfig(global_batch_size=64))) == path


def test_a_checkpoint_from_before_a_key_was_known_has_its_default():
    old = meta(5)
    old.order.pop("document_end")
    assert data_order_change(old, sample_order(recipe(Path("c")))) == ""
    marked = replace(recipe(Path("c")), data=DataConfig(document_end=3))
    assert data_order_change(old, sample_order(marked)) == "document_end -1 there, 3 here"
