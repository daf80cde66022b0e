"""A model is found from a run, a checkpoint or a Hugging Face folder; other paths are refused."""

import contextlib
import json
import shutil

import pytest

from moefold.checkpoint.find_checkpoint import locate_checkpoint, locate_folder
from moefold.cli.main import main
from moefold.convert.preflight import read_model
from moefold.errors import ConfigError
from moefold.inference.source import find_source
from tests.inference.checkpoint_folder import described_run


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-000020"])
def test_the_newest_checkpoint_of_a_run_is_found_from_anywhere(tmp_path, name):
    cfg = described_run(tmp_path, (3, 20, 9), moe={"router_dtype": "float64", "trace_every": 5})
    (tmp_path / "checkpoints" / "step-000030").mkdir()
    source = find_source(str(tmp_path / name))
    assert source.path.name == "step-000020"
    assert source.model.ffn.moe.num_experts == cfg.model.ffn.moe.num_experts
    assert (source.kind, source.dtype, source.context) == ("checkpoint", "float32", cfg.train.seq_len)
    assert (source.moe.router_dtype, source.moe.trace_every) == ("float64", 0)


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-000020"])
def test_a_newer_checkpoint_that_lacks_its_description_is_passed_over_by_name(tmp_path, name):
    described_run(tmp_path, (9, 20, 30))
    for step in (30, 9):
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "moefold.json").unlink()
    source = find_source(str(tmp_path / name))
    assert source.path.name == "step-000020"
    words = ("step-000030: ",) if not name.startswith("checkpoints/") else ()
    start = "skipped a damaged checkpoint, "
    assert [one[: len(f"{start}step-000030: ")] for one in source.notices] == [start + word for word in words]
    assert all("moefold.json" in one or "manifest.json" in one for one in source.notices)
    (tmp_path / "checkpoints" / "step-000020" / "moefold.json").unlink()
    with pytest.raises(ConfigError, match="not a complete checkpoint and holds none .step-000009: .*step-000030: "):
        locate_checkpoint(tmp_path)


def test_every_command_names_passed_over_checkpoints(tmp_path, capsys):
    described_run(tmp_path, (20, 30))
    (tmp_path / "checkpoints" / "step-000030" / "moefold.json").unlink()
    for words in (
        ["eval", "--seq-len", "4", "--tokens", "x"],
        ["generate", "x", "parallel.tp=0"],
        ["checkpoint", "show"],
    ):
        command = [*words[:1], str(tmp_path), *words[1:]] if words[0] != "checkpoint" else [*words, str(tmp_path)]
        with contextlib.suppress(SystemExit):
            main(command)
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if "skipped a damaged checkpoint, step-000030: " in line] == lines[:1], command


def test_checkpoints_in_another_folder(tmp_path):
    elsewhere = tmp_path / "disk"
    described_run(tmp_path / "run", checkpoint={"dir": str(elsewhere)})
    shutil.move(tmp_path / "run" / "checkpoints", elsewhere)
    assert find_source(str(tmp_path / "run")).path == (elsewhere / "step-000010").resolve()


def test_a_checkpoint_without_its_run_has_all_but_the_runs_routing(tmp_path):
    described_run(tmp_path, run={"dtype": "float64"}, moe={"router_dtype": "float64"})
    (tmp_path / "config.json").unlink()
    source = find_source(str(tmp_path))
    assert (source.model.hidden_size, source.data.kind, source.dtype) == (64, "python-docs", "float32")
    assert source.moe.router_dtype == "float32"


def test_a_run_of_another_model_above_the_checkpoint_does_not_count(tmp_path):
    described_run(tmp_path, moe={"router_dtype": "float64"})
    file = tmp_path / "config.json"
    tree = json.loads(file.read_text())
    tree["model"]["ffn"]["moe"]["num_experts"] = 16
    file.write_text(json.dumps(tree))
    source = find_source(str(tmp_path))
    assert (source.model.ffn.moe.num_experts, source.moe.router_dtype) == (8, "float32")


def test_paths_that_are_not_models(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "config.json").write_text("{")
    cases = {
        "nothing": "does not exist",
        "file": "is a file; name a checkpoint",
        "": r"config.json'? is not (readable )?JSON",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            find_source(str(tmp_path / name))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no model: no moefold.json"):
        find_source(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mixtra"}')
    with pytest.raises(ConfigError, match="did you mean 'mixtral'"):
        find_source(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_attention_heads", 0, "model.attention.num_heads=0 must be at least 1"),
        ("layers", "x", "model.layers='x' names 'x'"),
    ],
)
def test_a_description_that_makes_no_sense_is_named(tmp_path, key, value, message):
    described_run(tmp_path)
    meta = tmp_path / "checkpoints" / "step-000010" / "moefold.json"
    content = json.loads(meta.read_text())
    content["model"][key] = value
    meta.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"has a broken moefold.json: {message}"):
        find_source(str(tmp_path))
    with pytest.raises(ConfigError, match=f"has a broken moefold.json: {message}"):
        read_model(tmp_path)


def test_a_description_of_other_types_is_broken(tmp_path):
    described_run(tmp_path)
    meta = tmp_path / "checkpoints" / "step-000010" / "moefold.json"
    content = json.loads(meta.read_text())
    content["model"]["hidden_size"] = "64"
    meta.write_text(json.dumps(content))
    for read in (lambda: find_source(str(tmp_path)), lambda: read_model(tmp_path)):
        with pytest.raises(ConfigError, match="has a broken moefold.json: model.hidden_size='64' must be an integer"):
            read()


def test_every_command_finds_checkpoints_in_another_folder(tmp_path):
    described_run(tmp_path / "run", checkpoint={"dir": str(tmp_path / "disk")})
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "disk")
    assert locate_folder(tmp_path / "run") == tmp_path / "disk"
    assert locate_checkpoint(tmp_path / "run") == tmp_path / "disk" / "step-000010"


def test_a_hugging_face_folder_whose_context_is_not_a_number(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "max_position_embeddings": "x"}')
    with pytest.raises(ConfigError, match="max_position_embeddings='x' must be a number, at least 1"):
        find_source(str(tmp_path))


def test_checkpoint_with_a_key_of_a_later_version_is_explained(tmp_path):
    described_run(tmp_path)
    meta = tmp_path / "checkpoints" / "step-000010" / "moefold.json"
    content = json.loads(meta.read_text())
    content["model"]["num_heads_of_tomorrow"] = 3
    meta.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="of another version of moefold: unknown key model.num_heads_of_tomorrow"):
        find_source(str(tmp_path))
