"""Any legal recipe shrinks to a small legal one with the same mapping and kinds of layers."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.cost.flops import count_parameters
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config
from moefold.verify.shrink import changed_axes, shrink
from tests.models import config_of, edit_model

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
PRESETS = ("mixtral-8x7b", "mixtral-8x22b", "qwen2-57b-a14b", "qwen3-30b-a3b", "qwen3-235b-a22b", "quickstart")
PRESETS += ("deepseek-v2-lite", "deepseek-v3", "olmoe-1b-7b", "gpt-oss-20b")
KEPT = ("order", "moe_order", "schedule", "zero", "dispatcher", "context")
AXES = ("tp", "cp", "pp", "ep", "etp", "dp", "edp", "virtual_stages")


def preset(name: str, batch: int = 64, **parallel: object) -> Config:
    words = [f"model.preset={name}", "train.seq_len=4096", f"train.global_batch_size={batch}"]
    return load_config(None, [*words, *(f"parallel.{key}={value}" for key, value in parallel.items())])


def mappings() -> list[dict[str, object]]:
    found = []
    for tp, cp, pp, ep, etp in product((1, 2, 4, 8), (1, 2), (1, 2), (1, 4, 8), (1, 2)):
        kinds = {"context": ("ring", "ulysses", "allgather")[(tp + ep) % 3], "zero": (tp + cp + pp) % 4}
        found.append({"world_size": 64, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp, **kinds})
    found.append({"world_size": 64, "pp": 4, "schedule": "interleaved", "virtual_stages": 2, "ep": 8})
    return found


@pytest.mark.parametrize(("number", "name"), enumerate(PRESETS), ids=PRESETS)
def test_any_legal_recipe_shrinks_to_a_legal_one_with_its_mapping(number, name):
    """Each preset has every other mapping: two presets have all."""
    tried = 0
    for mapping in mappings()[number % 2 :: 2]:
        cfg = preset(name, **mapping)
        try:
            check_config(cfg)
        except ConfigError:
            continue
        tried += 1
        small = shrink(cfg)
        check_config(small)
        assert all(getattr(small.parallel, key) == getattr(cfg.parallel, key) for key in KEPT)
        for axis in AXES:
            there, here = getattr(cfg.parallel, axis), getattr(small.parallel, axis)
            assert there % here == 0
            assert min(there, 2) <= here
        assert small.parallel.world_size <= cfg.parallel.world_size
        assert count_parameters(small.model).total < 300_000
        assert small.model.ffn.moe.num_experts == 1 or small.model.ffn.moe.top_k < small.model.ffn.moe.num_experts
        assert small.data == DataConfig(kind="synthetic")
        assert small.num_micro_batches > 1
    assert tried > 10


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_shrinks(recipe):
    large = load_config(recipe, [])
    small = shrink(large)
    assert small.parallel.world_size <= 16
    assert changed_axes(large.parallel, small.parallel)[1] == []


def test_degrees_are_lowered_only_to_stay_within_the_ranks_asked_for():
    words = ["parallel.schedule=interleaved", "parallel.virtual_stages=8"]
    large = load_config(RECIPES[0].parent / "mixtral-8x7b.toml", words)
    p = shrink(large).parallel
    assert (p.world_size, p.tp, p.pp, p.dp, p.ep, p.edp, p.virtual_stages) == (16, 2, 4, 2, 2, 2, 2)
    assert changed_axes(large.parallel, p) == (["ep 8 -> 2", "dp 8 -> 2", "virtual_stages 8 -> 2"], [])
    p = shrink(large, max_ranks=64).parallel
    assert (p.world_size, p.tp, p.pp, p.dp, p.ep, p.edp) == (64, 2, 4, 8, 8, 2)
    # Fewer than every axis takes: the fewest ranks that have all of them.
    p = shrink(large, max_ranks=2).parallel
    assert (p.world_size, p.tp, p.pp, p.dp, p.ep, p.edp) == (8, 2, 2, 2, 2, 2)


def test_data_parallelism_stays_where_there_are_few_ranks():
    small = shrink(preset("qwen3-30b-a3b", world_size=64, tp=2, ep=2)).parallel
    assert (small.world_size, small.dp, small.edp) == (4, 2, 2)
    small = shrink(preset("qwen3-30b-a3b", world_size=64, tp=2, ep=32)).parallel
    assert (small.world_size, small.dp, small.ep, small.edp) == (16, 8, 8, 2)
    small = shrink(preset("qwen3-30b-a3b", world_size=4, tp=2, cp=2, ep=4)).parallel
    assert (small.world_size, small.dp, small.edp) == (4, 1, 1)


def test_an_order_that_folds_over_some_worlds_only_stays_legal():
    # tp*dp = etp*edp = stride of pp: a smaller world changes both.
    cfg = preset(
        "quickstart", world_size=16, tp=2, cp=2, pp=2, ep=2, etp=2, order="cp-pp-tp-dp", moe_order="ep-pp-etp-edp"
    )
    check_config(cfg)
    assert shrink(cfg).parallel.order == "cp-pp-tp-dp"


def test_kinds_of_layers_and_an_uneven_cut_stay():
    cfg = preset("quickstart", world_size=4, pp=4)
    model = edit_model(
        cfg.model, {"layers": 6, "layers.ffn": "dense, 5 moe", "tie_embeddings": True, "attention.qk_norm": {}}
    )
    small = shrink(replace(cfg, model=model)).model
    assert small.num_layers == 5
    assert {layer.ffn.is_routed for layer in small.decoder_layers} == {False, True}
    assert (small.tie_embeddings, small.attention.qk_norm is not None) == (True, True)
    assert [
        layer.ffn.kind
        for layer in shrink(replace(cfg, model=edit_model(model, {"layers.ffn": "moe"}))).model.decoder_layers
    ] == ["moe"] * 5


def test_each_kind_of_attention_survives_other_patterns():
    words = [
        "model.layers=2 window, full, window/nope, window, full, window, window/nope, full, 2 window, full/nope",
        "model.sliding_window=9",
    ]
    large = load_config(None, words)
    kinds = [
        {(layer.attention.window > 0, layer.attention.has_rope) for layer in model.decoder_layers}
        for model in (large.model, shrink(large).model)
    ]
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) == shrink(large).model.num_layers == 4


def test_a_capacity_that_few_experts_would_void_still_drops():
    cfg = preset("qwen3-30b-a3b", world_size=8, ep=4)
    cfg = replace(cfg, moe=replace(cfg.moe, capacity_factor=4.0, eval_capacity_factor=1.25))
    small = shrink(cfg)
    assert (
        cfg.model.ffn.moe.num_experts / cfg.model.ffn.moe.top_k
        > 4
        >= small.model.ffn.moe.num_experts / small.model.ffn.moe.top_k
    )
    assert (small.moe.capacity_factor, small.moe.eval_capacity_factor) == (1.0, 1.25)


def test_an_illegal_recipe_is_refused_as_it_stands():
    with pytest.raises(ConfigError, match="parallel.tp=3 must divide"):
        shrink(replace(preset("quickstart"), parallel=ParallelConfig(world_size=8, tp=3)))


@pytest.mark.parametrize(("ep", "num_experts"), [(1, 16), (4, 16), (32, 32)])
def test_groups_of_experts_survive(ep, num_experts):
    """The routing of DeepSeek-V3: 256 experts in 8 groups, 8 chosen out of 4 groups."""
    routing = {
        "ffn.moe.num_experts": 256,
        "ffn.moe.top_k": 8,
        "ffn.moe.router.num_groups": 8,
        "ffn.moe.router.top_groups": 4,
        "ffn.moe.router": "sigmoid",
    }
    cfg = config_of({"model": routing, "parallel": {"world_size": 32, "ep": ep}, "train": {"global_batch_size": 32}})
    small = shrink(cfg).model
    assert (
        small.ffn.moe.num_experts,
        small.ffn.moe.router.num_groups,
        small.ffn.moe.router.top_groups,
        small.ffn.moe.top_k,
    ) == (num_experts, 8, 4, 8)


@pytest.mark.parametrize(("name", "has_query_latent"), [("deepseek-v2-lite", False), ("deepseek-v3", True)])
def test_latent_attention_survives(name, has_query_latent):
    cfg = preset(name, world_size=32, tp=4, cp=2, ep=8)
    small = shrink(cfg).model
    assert (small.attention.kind, small.attention.q_lora_rank > 0, small.mtp_layers) == (
        "mla",
        has_query_latent,
        cfg.model.mtp_layers,
    )
    assert small.attention.v_head_dim not in (small.softmax_attention.head_dim, cfg.model.attention.v_head_dim)
    assert small.attention.num_heads == 8


def test_several_further_tokens_become_two():
    cfg = preset("quickstart")
    assert shrink(replace(cfg, model=replace(cfg.model, mtp_layers=5))).model.mtp_layers == 2


@pytest.mark.parametrize(
    ("data", "document_end"),
    [
        (DataConfig(kind="sft", path="chats.jsonl"), 0),
        (DataConfig(kind="tokens", path="tokens", document_index=True), 0),
        (DataConfig(kind="text", path="texts", document_end=3), 0),
        (DataConfig(kind="text", path="texts"), -1),
    ],
)
def test_documents_stay_separate_where_they_were(data: DataConfig, document_end: int):
    small = shrink(replace(preset("quickstart", 8), data=data))
    assert small.data == DataConfig(kind="synthetic", document_end=document_end)


@pytest.mark.parametrize(("pool", "kept"), [(0, 0), (4, 4), (32, 0)])
def test_attention_work_still_moves(pool: int, kept: int):
    large = preset("quickstart", 64, world_size=32)
    parallel = replace(large.parallel, cp=2, context=make_part("context", "planned", hosts="balanced", pool=pool))
    small = shrink(replace(large, parallel=parallel, data=DataConfig(kind="text", path="texts", document_end=3)))
    assert small.parallel.context.kind == "planned"
    assert small.parallel.context.hosts == "balanced"
    assert small.parallel.context.pool == kept
    assert small.parallel.context.block == 2


@pytest.mark.parametrize(("width", "rank"), [("head", 1), ("dim", 2)])
def test_the_rank_of_adapters_fits_the_gates_of_a_single_head(width, rank):
    """One head of plain multi-head attention is left, whose gates are a matrix [1, H]."""
    words = ["model.attention.num_kv_heads=8", "model.attention.gate={}", f"model.attention.gate.per={width}"]
    small = shrink(load_config(None, [*words, "lora.rank=8", "checkpoint.init_from=base"]))
    assert (small.model.attention.num_heads, small.lora.rank) == (1, rank)
