"""The checkpoint with the lowest held-out loss: it is kept, listed, and named by RUN/best."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_meta import META_FILE, counted, read_meta, write_meta
from moefold.checkpoint.find_checkpoint import (
    best_of,
    complete_checkpoints,
    locate_checkpoint,
    names_best,
    skipped_checkpoints,
    step_path,
)
from moefold.checkpoint.retention import remove_older
from moefold.cli.main import main
from moefold.convert.preflight import resolve_weights_folder
from moefold.errors import ConfigError
from moefold.inference.source import find_source
from moefold.recipe import load_config
from moefold.validate.config import check_config
from tests.checkpoint.empty_checkpoints import names, seal
from tests.inference.checkpoint_folder import described_run

LOSSES = {5: None, 10: 2.5, 15: 2.25, 20: 2.25, 25: 3.0}


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with checkpoints of these held-out losses."""
    described_run(tmp_path / "run", tuple(LOSSES))
    for step, loss in LOSSES.items():
        path = step_path(tmp_path / "run/checkpoints", step)
        meta = read_meta(path)
        write_meta(path, replace(meta, states=meta.states | {"evaluation": {"eval_loss": loss}}))
        seal(path)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("newest", "keep", "kept"), [(25, 1, [15, 25]), (25, 4, [10, 15, 20, 25]), (10, 1, [10, 15, 20, 25])]
)
def test_retention_keeps_the_first_of_the_best(run, newest, keep, kept):
    folder = run / "checkpoints"
    remove_older(step_path(folder, newest), keep, keeps_best=True)
    assert names(folder) == [f"step-{step:06d}" for step in kept]


def test_without_keep_best_it_goes(run):
    remove_older(step_path(run / "checkpoints", 25), 1)
    assert names(run / "checkpoints") == ["step-000025"]


def test_a_damaged_one_is_not_compared(run):
    (step_path(run / "checkpoints", 15) / META_FILE).write_text("{")
    assert best_of(complete_checkpoints(run / "checkpoints")) == step_path(run / "checkpoints", 20)


@pytest.mark.parametrize("loss", ["NaN", "Infinity", '"low"', "true"])
def test_a_loss_that_no_run_writes_is_a_damage(run, loss):
    file = step_path(run / "checkpoints", 25) / META_FILE
    file.write_text(file.read_text().replace('"eval_loss": 3.0', f'"eval_loss": {loss}'))
    with pytest.raises(ConfigError, match=f"broken {META_FILE}"):
        read_meta(file.parent)


def test_every_reader_of_models_takes_run_best(run):
    best = step_path(run / "checkpoints", 15)
    for path in (run / "best", run / "checkpoints/best"):
        assert locate_checkpoint(path) == best
        assert resolve_weights_folder(path) == best
        assert (find_source(str(path)).path, find_source(str(path)).notices) == (best, ())
        assert skipped_checkpoints(path, best) == []
    assert find_source(str(run)).path == step_path(run / "checkpoints", 25)


def test_run_best_without_a_loss_or_a_run_is_refused(tmp_path):
    described_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run/best': no complete checkpoint of .* has a held-out loss; .*eval_every"):
        find_source(str(tmp_path / "run/best"))
    with pytest.raises(ConfigError, match="does not exist"):
        find_source(str(tmp_path / "none/best"))
    # A folder of that name is the best checkpoint.
    (tmp_path / "run/best").mkdir()
    assert not names_best(tmp_path / "run/best")


def test_the_list_marks_the_best_checkpoint(run, capsys):
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "(best)" in line] == ["step-000015"]
    assert "2.2500 (best)" in lines[3]
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [[row["meta"]["states"][name] for name in ("position", "evaluation")] for row in rows] == [
        [counted(step=step)["position"], {"eval_loss": loss}] for step, loss in LOSSES.items()
    ]
    assert [Path(row["path"]).name for row in rows if row["is_best"]] == ["step-000015"]
    assert main(["checkpoint", "verify", str(run / "best")]) == 1  # it holds no tensors
    assert capsys.readouterr().out.startswith(str(step_path(run / "checkpoints", 15)))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("checkpoint.every=10", "compares held-out losses, and train.eval_every=0 computes none; set eval_every"),
        ("checkpoint.every=10 train.eval_every=4", "checkpoint.every=10 must be a multiple of train.eval_every=4"),
        ("checkpoint.every=10 train.eval_every=10 rl.group_size=2 data.kind=task", "is evaluated by rewards"),
    ],
)
def test_checkpoints_without_a_loss_are_refused(words, reason):
    with pytest.raises(ConfigError, match=reason):
        check_config(load_config(None, ["checkpoint.keep_best=true", *words.split()]))


@pytest.mark.parametrize("word", ["checkpoint.keep=0", "checkpoint.every=0"])
def test_where_nothing_is_deleted_it_has_no_effect(word):
    with pytest.raises(ConfigError, match=f"keep_best=true has no effect: nothing reads it with {word}; set "):
        load_config(None, ["checkpoint.keep_best=true", "train.eval_every=10", word])
