"""A resumed run keeps the values that it has resolved for keys that its recipe leaves out."""

from dataclasses import replace

import pytest

from moefold.checkpoint.checkpoint_meta import read_meta, write_meta
from moefold.checkpoint.find_checkpoint import step_path
from moefold.checkpoint.manifest import digest_file, write_manifest
from moefold.optim.lr_schedule import schedule_settings
from moefold.recipe import load_recipe
from moefold.train.run_folder import choose_run_folder
from moefold.train.start import set_up_run
from tests.train.written_runs import WORDS, write_run

OLD_RATE = "train.lr=0.002"


def started(*words):
    return set_up_run(load_recipe(None, [*WORDS, *words]), None)


@pytest.mark.parametrize("saved", [5, 10, None], ids=["resumes", "finished", "starts over"])
def test_a_run_keeps_the_rate_that_an_older_version_resolved(tmp_path, saved):
    run = f"run.dir={tmp_path / 'run'}"
    write_run(tmp_path / "run", OLD_RATE, steps=saved or 3, saved=saved)
    setup = started(run)
    assert (setup.cfg.train.lr, setup.folder.cfg.train.lr) == (0.002, 0.002)
    assert setup.folder.cfg.run.dir == str(tmp_path / "run")
    assert any("train.lr=0.002, as the run has it" in line and "0.0003" in line for line in setup.messages)
    # A rate that is set is a change of the settings, as ever.
    assert started(run, "train.lr=0.1").cfg.train.lr == 0.1


def test_a_run_of_another_method_or_another_run_has_the_default(tmp_path):
    write_run(tmp_path / "run", OLD_RATE, steps=5, saved=5)
    adapters = load_recipe(None, [*WORDS, f"run.dir={tmp_path / 'run'}", "lora.rank=2"])
    assert choose_run_folder(adapters.cfg, left_out=adapters.left_out).cfg.train.lr == 2e-4
    other = started(f"run.dir={tmp_path / 'run'}", "run.seed=7")
    assert (other.folder.cfg.run.dir, other.folder.cfg.train.lr) == (str(tmp_path / "run-2"), 3e-4)
    assert "train.lr=0.0003 is the default of pretraining" in other.messages
    assert "train.lr" not in " ".join(started(f"run.dir={tmp_path / 'new'}", "train.lr=0.0003").messages)


def test_a_named_checkpoint_gives_its_rate_to_a_new_folder(tmp_path):
    write_run(tmp_path / "run", steps=5, saved=5)
    path = step_path(tmp_path / "run/checkpoints", 5)
    cfg = started(f"run.dir={tmp_path / 'x'}").cfg
    schedule = schedule_settings(cfg.run, cfg.train) | {"run.steps": 10}
    meta = read_meta(path)
    write_meta(path, replace(meta, states=meta.states | {"schedule": schedule | {"train.lr": 0.004}}))
    write_manifest(path, {"moefold.json": digest_file(path / "moefold.json")})
    words = (f"run.dir={tmp_path / 'next'}", f"checkpoint.resume={path}")
    assert started(*words).folder.cfg.train.lr == 0.004
    assert started(*words, "train.lr=0.1").folder.cfg.train.lr == 0.1


def test_random_weights_under_a_method_for_trained_ones_are_said(tmp_path):
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}\n' * 4
    )
    words = ("model.preset=tiny", "data.kind=sft", f"data.path={tmp_path / 'chat.jsonl'}", "run.device=cpu")
    recipe = load_recipe(None, [*words, f"run.dir={tmp_path / 'run'}", "train.seq_len=32"])
    setup = set_up_run(recipe, None)
    assert setup.folder.cfg.train.lr == 2e-5
    assert [line for line in setup.messages if "2e-05 is the default of supervised fine-tuning; the run begins" in line]


def test_a_run_of_an_older_version_keeps_its_loss_in_one_piece(tmp_path):
    write_run(tmp_path / "run", "train.loss_chunk=0", steps=5, saved=5)
    run = f"run.dir={tmp_path / 'run'}"
    setup = started(run)
    assert (setup.cfg.train.loss_chunk, setup.folder.cfg.run.dir, setup.folder.message) == (
        0,
        str(tmp_path / "run"),
        "",
    )
    assert started(run, "train.loss_chunk=-1").cfg.train.loss_chunk == -1
    # A chunk that another batch does not have is refused.
    write_run(tmp_path / "other", "train.loss_chunk=16", steps=5, saved=5)
    assert started(f"run.dir={tmp_path / 'other'}", "train.seq_len=16").cfg.train.loss_chunk == -1
