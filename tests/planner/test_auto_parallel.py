"""`parallel="auto"` chooses a legal mapping that fits, and keeps what the recipe gives."""

import re
from pathlib import Path

import pytest

from moefold.cost.hardware import DetectedMachine
from moefold.errors import ConfigError
from moefold.launch.detect_hardware import planner_gpu_name, slowest_machine
from moefold.planner.auto_parallel import plan_mapping
from moefold.planner.plan_request import PlanOptions, plan_request
from moefold.planner.search.constraints import MappingConstraints, Restriction
from moefold.planner.search.space import MappingSpace
from moefold.recipe import load_recipe
from moefold.validate.config import check_config

RECIPE = """parallel = "auto"
[run]
device = "cpu"
dtype = "float32"
[model]
preset = "tiny"
[train]
seq_len = 64
global_batch_size = 6
"""


def planned(tmp_path: Path, *overrides: str, ranks: int = 4, launched: bool = False, memory_gib: float = 16.0):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return plan_mapping(*load_recipe(path, overrides)[:2], DetectedMachine("cpu", "cpu", ranks, launched, memory_gib))


def test_the_chosen_mapping_is_legal_and_told(tmp_path):
    cfg, words = planned(tmp_path)
    check_config(cfg)
    assert cfg.parallel.mapping == "given"
    assert cfg.run.device == "cpu"
    assert words.startswith(f"parallel = auto: tp={cfg.parallel.tp} ")
    assert "bound by" in words


def test_sparse_attention_is_searched_with_its_kind_of_cp(tmp_path):
    words = ["model.attention.indexer.top_k=8", "model.attention.indexer.head_dim=16", "parallel.cp=2"]
    cfg, _ = planned(tmp_path, *words, "parallel.world_size=2")
    assert (cfg.parallel.cp, cfg.parallel.context.kind) == (2, "allgather")
    options = PlanOptions(num_gpus=16, seq_len=4096, global_batch_size=64)
    constraints = MappingConstraints(plan_request("glm-5", "h100", options).base_config)
    assert {fold.cp for fold, _ in MappingSpace(constraints, Restriction({"tp": 1, "pp": 1})).folds} == {1, 2, 4, 8, 16}


def test_a_margin_of_memory_stays_free(tmp_path):
    # 16 GiB for four ranks, less half a GiB for each process.
    assert "0.2 of 3.5 GiB (5%) are left free" in planned(tmp_path)[1]
    large = ("model.hidden_size=8192", "model.layers=12")
    with pytest.raises(ConfigError, match=r"\(0\.502 less 0\.0 kept free\)"):
        planned(tmp_path, *large, "parallel.world_size=4", "parallel.tp=1", "parallel.pp=1", memory_gib=4.008)


def test_products_that_are_simulated_are_told(tmp_path):
    cfg, words = planned(tmp_path, "train.precision=mxfp8")
    assert cfg.train.precision == "mxfp8"
    assert "priced in float32: train.precision='mxfp8' is simulated" in words
    assert "simulated" not in planned(tmp_path)[1]


def test_a_gpu_with_the_units_is_priced_with_them(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("float32", "bfloat16").replace('"cpu"', '"cuda"'))
    machine = DetectedMachine("cuda", "b200", 4, False, 0.0)
    plain, narrow = (plan_mapping(*load_recipe(path, words)[:2], machine) for words in ([], ["train.precision=mxfp8"]))
    assert plain[1] != narrow[1]
    assert "simulated" not in narrow[1]


def test_a_type_without_a_price_is_told(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace('"cpu"', '"cuda"'))
    machine = DetectedMachine("cuda", "b200", 4, False, 0.0)
    cfg, words = plan_mapping(*load_recipe(path, ["run.dtype=float64"])[:2], machine)
    assert cfg.run.dtype == "float64"
    assert words.endswith(
        "\n  priced in bf16: run.dtype='float64' has no price, as nothing is known of b200 in float64"
    )
    assert "has no price" not in plan_mapping(*load_recipe(path, ["run.dtype=float32"])[:2], machine)[1]


def test_axes_given_beside_auto_are_kept(tmp_path):
    cfg, _ = planned(tmp_path, "parallel.world_size=2", "parallel.ep=2", "train.micro_batch_size=3")
    assert (cfg.parallel.world_size, cfg.parallel.ep, cfg.train.micro_batch_size) == (2, 2, 3)


def test_as_many_devices_are_taken_as_some_mapping_uses(tmp_path):
    cfg, _ = planned(tmp_path, ranks=7)
    assert 1 < cfg.parallel.world_size <= 6


def test_all_ranks_of_a_launcher_are_taken(tmp_path):
    assert planned(tmp_path, ranks=2, launched=True)[0].parallel.world_size == 2
    with pytest.raises(ConfigError, match="no mapping of 7 GPUs"):
        planned(tmp_path, ranks=7, launched=True)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["parallel.dispatcher=local", "parallel.ep=4"], "parallel.dispatcher='local' needs ep=etp=1"),
        (["parallel.zero=3", "parallel.overlap_experts=true"], "parallel.zero=3 frees its parameters after one"),
        (["parallel.pipeline_layout=Et"], "parallel.pipeline_layout='Et'"),
        (['train.recompute=["auto"]', "train.memory_budget_gib=1"], "leave out train.recompute and train.memory_b"),
    ],
)
def test_keys_under_which_nothing_is_legal_are_named(tmp_path, keys, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        planned(tmp_path, *keys)


def test_too_little_memory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"parallel.world_size=2 leaves 0.25 GiB"):
        planned(tmp_path, "parallel.world_size=2", memory_gib=0.5)


@pytest.mark.parametrize(
    ("driver", "name"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GB200", "gb200"), ("AMD Instinct MI300X", "mi300x")],
)
def test_the_driver_s_name_is_understood(driver, name):
    assert planner_gpu_name(driver) == name


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ConfigError, match="--gpu FILE.toml"):
        planner_gpu_name("NVIDIA GeForce RTX 3090")


def test_a_plan_is_for_the_device_of_least_memory():
    machines = [DetectedMachine("cuda", name, 3, True, 0.0, name) for name in ("h200", "h100", "h200")]
    assert slowest_machine(machines).device == "h100"


def test_a_plan_is_for_the_rank_whose_machine_has_least_memory_for_each():
    # 16 GiB for two ranks, and 12 GiB for one.
    machines = [
        DetectedMachine("cpu", "cpu", 3, True, gib, host) for gib, host in ((16.0, "a"), (16.0, "a"), (12.0, "b"))
    ]
    assert slowest_machine(machines).memory_gib == pytest.approx(3 * 8.0)
    assert slowest_machine(machines[:1]).memory_gib == pytest.approx(16.0)


def test_ranks_with_and_without_gpus_have_no_plan():
    machines = [DetectedMachine("cuda", "h100", 2, True, 0.0, "a"), DetectedMachine("cpu", "cpu", 2, True, 16.0, "b")]
    with pytest.raises(ConfigError, match="rank 1 on b has cpu; set run.device='cpu'"):
        slowest_machine(machines)
