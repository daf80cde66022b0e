"""`--lengths` of plan and simulate: numbers that follow from the documents, and bad input."""

import json
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.config.schema import config_to_dict
from moefold.data.sample import PADDING_DOCUMENT
from moefold.planner.lengths.samples import open_document_samples
from moefold.recipe import load_config

RECIPE = """
[model]
layers = 4
hidden_size = 256
ffn = { moe = { num_experts = 8 } }
[parallel]
world_size = 8
cp = 2
ep = 8
[train]
global_batch_size = 16
seq_len = 4096
[data]
kind = "text"
path = "text"
document_end = 0
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return str(path)


def answer(capsys, *words) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def message(capsys, *words) -> str:
    assert main([*words]) == 2
    return capsys.readouterr().err


def test_simulate_prices_documents(recipe, capsys):
    plain = answer(capsys, "simulate", recipe)
    short = answer(capsys, "simulate", recipe, "--lengths", "wikipedia")
    assert "lengths" not in plain
    assert short["lengths"] == "wikipedia"
    assert 0 < short["effective_length"] < 4096
    assert short["attention_max_over_mean"] > 1
    assert short["step_time_s"] < plain["step_time_s"]
    assert main(["simulate", recipe, "--lengths", "wikipedia"]) == 0
    out = capsys.readouterr().out
    assert "attention: ring attention; the busiest rank has" in out
    assert "FlexSP" in out
    assert "longer than a sample of 4,096 tokens and are cut" in out


def test_documents_of_a_whole_sample_change_nothing(recipe, tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("4096\n")
    plain, whole = (answer(capsys, "simulate", recipe, *more) for more in ([], ["--lengths", str(path)]))
    assert whole["step_time_s"] == pytest.approx(plain["step_time_s"], rel=1e-3)
    assert whole["attention_max_over_mean"] == 1


def test_plan_chooses_how_attention_is_shared(recipe, tmp_path, capsys):
    start = ["plan", recipe, "--gpu", "h100", "--num-gpus", "2", "--lengths", "wlb"]
    words = [*start, "--fix", "tp=1,cp=2,pp=1,ep=2,mbs=1"]
    planned = tmp_path / "planned.toml"
    found = answer(capsys, *words, "--recipe", str(planned))
    assert found["lengths"] == "wlb"
    best = found["mappings"][0]
    assert set(best["attention"]) == {"context", "placement", "attention_hosts"}
    assert load_config(planned).parallel.context.kind == best["attention"]["context"]
    assert main([*start, "--explain", "tp=1 cp=2 pp=1 ep=2 mbs=1"]) == 0
    out = capsys.readouterr().out
    assert "attention:" in out
    assert "lengths:" in out
    assert "rank:" in out


def test_lengths_of_a_runs_data_are_printed(recipe, tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("word " * 3000)
    (text / "b.txt").write_text("word " * 9000)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    cfg = load_config(Path(recipe), ["data.path=" + str(text), "data.validation_fraction=0"])
    (run_dir / "config.json").write_text(json.dumps(config_to_dict(cfg)))
    found = answer(capsys, "simulate", recipe, "--lengths", str(run_dir))
    assert found["lengths"] == str(run_dir)
    assert found["attention_max_over_mean"] > 1
    err = message(capsys, "simulate", recipe, "train.seq_len=2048", "--lengths", str(run_dir))
    assert "samples of 4096 tokens" in err
    (run_dir / "config.json").unlink()
    assert "holds no run" in message(capsys, "simulate", recipe, "--lengths", str(run_dir))


def test_padding_of_a_run_counts_as_the_short_documents_that_attention_sees(recipe, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text("x" * 2500)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    changes = [f"data.path={text}", "data.validation_fraction=0", "data.packing=best_fit"]
    (run_dir / "config.json").write_text(json.dumps(config_to_dict(load_config(Path(recipe), changes))))
    sample = open_document_samples(str(run_dir), 4096).draw(4096, 1, 0)[0]
    # A document with its end, and 1,595 tokens of padding.
    assert sample == (2501, *[PADDING_DOCUMENT] * 12, 59)


BAD = [
    (["simulate", "RECIPE", "--lengths", "wiki"], "did you mean 'wikipedia'"),
    (["simulate", "RECIPE", "data.document_end=-1", "--lengths", "wlb"], "has no effect on a recipe without documents"),
    (["plan", "RECIPE", "--gpu", "h100", "--lengths", "nowhere.txt"], "is neither a histogram nor a file nor a run"),
    (
        ["plan", "RECIPE", "--gpu", "h100", "--lengths", "wlb", "--compare-folding"],
        "has no effect on --compare-folding",
    ),
    (["simulate", "RECIPE", "--lengths", ""], "--lengths '' is neither a histogram nor a file nor a run"),
]


@pytest.mark.parametrize(("words", "text"), BAD)
def test_bad_input_is_refused(recipe, capsys, words, text):
    assert text in message(capsys, *(recipe if word == "RECIPE" else word for word in words))
