"""A layer that a kernel computes whole has the bits of its modules, with every option that the kernel supports."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from moefold.comm.groups import fake_rank
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.model.block import Block, LayerInputs
from moefold.model.fused_block import FusedBlock, FusedHead, FusedLayers, supports_fused, supports_fused_head
from moefold.model.head import Head
from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.layer_cache import CurrentPass, PassRows
from moefold.model.paged_cache import KeyLimits, PagedAttention
from moefold.model.transformer import Transformer, build_model
from moefold.model.weight_init import init_weights
from moefold.ops.cpu.decode import CDecode, CDecodePass
from moefold.ops.cpu.gemm import CGemm
from moefold.ops.decode import DecodeChoice
from moefold.ops.gemm import TORCH_GEMM
from moefold.ops.torch_experts import TORCH_EXPERT_OPS
from moefold.parallel.kernels.select import apply_kernels, select_kernels, uses_c_kernels
from moefold.parallel.tensor_parallel import SequenceParallelTokens
from tests.model.transformers_families import FAMILIES, SIZES
from tests.models import config_of
from tests.ops.c_kernels import CPU, needs_compiler
from tests.slow import slow

pytestmark = needs_compiler

KINDS = {name: model for name, (model, *_) in FAMILIES.items()} | {
    "norms-around-zero": {"norm.zero_centered": True, "attention.qk_norm": {}},
    "qk-norm-of-all-heads": {"attention.qk_norm": {}, "attention.qk_norm.over": "all_heads"},
    "other-activation": {"ffn.moe.bias": True, "ffn.moe.activation": "clamped_swiglu", "ffn.moe.activation.limit": 0.3},
}
OF_MODULES = ("qk-norm-of-all-heads", "other-activation")
"""Kinds whose layers are computed by their modules."""
PAGES = 3
"""Length of each sample."""


def recipe(model: dict[str, Any], dtype: str = "float32") -> Config:
    """A small model computed by the C kernels."""
    return config_of(
        {
            "run": {"dtype": dtype, "seed": 3, "kernels": "c"},
            "model": SIZES | model,
            "train": {"seq_len": PAGES * PAGE_POSITIONS},
            "data": {"kind": "synthetic"},
        }
    )


def build(cfg: Config) -> Transformer:
    """A model of one rank in evaluation, with random biases and norms."""
    stage = build_model(cfg)
    stage.to_empty(device="cpu")
    init_weights(stage, cfg.model, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stage.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    apply_kernels(stage, select_kernels(cfg, CPU))
    return stage.train(False)


def rows_of(spans: Sequence[range]) -> PassRows:
    """Return consecutive positions of samples 0, 1, ..., some maybe without any; sample i has pages of its own."""
    tables = torch.tensor([[i + p * len(spans) for p in range(PAGES)] for i in range(len(spans))], dtype=torch.int32)
    chosen = [i for i, span in enumerate(spans) if span]
    counts = [len(spans[i]) for i in chosen]
    positions = torch.tensor([position for span in spans for position in span])
    sample_of_row = torch.tensor(chosen).repeat_interleave(torch.tensor(counts))
    slots = tables[sample_of_row, positions // PAGE_POSITIONS].long() * PAGE_POSITIONS + positions % PAGE_POSITIONS
    return PassRows(slots, positions, tables[chosen], counts, [spans[i][-1] for i in chosen])


def run(
    stage: Transformer, passes: Sequence[PassRows], num_pages: int, *, fuses: bool, at_once: bool = False
) -> list[torch.Tensor]:
    """Residual streams after each layer of each pass; after the last layer only if all are computed at once."""
    current = CurrentPass()
    found = []
    blocks = [block for block in stage.layers.values() if isinstance(block, Block)]
    decode_pass = None
    for block in blocks:
        attention = block.attention
        cache = PagedAttention(
            current, num_pages, PAGE_POSITIONS, KeyLimits(attention.window), attention.kernels.paged_attention
        )
        attention.core_attention = cache
        block.fused = None
        if fuses and supports_fused(block):
            decode_pass = decode_pass or attention.kernels.decode.new_pass()
            block.fused = FusedBlock(block, decode_pass, current, cache)
    fused = [block.fused for block in blocks if isinstance(block.fused, FusedBlock)]
    generator = torch.Generator().manual_seed(2)
    layers = [FusedLayers(fused, decode_pass, current)] if at_once and len(fused) == len(blocks) else blocks
    with torch.no_grad():
        for rows in passes:
            current.rows = rows
            stage.set_positions(rows.positions_R)
            x = torch.randn(len(rows.slots_R), 1, stage.config.hidden_size, generator=generator).to(stage.dtype)
            for layer in layers:
                output = layer(x, LayerInputs(stage.rope))
                x = output if isinstance(output, torch.Tensor) else output.y
                found.append(x)
    return found[len(blocks) - 1 :: len(blocks)] if at_once and layers is blocks else found


def assert_equal_bits(stage: Transformer, passes: Sequence[PassRows], num_samples: int) -> None:
    """Compare all layers of all passes."""
    fused, plain = (run(stage, passes, num_samples * PAGES, fuses=fuses) for fuses in (True, False))
    assert all(block.fused is None for block in stage.layers.values())
    for a, b in zip(fused, plain, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, b)
        assert a.isfinite().all()
    together = run(stage, passes, num_samples * PAGES, fuses=True, at_once=True)
    for a, b in zip(together, plain[len(stage.layers) - 1 :: len(stage.layers)], strict=True):
        assert torch.equal(a, b)


def fixed_passes() -> list[PassRows]:
    """Whole prompts, then a piece of one and single rows of others, then single rows."""
    starts = [(0, 70, 71, 72), (0, 0, 30, 31), (0, 5, 6, 7), (0, 64, 65, 66)]
    return [rows_of([range(*ends) for ends in step]) for step in zip(*map(pairwise, starts), strict=True)]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), *slow([(kind, "bfloat16") for kind in KINDS])]
)
def test_a_fused_layer_has_the_bits_of_its_modules(kind, dtype):
    stage = build(recipe(KINDS[kind], dtype))
    assert all(map(supports_fused, stage.layers.values())) == (kind not in OF_MODULES)
    assert_equal_bits(stage, fixed_passes(), 4)


def calls_of_layers(monkeypatch) -> list[int]:
    """The layers of each call of the kernel from now on."""
    counts = []
    compute = CDecodePass.compute
    monkeypatch.setattr(
        CDecodePass,
        "compute",
        lambda self, layers, *args: (counts.append(len(layers)), compute(self, layers, *args))[1],
    )
    return counts


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, [1, 1, 2, 2]),
        ({"ffn.moe.router": "sigmoid"}, []),
        ({"ffn.moe.shared.intermediate_size": 12}, []),
        ({"layers.ffn": "dense, moe"}, [1, 1, 1]),
    ],
)
def test_layers_are_one_call_from_the_second_pass_on(monkeypatch, model, expected):
    stage = build(recipe({"layers": 2} | model))
    counts = calls_of_layers(monkeypatch)
    overrides = set_overrides(stage)
    run(stage, fixed_passes(), 4 * PAGES, fuses=True, at_once=True)
    assert counts == expected
    # Choices of experts are recorded of each layer once.
    num_rows = [len(rows.slots_R) for rows in fixed_passes()]
    assert all([len(ids) for ids in override.chosen] == num_rows for override in overrides)


def test_a_decoder_is_freed_without_the_garbage_collector(monkeypatch):
    references = []
    layer = CDecodePass.layer
    monkeypatch.setattr(
        CDecodePass, "layer", lambda self, *args: (found := layer(self, *args), references.append(ref(found)))[0]
    )
    stage = build(recipe({"layers": 2}))
    gc.disable()
    try:
        run(stage, fixed_passes(), 4 * PAGES, fuses=True, at_once=True)
        for block in stage.layers.values():
            block.fused = None
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_replaced_choices_and_layers_by_modules_are_not_a_single_call(monkeypatch):
    cfg = recipe({"layers": 2})
    stage = build(cfg)
    counts = calls_of_layers(monkeypatch)
    expected = run(stage, fixed_passes(), 4 * PAGES, fuses=False)
    set_overrides(stage, num_experts=stage.config.ffn.moe.num_experts)
    run(stage, fixed_passes(), 4 * PAGES, fuses=True, at_once=True)
    assert counts == []
    for layer in stage.moe_layers().values():
        layer.router.override = None
    # The second pass by modules, the others whole.
    apply_kernels(stage, of_libraries(select_kernels(cfg, CPU), ScriptedClock([1.0, 3.0, 3.0, 1.0, 1.0, 3.0])))
    found = run(stage, fixed_passes(), 4 * PAGES, fuses=True, at_once=True)
    assert counts[-1] == 1, "the third pass measures first"
    assert 2 not in counts
    for a, b in zip(found, expected[1::2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("router_softmax", ["pre", "post"])
def test_equal_logits_choose_the_experts_that_the_router_chooses(router_softmax):
    stage = build(recipe({"ffn.moe.router.softmax": router_softmax, "ffn.moe.top_k": 3}))
    with torch.no_grad():
        for layer in stage.moe_layers().values():
            # Pairs of equal experts.
            layer.router.weight[1::2] = layer.router.weight[::2]
    assert_equal_bits(stage, fixed_passes(), 4)


@st.composite
def options(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """Sizes that are not multiples of vectors, and each option of the layers."""
    groups = draw(st.sampled_from([1, 2, 3]))
    experts = draw(st.sampled_from([3, 8]))
    model = {
        "layers": 2,
        "hidden_size": draw(st.sampled_from([24, 40, 50])),
        "attention.num_kv_heads": groups,
        "attention.num_heads": groups * draw(st.sampled_from([1, 2, 7])),
        "attention.head_dim": draw(st.sampled_from([6, 16, 34])),
        "ffn.moe.num_experts": experts,
        "ffn.moe.top_k": draw(st.integers(1, 3)),
        "ffn.moe.intermediate_size": draw(st.sampled_from([5, 33])),
        "layers.ffn": draw(st.sampled_from(["moe", "dense, moe"])),
        "ffn.moe.router": draw(st.sampled_from(["softmax", "sigmoid"])),
        "ffn.moe.router.bias": draw(st.booleans()),
        "ffn.moe.router.scaling_factor": draw(st.sampled_from([1.0, 2.5])),
    }
    if model["ffn.moe.router"] == "softmax":
        model["ffn.moe.router.softmax"] = draw(st.sampled_from(["pre", "post"]))
    for name in ("qkv_bias", "output_bias", "sinks"):
        model[f"attention.{name}"] = draw(st.booleans())
    model["attention.qk_norm"] = {} if draw(st.booleans()) else "none"
    if draw(st.booleans()):
        model |= {"layers.attention": "window, full", "sliding_window": draw(st.sampled_from([1, 5, 66]))}
    if draw(st.booleans()):
        model |= {"ffn.moe.shared.intermediate_size": 12, "ffn.moe.shared.gate": draw(st.booleans())}
    return model, draw(st.sampled_from(["float32", "bfloat16"]))


def assert_options(options: tuple[dict[str, Any], str], num_threads: int) -> None:
    """Compare the bits of a model with these options."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        stage = build(recipe(*options))
        assert all(map(supports_fused, stage.layers.values()))
        assert_equal_bits(stage, fixed_passes(), 4)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=12, derandomize=True, phases=[Phase.generate], database=None)
@given(options())
def test_every_option_of_a_fused_layer(options):
    assert_options(options, 1)


@pytest.mark.slow
@settings(max_examples=150, phases=[Phase.generate, Phase.shrink], database=None)
@given(options(), st.sampled_from([1, 2, 3]))
def test_many_options_of_a_fused_layer(options, num_threads):
    assert_options(options, num_threads)


def change_class(block: Block) -> None:
    """Make the attention an instance of a subclass, whose forward pass may differ."""
    block.attention.__class__ = type("Other", (type(block.attention),), {})


def add_parameter(block: Block) -> None:
    """Add a parameter that the kernel does not know."""
    block.attention.gate = nn.Parameter(torch.zeros(3))


def add_hook(block: Block) -> None:
    """Add a hook, which the kernel would not run."""
    block.ffn.router.register_forward_hook(lambda *args: None)


def change_kernels(block: Block) -> None:
    """Compute the linear layers otherwise."""
    block.attention.kernels = replace(block.attention.kernels, linear_backend=None)


def apply_probs(block: Block) -> None:
    """Weight the hidden values of the experts."""
    block.ffn.experts.applies_probs = True


def shard_tokens(block: Block) -> None:
    """Share the tokens among two ranks of tp: the output of the attention is then a part of a sum."""
    with fake_rank(ParallelConfig(world_size=2, tp=2), 0) as groups:
        block.attention.sequence_parallel = SequenceParallelTokens(groups.attn.tp)


@pytest.mark.parametrize("change", [change_class, add_parameter, add_hook, change_kernels, apply_probs, shard_tokens])
def test_a_layer_that_differs_keeps_its_modules(change):
    block = build(recipe({})).layers["0"]
    assert supports_fused(block)
    change(block)
    assert not supports_fused(block)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [{}, {"tie_embeddings": True, "hidden_size": 56}, {"norm.zero_centered": True}])
def test_a_fused_head_has_the_bits_of_its_modules(model, dtype):
    stage = build(recipe(model, dtype))
    head = stage.head
    kernel = stage.layers["0"].attention.kernels.decode
    assert supports_fused_head(head, kernel)
    fused = FusedHead(head, kernel)
    tied_weight = stage.embedding.weight if head.weight is None else None
    x = torch.randn(40, 1, stage.config.hidden_size, generator=torch.Generator().manual_seed(4)).to(stage.dtype)
    # More rows than before, and fewer: the workspace grows, and is used again.
    for picked in ([39], list(range(40)), [3, 0, 3], [], [17, 18]):
        head.picked_rows_N = torch.tensor(picked, dtype=torch.int64)
        with torch.no_grad():
            head.fused = None
            expected = head(x, tied_weight)
            head.fused = fused
            found = head(x, tied_weight)
        assert found.shape == expected.shape == (len(picked), 1, stage.config.vocab_size)
        assert found.dtype == expected.dtype == torch.float32
        assert torch.equal(found, expected)
    for outside in (40, -1):
        with pytest.raises(AssertionError, match=str(outside)):
            fused(x.squeeze(1), torch.tensor([0, outside]), tied_weight)


def add_bias(head: Head) -> None:
    """Add a bias to the logits."""
    head.bias = nn.Parameter(torch.zeros(8))


def divide_logits(head: Head) -> None:
    """Divide the logits."""
    head.input_factor = 0.5


def change_gemm(head: Head) -> None:
    """Multiply by a library."""
    head.gemm = TORCH_GEMM


def change_norm_kernel(head: Head) -> None:
    """Normalise by torch operations."""
    head.norm.kernels = TORCH_KERNELS


def add_hook_to_norm(head: Head) -> None:
    """Add a hook, which the kernel would not run."""
    head.norm.register_forward_hook(lambda *args: None)


@pytest.mark.parametrize("change", [add_bias, divide_logits, change_gemm, change_norm_kernel, add_hook_to_norm])
def test_a_head_that_differs_keeps_its_modules(change):
    stage = build(recipe({}))
    kernel = stage.layers["0"].attention.kernels.decode
    assert supports_fused_head(stage.head, kernel)
    change(stage.head)
    assert not supports_fused_head(stage.head, kernel)


class ScriptedClock:
    """Seconds such that each measured candidate takes the next of some times."""

    def __init__(self, times: Sequence[float]) -> None:
        self.times = list(times)
        self.now = 0.0
        self.has_begun = False

    def __call__(self) -> float:
        """Return a beginning, then its end, and so on."""
        self.now += self.times.pop(0) if self.has_begun else 0.0
        self.has_begun = not self.has_begun
        return self.now


class KeptChoices:
    """Override of a router that keeps the choices, and may replace them by the experts after them."""

    in_evaluation = True

    def __init__(self, num_experts: int = 0) -> None:
        self.only_records = not num_experts
        self.num_experts = num_experts
        self.chosen: list[torch.Tensor] = []

    def apply(self, ids_TK: torch.Tensor, sample_ids_B: torch.Tensor) -> torch.Tensor:
        """Keep the choice."""
        self.chosen.append(ids_TK)
        return ids_TK if self.only_records else (ids_TK + 1) % self.num_experts


def set_overrides(stage: Transformer, num_experts: int = 0) -> list[KeptChoices]:
    """Override all routers."""
    overrides = [KeptChoices(num_experts) for _ in stage.moe_layers()]
    for layer, override in zip(stage.moe_layers().values(), overrides, strict=True):
        layer.router.override = override
    return overrides


def of_libraries(kernels: Kernels, clock: ScriptedClock | None) -> Kernels:
    """The kernels where the GEMMs of training are the libraries'."""
    parts = kernels.norm, kernels.rope, kernels.paged_attention, kernels.permute_ops, kernels.expert_activation
    softmax = kernels.router_softmax
    return replace(
        kernels,
        gemm=TORCH_GEMM,
        linear_backend=None,
        expert_ops=TORCH_EXPERT_OPS,
        decode=CDecode([*parts, softmax, TORCH_GEMM, TORCH_EXPERT_OPS, None]),
        decode_choice=None if clock is None else DecodeChoice(clock),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_of_whole_layers_and_of_modules_go_on_from_one_another(monkeypatch, dtype):
    cfg = recipe({}, dtype)
    stage = build(cfg)
    passes = fixed_passes()
    kernels = select_kernels(cfg, CPU)
    apply_kernels(stage, of_libraries(kernels, None))
    expected = run(stage, passes, 4 * PAGES, fuses=False)
    # The first pass by modules, the second whole, the third by modules again.
    clock = ScriptedClock([3.0, 1.0, 1.0, 3.0, 3.0, 1.0])
    apply_kernels(stage, of_libraries(kernels, clock))
    overrides = set_overrides(stage)
    run_modules = mock.Mock(wraps=Block.run_modules)
    monkeypatch.setattr(Block, "run_modules", lambda *args: run_modules(*args))
    found = run(stage, passes, 4 * PAGES, fuses=True)
    assert not clock.times
    num_layers = len(stage.layers)
    # Twice for each measurement, and in two passes.
    assert run_modules.call_count == 2 * len(passes) + 2 * num_layers
    assert all(torch.equal(a, b) for a, b in zip(found[:num_layers], expected[:num_layers], strict=True))
    within = 1e-5 if dtype == "float32" else 5e-2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=within, atol=within)
    # Measuring leaves no trace in the recorded choices.
    num_rows = [len(rows.slots_R) for rows in passes]
    assert all([len(ids) for ids in override.chosen] == num_rows for override in overrides)


@pytest.mark.parametrize("replaces", [False, True])
def test_choices_are_recorded_and_replaced_as_in_the_modules(replaces):
    stage = build(recipe({}))
    num_experts = stage.config.ffn.moe.num_experts if replaces else 0
    chosen = []
    found = []
    for fuses in (True, False):
        overrides = set_overrides(stage, num_experts)
        found.append(run(stage, fixed_passes(), 4 * PAGES, fuses=fuses))
        chosen.append([ids for override in overrides for ids in override.chosen])
    for of_kernel, of_modules in zip(*chosen, strict=True):
        assert torch.equal(of_kernel, of_modules)
    for of_kernel, of_modules in zip(*found, strict=True):
        assert torch.equal(of_kernel, of_modules)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_layers_decode_in_c_whatever_multiplies_in_training(monkeypatch, is_deterministic):
    cfg = recipe({})
    run_config = replace(cfg.run, kernels="auto", deterministic=is_deterministic)
    monkeypatch.setattr(CGemm, "is_fast", lambda self, dtype: False)
    kernels = select_kernels(replace(cfg, run=run_config), CPU)
    assert kernels.gemm is TORCH_GEMM
    assert not uses_c_kernels(kernels)
    has_attention = kernels.paged_attention is not None
    assert (kernels.decode is not None) == has_attention
    assert ("whole layers of decoding where they are faster" in kernels.message) == has_attention
    assert (kernels.decode_choice is None) == is_deterministic
    stage = build(cfg)
    apply_kernels(stage, kernels)
    assert all(map(supports_fused, stage.layers.values())) == has_attention
    # With the GEMMs of training in C there is nothing to choose: sampling has its bits.
    assert select_kernels(cfg, CPU).decode_choice is None
