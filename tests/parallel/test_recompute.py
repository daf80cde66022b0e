"""The tensors that a forward pass keeps fall as the formula of each part says, within a tenth."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.saved_memory import measure_saved_bytes
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.auto_recompute import DEFAULT_MEMORY_FRACTION, choose_recompute
from moefold.cost.saved_tensors import CPU_KERNELS
from moefold.model.activation_checkpoint import checkpoint_without_output, no_checkpoint
from moefold.model.transformer import build_model
from moefold.parallel.recompute import apply_recompute, resolve_recompute
from moefold.verify.distributed_run import create_groups
from tests.models import model_of
from tests.parallel.counted_models import FE, FS, GQA, LATENT, A, F, H, K, T, V
from tests.verify.recipes import tiny

DENSE, SHARED, MOE = 4 * F, 4 * FS, K * (2 * H + 2 * FE)
"""Numbers that a token keeps: gate, its SiLU, up and their product; the same; rows, their results, two projections."""


def _kept_numbers(model: ModelConfig, parts: tuple[str, ...]) -> float:
    """Numbers in memory between the passes, for each token."""
    cfg = Config(
        run=RunConfig(dtype="float64"),
        model=model,
        train=TrainConfig(seq_len=T // 2, micro_batch_size=2, recompute=parts),
    )
    module = build_model(cfg).double()
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    module.set_positions(torch.arange(T // 2))
    apply_recompute(module, parts)
    tokens = torch.randint(V, (2, T // 2))
    loss, found = measure_saved_bytes(lambda: module(tokens, labels=tokens, weights=torch.ones(tokens.shape)))
    loss.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    return found / 8 / T


@pytest.mark.parametrize(
    ("part", "formula"),
    [
        # The results of two norms in each of two layers, and the root mean square.
        ("norms", 2 * 2 * (H + 1)),
        # The log-sum-exp: the backward pass runs again from the inputs, and the output is an input of the projection.
        ("core_attention", 2 * A),
        ("dense_mlp", DENSE),
        ("expert_activation", K * 2 * FE),
        ("shared_experts", SHARED),
        ("moe", MOE + SHARED),
    ],
)
def test_each_part_saves_the_bytes_of_its_formula(part, formula):
    saved = _kept_numbers(GQA, ()) - _kept_numbers(GQA, (part,))
    assert saved == pytest.approx(formula, rel=0.1)


def test_the_heads_of_latent_attention_are_not_kept():
    saved = _kept_numbers(LATENT, ()) - _kept_numbers(LATENT, ("mla_up",))
    # Queries and keys of 16, and the projection [plain key, value]; the values are a part of it.
    assert saved == pytest.approx(2 * A * (16 + 16 + 12 + 16), rel=0.1)


def test_a_layer_that_runs_again_keeps_its_input():
    # The inputs of two layers; after the last one, the norm and the loss keep the same tensors as always.
    head = _kept_numbers(model_of({**_fields(GQA), "layers": 1, "layers.ffn": "dense"}), ("layer",)) - H
    assert _kept_numbers(GQA, ("layer",)) - head == pytest.approx(2 * H, rel=0.1)


def _fields(model: ModelConfig) -> dict[str, object]:
    return {name: getattr(model, name) for name in ModelConfig.__dataclass_fields__}


def _double(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x * w, x + w


def test_recalled_results_are_made_again_once_and_give_the_gradients():
    calls = []

    def counted(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return _double(x, w)

    found = []
    for recall in (no_checkpoint, checkpoint_without_output):
        x, w = (torch.linspace(1, 2, 6, dtype=torch.float64).view(2, 3) * k for k in (1, 3))
        x.requires_grad_()
        w.requires_grad_()
        with recall(counted, x, w) as (product, total):
            y = (product * total).t() @ total.flatten()[2:4] + product.sum()
        y.square().sum().backward()
        found.append((y.detach(), x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(calls) == 1 + 2


def test_nothing_is_made_again_without_gradients():
    x = torch.ones(3)
    with torch.no_grad(), checkpoint_without_output(_double, x.requires_grad_(), x) as results:
        assert not any(result.requires_grad for result in results)


def _settled_parts(cfg: Config, device_bytes: list[int]) -> tuple[str, ...]:
    groups = create_groups(cfg)
    cfg = replace(cfg, train=replace(cfg.train, recompute=("auto",)))
    return resolve_recompute(cfg, groups, device_bytes[groups.rank])[0].train.recompute


@pytest.mark.parity
def test_ranks_of_unequal_devices_make_the_same_again(pool):
    """A rank that made other parts again would wait for exchanges that never come."""
    cfg = tiny(world_size=2, ep=2)
    plenty = choose_recompute(cfg, 10**12, CPU_KERNELS)
    scarce = choose_recompute(cfg, plenty.max_rank_bytes - 1, CPU_KERNELS)
    assert plenty.parts != scarce.parts
    enough, less = (round(choice.max_rank_bytes / DEFAULT_MEMORY_FRACTION) + 1 for choice in (plenty, scarce))
    assert pool.run(2, _settled_parts, cfg, [enough, enough]) == [plenty.parts] * 2
    assert pool.run(2, _settled_parts, cfg, [enough, less]) == [scarce.parts] * 2
    assert pool.run(2, _settled_parts, cfg, [less, enough]) == [scarce.parts] * 2


def test_a_graph_with_outputs_made_again_is_freed_at_once():
    """Also where no gradient passes a branch, such as the router's scores without a loss of them."""
    gc.disable()
    try:
        x = torch.ones(3, requires_grad=True)
        with checkpoint_without_output(lambda y: (y.exp(),), x) as (result,):
            root = result.sin().sum()
            unused = result.softmax(-1)
        root.backward()
        storage = weakref.ref(x.untyped_storage())
        assert storage() is not None
        del x, result, root, unused
        assert storage() is None
    finally:
        gc.enable()
