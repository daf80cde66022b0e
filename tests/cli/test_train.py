"""The decisions of `moefold train` before any rank starts."""

from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_meta import META_FILE, CheckpointMeta, counted, model_sizes, write_meta
from moefold.checkpoint.find_checkpoint import step_path
from moefold.checkpoint.manifest import digest_file, write_manifest
from moefold.checkpoint.sample_order import sample_order
from moefold.cli import command_parser
from moefold.cli.main import main
from moefold.config.base.limits import FORMAT
from moefold.recipe import load_config, load_recipe
from moefold.train.start import set_up_run

SMALL = ("model.preset=tiny", "data.kind=synthetic", "run.device=cpu", "train.seq_len=32")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.toml"
    path.touch()
    return str(path)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch):
    """Make this process look as if torchrun had started it as one rank of two."""

    def start(local_rank: int) -> None:
        for name, value in (
            ("RANK", local_rank),
            ("LOCAL_RANK", local_rank),
            ("WORLD_SIZE", 2),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", 29500),
        ):
            monkeypatch.setenv(name, str(value))

    return start


def write_checkpoint(run_dir: Path, step: int) -> Path:
    cfg = load_config(None, [*SMALL])
    order, model = sample_order(cfg), model_sizes(cfg.model)
    path = step_path(run_dir / "checkpoints", step)
    path.mkdir(parents=True)
    meta = CheckpointMeta(format=FORMAT, states=counted(step=step), order=order, model=model, parallel={})
    write_meta(path, meta)
    write_manifest(path, {META_FILE: digest_file(path / META_FILE)})
    return path


def test_keys_are_listed_without_a_recipe(capsys):
    assert main(["train", "--keys"]) == 0
    assert "parallel.etp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pattern", "some", "others"),
    [
        (
            "lr",
            ["train.lr", "train.lr_schedule.min_lr", "train.lr_schedule", "sites.lr"],
            ["train.optimizer.beta1", "[moe]", "Presets"],
        ),
        ("PARALLEL.*p", ["parallel.tp", "parallel.etp"], ["parallel.zero", "model.ffn.moe.top_k"]),
        ("top_k", ["model.ffn.moe.top_k"], ["moe.choice"]),
        ("deepseek-v2", ["model.attention"], ["train.lr"]),
    ],
)
def test_keys_are_listed_by_a_pattern(capsys, pattern, some, others):
    assert main(["train", "--keys", pattern]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} = " in out for name in some)
    assert not any(f"{name} = " in out or f"{name}  " in out for name in others)


def test_a_pattern_without_keys_is_refused(capsys):
    assert main(["train", "--keys", "warmup_stps"]) == 2
    assert capsys.readouterr().err == (
        "moefold: error: --keys warmup_stps: no key has it in its name or help; did you mean 'warmup_steps'?\n"
    )
    assert main(["train", "--keys", "num_generations"]) == 2
    assert capsys.readouterr().err.endswith("in its name or help; moefold calls this rl.group_size\n")


def test_a_recipe_or_a_setting_must_be_given(capsys):
    assert main(["train"]) == 2
    assert capsys.readouterr().err == (
        "moefold: error: a recipe or a setting is missing: moefold train [RECIPE.toml] [section.key=value ...]\n"
    )


def test_settings_without_a_recipe_change_the_defaults(tmp_path, monkeypatch, capsys):
    """A first word with "=" is a setting, unless a file has that name; also of verify and memory."""
    monkeypatch.chdir(tmp_path)
    path = write_checkpoint(tmp_path / "run", 10)
    assert main(["train", "model.preset=tiny", *SMALL, f"run.dir={tmp_path}/run", "run.steps=10"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{path} has all 10 steps of run.steps; nothing to do"
    for command in ("train", "verify", "memory"):
        assert main([command, "run.stps=1"]) == 2
        assert capsys.readouterr().err == "moefold: error: unknown key run.stps; did you mean run.steps?\n"
    (tmp_path / "run.stps=1").write_text("[run]\nseeed = 1\n")
    assert main(["train", "run.stps=1"]) == 2
    assert "did you mean run.seed?" in capsys.readouterr().err


def test_a_finished_run_has_nothing_to_do(recipe, tmp_path, capsys):
    path = write_checkpoint(tmp_path / "run", 10)
    assert main(["train", recipe, *SMALL, f"run.dir={tmp_path}/run", "run.steps=10"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path} has all 10 steps of run.steps; nothing to do",
        f"next: moefold checkpoint show {tmp_path}/run",
        "or train on: the same command with run.steps=20 train.lr=0.00015 (its learning rate has ended at 0: this one "
        "rises again, half as high, and ends at 0 too)",
        "or start a new run: the same command with run.dir=ANOTHER_FOLDER",
    ]


def test_a_finished_run_whose_checkpoint_is_damaged_is_not_finished(tmp_path):
    path = write_checkpoint(tmp_path / "run", 10)
    (path / "__0_0.distcp").write_bytes(b"weights")
    write_manifest(path, {name: digest_file(path / name) for name in (META_FILE, "__0_0.distcp")})
    words = [*SMALL, f"run.dir={tmp_path}/run", "run.steps=10"]
    assert set_up_run(load_recipe(None, words), None).is_finished
    (path / "__0_0.distcp").write_bytes(b"weighty")
    damaged = set_up_run(load_recipe(None, words), None)
    # The ranks restore it, and report what they find.
    assert damaged.resume == path
    assert not damaged.is_finished
    assert set_up_run(load_recipe(None, [*words, "checkpoint.verify=false"]), None).is_finished


@pytest.mark.parametrize(
    "words", [["train.lr=x"], ["parallel.world_size=4"], ["parallel.world_size=2", "parallel.tp=3"]]
)
def test_error_on_all_ranks_of_a_host_is_printed_by_the_first(recipe, capsys, torchrun, tmp_path, monkeypatch, words):
    monkeypatch.setattr(command_parser, "RANK0_REPORT_WAIT_S", 0.01)
    command = ["train", recipe, *SMALL, f"run.dir={tmp_path}/run", *words]
    torchrun(local_rank=0)
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("moefold: error: ")
    torchrun(local_rank=1)
    assert main(command) == 2
    assert capsys.readouterr().err == ""


def test_only_the_first_rank_reports_a_finished_run(recipe, capsys, torchrun, tmp_path):
    write_checkpoint(tmp_path / "run", 10)
    torchrun(local_rank=1)
    words = [f"run.dir={tmp_path}/run", "run.steps=10", "parallel.world_size=2"]
    assert main(["train", recipe, *SMALL, *words]) == 0
    assert capsys.readouterr().out == ""


def test_half_of_a_launchers_environment_is_refused(recipe, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main(["train", recipe, *SMALL]) == 2
    assert "the environment has RANK but not LOCAL_RANK" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.memory_budget_gib=0.0001"], "train.memory_budget_gib=0.0001 is too small"),
        ([], "needs train.memory_budget_gib, and the ranks would run on the CPU"),
    ],
)
def test_a_wrong_budget_is_refused_before_there_are_ranks(recipe, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = [*words, f"run.dir={tmp_path / 'run'}", "parallel.world_size=2", 'train.recompute=["auto"]']
    assert main(["train", recipe, *SMALL, "run.device=auto", "train.global_batch_size=2", *words]) == 2
    # Ranks would print it past this process.
    assert message in capsys.readouterr().err
