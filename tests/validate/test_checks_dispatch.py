"""Obstacles of dispatchers are refused by name, and `auto` avoids them."""

import importlib.machinery
import importlib.util
from dataclasses import replace

import pytest

from moefold.config.chosen import chosen
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.load import config_from_dict
from moefold.config.rule import apply_rule
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.validate.config import check_config
from moefold.validate.moe import check_dispatch_device, check_dispatch_package


def _recipe(dispatcher: str = "deepep", **sections: dict[str, object]) -> Config:
    parallel = {"world_size": 4, "ep": 4, "dispatcher": dispatcher} | sections.pop("parallel", {})
    return config_from_dict({"data": {"kind": "synthetic"}, "parallel": parallel, **sections})


OBSTACLES = [
    ({"parallel": {"ep": 2, "etp": 2}}, "parallel.etp=2 shards the experts"),
    ({"moe": {"capacity_factor": 1.0, "pad_to_capacity": True}}, "moe.pad_to_capacity=true pads"),
    ({"run": {"dtype": "float32"}}, "deep_ep supports only bfloat16, and run.dtype='float32'"),
    (
        {"faults": {"check_dispatch": True}},
        "does not expose its row counts, and faults.check_dispatch=true compares them",
    ),
    ({"run": {"device": "cpu"}}, "deep_ep needs CUDA GPUs, and run.device='cpu'"),
    (
        {"model": {"hidden_size": 36, "attention.num_heads": 2, "attention.num_kv_heads": 2, "attention.head_dim": 18}},
        "units of 16 bytes, and model.hidden_size=36 is not a multiple of 8",
    ),
    (
        {
            "model": {
                "hidden_size": 64,
                "attention.num_heads": 2,
                "attention.num_kv_heads": 2,
                "attention.head_dim": 32,
            },
            "moe": {"dispatch_precision": "fp8-blockwise"},
        },
        "with moe.dispatch_precision='fp8-blockwise' model.hidden_size=64 is not a multiple of that",
    ),
]


SYMM_MEM_OBSTACLES = [
    ({"parallel": {"ep": 2, "etp": 2}}, "parallel.etp=2 shards the experts"),
    ({"moe": {"capacity_factor": 1.0, "pad_to_capacity": True}}, "'alltoall' waits for nothing either"),
    ({"moe": {"dispatch_precision": "fp8-blockwise"}}, "moe.dispatch_precision='fp8-blockwise'"),
    ({"model": {"ffn.moe.bias": True}}, "model.ffn.moe.bias=true adds the bias of an expert to each row"),
    ({"faults": {"check_dispatch": True}}, "faults.check_dispatch=true compares them on the host"),
    ({"parallel": {"overlap_experts": True}}, "parallel.overlap_experts=true computes meanwhile"),
    ({"run": {"device": "cpu"}}, "it needs CUDA GPUs, and run.device='cpu'"),
]


@pytest.mark.parametrize(("sections", "reason"), SYMM_MEM_OBSTACLES)
def test_each_obstacle_of_symmetric_memory_is_refused_by_name(sections, reason):
    with pytest.raises(ConfigError) as caught:
        check_config(_recipe("symm_mem", **sections))
    assert "parallel.dispatcher='symm_mem' cannot run: " in str(caught.value)
    assert f"{reason}; choose 'alltoall', or 'auto'" in str(caught.value)


def test_symmetric_memory_needs_the_cuda_build_of_torch(monkeypatch):
    check_config(_recipe("symm_mem"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    cfg = _recipe("symm_mem")
    with pytest.raises(ConfigError, match=r"'symm_mem' needs the package nvidia.nvshmem, which is not installed"):
        check_dispatch_package(cfg.model, cfg.parallel)


def test_a_plain_recipe_has_no_obstacle():
    assert list(apply_rule(chosen(_recipe(), DispatcherPart).unsupported, _recipe())) == []
    check_config(_recipe())


@pytest.mark.parametrize(("sections", "reason"), OBSTACLES)
def test_each_obstacle_is_refused_by_name_and_accepted_under_auto(sections, reason):
    cfg = _recipe(**sections)
    with pytest.raises(ConfigError) as caught:
        check_config(cfg)
    message = str(caught.value)
    assert message.startswith("parallel.dispatcher='deepep' cannot run: ")
    assert f"{reason}; choose 'alltoall', or 'auto'" in message
    check_config(replace(cfg, parallel=replace(cfg.parallel, dispatcher="auto")))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"parallel": {"ep": 2, "etp": 2}},
            "sends tokens to whole experts, and parallel.etp=2 shards the experts; choose 'alltoall', or etp=1",
        ),
        (
            {"moe": {"capacity_factor": 1.0, "pad_to_capacity": True}},
            "has a row for a token and a rank, and moe.pad_to_capacity=true pads the rows of an expert; choose "
            "'alltoall', or pad_to_capacity=false",
        ),
        ({"parallel": {"world_size": 1, "ep": 1}}, "choose 'alltoall' or 'auto', or ep or etp of 2 or more"),
    ],
)
def test_dispatch_without_duplicates_refuses_unsupported_settings(sections, message):
    check_config(_recipe("dedup_alltoall"))
    with pytest.raises(ConfigError) as caught:
        check_config(_recipe("dedup_alltoall", **sections))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["auto", "alltoall"])
def test_the_package_matters_only_where_deepep_is_named(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    cfg = _recipe(name)
    check_dispatch_package(cfg.model, cfg.parallel)
    recipe = _recipe(parallel={"world_size": 1, "ep": 1})
    check_dispatch_package(recipe.model, recipe.parallel)
    given = _recipe()
    with pytest.raises(ConfigError, match="'deepep' needs the package deep_ep, which is not installed"):
        check_dispatch_package(given.model, given.parallel)


def test_a_package_that_is_there_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "deep_ep.py").write_text("raise RuntimeError('imported')")
    assert chosen(_recipe(), DispatcherPart).has_package() == (
        importlib.machinery.PathFinder.find_spec("deep_ep") is not None
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert chosen(_recipe(), DispatcherPart).has_package()
    cfg = _recipe()
    check_dispatch_package(cfg.model, cfg.parallel)


def test_a_device_that_is_not_a_gpu_is_refused():
    cfg = _recipe()
    check_dispatch_device(cfg.model, cfg.parallel, "cuda")
    recipe = _recipe("auto")
    check_dispatch_device(recipe.model, recipe.parallel, "cpu")
    given = _recipe()
    with pytest.raises(ConfigError, match="needs CUDA GPUs, and the ranks would run on the CPU"):
        check_dispatch_device(given.model, given.parallel, "cpu")
