"""The package of this folder and a file of it: trained in all kinds of ranks, saved, resumed, used, planned, judged."""

import json
import shutil
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import moefold_plugin_example
import pytest

from moefold.recipe import load_config
from moefold.train.run_folder import SETTINGS_FILE
from moefold.verify.distributed_run import run_distributed
from moefold.verify.ranks.pool import WorkerPool
from tests.architecture.test_imports import imports_torch
from tests.e2e.command import checkpoints, losses, metrics, moefold, train
from tests.verify.recipes import tiny

MAPPING = ("parallel.world_size=4", "parallel.tp=2", "parallel.pp=2", "parallel.ep=2")
SETTINGS = ("train.lr_schedule.floor=0.2", "train.lr_schedule.timescale=2")
WORD = "train.lr_schedule=inverse_sqrt"
SAVES = ("run.steps=4", "checkpoint.every=2", "train.lr=1e-2")


@pytest.fixture
def file(tmp_path):
    """A file of the user with the class of the package."""
    return Path(shutil.copy(Path(moefold_plugin_example.__file__).with_name("inverse_sqrt.py"), tmp_path / "parts.py"))


def expected_rates():
    return [1e-2 * max(0.2, (2 / (2 + step)) ** 0.5) for step in range(4)]


def test_the_package_is_installed_and_no_part_of_the_wheel():
    assert distribution("moefold-plugin-example").version == "0.1"
    assert Path(moefold_plugin_example.__file__).parent.parent.parent == Path(__file__).parent


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["entry point", "file"])
def test_it_trains_saves_resumes_and_generates(tmp_path, file, kind):
    word = WORD if kind == "entry point" else f"train.lr_schedule={file}:InverseSqrt"
    run = tmp_path / "run"
    train(run, word, *SETTINGS, *MAPPING, *SAVES)
    assert checkpoints(run) == ["step-000002", "step-000004"]
    assert [record["lr"] for record in metrics(run)] == pytest.approx(expected_rates())
    table = json.loads((run / SETTINGS_FILE).read_text())["train"]["lr_schedule"]
    assert (table["floor"], table["timescale"]) == (0.2, 2)
    again = tmp_path / "again"
    (again / "checkpoints").mkdir(parents=True)
    for name in (SETTINGS_FILE, "metrics.jsonl"):
        shutil.copy(run / name, again / name)
    shutil.copytree(run / "checkpoints" / "step-000002", again / "checkpoints" / "step-000002")
    done = train(again, word, *SETTINGS, *SAVES, "parallel.world_size=1")
    assert "resumed" in done.stdout
    assert losses(again) == pytest.approx(losses(run), rel=1e-5)
    words = ["generate", str(run), "1 2", "--max-tokens", "2", "--device", "cpu"]
    if kind == "file":
        assert table["from"]["file"] == str(file)
        refused = moefold(*words)
        assert refused.returncode == 2
        assert "was trained with parts.py:InverseSqrt" in refused.stderr
        assert "name it: --part parts.py:InverseSqrt" in refused.stderr
        words += ["--part", f"{file}:InverseSqrt"]
    else:
        assert table["from"] == {"distribution": "moefold-plugin-example", "version": "0.1"}
    done = moefold(*words)
    assert done.returncode == 0, done.stderr


@pytest.mark.e2e
def test_a_changed_file_is_said_when_a_run_goes_on_and_when_it_is_read(tmp_path, file):
    word, run = f"train.lr_schedule={file}:InverseSqrt", tmp_path / "run"
    train(run, word, "run.steps=2", "checkpoint.every=2")
    file.write_text(file.read_text() + "\n# changed\n")
    done = train(run, word, "run.steps=3", "checkpoint.every=2")
    assert "goes on with other settings: train.lr_schedule=" in done.stdout
    done = moefold("generate", str(run), "1 2", "--max-tokens", "2", "--device", "cpu", "--part", f"{file}:InverseSqrt")
    assert done.returncode == 0, done.stderr
    file.write_text(file.read_text() + "\n# again\n")
    done = moefold("generate", str(run), "1 2", "--max-tokens", "2", "--device", "cpu", "--part", f"{file}:InverseSqrt")
    assert "the file has changed since" in done.stderr


def _rates(cfg):
    return [step.lr for step in run_distributed(cfg, 3).steps]


@pytest.mark.parity
@pytest.mark.parametrize("forks", [True, False], ids=["forked", "spawned"])
def test_ranks_get_the_part(pool, file, forks):
    one = tiny(world_size=2, tp=2, train={"lr": 1e-2})
    ranks = pool if forks else WorkerPool(forks=False)
    for kind in ("inverse_sqrt", f"{file}:InverseSqrt"):
        part = load_config(None, [f"train.lr_schedule={kind}", *SETTINGS]).train.lr_schedule
        for rates in ranks.run(2, _rates, replace(one, train=replace(one.train, lr_schedule=part))):
            assert rates == pytest.approx(expected_rates()[:3])


@pytest.mark.e2e
def test_verify_judges_it_or_refuses_it_by_name(tmp_path, file):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\npreset = "tiny"\n[run]\nsteps = 3\n[data]\nkind = "synthetic"\n'
        "[train]\nseq_len = 16\nmicro_batch_size = 1\nglobal_batch_size = 4\nlr = 1e-2\n"
        'lr_schedule = {kind = "parts.py:InverseSqrt", floor = 0.2, timescale = 2}\n'
    )
    words = ["verify", str(recipe), *MAPPING, "--steps", "3"]
    done = moefold(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nequal: " in done.stdout
    file.write_text(file.read_text().replace("def formula", "def other_formula"))
    refused = moefold(*words)
    assert refused.returncode == 3
    assert "no formula for train.lr_schedule='parts.py:InverseSqrt' (" in refused.stderr
    assert refused.stderr.endswith("--against one-rank\n")
    done = moefold(*words, "--against", "one-rank")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT judged by the oracle" in done.stdout
    assert "\nequal: " in done.stdout
    # The oracle finds an error of the code, one rank of the same code does not.
    file.write_text(file.read_text().replace("return peak * max", "return 2 * peak * max").replace("other_f", "f"))
    assert moefold(*words).returncode == 1
    assert moefold(*words, "--against", "one-rank").returncode == 0


@pytest.mark.e2e
def test_it_is_planned_and_the_planned_recipe_names_it(tmp_path, file):
    recipe, planned = tmp_path / "recipe.toml", tmp_path / "planned" / "recipe.toml"
    planned.parent.mkdir()
    recipe.write_text('[model]\npreset = "tiny"\n[train]\nlr_schedule = {kind = "parts.py:InverseSqrt", floor = 0.2}\n')
    done = moefold("plan", str(recipe), "--gpu", "h100", "--num-gpus", "8", "--recipe", str(planned))
    assert done.returncode == 0, done.stderr
    assert f'lr_schedule = {{ kind = "{file}:InverseSqrt", floor = 0.2, timescale = 10 }}' in planned.read_text()
    assert load_config(planned).train.lr_schedule == load_config(recipe).train.lr_schedule


def test_it_is_read_without_torch():
    assert imports_torch(["moefold_plugin_example.inverse_sqrt"]) == []
