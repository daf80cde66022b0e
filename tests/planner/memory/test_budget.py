"""The planner's memory equals the runtime's: its formula for the recipe of a mapping, and the built model's bytes."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from moefold.config.base.part import make_part
from moefold.config.base.part_registry import find_part
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.activation_memory import activation_memory
from moefold.cost.hardware import load_device
from moefold.cost.memory_columns import columns_of
from moefold.cost.peak_candidates import PipelineStages, StepSchedule, StepSnapshots
from moefold.cost.peak_memory import RankMemory, compute_rank_memory
from moefold.cost.recompute_parts import missing_reason
from moefold.cost.saved_tensors import CPU_KERNELS
from moefold.errors import ConfigError
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.export_recipe import config_with_mapping
from moefold.planner.mapping import ParallelMapping, mapping_from_config
from moefold.planner.memory.budget import OVERHEAD_GIB, REPORTED_ACTIVATIONS, MemoryEstimate, MemoryModel
from moefold.planner.model_spec import load_model_spec, model_spec_from_config
from moefold.planner.search.constraints import MappingConstraints
from moefold.planner.stage_splitter import RecipeStageSplitter, placed_ranks, stages_by_rank
from moefold.recipe import load_config
from moefold.topology.schedules import schedule_named
from moefold.validate.config import check_config
from tests.cost.measured_memory import LATENT, memory_config
from tests.cost.random_mappings import random_config
from tests.models import edit_model, model_of

GIB = 2**30
H100 = load_device("h100")
BIG = [
    ("mixtral-8x22b", {"world_size": 128, "tp": 2, "pp": 8, "ep": 8}, 256, "1f1b", 1),
    ("mixtral-8x22b", {"world_size": 128, "tp": 4, "pp": 4, "ep": 8, "zero": 2}, 256, "interleaved", 7),
    ("mixtral-8x7b", {"world_size": 64, "tp": 2, "ep": 8, "zero": 3}, 128, "1f1b", 1),
    ("qwen3-30b-a3b", {"world_size": 1024, "tp": 2, "cp": 2, "pp": 4, "ep": 64}, 1024, "zero-bubble", 1),
    ("deepseek-v3", {"world_size": 1024, "tp": 1, "pp": 16, "ep": 64}, 4096, "1f1b", 1),
    ("gpt-oss-20b", {"world_size": 16, "tp": 4, "etp": 2, "ep": 4, "pp": 2}, 64, "zbv", 2),
]


def recipe(preset: str, parallel: dict, batch: int, schedule: str, vpp: int) -> Config:
    cfg = load_config(None, [f"model.preset={preset}"])
    layout = "auto" if parallel.get("pp", 1) > 1 and (cfg.model.num_layers % (parallel["pp"] * vpp)) else ""
    cfg = replace(
        cfg,
        parallel=ParallelConfig(**parallel, schedule=schedule, virtual_stages=vpp, pipeline_layout=layout),
        train=replace(cfg.train, seq_len=4096, global_batch_size=batch),
    )
    check_config(cfg)
    return cfg


def estimated(cfg: Config, mapping: ParallelMapping | None = None) -> tuple[Config, MemoryEstimate]:
    """Return a recipe with its stages spelled out, and the planner's memory for it."""
    shape, device = model_spec_from_config(cfg.model), load_device("h100")
    workload = TrainingWorkload(
        seq_len=cfg.train.seq_len,
        global_batch_size=cfg.train.global_batch_size,
        capacity_factor=cfg.moe.capacity_factor,
    )
    memory = MemoryModel(shape, workload, device, cfg, RecipeStageSplitter(cfg, shape))
    mapping = mapping or mapping_from_config(cfg.parallel, cfg.train)
    return config_with_mapping(MappingConstraints(cfg), mapping), memory.estimate(mapping)


TYING_PARTS = ("activations", "logits", "pipeline")
"""Parts with hidden states: one that a layer saves, one that is sent, and here two columns of logits have the same
bytes, so that snapshots of a step may tie."""


def assert_formula(cfg: Config, tying: tuple[str, ...] = ()) -> None:
    """Compare each part of the fullest rank, and the sum of parts that different snapshots may divide differently."""
    spelled, estimate = estimated(cfg)
    ranks = compute_rank_memory(spelled)
    most = max(ranks, key=lambda rank: rank.total)
    assert estimate.total - estimate.parts["workspace"] == pytest.approx(most.total, rel=1e-9), cfg
    twins = [parts_of(rank) for rank in ranks if rank.total == most.total]
    found = [{part: size for part, size in parts.items() if part not in tying} for parts in twins]
    planned = {part: estimate.parts[part] for part in found[0]}
    assert any(planned == pytest.approx(parts, rel=1e-9, abs=1) for parts in found), (cfg, planned, found)


def parts_of(rank: RankMemory) -> dict[str, float]:
    """Return the bytes of a rank by the parts of the planner, but for its workspace."""
    states = rank.states
    gradients = max(states.gradients, states.gradient_sums)
    found = {"weights": states.weights, "gathered": states.gathered, "gradients": gradients, "buffers": states.buffers}
    found |= {"optimizer": states.optimizer + rank.optimizer_in_transit, **activation_parts(rank)}
    return found


def activation_parts(rank: RankMemory) -> dict[str, float]:
    found = dict.fromkeys(("activations", *REPORTED_ACTIVATIONS.values()), 0)
    for part, size in rank.activations.by_part.items():
        found[REPORTED_ACTIVATIONS.get(part, "activations")] += size
    return found


@pytest.mark.parametrize("case", BIG, ids=lambda case: f"{case[0]}-{case[3]}")
@pytest.mark.parametrize("recompute", [(), ("norms", "expert_activation"), ("layer",)], ids="+".join)
def test_a_recipe_needs_the_memory_of_the_runtime_s_formula(case, recompute):
    cfg = recipe(*case)
    assert_formula(replace(cfg, train=replace(cfg.train, recompute=recompute)))


def test_symmetric_memory_is_counted_as_the_runtime_does():
    cfg = recipe("mixtral-8x7b", {"world_size": 8, "ep": 4, "tp": 2}, 8, "1f1b", 1)
    parallel = replace(cfg.parallel, dispatcher=make_part("dispatcher", "symm_mem", receive_factor=1.5))
    symmetric = replace(cfg, parallel=parallel, run=replace(cfg.run, device="cuda"))
    check_config(symmetric)
    assert_formula(symmetric)
    extra = estimated(symmetric)[1].parts["buffers"] - estimated(cfg)[1].parts["buffers"]
    assert extra >= 3 * 1.5 * 4096 // 2 * cfg.model.ffn.moe.top_k * cfg.model.hidden_size * 2


SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zbv", 2))


@pytest.mark.parametrize("schedule", [*SCHEDULES, ("zero-bubble", 2), ("dualpipev", 2)])
@pytest.mark.parametrize("batch", [8, 24, 48])
def test_every_schedule_has_as_much_in_flight_as_its_order_of_work(schedule, batch):
    name, vpp = schedule
    parallel = {"world_size": 8, "pp": 4, "ep": 2}
    try:
        cfg = recipe("mixtral-8x7b", parallel, batch, name, vpp)
    except ConfigError:
        assert name == "dualpipev"
        return
    assert_formula(cfg)
    assert_formula(replace(cfg, train=replace(cfg.train, loss_chunk=-1)))


@pytest.mark.parametrize("schedule", [*SCHEDULES, ("zero-bubble", 4), ("dualpipev", 2), ("interleaved", 6)])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_more_micro_batches_than_fill_a_pipeline_are_no_heavier(schedule, pp, overlap):
    """The heaviest snapshots of a short step equal the heaviest of a step that is not shortened."""
    name, vpp = schedule
    if overlap and not schedule_named(name).pairs_passes():
        return
    model = model_of({"layers": 2 * pp * vpp, "layers.ffn": "dense, 3 moe", "vocab_size": 64, "mtp_layers": 1})
    ranks = placed_ranks(name, pp, vpp)
    chunks = RecipeStageSplitter(Config(model=model), model_spec_from_config(model))(ranks)
    stages = PipelineStages(chunks, stages_by_rank(ranks), columns_of(model.distinct_kinds))
    whole = StepSchedule(name, pp, vpp, 6 * pp, overlap)
    shortest = whole.shortest_equivalent(finds_all=False)
    assert (shortest.num_micro_batches < 6 * pp) == (name != "gpipe")
    heaviest, wanted = (StepSnapshots(one, stages, finds_all=False).few_candidates() for one in (shortest, whole))
    np.testing.assert_array_equal(heaviest.activations, wanted.activations)


PAIRED = [
    (schedule, pp, vpp)
    for schedule, vpp in (("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("dualpipev", 2))
    for pp in (1, 2, 4)
    if vpp == 1 or pp > 1
]
SAVED = [(), ("moe",), ("layer",), ("norms", "expert_activation"), ("shared_experts", "dense_mlp", "core_attention")]
PAIRED_MODELS = {
    "moe": {},
    "mtp": {"mtp_layers": 1, "layers.ffn": "dense, 2 moe"},
    "shared": {"ffn.moe.shared.intermediate_size": 256, "layers.ffn": "dense, moe"},
    "windows": {"layers.ffn": "dense, 3 moe", "layers.attention": "window, full", "sliding_window": 64},
}


def paired_recipes(schedule: str, pp: int, vpp: int, model: str):
    """Recipes with hidden exchanges: models, and parts that run again."""
    sizes = model_of({"layers": 16, "ffn.moe.num_experts": 8, "ffn.moe.top_k": 2, **PAIRED_MODELS[model]})
    layout = "auto" if pp > 1 and (sizes.num_layers % (pp * vpp) or sizes.mtp_layers) else ""
    parallel = ParallelConfig(
        world_size=2 * pp, pp=pp, ep=2, schedule=schedule, virtual_stages=vpp, overlap_experts=True,
        pipeline_layout=layout,
    )  # fmt: skip
    # More micro-batches repeat the steady phase, whatever is saved.
    for batch, parts in ((128, ()), *((32, parts) for parts in SAVED)):
        if lacks := [part for part in parts if missing_reason(part, sizes)]:
            parts = tuple(part for part in parts if part not in lacks)
        train = TrainConfig(seq_len=512, global_batch_size=batch, recompute=parts)
        cfg = Config(run=RunConfig(dtype="bfloat16"), model=sizes, parallel=parallel, train=train)
        check_config(cfg)
        yield cfg


@pytest.mark.parametrize(
    ("case", "model"),
    [
        pytest.param(case, model, id="-".join(map(str, (*case, model))), marks=pytest.mark.slow if (i + j) % 3 else ())
        for i, case in enumerate(PAIRED)
        for j, model in enumerate(PAIRED_MODELS)
    ],
)
def test_pairs_have_as_much_as_the_runtime_s_formula_says(case, model):
    for cfg in paired_recipes(*case, model):
        assert_formula(cfg, TYING_PARTS)


@pytest.mark.parametrize("seed", range(24))
def test_a_random_mapping_needs_the_memory_of_the_runtime_s_formula(seed):
    """`tests/cost/test_rank_state_memory.py` compares the states of these formulas with built models."""
    cfg = random_config(seed)
    assert_formula(replace(cfg, run=replace(cfg.run, device="cuda")))


@pytest.mark.parametrize(("cp", "mbs"), [(1, 1), (2, 1), (8, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize(
    ("model", "context"),
    [
        # Values are padded to the width of keys, outputs are saved twice, and keys of all ranks are gathered.
        ({**LATENT, "mtp_layers": 1}, "ring"),
        ({"attention.num_heads": 8, "attention.num_kv_heads": 8}, "ulysses"),
        ({**LATENT, "attention.indexer.top_k": 32, "attention.indexer.head_dim": 16}, "allgather"),
        ({"attention.indexer.top_k": 32, "attention.indexer.head_dim": 16}, "allgather"),
    ],
    ids=["latent", "ulysses", "sparse latent", "sparse"],
)
def test_context_parallelism_decides_more_than_the_tokens_of_a_rank(model, context, cp, mbs):
    train = {"seq_len": 256, "micro_batch_size": mbs, "global_batch_size": 32}
    cfg = memory_config("bfloat16", model, train, world_size=8, cp=cp, context=context)
    assert_formula(replace(cfg, run=replace(cfg.run, device="cuda")))


@pytest.mark.parametrize("size", [1, 16])
def test_the_workspace_has_the_gradients_of_one_module(size):
    """Mixtral 8x22B, ep=8: one expert of 3 x 6144 x 16384 a layer, and two rows for each token."""
    cfg = recipe("mixtral-8x22b", {"world_size": 16, "ep": 8}, 16 * size, "1f1b", 1)
    cfg = replace(cfg, train=replace(cfg.train, micro_batch_size=size))
    _, estimate = estimated(cfg)
    expert, rows = 3 * 6144 * 16384, 2 * size * 4096
    # In bfloat16, and the buffer of the reduction in float32.
    assert estimate.parts["workspace"] - OVERHEAD_GIB * GIB == expert * (2 + 4)
    # Four arrays of the inner width in bfloat16, once.
    assert activation_memory(cfg).experts.expert_transient() == {"experts": 4 * 2 * rows * 16384}
    assert_formula(cfg)
    single = MemoryModel(load_model_spec("mixtral-8x22b"), TrainingWorkload(seq_len=64, global_batch_size=1), H100)
    assert single.workspace(ParallelMapping()) == OVERHEAD_GIB * GIB


def test_uneven_experts_need_larger_buffers():
    cfg = recipe(*BIG[0])
    shape, device = model_spec_from_config(cfg.model), load_device("h100")
    plain = TrainingWorkload(seq_len=4096, global_batch_size=256)
    even, uneven = (
        MemoryModel(shape, replace(plain, imbalance=load), device, cfg).estimate(
            mapping_from_config(cfg.parallel, cfg.train)
        )
        for load in (1.0, 1.5)
    )
    ranks = compute_rank_memory(cfg, imbalance=1.5)
    assert uneven.parts["dispatch"] > even.parts["dispatch"]
    assert uneven.total - uneven.parts["workspace"] == pytest.approx(max(rank.total for rank in ranks), rel=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({"world_size": 8, "pp": 2, "ep": 4, "zero": 0}, {}),
        ({"world_size": 8, "tp": 2, "ep": 2, "etp": 2, "zero": 2}, {"mtp_layers": 1}),
        ({"world_size": 4, "ep": 4, "zero": 3}, {}),
        ({}, {"layers": 2}),
    ],
)
def test_quantized_weights_are_counted_where_micro_batches_share_them(parallel, model, micro_batches):
    cfg = load_config(None, ["model.preset=qwen3-30b-a3b"])
    degrees = {"world_size": 1, "tp": 1, "pp": 1} | parallel
    micro_batches = max(micro_batches, degrees["pp"])
    samples = micro_batches * degrees["world_size"] // degrees["tp"] // degrees["pp"]
    fp8, plain = (
        replace(
            cfg,
            run=replace(cfg.run, dtype="bfloat16", device="cuda"),
            model=edit_model(cfg.model, model),
            parallel=ParallelConfig(**parallel),
            train=TrainConfig(seq_len=64, global_batch_size=samples, precision=precision),
        )
        for precision in ("fp8-blockwise", "dtype")
    )
    check_config(fp8)
    assert_formula(fp8)
    quantized, unquantized = (compute_rank_memory(config)[0].states for config in (fp8, plain))
    is_counted = micro_batches > 1 and parallel.get("zero", 1) < 3
    assert (quantized.gathered > unquantized.gathered) == is_counted
    assert replace(quantized, gathered=unquantized.gathered) == unquantized
    on_cpu = [compute_rank_memory(config, kernels=CPU_KERNELS)[0].states for config in (fp8, plain)]
    assert on_cpu[0] == on_cpu[1]


AWAY = [
    ("mixtral-8x7b", {"world_size": 8, "pp": 2, "ep": 4, "zero": 0}, {}, {}),
    ("mixtral-8x7b", {"world_size": 8, "tp": 2, "ep": 2, "zero": 1}, {"offload_min_kib": 2**10}, {}),
    (
        "qwen3-30b-a3b",
        {"world_size": 4, "ep": 4, "zero": 3},
        {"optimizer": make_part("optimizer", "adamw", moment_dtype="bfloat16")},
        {},
    ),
    ("deepseek-v3", {"world_size": 64, "pp": 4, "ep": 16}, {}, {"layers.ffn": "3 dense, moe"}),
    ("mixtral-8x7b", {"world_size": 8, "pp": 8}, {"optimizer": "muon"}, {"tie_embeddings": True}),
]


@pytest.mark.parametrize("case", AWAY, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1].values()))}")
def test_an_update_brings_moments_back(case):
    """With few activations they decide."""
    preset, parallel, train, model = case
    cfg = load_config(None, [f"model.preset={preset}"])
    batch = TrainConfig(seq_len=64, global_batch_size=64, offload_optimizer="host", **train)
    cfg = replace(
        cfg,
        run=replace(cfg.run, dtype="bfloat16", device="cuda"),
        model=edit_model(cfg.model, model),
        parallel=ParallelConfig(pipeline_layout="auto" if "pp" in parallel else "", **parallel),
        train=batch,
    )
    check_config(cfg)
    fullest = max(compute_rank_memory(cfg), key=lambda rank: rank.total)
    assert fullest.optimizer_in_transit > 0, "else the case shows nothing"
    assert_formula(cfg)


@pytest.mark.parametrize("offload", [("expert_activation",), ("core_attention", "moe")], ids="+".join)
def test_offloaded_tensors_are_not_counted(offload):
    """Neither the moments nor the activations that the runtime's formula leaves out, part by part."""
    cfg = recipe(*BIG[2])
    _, plain = estimated(cfg)
    mapping = mapping_from_config(cfg.parallel, cfg.train)
    _, away = estimated(cfg, replace(mapping, offload=(*offload, "optimizer")))
    assert away.parts["optimizer"] < 0.01 * plain.parts["optimizer"]
    assert away.parts["weights"] == plain.parts["weights"]
    (rank,) = compute_rank_memory(cfg, offload=offload)
    left = activation_parts(rank)
    assert {part: away.parts[part] for part in left} == pytest.approx(left)
    assert left["dispatch"] < plain.parts["dispatch"]


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_memory_of_a_mapping_does_not_depend_on_those_before_it(device, dispatcher):
    """Sizes are found once for all mappings that share them, so a degree that was forgotten shows here."""
    sizes = {"layers": 2, "layers.ffn": "dense, moe", "ffn.moe.num_experts": 16, "ffn.moe.top_k": 4, "vocab_size": 64}
    model = model_of(sizes)
    cfg = Config(run=RunConfig(device="cuda"), model=model, train=TrainConfig(seq_len=64, global_batch_size=64))
    shape, workload = model_spec_from_config(model), TrainingWorkload(seq_len=64, global_batch_size=64, imbalance=3.0)

    def memory() -> MemoryModel:
        return MemoryModel(shape, workload, load_device(device), cfg)

    shared, found = memory(), set()
    ways = ((1, "1f1b", False), (1, "1f1b", True), (2, "zero-bubble", False))
    for (pp, schedule, overlap), tp, ep, etp in product(ways, (1, 2), (1, 2, 4, 8, 16), (1, 2)):
        mapping = ParallelMapping(
            tp=tp, dp=32 // tp, pp=pp, schedule=schedule, ep=ep, etp=etp, edp=32 // (ep * etp),
            dispatcher=find_part("dispatcher", dispatcher)(),
            overlap=overlap,
        )  # fmt: skip
        fresh = memory()
        estimate = shared.estimate(mapping)
        assert estimate == fresh.estimate(mapping), mapping
        # Also columns below the peak, such as the snapshots of a dense layer under overlap.
        tables = (one.activation_memory.bytes_by_part(mapping) for one in (shared, fresh))
        np.testing.assert_array_equal(*tables, err_msg=str(mapping))
        found.add(estimate.total)
    assert len(found) > 30
