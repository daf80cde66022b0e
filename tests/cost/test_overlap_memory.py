"""Two passes that take turns: what is in memory at once, where they stand."""

from dataclasses import replace

import pytest

from moefold.config.model import ModelConfig
from moefold.config.schema import Config, ParallelConfig, TrainConfig
from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.overlap_memory import (
    EMPTY,
    CommInterval,
    OverlappedPassMemory,
    PassIntervals,
    SizedParts,
    overlapped_peak,
)
from moefold.cost.saved_tensors import CPU_KERNELS, CUDA_KERNELS, BytesByPart
from moefold.cost.stages import plan_stages
from moefold.topology.collective_order import stage_collectives


def _way(*bytes_: tuple[int, int]) -> PassIntervals:
    """Stretches of so many bytes at their fullest moment and at the exchange behind."""
    return tuple(
        CommInterval(SizedParts(BytesByPart(a=most)), SizedParts(BytesByPart(a=rests))) for most, rests in bytes_
    )


def _both(forward: PassIntervals, backward: PassIntervals, sent: int = 0) -> tuple[int, int]:
    ahead, behind = overlapped_peak(forward, backward, SizedParts(BytesByPart(a=sent)))
    return ahead.size, behind.size


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        # Without an exchange backward, the forward pass runs behind it, beside what was sent.
        ([(10, 5), (30, 20)], [(25, 0)], (30, 4)),
        ([(10, 5), (20, 20)], [(25, 0)], (0, 25)),
        # At the first exchange the backward pass rests with 15; the forward pass reaches 10 there, rests with 5.
        ([(10, 5), (8, 7)], [(20, 15), (21, 0)], (5, 21)),
        ([(30, 5), (8, 7)], [(20, 15), (21, 0)], (30, 15)),
        # Two exchanges, and a forward pass without one: it is through at the first, and rests with all that it keeps.
        ([(9, 9)], [(20, 15), (12, 11), (30, 0)], (9, 30)),
    ],
)
def test_hand_worked_turns(forward, backward, expected):
    assert _both(_way(*forward), _way(*backward), sent=4) == expected


def _config(parts: tuple[str, ...] = (), **parallel: object) -> Config:
    model = ModelConfig(num_layers=8, layer_pattern="DMM", num_experts=8, mtp_layers=1)
    train = TrainConfig(seq_len=256, global_batch_size=64, recompute=parts)
    return Config(model=model, parallel=ParallelConfig(overlap_experts=True, **parallel), train=train)


@pytest.mark.parametrize("parts", [(), ("norms",), ("moe",), ("layer",)], ids=lambda parts: "+".join(parts) or "plain")
@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev"])
def test_a_pass_has_a_stretch_for_each_exchange_and_one_more(schedule, parts):
    cfg = _config(parts, world_size=8, pp=2, ep=4, schedule=schedule, virtual_stages=2)
    ways = OverlappedPassMemory(ActivationMemory(cfg, kernels=CPU_KERNELS), splits_backward=schedule == "dualpipev")
    for stage in plan_stages(cfg).stages:
        for kind, way in (("F", ways.forward_intervals(stage)), ("B", ways.backward_intervals(stage))):
            assert len(way) == len(list(stage_collectives(cfg, stage, kind, 0))) + 1


@pytest.mark.parametrize("kernels", [CPU_KERNELS, CUDA_KERNELS], ids=["cpu", "cuda"])
@pytest.mark.parametrize("parts", [(), ("norms", "shared_experts"), ("moe",), ("layer",)])
def test_a_forward_pass_ends_with_what_a_backward_pass_begins_with(parts, kernels):
    cfg = _config(parts, world_size=4, ep=4)
    cfg = replace(cfg, model=replace(cfg.model, shared_expert_ffn_hidden_size=64))
    formula = ActivationMemory(cfg, kernels=kernels)
    ways, (stage,) = OverlappedPassMemory(formula, splits_backward=False), plan_stages(cfg).stages
    forward, backward = ways.forward_intervals(stage), ways.backward_intervals(stage)
    assert forward[-1].during_comm.parts == formula.stage_saved(stage)
    assert backward[0].peak.size >= forward[-1].during_comm.size
    assert backward[-1].during_comm.size <= formula.embedding().total(), "all layers have given back what they kept"
    assert all(stretch.peak.size >= stretch.during_comm.size > 0 for stretch in forward)
    assert overlapped_peak(forward, backward, EMPTY)[0].size > 0
