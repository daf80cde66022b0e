"""A layer that a kernel computes whole has the bits of its modules, with every option that the kernel supports."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.model.fused_block import FusedBlock, supports_fused
from moefold.model.init import init_weights
from moefold.model.paged_cache import CurrentPass, PagedAttention, PassRows
from moefold.model.transformer import Block, Transformer, build_model
from moefold.ops.paged_attention import PAGE_SIZE
from moefold.parallel.select_ops import apply_kernels, select_kernels
from tests.model.test_against_transformers import FAMILIES, SIZES
from tests.ops.c_kernels import CPU, needs_compiler
from tests.slow import slow

pytestmark = needs_compiler

KINDS = {name: model for name, (model, *_) in FAMILIES.items()} | {
    "norms-around-zero": {"zero_centered_norms": True, "qk_norm": True},
    "qk-norm-of-all-heads": {"qk_norm": True, "qk_norm_width": "all_heads"},
    "other-activation": {"moe_bias": True, "moe_activation": "clamped_swiglu", "swiglu_limit": 0.3},
}
OF_MODULES = ("qk-norm-of-all-heads", "other-activation")
"""Kinds whose layers are computed by their modules."""
PAGES = 3
"""Of each sample."""


def recipe(model: dict[str, Any], dtype: str = "float32") -> Config:
    """A small model computed by the C kernels."""
    return config_from_dict(
        {
            "run": {"dtype": dtype, "seed": 3, "kernels": "c"},
            "model": SIZES | model,
            "train": {"seq_len": PAGES * PAGE_SIZE},
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
    """Consecutive positions of samples 0, 1, ..., of which some may have none; sample i has pages of its own."""
    tables = torch.tensor([[i + p * len(spans) for p in range(PAGES)] for i in range(len(spans))], dtype=torch.int32)
    chosen = [i for i, span in enumerate(spans) if span]
    counts = [len(spans[i]) for i in chosen]
    positions = torch.tensor([position for span in spans for position in span])
    sample_of_row = torch.tensor(chosen).repeat_interleave(torch.tensor(counts))
    slots = tables[sample_of_row, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    return PassRows(slots, positions, tables[chosen], counts)


def run(stage: Transformer, passes: Sequence[PassRows], num_pages: int, *, fuses: bool) -> list[torch.Tensor]:
    """Residual streams after each layer of each pass."""
    current = CurrentPass()
    found = []
    blocks = [block for block in stage.layers.values() if isinstance(block, Block)]
    decode_pass = None
    for block in blocks:
        attention = block.attention
        cache = PagedAttention(current, num_pages, PAGE_SIZE, attention.window, attention.kernels.paged_attention)
        attention.core_attention = cache
        block.fused = None
        if fuses and supports_fused(block):
            decode_pass = decode_pass or attention.kernels.decode.new_pass()
            block.fused = FusedBlock(block, decode_pass, current, cache)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for rows in passes:
            current.rows = rows
            stage.set_positions(rows.positions_R)
            x = torch.randn(len(rows.slots_R), 1, stage.cfg.model.hidden_size, generator=generator).to(stage.dtype)
            for block in blocks:
                x = block(x, stage.rope)
                found.append(x)
    return found


def assert_equal_bits(stage: Transformer, passes: Sequence[PassRows], num_samples: int) -> None:
    """Compare all layers of all passes."""
    fused, plain = (run(stage, passes, num_samples * PAGES, fuses=fuses) for fuses in (True, False))
    assert all(block.fused is None for block in stage.layers.values())
    for a, b in zip(fused, plain, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, b)
        assert a.isfinite().all()


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


@st.composite
def options(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """Sizes that are no multiples of vectors, and each option of the layers."""
    groups = draw(st.sampled_from([1, 2, 3]))
    experts = draw(st.sampled_from([3, 8]))
    model = {
        "num_layers": 2,
        "hidden_size": draw(st.sampled_from([24, 40, 50])),
        "num_query_groups": groups,
        "num_attention_heads": groups * draw(st.sampled_from([1, 2, 7])),
        "head_dim": draw(st.sampled_from([6, 16, 34])),
        "num_experts": experts,
        "top_k": draw(st.integers(1, 3)),
        "moe_ffn_hidden_size": draw(st.sampled_from([5, 33])),
        "layer_pattern": draw(st.sampled_from(["M", "DM"])),
        "router_score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "router_bias": draw(st.booleans()),
    }
    for name in ("qk_norm", "qkv_bias", "attention_output_bias", "attention_sinks"):
        model[name] = draw(st.booleans())
    if draw(st.booleans()):
        model |= {"attention_pattern": "WF", "sliding_window": draw(st.sampled_from([1, 5, 66]))}
    if draw(st.booleans()):
        model |= {"shared_expert_ffn_hidden_size": 12, "shared_expert_gate": draw(st.booleans())}
    return model, draw(st.sampled_from(["float32", "bfloat16"]))


def check_options(options: tuple[dict[str, Any], str], num_threads: int) -> None:
    """Compare the bits of a model with these options."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        stage = build(recipe(*options))
        assert all(map(supports_fused, stage.layers.values()))
        assert_equal_bits(stage, fixed_passes(), 4)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
@given(options())
def test_every_option_of_a_fused_layer(options):
    check_options(options, 1)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, phases=[Phase.generate, Phase.shrink], database=None)
@given(options(), st.sampled_from([1, 2, 3]))
def test_many_options_of_a_fused_layer(options, num_threads):
    check_options(options, num_threads)


def change_class(block: Block) -> None:
    """Make the attention one of a subclass, whose forward pass may differ."""
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


@pytest.mark.parametrize("change", [change_class, add_parameter, add_hook, change_kernels, apply_probs])
def test_a_layer_that_differs_keeps_its_modules(change):
    block = build(recipe({})).layers["0"]
    assert supports_fused(block)
    change(block)
    assert not supports_fused(block)
