"""Two passes that take turns: the tensors that are in memory at the same time, at each point."""

from dataclasses import replace

import numpy as np
import pytest

from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.activation_columns import activation_table, end_table, layer_table, recomputes_comm
from moefold.cost.activation_memory import activation_memory
from moefold.cost.memory_columns import ModelChunk, columns_of, recipe_chunk
from moefold.cost.overlap_memory import (
    CommInterval,
    OverlapSpec,
    backward_intervals,
    forward_intervals,
    interleave,
    overlap_snapshots,
)
from moefold.cost.saved_tensors import CPU_KERNELS, CUDA_KERNELS
from moefold.cost.stage_balance import plan_stages
from moefold.topology.collective_order import stage_collectives
from tests.models import edit_model, model_of

Intervals = tuple[CommInterval, ...]


def _way(*bytes_: tuple[int, int]) -> Intervals:
    """Intervals of so many bytes at their peak and during the collective that ends them."""
    return tuple(CommInterval(np.array([[float(most)]]), np.array([[float(rests)]])) for most, rests in bytes_)


def _both(forward: Intervals, backward: Intervals, sent: int = 0) -> tuple[int, int]:
    states = interleave(forward, backward, np.zeros((1, 1)), np.array([[float(sent)]]))
    ahead, behind = max(states, key=lambda state: state[0].sum() + state[1].sum())
    return ahead.item(), behind.item()


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        # Without an exchange backward, the forward pass runs after it, and the sent tensors are in memory too.
        ([(10, 5), (30, 20)], [(25, 0)], (30, 4)),
        ([(10, 5), (20, 20)], [(25, 0)], (0, 25)),
        # At the first exchange the backward pass rests with 15; the forward pass reaches 10 there, rests with 5.
        ([(10, 5), (8, 7)], [(20, 15), (21, 0)], (5, 21)),
        ([(30, 5), (8, 7)], [(20, 15), (21, 0)], (30, 15)),
        # Two exchanges, and a forward pass without one: it is through at the first, and rests with all that it keeps.
        ([(9, 9)], [(20, 15), (12, 11), (30, 0)], (9, 30)),
    ],
)
def test_overlapped_passes_by_hand(forward, backward, expected):
    assert _both(_way(*forward), _way(*backward), sent=4) == expected


def _config(parts: tuple[str, ...] = (), **parallel: object) -> Config:
    model = model_of({"layers": 8, "layers.ffn": "dense, 2 moe", "ffn.moe.num_experts": 8, "mtp_layers": 1})
    train = TrainConfig(seq_len=256, global_batch_size=64, recompute=parts)
    return Config(model=model, parallel=ParallelConfig(overlap_experts=True, **parallel), train=train)


def _intervals(cfg: Config, chunk: ModelChunk, *, splits_backward: bool) -> tuple[Intervals, Intervals]:
    spec = _spec(cfg, splits_backward=splits_backward)
    return forward_intervals(spec, chunk), backward_intervals(spec, chunk)


def _spec(cfg: Config, *, splits_backward: bool) -> OverlapSpec:
    return OverlapSpec(columns_of(cfg.model.distinct_kinds), splits_backward, recomputes_comm(cfg.train.recompute))


@pytest.mark.parametrize("parts", [(), ("norms",), ("moe",), ("layer",)], ids=lambda parts: "+".join(parts) or "plain")
@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev"])
def test_a_pass_has_a_stretch_for_each_exchange_and_one_more(schedule, parts):
    cfg = _config(parts, world_size=8, pp=2, ep=4, schedule=schedule, virtual_stages=2)
    for stage in plan_stages(cfg).stages:
        chunk = recipe_chunk(cfg.model, stage.parts)
        for kind, way in zip("FB", _intervals(cfg, chunk, splits_backward=schedule == "dualpipev"), strict=True):
            assert len(way) == len(list(stage_collectives(cfg.model, cfg.parallel, cfg.train, stage, kind, 0))) + 1


@pytest.mark.parametrize("kernels", [CPU_KERNELS, CUDA_KERNELS], ids=["cpu", "cuda"])
@pytest.mark.parametrize("parts", [(), ("norms", "shared_experts"), ("moe",), ("layer",)])
def test_a_forward_pass_ends_with_the_tensors_that_a_backward_pass_begins_with(parts, kernels):
    cfg = _config(parts, world_size=4, ep=4)
    cfg = replace(cfg, model=edit_model(cfg.model, {"ffn.moe.shared.intermediate_size": 64}))
    formula = activation_memory(cfg, kernels=kernels)
    (stage,) = plan_stages(cfg).stages
    chunk = recipe_chunk(cfg.model, stage.parts)
    forward, backward = _intervals(cfg, chunk, splits_backward=False)
    table = activation_table([layer_table(formula, kind) for kind in cfg.model.distinct_kinds], end_table(formula))
    sizes = table.sum(axis=0)
    saved = sum((formula.saved_by_kind[kind] for kind in cfg.model.block_kinds), formula.embedding() + formula.head())
    saved += formula.mtp_layer()
    assert (table @ forward[-1].during_comm[0]).sum() == saved.total()
    assert (backward[0].peak @ sizes).max() >= (forward[-1].during_comm @ sizes).item()
    assert backward[-1].during_comm @ sizes <= formula.embedding().total(), "all layers have given back what they kept"
    for stretch in forward:
        assert (stretch.peak @ sizes).max() >= (stretch.during_comm @ sizes).item() > 0
    both = overlap_snapshots(_spec(cfg, splits_backward=False), chunk, chunk)
    assert (both @ sizes).max() > (backward[0].peak @ sizes).max()
