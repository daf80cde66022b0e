"""The recipes of recipes/pretrain and recipes/finetune: valid, as planned, and small enough for their GPUs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planned_recipes import (
    FIXED_AXES,
    PAGE,
    REASONS,
    PlannedRecipe,
    page_with_table,
    plan_again,
    planned_recipes,
    read_head,
    reasons,
)
from moefold.cli.main import main
from moefold.config.schema import Config
from moefold.config.sections.sites import SitesConfig
from moefold.cost.hardware import load_device
from moefold.host.memory import AvailableMemory
from moefold.recipe import load_config
from moefold.validate.config import check_config
from moefold.validate.memory_need import HostCapacity, check_training_fits

pytestmark = pytest.mark.usefixtures("forks_without_threads")

ROOT = Path(__file__).parents[2]
FOLDERS = ("pretrain", "finetune")
PLANNED = planned_recipes()
KEYS = {"tp": "tp", "cp": "cp", "pp": "pp", "ep": "ep", "etp": "etp", "zero": "zero"}
FAMILIES = (
    "pretrain/qwen3-30b-a3b-256xh100",
    "pretrain/mixtral-8x7b-8xh100",
    "pretrain/deepseek-v2-lite-64xh100",
    "pretrain/olmoe-1b-7b-256xh100",
    "pretrain/qwen3-30b-a3b-128k-64xh100",
    "finetune/qwen3-30b-a3b-sft-8xh100",
)


def by_path(recipe: PlannedRecipe) -> str:
    return str(recipe.path)


def base_of(recipe: PlannedRecipe) -> Path:
    return ROOT / recipe.command[1]


def test_every_recipe_of_the_folders_is_planned_or_is_planned_from():
    paths = {path for folder in FOLDERS for path in (ROOT / "recipes" / folder).iterdir()}
    assert paths == {ROOT / recipe.path for recipe in PLANNED} | {base_of(recipe) for recipe in PLANNED}
    pretraining = {(path.stem, size) for path in paths for size in (8, 64, 256) if path.parent.name == "pretrain"}
    written = {(base_of(recipe).stem, recipe.num_gpus) for recipe in PLANNED}
    for name in ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "olmoe-1b-7b"):
        assert {(name, size) for size in (8, 64, 256)} <= pretraining & written


@pytest.mark.parametrize("recipe", PLANNED, ids=by_path)
def test_a_planned_recipe_is_valid_has_the_mapping_of_its_head_and_fits(recipe):
    cfg = load_config(ROOT / recipe.path)
    check_config(cfg)
    assert recipe.path.stem == f"{base_of(recipe).stem}-{recipe.num_gpus}x{recipe.gpu}"
    assert recipe.command[-1] == str(recipe.path)
    assert cfg.parallel.world_size == recipe.num_gpus
    assert {axis: str(getattr(cfg.parallel, key)) for axis, key in KEYS.items()} == {
        axis: recipe.mapping[axis] for axis in KEYS
    }
    assert str(cfg.train.micro_batch_size) == recipe.mapping["mbs"]
    memory_gib = load_device(recipe.gpu).memory_gib
    # A tenth of a GPU stays free, for memory that no formula counts.
    assert recipe.memory_gib <= 0.9 * memory_gib
    memory = AvailableMemory(int(memory_gib * 2**30), "GPU")
    check_training_fits(cfg, HostCapacity("cuda", tuple(range(cfg.parallel.pp)), memory))


@pytest.mark.parametrize("recipe", PLANNED, ids=by_path)
def test_a_planned_recipe_differs_from_its_base_only_in_planned_keys(recipe):
    base = load_config(base_of(recipe))
    assert base.parallel.mapping == "auto"
    assert settings(load_config(ROOT / recipe.path)) == settings(base)


def settings(cfg: Config) -> Config:
    """Return a recipe without the keys that a planner sets."""
    train = replace(
        cfg.train, micro_batch_size=1, recompute=(), offload=(), offload_optimizer="none", offload_waits=False
    )
    parallel = replace(Config().parallel, context=cfg.parallel.context)
    rounds = {key: getattr(SitesConfig(), key) for key in ("every", "overlap", "keep_local", "precision")}
    sites = replace(cfg.sites, **rounds)
    return replace(cfg, train=train, parallel=parallel, sites=sites, run=replace(cfg.run, device="auto"))


def test_the_table_of_the_page_equals_the_recipes():
    page = PAGE.read_text()
    assert page == page_with_table(page)


@pytest.mark.parametrize("recipe", PLANNED, ids=by_path)
def test_the_head_has_a_reason_for_each_axis(recipe):
    line = next(line for line in (ROOT / recipe.path).read_text().splitlines() if line.startswith(REASONS))
    reasons = dict(entry.split(": ", 1) for entry in line.removeprefix(REASONS).rstrip(".").split("; "))
    assert tuple(reasons) == FIXED_AXES
    for axis, found in reasons.items():
        assert recipe.mapping[axis] not in [other.split()[0] for other in found.split(", ")]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", PLANNED, ids=by_path)
def test_planning_again_gives_the_same_recipe(recipe):
    lines = (ROOT / recipe.path).read_text().splitlines(keepends=True)
    assert plan_again(recipe) == "".join(line for line in lines if not line.startswith(REASONS))


@pytest.mark.slow
def test_the_reasons_also_change_an_axis_that_the_command_fixes():
    path = Path("recipes/pretrain/mixtral-8x7b-256xh100.toml")
    assert "--fix tp=2" in (text := (ROOT / path).read_text())
    line = reasons(read_head(path))
    assert "tp: 1 " in line
    assert line in text


@pytest.mark.slow
@pytest.mark.parametrize("recipe", PLANNED, ids=by_path)
def test_the_built_model_needs_no_more_memory_than_the_planner_says(capsys, recipe):
    words = ["--dry", "--device", "cuda", "--imbalance", "1.2", "--json"]
    assert main(["memory", str(ROOT / recipe.path), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    fullest = max(rank["total"] for rank in found["ranks"]) / 2**30
    assert 0.7 * recipe.memory_gib < fullest < recipe.memory_gib


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("name", FAMILIES)
def test_a_shrunk_recipe_equals_one_process(name):
    assert main(["verify", str(ROOT / "recipes" / f"{name}.toml"), "--shrink"]) == 0
