"""`moefold init` writes its files, replaces none unless asked, and names the next command."""

from pathlib import Path

import pytest

from moefold.cli.init import PLANNED
from moefold.cli.main import main
from moefold.config.shipped_recipes import shipped_files
from moefold.recipe import load_config
from moefold.validate.config import check_config


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ([], ["quickstart.toml"]),
        (["single"], ["single.toml"]),
        (["sft", "a/b"], ["a/b/sft.toml", "a/b/conversations.jsonl"]),
        (["dpo"], ["dpo.toml", "preferences.jsonl"]),
        (["lora"], ["lora.toml", "conversations.jsonl"]),
        (["single", "experiments"], ["experiments/single.toml"]),
        (["slurm"], ["slurm.sbatch"]),
        (["pretrain/olmoe-1b-7b-8xh100", "mine"], ["mine/olmoe-1b-7b-8xh100.toml"]),
    ],
)
def test_files_are_written_and_the_next_command_is_printed(capsys, words, written):
    assert main(["init", *words]) == 0
    assert sorted(map(str, (path for path in Path().rglob("*") if path.is_file()))) == sorted(written)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [f"wrote {path}" for path in written]
    assert lines[-1].startswith("next: ")
    assert lines[-1].endswith(written[0])
    if written[0].endswith(".toml"):
        check_config(load_config(Path(written[0])))


def test_nothing_is_replaced_unless_asked(capsys):
    Path("sft.toml").write_text("mine")
    assert main(["init", "sft"]) == 2
    assert "sft.toml exists already; add --force" in capsys.readouterr().err
    assert Path("sft.toml").read_text() == "mine"
    assert not Path("conversations.jsonl").exists()
    assert main(["init", "sft", "--force"]) == 0
    assert Path("sft.toml").read_text() != "mine"


def test_a_folder_alone_gets_the_quickstart_if_it_exists(capsys):
    Path("mine").mkdir()
    assert main(["init", "mine"]) == 0
    assert Path("mine/quickstart.toml").is_file()


def _folder(name):
    return name.rpartition("/")[0]


def test_list_describes_each_recipe(capsys):
    assert main(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(len(line.split()) > 3 for line in lines if line)
    shown = [line.split()[0] for line in lines if line.startswith("  ")]
    assert shown == [
        name.rpartition("/")[2] for name in sorted(shipped_files(), key=_folder) if not PLANNED.search(name)
    ]
    [line] = [line for line in lines if line.startswith("  mixtral-8x7b  ") and "Pretraining" in line]
    assert line.split()[1:4] == ["8,", "64,", "256"], "planned variants share the line"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sftt"], "did you mean 'sft'?"),
        (["olmoe-1b-7b-8xh100"], "did you mean 'pretrain/olmoe-1b-7b-8xh100'?"),
        (["qwen3"], "these match: finetune/qwen3-30b-a3b-dpo, "),
        (["experiments"], "'experiments' is not a recipe that comes with moefold, and there is no such folder"),
        (["xxxxxxx", "folder"], "`moefold init --list` shows the recipes"),
        (["--list", "sft"], "--list lists all recipes, so 'sft' has no effect; leave it out"),
        (["sft", "a", "b"], "one argument too many"),
        (["sft", f"{__file__}/none"], f"DIR='{__file__}/none' cannot be written"),
    ],
)
def test_invalid_arguments_are_one_message(capsys, words, message):
    assert main(["init", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(Path().iterdir()) == []
