import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_dir import (
    FORMAT,
    META_FILE,
    CheckpointMeta,
    checkpoint_folder,
    complete_checkpoints,
    counted,
    data_order_change,
    find_resume,
    model_sizes,
    quick_validate,
    read_meta,
    sample_order,
    step_path,
    write_meta,
)
from moefold.checkpoint.commit import commit, remove_older
from moefold.checkpoint.folder_writer import tmp_checkpoint_path
from moefold.checkpoint.manifest import MANIFEST_FILE, digest_file, write_manifest
from moefold.config.checkpoint import CheckpointConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.rl import RLConfig
from moefold.config.run import RunConfig
from moefold.config.schema import Config
from moefold.config.train import TrainConfig
from moefold.errors import ConfigError
from tests.models import edit_model, model_of

MODEL = model_of({"num_layers": 2})


def meta(step: int, model: ModelConfig = MODEL) -> CheckpointMeta:
    return CheckpointMeta(
        format=FORMAT,
        states=counted(step=step, samples=8 * step, tokens=64 * step),
        order=sample_order(Config()),
        model=model_sizes(model),
        parallel={},
    )


def write(folder: Path, step: int, model: ModelConfig = MODEL) -> Path:
    path = step_path(folder, step)
    path.mkdir(parents=True)
    write_meta(path, meta(step, model))
    seal(path)
    return path


def seal(path: Path) -> None:
    write_manifest(path, {file.name: digest_file(file) for file in path.iterdir() if file.name != MANIFEST_FILE})


def recipe(folder: Path, resume: str = "auto", every: int = 5, model: ModelConfig = MODEL) -> Config:
    return Config(
        model=model, checkpoint=CheckpointConfig(dir=str(folder), every=every, at_end=every > 0, resume=resume)
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_is_the_runs_own_unless_one_is_named():
    cfg = Config(run=RunConfig(dir="runs/a"))
    assert checkpoint_folder(cfg.run, cfg.checkpoint) == Path("runs/a/checkpoints")
    given = recipe(Path("/scratch/x"))
    assert checkpoint_folder(given.run, given.checkpoint) == Path("/scratch/x")


def test_steps_sort_by_number():
    assert step_path(Path("c"), 100).name == "step-000100"
    assert step_path(Path("c"), 12345678).name == "step-12345678"


def test_complete_ones_in_order_and_nothing_else(tmp_path):
    paths = [write(tmp_path, step) for step in (1000000, 5, 20)]
    (tmp_path / "step-000030").mkdir()
    (tmp_path / "step-last").mkdir()
    tmp_checkpoint_path(tmp_path, 40, "job").mkdir()
    write_meta(tmp_checkpoint_path(tmp_path, 40, "job"), meta(40))
    assert complete_checkpoints(tmp_path) == [paths[1], paths[2], paths[0]]
    assert complete_checkpoints(tmp_path / "absent") == []


def test_meta_comes_back(tmp_path):
    assert read_meta(write(tmp_path, 7)) == meta(7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, f"is no moefold checkpoint: it has no {META_FILE}"),
        ("{", f"has a broken {META_FILE}"),
        ('{"format": 1}', f"has a broken {META_FILE}"),
        ("[]", f"has a broken {META_FILE}"),
        ("[" * 100_000, f"has a broken {META_FILE}"),
        (json.dumps(asdict(meta(1)) | {"states": {"position": {"step": "1"}}}), f"broken {META_FILE}: step is '1'"),
        (json.dumps(asdict(meta(1)) | {"states": {}}), f"broken {META_FILE}: step is None"),
        (json.dumps(asdict(meta(1)) | {"states": []}), f"broken {META_FILE}: states is no object"),
        (json.dumps(asdict(meta(1)) | {"states": {"data": 3}}), f"broken {META_FILE}: data is no object"),
        (
            json.dumps(asdict(meta(1)) | {"states": counted() | {"weights": {"moment_updates": "1"}}}),
            f"broken {META_FILE}: moment_updates is '1'",
        ),
        (
            json.dumps(asdict(meta(1)) | {"states": counted() | {"weights": {"moment_updates": 2**63}}}),
            f"broken {META_FILE}: moment_updates is {2**63}",
        ),
        (json.dumps(asdict(meta(1)) | {"model": []}), f"has a broken {META_FILE}: model is no object"),
        (json.dumps(asdict(meta(1)) | {"order": {"seq_len": "x"}}), f"broken {META_FILE}: order.seq_len is 'x'"),
        (json.dumps(asdict(meta(1)) | {"parallel": {"tp": 0}}), f"broken {META_FILE}: parallel.tp is 0"),
        (json.dumps(asdict(meta(1)) | {"dtype": 3}), f"broken {META_FILE}: dtype is no text"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_folder_that_is_no_checkpoint(tmp_path, content, message):
    if content is not None:
        (tmp_path / META_FILE).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_meta(tmp_path)


def test_another_format_is_refused(tmp_path):
    path = write(tmp_path, 1)
    write_meta(path, replace(meta(1), format=FORMAT + 1))
    with pytest.raises(
        ConfigError, match=f"has format {FORMAT + 1}, and this version reads up to {FORMAT}; update moefold"
    ):
        read_meta(path)


def test_auto_takes_the_newest_if_any(tmp_path):
    assert find_resume(recipe(tmp_path)) is None
    write(tmp_path, 5)
    newest = write(tmp_path, 10)
    (tmp_path / "step-000015").mkdir()
    assert find_resume(recipe(tmp_path)) == newest


def test_one_that_has_lost_its_description_is_passed_over_and_neither_counts_nor_goes(tmp_path):
    for step in (5, 10, 15):
        write(tmp_path, step)
    (step_path(tmp_path, 10) / META_FILE).unlink()
    assert quick_validate(step_path(tmp_path, 10)) == [f"file {META_FILE} is missing"]
    remove_older(step_path(tmp_path, 15), 2)
    assert names(tmp_path) == ["step-000005", "step-000010", "step-000015"]
    shutil.rmtree(step_path(tmp_path, 15))
    with pytest.raises(ConfigError, match=r"starts after step 5, .*step-000010.*or set another checkpoint\.dir"):
        find_resume(recipe(tmp_path, resume=str(step_path(tmp_path, 5))))


@pytest.mark.parametrize("content", ["{", '{"format": 9}', None], ids=str)
def test_auto_passes_over_one_whose_files_are_not_what_was_written(tmp_path, content):
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


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b", "link"])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path, name):
    path = write(tmp_path / "c", 5)
    (tmp_path / "secret").touch()
    (path / "link").symlink_to(tmp_path / "secret")
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    manifest["files"][name] = {"size_bytes": 0, "sha256": ""}
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert quick_validate(path) == [f"its {MANIFEST_FILE} cannot be read: file name {name!r} leads out of the folder"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[" * 100_000, "it is nested deeper than 100 levels"),
        ('{"files": {"a": {"size_bytes": 1e400, "sha256": ""}}}', "it is no manifest"),
        ("[]", "it is no manifest"),
    ],
)
def test_a_strange_manifest_is_a_fault(tmp_path, content, fault):
    path = write(tmp_path, 5)
    (path / MANIFEST_FILE).write_text(content)
    assert quick_validate(path) == [f"its {MANIFEST_FILE} cannot be read: {fault}"]


def test_never_and_a_named_one(tmp_path):
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


def test_another_model_is_refused_with_what_differs(tmp_path):
    write(tmp_path, 5)
    wrong = edit_model(MODEL, {"num_layers": 3, "ffn.moe.num_experts": 16})
    message = "is of another model: layers 2 there, 3 here; ffn.moe.num_experts 8 there, 16 here; give"
    with pytest.raises(ConfigError, match=message):
        find_resume(recipe(tmp_path, model=wrong))
    same = replace(MODEL, preset="anything", init_std=0.5)
    assert find_resume(recipe(tmp_path, model=same)) is not None


def test_only_the_newest_are_kept_and_drafts_of_killed_runs_go(tmp_path):
    for step in (5, 10, 15):
        write(tmp_path, step)
    tmp_checkpoint_path(tmp_path, 12, "job").mkdir()
    (tmp_path / ".step-000002.old").mkdir()
    (tmp_path / "notes.txt").touch()
    newest = step_path(tmp_path, 15)
    remove_older(newest, 0)
    assert names(tmp_path) == ["notes.txt", "step-000005", "step-000010", "step-000015"]
    remove_older(newest, 2)
    assert names(tmp_path) == ["notes.txt", "step-000010", "step-000015"]


def test_later_checkpoints_that_a_resume_passed_over_count_for_nothing(tmp_path):
    for step in (5, 10, 15, 20):
        write(tmp_path, step)
    remove_older(step_path(tmp_path, 10), 1)
    assert names(tmp_path) == ["step-000010", "step-000015", "step-000020"]


def test_checkpoints_of_every_so_many_steps_are_kept_too(tmp_path):
    for step in (5, 10, 15, 20, 25):
        write(tmp_path, step)
    remove_older(step_path(tmp_path, 25), 1, 10)
    assert names(tmp_path) == ["step-000010", "step-000020", "step-000025"]


def test_a_checkpoint_that_another_job_has_just_saved_is_not_replaced(tmp_path, monkeypatch):
    (write(tmp_path, 5) / "other").touch()
    draft = tmp_checkpoint_path(tmp_path, 5, "job")
    draft.mkdir()
    # It appears after the look for one of that name.
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(OSError, match=r"not empty|exists"):
        commit(draft, step_path(tmp_path, 5))
    monkeypatch.undo()
    assert (step_path(tmp_path, 5) / "other").exists()


def test_a_draft_replaces_a_checkpoint_of_its_step(tmp_path):
    (write(tmp_path, 5) / "old").touch()
    draft = tmp_checkpoint_path(tmp_path, 5, "job")
    draft.mkdir()
    (draft / "new").touch()
    commit(draft, step_path(tmp_path, 5))
    assert names(tmp_path) == ["step-000005"]
    assert names(tmp_path / "step-000005") == ["new"]


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


def test_sizes_that_nothing_reads_and_other_spellings_of_layers_are_the_same_model(tmp_path):
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
