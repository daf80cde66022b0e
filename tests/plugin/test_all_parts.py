"""Test all parts of the package together: trained in all kinds of ranks, saved, resumed, planned and verified."""

import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

from moefold.config.base.part import Part
from moefold.config.base.part_registry import find_part
from moefold.config.schema import config_to_dict
from moefold.config.sections.data import DataConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import SETTINGS_FILE
from moefold.data.dataset import ProgramData
from moefold.launch.rank_pool import WorkerPool
from moefold.recipe import load_config
from moefold.verify.distributed_run import run_distributed
from tests.architecture.imports import imports_torch
from tests.e2e.command import TWO, checkpoints, here, losses, metrics, moefold, train
from tests.objectives.losses import policy
from tests.parts.formula_rule import assert_formula
from tests.plugin.recipes import EIGHT, FOUR, PACKAGE, PARTS, SIZES, recipe, words
from tests.slow import slow
from tests.verify.packed_rollouts import PackedRollouts

ROLLOUTS = (
    *(word for word in SIZES if not word.startswith(("data.kind", "run.dtype"))),
    "run.dtype=float32",
    "run.steps=4",
    "checkpoint.every=2",
    "data.kind=task",
    "data.task=sort",
    "data.task_size=2",
    "moe.aux_loss=0.0",
    "rl.group_size=4",
    "rl.updates=2",
    "rollout.max_tokens=3",
)


@pytest.fixture
def file(tmp_path):
    """A file of the user with the class of the package."""
    return Path(shutil.copy(PACKAGE / "inverse_sqrt.py", tmp_path / "parts.py"))


@pytest.mark.parametrize("key", PARTS)
def test_its_formulas_follow_the_rule(key):
    part = find_part(key.partition(".")[2], PARTS[key][0])
    assert part.changes_maths == (part.formula is not Part.formula)
    if part.changes_maths:
        assert_formula(part)


def test_the_package_is_installed_and_no_part_of_the_wheel():
    assert distribution("moefold-plugin-example").version == "0.1"
    assert PACKAGE.parent.parent == Path(__file__).parent


def _run(pool: WorkerPool, forks: bool, cfg, function, *args):
    """Call a function on ranks that are forked or spawned; spawned ranks import torch first, each for itself."""
    ranks = pool if forks else WorkerPool(forks=False)
    return ranks.run(cfg.parallel.world_size, function, cfg, *args, timeout_s=120.0 if forks else 280.0)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("forks", "by_file", "mapping"),
    [
        # Fast: `test_verify_judges_all_and_refuses_an_attention_without_a_formula_by_name`, on these ranks.
        *slow(
            [
                (True, False, FOUR),
                (True, True, FOUR),
                *((forks, by_file, EIGHT) for forks in (True, False) for by_file in (False, True)),
            ]
        ),
    ],
    ids=[
        *("forked-entry point-4", "forked-file-4", "forked-entry point-8", "forked-file-8"),
        *("spawned-entry point-8", "spawned-file-8"),
    ],
)
def test_ranks_equal_one_rank(pool: WorkerPool, forks, by_file, mapping):
    cfg = recipe(*words(by_file=by_file), *mapping)
    ranks = _run(pool, forks, cfg, run_distributed, 2)
    [alone] = pool.run(1, run_distributed, replace(cfg, parallel=ParallelConfig()), 2)
    assert [step.loss for step in ranks[0].steps] == pytest.approx([step.loss for step in alone.steps], rel=1e-12)
    assert [step.lr for step in ranks[0].steps] == pytest.approx([1e-2, 1e-2 * (2 / 3) ** 0.5])
    for found, expected in (
        ({name: value for rank in ranks for name, value in rank.gradients.items()}, alone.gradients),
        ({name: value for rank in ranks for name, value in rank.weights.items()}, alone.weights),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def run_rollouts(cfg, steps, objective):
    found = policy(objective=objective, kl=0.2)
    return run_distributed(cfg, steps, loss=found, data=ProgramData(PackedRollouts(), PackedRollouts()))


REBUILT = """
import json, pickle, sys
from moefold.config.schema import config_to_dict
try:
    print(json.dumps(config_to_dict(pickle.load(sys.stdin.buffer))))
except Exception as error:
    print(error)
"""


def test_parts_of_files_come_to_another_interpreter_if_their_files_are_unchanged(file):
    schedule = words("parallel.schedule", by_file=True)
    cfg = recipe(*schedule, f"train.lr_schedule={{kind = '{file}:InverseSqrt', floor = 0.2}}")
    sent = pickle.dumps(cfg)
    run = [sys.executable, "-c", REBUILT]
    rebuilt = subprocess.run(run, input=sent, capture_output=True, check=True).stdout
    assert json.loads(rebuilt) == json.loads(json.dumps(config_to_dict(cfg)))
    file.write_text(file.read_text() + "\n# changed\n")
    refused = subprocess.run(run, input=sent, capture_output=True, check=True).stdout
    assert b"parts.py:InverseSqrt has changed while the run was starting; start it again" in refused


@pytest.mark.parity
@pytest.mark.parametrize(
    ("forks", "by_file", "mapping"),
    [(True, True, TWO), *slow([(False, True, FOUR), (False, False, EIGHT)])],
    ids=["forked-file-2", "spawned-file-4", "spawned-entry point-8"],
)
def test_all_parts_together_equal_one_rank(pool: WorkerPool, forks, by_file, mapping):
    of_rollouts = words("rl.objective", by_file=by_file)
    objective = load_config(None, ["data.kind=task", "rl.group_size=4", *of_rollouts]).rl.objective
    cfg = replace(recipe(*words(by_file=by_file), *mapping), data=DataConfig(kind="program"))
    ranks = _run(pool, forks, cfg, run_rollouts, 2, objective)
    [alone] = pool.run(1, run_rollouts, replace(cfg, parallel=ParallelConfig()), 2, objective)
    assert "outside" in ranks[0].steps[0].loss_metrics
    found = {name: value for rank in ranks for name, value in rank.weights.items()}
    torch.testing.assert_close(found, alone.weights, rtol=1e-11, atol=1e-13)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["entry point", pytest.param("file", marks=pytest.mark.slow)])
def test_all_six_train_with_rollouts_save_resume_and_generate(tmp_path, kind):
    by_file = kind == "file"
    chosen = words(*PARTS, by_file=by_file)
    run = tmp_path / "run"
    train(run, *ROLLOUTS, *TWO, *chosen)
    assert checkpoints(run) == ["step-000002", "step-000004"]
    assert "outside" in metrics(run)[-1]["rl"]
    settings = json.loads((run / SETTINGS_FILE).read_text())
    again = tmp_path / "again"
    (again / "checkpoints").mkdir(parents=True)
    for name in (SETTINGS_FILE, "metrics.jsonl"):
        shutil.copy(run / name, again / name)
    shutil.copytree(run / "checkpoints" / "step-000002", again / "checkpoints" / "step-000002")
    done = train(again, *ROLLOUTS, *TWO, *chosen)
    assert "resumed" in done.stdout
    assert losses(again) == losses(run)
    asked = ["generate", str(run), "1 2", "--max-tokens", "2", "--device", "cpu"]
    files = [f"{PACKAGE / name}" for _, name, _ in PARTS.values()]
    assert (f" --part {files[0]}" in done.stdout) == by_file
    for key, (_, name, _) in PARTS.items():
        source = settings[key.split(".")[0]][key.split(".")[1]]["from"]
        expected = {"file": str(PACKAGE / name.split(":")[0])} if by_file else {"version": "0.1"}
        assert source.items() >= expected.items()
    if by_file:
        refused = moefold(*asked)
        assert refused.returncode == 2
        assert "was trained with gated_attention.py:Gated" in refused.stderr
        assert f"name it: --part {files[0]}" in refused.stderr
        needed = [file for file, key in zip(files, PARTS, strict=True) if key.startswith(("model.", "moe."))]
        asked += [word for file in needed for word in ("--part", file)]
    done = moefold(*asked)
    assert done.returncode == 0, done.stderr


@pytest.mark.e2e
def test_all_parts_that_a_run_lacks_are_named_at_once(tmp_path):
    run = tmp_path / "run"
    train(run, *SIZES, "checkpoint.every=1", *words("model.attention", "train.lr_schedule", by_file=True))
    files = [f"{PACKAGE / PARTS[key][1]}" for key in ("model.attention", "train.lr_schedule")]
    asked = ("checkpoint", "verify", str(run / "checkpoints" / "step-000001"))
    refused = moefold(*asked)
    assert refused.returncode == 1
    assert all(f"name it: --part {file}" in refused.stdout for file in files), refused.stdout
    named = [word for file in files for word in ("--part", file)]
    assert moefold(*asked, *named).stdout.endswith("step-000001: sound\n")
    exported = moefold("export", asked[-1], str(tmp_path / "hf"), *named)
    family_lacks = "moefold: error: Hugging Face families have no model.attention='gated_attention.py:Gated' ("
    assert (exported.returncode, exported.stderr.startswith(family_lacks)) == (2, True), exported.stderr
    removed = moefold("checkpoint", "rm", asked[-1], *named)
    assert (removed.returncode, removed.stdout) == (0, f"removed {asked[-1]}\n"), removed.stderr
    for command in (("plan", "--help"), ("import", "--help")):
        assert "--part FILE.py:CLASS" in moefold(*command).stdout


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_goes_on_under_another_mapping(tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    settings = (*SIZES, "run.steps=4", "checkpoint.every=2", *words())
    train(run, *settings, *TWO)
    (again / "checkpoints").mkdir(parents=True)
    for name in (SETTINGS_FILE, "metrics.jsonl"):
        shutil.copy(run / name, again / name)
    shutil.copytree(run / "checkpoints" / "step-000002", again / "checkpoints" / "step-000002")
    done = train(again, *settings, "parallel.world_size=2", "parallel.ep=2")
    assert "resumed" in done.stdout
    assert losses(again) == pytest.approx(losses(run), rel=1e-12)


@pytest.mark.e2e
def test_a_changed_file_is_said_when_a_run_goes_on_and_when_it_is_read(tmp_path, file):
    word, run = f"train.lr_schedule={file}:InverseSqrt", tmp_path / "run"
    train(run, word, "run.steps=2", "checkpoint.every=2")
    file.write_text(file.read_text() + "\n# changed\n")
    done = train(run, word, "run.steps=3", "checkpoint.every=2")
    assert "goes on with other settings: train.lr_schedule.from=" in done.stdout
    # Generation needs no schedule of learning rates. A simulation reads the whole recipe.
    done = moefold("generate", str(run), "1 2", "--max-tokens", "2", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    file.write_text(file.read_text() + "\n# again\n")
    done = moefold("simulate", "--run", str(run), "--gpu", "h100", "--part", f"{file}:InverseSqrt")
    assert "the file has changed since" in done.stderr


@pytest.mark.e2e
def test_verify_judges_it_or_refuses_it_by_name(tmp_path, file, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\npreset = "tiny"\n[run]\nsteps = 2\n[data]\nkind = "synthetic"\n'
        "[train]\nseq_len = 16\nmicro_batch_size = 1\nglobal_batch_size = 4\nlr = 1e-2\n"
        'lr_schedule = {kind = "parts.py:InverseSqrt", floor = 0.2, timescale = 2}\n'
    )
    asked = ["verify", str(recipe), *TWO, "--steps", "2"]
    done = here(capsys, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nequal: " in done.stdout
    [note] = [line for line in done.stdout.splitlines() if "NOT checked" in line]
    assert note.startswith(
        "note         NOT checked: whether the formulas from outside share code with what they judge: "
    )
    assert note.count("=") == note.count("train.lr_schedule='parts.py:InverseSqrt' (") == 1
    text = file.read_text()
    file.write_text(f"{text}\n    def formula(self):\n        return self.rate\n")
    refused = here(capsys, *asked)
    assert refused.returncode == 3
    assert "formula() of train.lr_schedule='parts.py:InverseSqrt' (" in refused.stderr
    assert "returns its method rate, so that the code would be compared with itself" in refused.stderr
    file.write_text(text.replace("def formula", "def other_formula"))
    refused = here(capsys, *asked)
    assert refused.returncode == 3
    assert "no formula for train.lr_schedule='parts.py:InverseSqrt' (" in refused.stderr
    assert refused.stderr.endswith("--against one-rank\n")
    done = here(capsys, *asked, "--against", "one-rank")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT judged by the oracle" in done.stdout
    assert "NOT checked" not in done.stdout
    assert "\nequal: " in done.stdout
    # The oracle finds an error of the code.
    file.write_text(file.read_text().replace("return peak * max", "return 2 * peak * max").replace("other_f", "f"))
    assert here(capsys, *asked).returncode == 1


@pytest.mark.e2e
def test_it_is_planned_and_the_planned_recipe_names_it(tmp_path, file, capsys):
    recipe, planned = tmp_path / "recipe.toml", tmp_path / "planned" / "recipe.toml"
    planned.parent.mkdir()
    recipe.write_text('[model]\npreset = "tiny"\n[train]\nlr_schedule = {kind = "parts.py:InverseSqrt", floor = 0.2}\n')
    done = here(capsys, "plan", str(recipe), "--gpu", "h100", "--num-gpus", "8", "--recipe", str(planned))
    assert done.returncode == 0, done.stderr
    assert f'lr_schedule = {{ kind = "{file}:InverseSqrt", floor = 0.2, timescale = 10 }}' in planned.read_text()
    assert load_config(planned).train.lr_schedule == load_config(recipe).train.lr_schedule


@pytest.mark.e2e
def test_verify_judges_all_and_refuses_an_attention_without_a_formula_by_name(tmp_path, capsys):
    empty, file = tmp_path / "recipe.toml", tmp_path / "gated_attention.py"
    empty.touch()
    asked = ["verify", str(empty), *SIZES, *FOUR, *words(), "--steps", "2"]
    done = here(capsys, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dispatcher gathering, schedule eager" in done.stdout
    assert "\nequal: " in done.stdout
    file.write_text((PACKAGE / file.name).read_text().replace("def formula", "def other_formula"))
    asked.append(f"model.attention={file}:Gated")
    refused = here(capsys, *asked)
    assert refused.returncode == 3
    assert "no formula for model.attention='gated_attention.py:Gated' (" in refused.stderr
    # Its formula does not read wg.
    file.write_text((PACKAGE / file.name).read_text().replace('"wv", "wg"))', '"wv", "wv"))'))
    refused = here(capsys, *asked)
    assert refused.returncode == 3
    assert ".wg" in refused.stderr.partition(" of model.attention='gated_attention.py:Gated' (")[0]
    assert "write formula() of Gated" in refused.stderr


@pytest.mark.e2e
def test_a_mapping_of_all_is_planned_and_counted(tmp_path, capsys):
    path, planned = tmp_path / "recipe.toml", tmp_path / "planned.toml"
    sizes = 'model.preset = "tiny"', "train.seq_len = 16", "train.global_batch_size = 8"
    path.write_text("\n".join((*words(), *sizes)))
    fixed = "tp=2,cp=1,pp=2,ep=2,etp=1,mbs=1,schedule=eager,dispatcher=gathering"
    asked = ["plan", str(path), "--gpu", "h100", "--num-gpus", "8", "--fix", fixed]
    done = here(capsys, *asked, "--recipe", str(planned), "--json")
    assert done.returncode == 0, done.stderr
    [best, *_] = json.loads(done.stdout)["mappings"]
    assert (best["schedule"], best["dispatcher"]) == ("eager", "gathering")
    cfg = load_config(planned)
    assert cfg.model.attention == recipe(*words()).model.attention
    assert cfg.train.optimizer == recipe(*words()).train.optimizer
    done = here(capsys, "memory", str(path), "run.device=cpu", *FOUR)
    assert done.returncode == 0, done.stderr


def test_it_is_read_without_torch():
    assert imports_torch(["moefold_plugin_example.inverse_sqrt"]) == []
