"""Every recipe of the repository is legal, and faults of different rules are listed together."""

import subprocess
import sys
from pathlib import Path

import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.train.machine_checks import check_machine
from moefold.validate.config import check_config

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, overrides))
    return str(error.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_is_legal(path):
    cfg = load_config(path)
    layout = check_config(cfg)
    assert (layout.world_size, layout.dp, layout.edp) == (cfg.parallel.world_size, cfg.parallel.dp, cfg.parallel.edp)


def test_the_layout_follows_degrees_and_orders():
    layout = check_config(
        load_config(
            None,
            [
                "parallel.world_size=8",
                "parallel.tp=2",
                "parallel.ep=2",
                "parallel.order=pp-tp-dp-cp",
                "parallel.moe_order=pp-ep-edp-etp",
            ],
        )
    )
    assert layout.attention.groups("tp")[0] == (0, 4)
    assert layout.moe.groups("ep")[0] == (0, 4)


def test_the_quickstart_runs_on_one_rank_too():
    quickstart = next(path for path in RECIPES if path.stem == "quickstart")
    degrees = [f"parallel.{axis}=1" for axis in ("world_size", "tp", "cp", "pp", "ep", "etp")]
    assert check_config(load_config(quickstart, degrees)).world_size == 1


@pytest.mark.parametrize(
    ("overrides", "dp", "edp", "num_micro_batches"),
    [
        ([], 8, 2, 16),
        (["parallel.world_size=128"], 16, 4, 8),
        (["train.seq_len=16384", "parallel.cp=4"], 2, 2, 64),
    ],
)
def test_the_variants_that_the_mixtral_recipe_speaks_of_are_legal(overrides, dp, edp, num_micro_batches):
    cfg = load_config(next(path for path in RECIPES if path.stem == "mixtral-8x7b"), overrides)
    layout = check_config(cfg)
    assert (layout.dp, layout.edp, cfg.num_micro_batches) == (dp, edp, num_micro_batches)
    assert layout.moe.group(8, "ep") == tuple(range(8, 16))


def test_faults_of_different_rules_are_listed_together():
    lines = refused("model.ffn.moe.top_k=9", "train.lr_schedule.min_lr=1", "train.warmup_steps=200").splitlines()
    assert lines[0] == "3 settings cannot work:"
    assert [line.split()[0] for line in lines[1:]] == [
        "model.ffn.moe.top_k=9",
        "train.lr_schedule.min_lr=1.0",
        "train.warmup_steps=200",
    ]


def test_rules_between_keys_wait_for_sound_keys():
    assert (
        refused("model.attention.num_heads=0", "model.ffn.moe.top_k=9")
        == "model.attention.num_heads=0 must be at least 1"
    )


def test_check_machine_accepts_a_fresh_folder_and_creates_nothing(tmp_path):
    check_machine(load_config(None, [f"run.dir={tmp_path / 'runs' / 'new'}", "data.kind=synthetic"]))
    assert list(tmp_path.iterdir()) == []


def test_check_machine_looks_at_the_data(tmp_path):
    cfg = load_config(None, [f"run.dir={tmp_path}", "data.kind=text", f"data.path={tmp_path / 'none.txt'}"])
    with pytest.raises(ConfigError, match=r"data\.path"):
        check_machine(cfg)


def test_no_check_imports_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from moefold.recipe import load_config;"
        "from moefold.train.machine_checks import check_machine; from moefold.validate.config import check_config;"
        "cfg = load_config(Path(sys.argv[1]), sys.argv[2:]); check_config(cfg); check_machine(cfg);"
        "print('torch' in sys.modules)"
    )
    single = next(path for path in RECIPES if path.stem == "single")
    words = [sys.executable, "-c", code, str(single), f"run.dir={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
