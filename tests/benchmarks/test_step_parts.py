"""The parts of the bench's breakdown call the same code as the step."""

import pytest
import torch

from benchmarks.step_parts import EXPERTS, FUSED_EXPERTS, StepBreakdown, bare_loop_ratio, part_time, repeat_short_step
from moefold.bench.our_step import LayerStep
from moefold.bench.timing import PeakRates
from moefold.recipe import load_config
from tests.bench.small_sizes import SIZES

CPU = torch.device("cpu")
SHORT = [
    *("train.seq_len=4", "train.micro_batch_size=1", "train.global_batch_size=1", "model.ffn.moe.num_experts=4"),
    *("model.hidden_size=16", "model.ffn.moe.intermediate_size=16"),
]
UNFUSED = ["router", "permutation", EXPERTS, "combine"]
FUSED = ["router", "plan of the permutation", FUSED_EXPERTS]


class CallRecorder:
    """Expert operations that note the arguments of each call."""

    def __init__(self, ops):
        self._ops = ops
        self.calls = []

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def forward(self, x, weights, options, probs_R):
        """Note the call and run the operations."""
        self.calls.append(
            (
                tuple(x.shape),
                list(options.tokens_per_expert),
                None if options.permute_map is None else options.permute_map.source_R.tolist(),
                None if probs_R is None else probs_R.detach().clone(),
            )
        )
        return self._ops.forward(x, weights, options, probs_R)


@pytest.mark.parametrize(
    ("kernels", "in_expert", "names"),
    [("plain", False, UNFUSED), ("plain", True, UNFUSED), ("triton", False, FUSED)],
)
def test_the_experts_part_has_the_call_of_the_step(kernels, in_expert, names):
    if kernels == "triton":
        pytest.importorskip("triton")
    words = [*SIZES, *SHORT, f"run.kernels={kernels}", f"moe.weight_in_expert={str(in_expert).lower()}"]
    cfg = load_config(None, words)
    steps = LayerStep(cfg, "layer", "natural", CPU)
    layer = steps.first_moe_layer
    layer.experts.ops = recorder = CallRecorder(layer.experts.ops)
    states = []
    layer.router.register_forward_pre_hook(lambda module, args: states.append(args[0].detach()))
    steps.build()()
    (expected,) = recorder.calls
    breakdown = StepBreakdown(cfg, "layer", CPU, states[0].view(4, 1, -1), layer.router.weight.detach())
    breakdown.moe.experts.ops = recorder = CallRecorder(breakdown.moe.experts.ops)
    parts = breakdown.parts()
    assert [part.name for part in parts] == names
    recorder.calls.clear()
    for part in parts:
        part.run()
    (found,) = recorder.calls
    assert found[:3] == expected[:3]
    assert (found[3] is None) == (expected[3] is None)
    if found[3] is not None:
        assert torch.equal(found[3], expected[3])
    assert breakdown.routing_map.probs_TK.grad is None


@pytest.mark.parametrize("name", [EXPERTS, FUSED_EXPERTS])
def test_the_bare_loop_is_compared_with_the_experts(name):
    cfg = load_config(None, [*SIZES, *SHORT])
    steps = LayerStep(cfg, "layer", "natural", CPU)
    breakdown = StepBreakdown(cfg, "layer", CPU, steps.x, steps.first_moe_layer.router.weight.detach())
    part = next(part for part in breakdown.parts() if part.name == EXPERTS)
    times = [part_time(part, 2.0, PeakRates(1.0, 1.0))]
    renamed = [type(times[0])(name, times[0].seconds, times[0].floor_s)]
    assert bare_loop_ratio(renamed, 1.0, 1) == 0.5 / part.times_per_step


@pytest.mark.parametrize(("step_s", "repeats"), [(1.0, 1), (6e-3, 1), (2e-3, 3), (1.5e-4, 34), (0.0, 500)])
def test_a_short_step_is_repeated_for_five_milliseconds(step_s, repeats):
    now_s = 0.0
    calls = []

    def step():
        nonlocal now_s
        # The first call compiles.
        now_s += step_s if calls else 100.0
        calls.append(now_s)

    repeated = repeat_short_step(step, torch.device("cpu"), lambda: now_s)
    assert repeated.repeats == repeats
    calls.clear()
    repeated.run()
    assert len(calls) == repeats
