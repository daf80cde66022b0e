"""Activations by formula against the tracker of real runs: within 10 % for every schedule and choice of recompute."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from moefold.comm.groups import ParallelGroups
from moefold.comm.resumable import run_to_end
from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.cost.activation_memory import activation_memory
from moefold.cost.auto_layout_memory import max_in_flight
from moefold.cost.auto_recompute import choose_recompute
from moefold.cost.peak_memory import compute_rank_memory
from moefold.cost.saved_tensors import CPU_KERNELS, CUDA_KERNELS
from moefold.metrics.memory_tracker import MemoryTracker
from moefold.model.attention import CausalAttention, _BlockAttention
from moefold.model.loss import ChunkOptions, chunked_token_losses
from moefold.model.moe.dispatch.base import RoutingMap
from moefold.model.moe.experts import Experts
from moefold.ops import gemm
from moefold.ops.block_attention import MathBlockAttention
from moefold.ops.cpu.gemm import CGemm
from moefold.ops.grouped_experts import GroupedExpertOps
from moefold.ops.torch_experts import GroupedMMExpertOps
from moefold.parts.dispatcher.alltoall.module import AllToAllDispatcher
from moefold.topology.layout import fold
from moefold.train.memory_profile import MeasuredMemory, measure_rank
from moefold.units import GIB
from moefold.validate.config import check_config
from tests.cost.measured_memory import (
    LATENT,
    WITHIN,
    assert_memory_close,
    assert_states,
    formulas_of,
    lacking_values,
    measure_one_rank,
    measure_ranks,
    measured,
    memory_config,
)
from tests.model.moe.dispatch.symm_mem_stand_in import StandInOps, symmetric_memory
from tests.models import edit_model
from tests.slow import slow

LINEAR = {
    "layers.attention": "full, linear",
    "linear_attention.num_key_heads": 2,
    "linear_attention.num_value_heads": 4,
    "linear_attention.key_head_dim": 32,
    "linear_attention.value_head_dim": 48,
}
LLAMA4 = {
    "layers.attention": "chunk, full", "attention_chunk_size": 16, "layers.position": "rope, nope",
    "attention.qk_norm": {}, "attention.qk_norm.weight": False, "attention.temperature.scale": 0.1,
    "ffn.moe.probs_on_input": True,
}  # fmt: skip
HEAD_GATE = {"attention.gate": {}, "attention.gate.per": "head"}
SPARSE = {"attention.indexer.top_k": 24, "attention.indexer.num_heads": 3, "attention.indexer.head_dim": 16}
CHOICES = [
    (), ("norms",), ("core_attention",), ("dense_mlp",), ("expert_activation",), ("shared_experts",), ("moe",),
    ("layer",), ("norms", "moe"), ("norms", "dense_mlp", "expert_activation"),
]  # fmt: skip
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2)]
SCHEDULES += [("dualpipev", 2)]


@pytest.mark.parametrize("chunk", [8, 16])
def test_a_chunked_loss_sums_the_gradient_of_the_head_in_high_precision(monkeypatch, chunk):
    monkeypatch.setattr(gemm, "_EMULATES_BFLOAT16", False)
    cfg = memory_config("bfloat16", model={"vocab_size": 8192, "hidden_size": 96}, train={"loss_chunk": chunk})
    tokens, hidden, rows = cfg.train.seq_len * cfg.train.micro_batch_size, 96, 8192
    x, weight = (torch.randn(size, hidden, dtype=torch.bfloat16, requires_grad=True) for size in (tokens, rows))
    labels = torch.randint(0, rows, (tokens,))
    with MemoryTracker() as tracker:
        tracker.tag("before", [x, weight, labels])
        tracker.phase = "forward"
        loss = chunked_token_losses(x, weight, labels, ChunkOptions(chunk)).loss
        tracker.phase = "backward"
        loss.backward(torch.ones_like(loss))
    found = tracker.peak(lambda part: part == "workspace").total
    formula = activation_memory(cfg, kernels=CPU_KERNELS)
    assert formula.head_gradient_sum == rows * hidden * 4
    assert formula.transient_loss == pytest.approx(found, rel=WITHIN)
    # It is the gradient itself where that is in high precision, and there is none for one GEMM of all tokens.
    assert activation_memory(replace(cfg, run=replace(cfg.run, dtype="float32"))).head_gradient_sum == 0
    assert activation_memory(replace(cfg, train=replace(cfg.train, loss_chunk=0))).head_gradient_sum == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", [(), ("moe",), ("layer",)])
def test_products_in_c_hold_no_more_than_the_formulas_say(monkeypatch, parts, dtype):
    monkeypatch.setattr(CGemm, "is_fast", lambda gemm, dtype: True)
    cfg = memory_config(dtype, train={"recompute": parts})
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        (formula,) = compute_rank_memory(cfg, kernels=CPU_KERNELS)
        assert 0 < measure_rank(cfg).activations < (1 + WITHIN) * formula.activations.total
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", *slow([("float64",)])])
@pytest.mark.parametrize("parts", CHOICES, ids=lambda parts: "+".join(parts) or "nothing")
def test_every_choice_of_recompute(parts, dtype):
    cfg = memory_config(dtype, train={"recompute": parts})
    assert_memory_close(cfg, [measure_one_rank(cfg)])


@pytest.mark.parametrize("dtype", ["bfloat16", *slow([("float32",)])])
@pytest.mark.parametrize(
    "settings",
    [
        {"model": LATENT, "train": {"recompute": ("mla_up",)}},
        {"model": LATENT | {"attention.v_head_dim": 8, "attention.q_lora_rank": 0}},
        {"moe": {"weight_in_expert": True}},
        {"moe": {"input_jitter": 0.1}},
        {"moe": {"choice": "topk", "capacity_factor": 1.0, "pad_to_capacity": True}},
        {"model": {"vocab_size": 4096}},
        {"model": {"vocab_size": 4096}, "train": {"loss_chunk": 32}},
        {"model": {"mtp_layers": 1}},
        {"model": LINEAR | {"layers.attention": "linear"}, "train": {"recompute": ("layer",)}},
        {"model": LATENT | {"layers.attention": "full, linear", "linear_attention": "short_convolution", **HEAD_GATE}},
        {"model": LATENT | SPARSE},
        {"model": SPARSE, "train": {"recompute": ("layer",)}},
        {"model": LATENT | SPARSE | {"layers.selection": "own, shared"}},
        {"model": SPARSE | {"layers.selection": "own, shared", "mtp_layers": 1}, "train": {"indexer_stage": "warmup"}},
        {"model": SPARSE | {"layers.selection": "own, shared"}, "train": {"recompute": ("layer",)}},
        {"model": LLAMA4},
        {"model": {"norm": "layernorm", "head_bias": True, "mtp_layers": 1}, "train": {"recompute": ("norms",)}},
        {"model": {"norm": "layernorm", "head_bias": True, "vocab_size": 4096}, "train": {"loss_chunk": 32}},
        {
            "model": {"ffn.moe.router.softmax": "sparsemixer", "ffn.moe.num_experts": 4, "ffn.moe.top_k": 4},
            "moe": {"choice": "topk"},
        },
    ],
    ids=[
        "mla_up",
        "padded",
        "weighted",
        "jitter",
        "capacity",
        "logits",
        "chunks",
        "mtp",
        "linear, recomputed",
        "convolution and gated latent",
        "sparse latent",
        "sparse, recomputed",
        "shared selection",
        "warm-up of indexers",
        "shared selection, recomputed",
        "llama 4",
        "LayerNorm, recomputed",
        "LayerNorm, chunks with a bias",
        "sparsemixer",
    ],
)
def test_settings_that_are_counted_together(settings, dtype):
    cfg = memory_config(dtype, **settings)
    assert_memory_close(cfg, [measure_one_rank(cfg)])


@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_the_divisor_of_the_logits_saves_one_more_input_of_the_head(mtp_layers):
    sizes = {
        "hidden_size": 256,
        "vocab_size": 64,
        "layers.ffn": "dense",
        "layers": 1,
        "ffn.dense.intermediate_size": 32,
    }
    sizes |= {"ffn.moe.shared": "none", "mtp_layers": mtp_layers}
    peaks = []
    for divisor in (1.0, 3.0):
        cfg = memory_config(model=sizes | {"logits_divisor": divisor}, moe={"choice": "topk"})
        peaks.append((measure_one_rank(cfg).activations, formulas_of(cfg)[0].activations.total))
    (measured, formula), (measured_divided, formula_divided) = peaks
    assert formula_divided - formula == measured_divided - measured == (1 + mtp_layers) * 128 * 256 * 4


def test_output_gates_of_sparse_latent_attention_are_counted_to_the_byte():
    sizes = LATENT | SPARSE | {"layers.ffn": "dense", "ffn.dense.intermediate_size": 32, "ffn.moe.shared": "none"}
    sizes |= {"attention.num_heads": 16, "attention.v_head_dim": 64}
    cfgs = [
        memory_config(model=sizes | {"attention.gate": {} if gate else "none"}, moe={"choice": "topk"})
        for gate in (False, True)
    ]
    measured, gated = (measure_one_rank(cfg).activations for cfg in cfgs)
    formula, formula_gated = (formulas_of(cfg)[0].activations.total for cfg in cfgs)
    assert formula_gated - formula == gated - measured > 0


@pytest.mark.parametrize("kind", ["gated_deltanet", "kda"])
def test_linear_attention_by_torch_operations(kind):
    cfg = memory_config(model=LINEAR | {"linear_attention": kind})
    cfg = replace(cfg, run=replace(cfg.run, kernels="plain"))
    assert_memory_close(cfg, [measure_one_rank(cfg)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", [(), ("mla_up",)])
def test_latent_attention_saves_values_without_padding(monkeypatch, dtype, parts):
    """As on CUDA, where SDPA takes values narrower than the keys; this one saves the tensors of a flash kernel."""

    def attend(core, q, k, v, documents=None, sinks=None, scale=None):
        assert (v.shape[-1], scale) == (8, 0.25)
        return _BlockAttention.apply(q, k, v, None, "causal", MathBlockAttention())

    monkeypatch.setattr("moefold.parts.attention.mla.module.sdpa_supports_narrow_values", lambda device: True)
    monkeypatch.setattr(CausalAttention, "__call__", attend)
    cfg = memory_config(dtype, model=LATENT | {"attention.v_head_dim": 8}, train={"recompute": parts})
    narrow = replace(CPU_KERNELS, narrow_values=True)
    assert_memory_close(cfg, [measure_one_rank(cfg)], narrow)
    saved = [compute_rank_memory(cfg, kernels=kernels)[0].activations.total for kernels in (narrow, CPU_KERNELS)]
    assert (saved[0] < saved[1]) == (not parts)


def test_latent_attention_whose_work_moves_between_ranks_pads_its_values():
    narrow = replace(CPU_KERNELS, narrow_values=True)
    for keys, is_padded in (({"hosts": "balanced"}, True), ({"placement": "balanced"}, True), ({}, False)):
        context = make_part("context", "planned", **keys)
        cfg = memory_config(model=LATENT | {"attention.v_head_dim": 8}, world_size=2, context=context)
        saved = [compute_rank_memory(cfg, kernels=kernels)[0].activations.total for kernels in (narrow, CPU_KERNELS)]
        assert (saved[0] == saved[1]) == is_padded, keys


def test_a_schedule_of_split_passes_splits_nothing_without_a_pipeline():
    plain, split = (
        memory_config(schedule=schedule, model={"ffn.moe.top_k": 4}) for schedule in ("1f1b", "zero-bubble")
    )
    measured = measure_one_rank(split)
    assert measured.activations == measure_one_rank(plain).activations
    assert compute_rank_memory(split, kernels=CPU_KERNELS) == compute_rank_memory(plain, kernels=CPU_KERNELS)
    assert_memory_close(split, [measured])


def test_one_rank_holds_its_states_to_the_byte():
    cfg = memory_config("bfloat16")
    assert_states(cfg, [measure_one_rank(cfg)])


def test_a_formula_that_forgets_a_layer_is_found():
    cfg = memory_config()
    less = replace(cfg, model=edit_model(cfg.model, {"layers": 1}))
    measured = measure_one_rank(cfg)
    with pytest.raises(AssertionError):
        assert_memory_close(less, [measured])


def _small_pipeline(schedule: str, chunks: int, parts: tuple[str, ...], **parallel: object) -> Config:
    model = {"layers": 4}
    train = {"global_batch_size": 16, "recompute": parts}
    return memory_config(model=model, train=train, pp=2, schedule=schedule, virtual_stages=chunks, **parallel)


@pytest.mark.parity
@pytest.mark.parametrize(("schedule", "chunks"), [SCHEDULES[1], SCHEDULES[3], SCHEDULES[5], *slow(SCHEDULES[::2])])
def test_the_formula_is_close_to_measured_memory_of_every_schedule(pool, schedule, chunks):
    cfg = _small_pipeline(schedule, chunks, (), world_size=2)
    ranks = measure_ranks(pool, cfg)
    assert_memory_close(cfg, ranks)
    assert_states(cfg, ranks)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("parts", [("norms",), ("moe",), ("layer",)], ids=lambda parts: "+".join(parts))
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_every_schedule_with_parts_made_again(pool, schedule, chunks, parts):
    cfg = _small_pipeline(schedule, chunks, parts, world_size=2)
    assert_memory_close(cfg, measure_ranks(pool, cfg))


PAIRED = [("", 1), ("1f1b", 1), ("interleaved", 2), ("dualpipev", 2)]


def _pairs(schedule: str, chunks: int, parts: tuple[str, ...]) -> Config:
    pipeline = {"pp": 2, "schedule": schedule, "virtual_stages": chunks} if schedule else {}
    train = {"global_batch_size": 32, "recompute": parts}
    size = 4 if schedule else 2
    return memory_config(model={"layers": 4}, train=train, world_size=size, ep=2, overlap_experts=True, **pipeline)


@pytest.mark.parity
@pytest.mark.parametrize(("schedule", "chunks"), [PAIRED[3], *slow(PAIRED[:3])])
def test_pairs_of_micro_batches(pool, schedule, chunks):
    cfg = _pairs(schedule, chunks, ())
    ranks = measure_ranks(pool, cfg)
    assert_memory_close(cfg, ranks)
    assert_states(cfg, ranks)


@pytest.mark.parity
@pytest.mark.parametrize(("schedule", "chunks"), [("", 1), *slow([("interleaved", 2)])])
def test_pairs_whose_layers_run_again(pool, schedule, chunks):
    """The forward pass goes on in the recomputation too, and is through when the backward pass is half way."""
    cfg = _pairs(schedule, chunks, ("layer",))
    assert_memory_close(cfg, measure_ranks(pool, cfg))


@pytest.mark.parity
def test_pairs_of_auto_keep_to_the_budget(pool):
    """All ranks choose the same, or they would wait for each other's exchanges; and it needs the predicted memory."""
    known = _pairs("1f1b", 1, ("expert_activation", "shared_experts"))
    budget = max(rank.total for rank in compute_rank_memory(known, kernels=CPU_KERNELS))
    train = replace(known.train, recompute=("auto",), memory_budget_gib=budget / GIB)
    cfg = replace(known, train=train)
    check_config(cfg)
    choice = choose_recompute(cfg, budget, CPU_KERNELS)
    assert choice.parts
    chosen = replace(cfg, train=replace(train, recompute=choice.parts))
    assert_memory_close(chosen, measure_ranks(pool, cfg))


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [("norms",), ("core_attention",), ("expert_activation",), ("shared_experts",), ("moe",), ("layer",)],
    ids=lambda parts: "+".join(parts),
)
@pytest.mark.parametrize(("schedule", "chunks"), PAIRED)
def test_pairs_with_parts_made_again(pool, schedule, chunks, parts):
    cfg = _pairs(schedule, chunks, parts)
    assert_memory_close(cfg, measure_ranks(pool, cfg))


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("parts", [(), ("layer",)], ids=["plain", "layer"])
@pytest.mark.parametrize(
    "settings",
    [
        {"ep": 1, "etp": 2},
        {"world_size": 4, "etp": 2},
        {"dispatcher": "allgather"},
        {"dispatcher": "leastloaded"},
        {"tp": 2},
        {"cp": 2},
        {"zero": 2},
        {"dtype": "bfloat16"},
        {"model": LATENT},
        {"moe": {"weight_in_expert": True}},
        {"moe": {"choice": "topk", "capacity_factor": 1.0, "pad_to_capacity": True}},
        {"model": {"mtp_layers": 1}},
        {"model": {"layers.ffn": "moe"}},
    ],
    ids=[
        "etp", "ep-etp", "allgather", "leastloaded", "tp", "cp", "zero2", "bfloat16", "mla", "weighted", "capacity",
        "mtp", "moe-only",
    ],
)  # fmt: skip
def test_the_formula_is_close_to_measured_memory_of_overlapped_passes(pool, settings, parts):
    settings = {"world_size": 2, "ep": 2} | settings
    model = {"layers": 4} | settings.pop("model", {})
    train = {"global_batch_size": 32, "recompute": parts}
    cfg = memory_config(settings.pop("dtype", "float32"), model, train, overlap_experts=True, **settings)
    assert_memory_close(cfg, measure_ranks(pool, cfg))


def test_pairs_hold_more_micro_batches():
    """In 1F1B with p ranks, rank r holds 2 (p-1-r) + 2 micro-batches with pairs, and p-r without (docs/pipeline.md)."""
    totals = []
    for pairs, held in ((True, [8, 6, 4, 2]), (False, [4, 3, 2, 1])):
        model = {"layers": 4, "layers.ffn": "moe"}
        train = {"global_batch_size": 32}
        cfg = memory_config(model=model, train=train, world_size=8, pp=4, ep=2, overlap_experts=pairs)
        assert max_in_flight(cfg, 4) == held
        totals.append([rank.activations.total for rank in compute_rank_memory(cfg, kernels=CPU_KERNELS)])
    # A part of each micro-batch of a pair is in memory at a time.
    assert all(1.3 < paired / plain < 2.0 for paired, plain in zip(*totals, strict=True)), totals


@pytest.mark.parity
@pytest.mark.parametrize(
    "parallel",
    [
        # tp does not divide the vocabulary.
        {"tp": 2, "vocab_size": 4097},
        *slow([({"tp": 2, "vocab_size": 4097, "loss_chunk": 32},)]),
        {"tp": 2, "overlap_tp": True},
        *slow([({"ep": 2},), ({"cp": 2, "context": "ulysses"},), ({"zero": 2},)]),
        {"etp": 2},
        {"cp": 2, "zero": 0},
        {"ep": 2, "dispatcher": "allgather"},
        {"zero": 3, "ep": 2},
    ],
)
def test_every_axis_and_zero_level(pool, parallel):
    settings = {
        part: {key: parallel[key] for key in keys if key in parallel}
        for part, keys in (("model", ["vocab_size"]), ("train", ["loss_chunk"]))
    }
    mapping = {key: value for key, value in parallel.items() if key not in ("vocab_size", "loss_chunk")}
    cfg = memory_config("bfloat16", **settings, world_size=2, **mapping)
    ranks = measure_ranks(pool, cfg)
    assert_memory_close(cfg, ranks)
    assert_states(cfg, ranks)
    if cfg.parallel.zero < 3:
        gathered = compute_rank_memory(cfg, kernels=CPU_KERNELS)[0].states.gathered
        found = {rank.gathered + lacking_values(cfg, rank) * torch.bfloat16.itemsize for rank in ranks}
        assert found == {gathered}


@pytest.mark.parity
@pytest.mark.parametrize(
    ("ep", "etp", "dtype"),
    [
        (2, 1, "bfloat16"),
        *slow(
            [
                (4, 2, "bfloat16"),
                (4, 1, "float32"),
                (4, 1, "bfloat16"),
                (4, 2, "float32"),
                (8, 1, "float32"),
                (8, 1, "bfloat16"),
            ]
        ),
    ],
)
def test_the_tokens_of_all_ranks_are_counted_where_all_are_gathered(pool, ep, etp, dtype):
    model = {"ffn.moe.num_experts": 8, "layers.ffn": "moe"}
    train = {"global_batch_size": 16, "recompute": ("layer",)}
    parallel = {"world_size": ep * etp, "ep": ep, "etp": etp, "dispatcher": "allgather"}
    cfg = memory_config(dtype, model, train, **parallel)
    assert_memory_close(cfg, measure_ranks(pool, cfg))


@pytest.mark.parity
@pytest.mark.parametrize("dispatcher", ["alltoall", *slow([("allgather",)])])
def test_rows_that_travel_in_8_bits_are_kept_wide(pool, dispatcher):
    cfg = memory_config(
        "bfloat16", moe={"dispatch_precision": "fp8-blockwise"}, world_size=2, ep=2, dispatcher=dispatcher
    )
    assert_memory_close(cfg, measure_ranks(pool, cfg))


def test_memory_of_a_thousand_ranks_has_a_row_for_each_stage():
    cfg = memory_config(model={"layers": 32}, train={"global_batch_size": 1024}, world_size=1024, tp=4, pp=16, ep=4)
    ranks = compute_rank_memory(cfg)
    assert [rank.pp_rank for rank in ranks] == list(range(16))
    assert ranks[0].activations.in_flight == {0: 15}, "beside the one that runs"
    assert torch.tensor([rank.total for rank in ranks]).argmax() == 0


@pytest.mark.parametrize("saves_fc1", [True, False])
@pytest.mark.parametrize("weight_in_expert", [True, False])
@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_grouped_experts_after_an_all_to_all_save_the_bytes_of_their_formula(kernels, weight_in_expert, saves_fc1):
    cfg = memory_config("bfloat16", moe={"weight_in_expert": weight_in_expert})
    cfg = replace(cfg, run=replace(cfg.run, kernels=kernels))
    recompute = frozenset() if saves_fc1 else frozenset({"expert_activation"})
    formula = activation_memory(cfg, recompute, CUDA_KERNELS).experts
    model = cfg.model
    tokens = formula.routed_tokens // model.ffn.moe.top_k
    experts = Experts(
        model.ffn.moe.num_experts, model.hidden_size, model.ffn.moe.intermediate_size, applies_probs=weight_in_expert
    ).bfloat16()
    # The operations of a CUDA device, in torch: grouped, with the permutation fused if there are kernels.
    experts.ops = GroupedExpertOps() if kernels == "auto" else GroupedMMExpertOps()
    experts.saves_fc1 = saves_fc1
    x_TH = torch.randn(tokens, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    ids_TK = torch.arange(tokens * model.ffn.moe.top_k).view(tokens, -1) % model.ffn.moe.num_experts
    probs_TK = torch.rand(tokens, model.ffn.moe.top_k, requires_grad=True)
    saved: list[torch.Tensor] = []
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        groups = ParallelGroups.create(fold(world_size=1), torch.device("cpu"))
        moe = groups.moe
        dispatcher = AllToAllDispatcher(moe.ep, moe.etp, moe.experts, moe.expert_coordinates, model.ffn.moe.num_experts)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            run_to_end(dispatcher.run(x_TH, RoutingMap(ids_TK, probs_TK), experts))
    finally:
        dist.destroy_process_group()
    weights = {parameter.data_ptr() for parameter in experts.parameters()}
    found = {t.data_ptr(): t.nbytes for t in saved if t.is_floating_point() and t.data_ptr() not in weights}
    own_probs = 0 if formula.applies_probs else probs_TK.nbytes
    expected = formula.expert_tokens * formula.token_bytes + (formula.fc1_outputs() + formula.expert_outputs()).total()
    assert sum(found.values()) == expected + own_probs
    assert formula.applies_probs == (weight_in_expert or kernels == "auto")


def _measured_in_symmetric_memory(cfg: Config) -> MeasuredMemory:
    """Measure with the operators on symmetric memory replaced by their stand-in, whose own tensors are not counted."""

    class Uncounted(StandInOps):
        def dispatch(self, *tensors: Tensor) -> None:
            with _disable_current_modes():
                super().dispatch(*tensors)

        def combine(self, *tensors: Tensor) -> None:
            with _disable_current_modes():
                super().combine(*tensors)

    with symmetric_memory(Uncounted):
        return measured(cfg)


@pytest.mark.parity
@pytest.mark.parametrize("factor", [1.5, *slow([(2.0,)])])
def test_a_receive_buffer_is_counted_as_a_whole(pool, factor):
    plain = memory_config("bfloat16", {"layers.ffn": "moe"}, world_size=2, ep=2)
    parallel = replace(plain.parallel, dispatcher=make_part("dispatcher", "symm_mem", receive_factor=factor))
    cfg = replace(plain, run=replace(plain.run, device="auto"), parallel=parallel)
    check_config(cfg)
    assert_memory_close(cfg, pool.run(2, _measured_in_symmetric_memory, cfg))


@pytest.mark.parametrize("train", [{}, {"optimizer": "muon"}], ids=["adamw", "muon"])
def test_frozen_weights_have_no_gradients_and_no_moments(train):
    cfg = memory_config(model=LATENT | SPARSE | {"mtp_layers": 1}, train={"indexer_stage": "warmup"} | train)
    rank = measure_one_rank(cfg)
    assert_states(cfg, [rank])
    assert 0 < rank.after["gradients"] < rank.after["weights"] / 10
    assert_memory_close(cfg, [rank])


@pytest.mark.parity
def test_each_micro_batch_of_a_warm_up_in_a_pipeline_is_counted(pool):
    """A stage keeps its input, and the first one its embedded tokens; the loss, which has no graph, saves nothing."""
    model = SPARSE | {"layers": 4, "hidden_size": 64}
    found = []
    for count in (4, 8):
        train = {"indexer_stage": "warmup", "global_batch_size": 2 * count}
        cfg = memory_config(model=model, train=train, world_size=2, pp=2, schedule="gpipe")
        ranks = measure_ranks(pool, cfg)
        assert_memory_close(cfg, ranks)
        found.append(([rank.activations for rank in ranks], [rank.activations.total for rank in formulas_of(cfg)]))
    (measured_4, formula_4), (measured_8, formula_8) = found
    for rank in range(2):
        grown = measured_8[rank] - measured_4[rank]
        assert formula_8[rank] - formula_4[rank] == pytest.approx(grown, rel=1e-3)
