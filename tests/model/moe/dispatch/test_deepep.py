"""The DeepEP adaptor against a stand-in for DeepEP's contract (`deepep_stand_in`): it has not been run on hardware."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.parallel.expert_parallel import select_dispatcher
from moefold.parts.dispatcher.deepep.module import DeepEPDispatcher, open_buffer
from moefold.topology.layout import fold
from moefold.verify.distributed_run import create_groups
from tests.model.moe.dispatch.building import make_dispatcher
from tests.model.moe.dispatch.deepep_stand_in import StandInBuffer
from tests.model.moe.dispatch.dispatched_layer import CASES, LAYOUTS, E, H, T, draw_routing, run_layer
from tests.verify.covering import few_else_slow
from tests.verify.recipes import tiny
from tests.verify.shared_ranks import run_each


def _both(
    sizes: dict[str, Any], case: str, weighs_early: bool = False, packs: bool = False
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    buffer = StandInBuffer(groups.moe.ep.handle)
    width = 256 if packs else H
    deepep = DeepEPDispatcher(buffer, E, fp8_dispatch=packs)
    mine = run_layer(deepep, case, groups, weighs_early, width)
    theirs = run_layer(make_dispatcher("alltoall", groups.moe, E, fp8_dispatch=packs), case, groups, hidden_size=width)
    mine, theirs = ({key: value.numpy() for key, value in part.items()} for part in (mine, theirs))
    return mine, theirs, buffer.calls


def _both_in(
    sizes: dict[str, Any], cases: tuple[str, ...], weighs_early: bool, packs: bool
) -> dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]]:
    return {case: _both(sizes, case, weighs_early, packs) for case in cases}


@pytest.mark.parity
@pytest.mark.parametrize("sizes", few_else_slow(LAYOUTS, [LAYOUTS[0], LAYOUTS[3]]))
def test_it_equals_the_all_to_all(pool, sizes):
    _assert_equals_the_all_to_all(pool, sizes, CASES)


@pytest.mark.parity
def test_weights_may_be_applied_inside_the_experts(pool):
    _assert_equals_the_all_to_all(pool, LAYOUTS[-1], ("dropped", "empty rank"), True)


@pytest.mark.parity
def test_rows_in_8_bits_equal_the_rows_of_the_all_to_all(pool):
    _assert_equals_the_all_to_all(pool, LAYOUTS[0], ("dropped", "empty rank"), packs=True)


def _assert_equals_the_all_to_all(
    pool, sizes: dict[str, Any], cases: tuple[str, ...], weighs_early: bool = False, packs: bool = False
) -> None:
    """Compare all cases, which the ranks compute in one task."""
    for rank, found in enumerate(pool.run(sizes["world_size"], _both_in, sizes, cases, weighs_early, packs)):
        assert tuple(found) == cases
        for case, (mine, theirs, calls) in found.items():
            for key, value in theirs.items():
                torch.testing.assert_close(
                    torch.from_numpy(mine[key]),
                    torch.from_numpy(value),
                    rtol=1e-12,
                    atol=1e-12,
                    msg=lambda text, key=key, name=f"{case}, rank {rank}": f"{name}: {key}: {text}",
                )
            assert calls == ["layout", "dispatch", "combine", "dispatch again", "combine"], case


class _ForgetfulBuffer(StandInBuffer):
    """Loses the gradients of the weights on their way home."""

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None, Any]:
        combined, weights, event = super().combine(x, handle, topk_weights)
        return combined, None if weights is None else torch.zeros_like(weights), event


def _forgetful() -> tuple[bool, bool]:
    groups = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
    mine = run_layer(DeepEPDispatcher(_ForgetfulBuffer(groups.moe.ep.handle), E), "spread", groups)
    theirs = run_layer(make_dispatcher("alltoall", groups.moe, E), "spread", groups)
    return torch.allclose(mine["y"], theirs["y"]), torch.allclose(mine["probs"], theirs["probs"])


@pytest.mark.parity
def test_a_lost_gradient_is_noticed(pool):
    assert pool.run(2, _forgetful) == [(True, False)] * 2


def _in_bfloat16() -> tuple[torch.dtype, torch.dtype, float]:
    groups = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
    generator = torch.Generator().manual_seed(groups.rank)
    x = torch.randn(T, H, generator=generator).bfloat16().requires_grad_()
    assignment = draw_routing("spread", groups.rank, generator)
    dispatcher = DeepEPDispatcher(StandInBuffer(groups.moe.ep.handle), E)
    rows, plan = dispatcher.dispatch(x, assignment)
    y = dispatcher.combine(rows, plan)
    y.float().sum().backward()
    expected = x.detach().double() * assignment.probs_TK.detach().sum(1, keepdim=True)
    grad = assignment.probs_TK.grad
    assert grad is not None
    return y.dtype, grad.dtype, float((y.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parity
def test_bfloat16_tokens_travel_with_float32_weights(pool):
    for dtype, grad_dtype, error in pool.run(2, _in_bfloat16):
        assert (dtype, grad_dtype) == (torch.bfloat16, torch.float64)
        assert error < 2e-2


def _buffer_sizes(ep: int) -> tuple[tuple[int, int], bool] | str:
    module = ModuleType("deep_ep")
    module.Buffer = StandInBuffer
    sys.modules["deep_ep"] = module
    groups = ParallelGroups.create(fold(world_size=ep, ep=ep), torch.device("cpu"))
    try:
        buffer = open_buffer(groups.moe.ep, 64)
    except ConfigError as error:
        return str(error)
    assert isinstance(buffer, StandInBuffer)
    return buffer.sizes, buffer.group is groups.moe.ep.handle


@pytest.mark.parity
def test_the_buffer_is_as_large_as_deepep_recommends(pool):
    assert pool.run(2, _buffer_sizes, 2) == [((110 * 128 * 2, 0), True)] * 2


@pytest.mark.parity
def test_a_number_of_ranks_that_deepep_does_not_know_is_refused(pool):
    (message, *_) = pool.run(3, _buffer_sizes, 3)
    assert message.startswith("parallel.ep=3: deep_ep has no configuration for this number of ranks; choose another ep")


def _selected(cfg: Config) -> tuple[str, str]:
    try:
        part, message = select_dispatcher(cfg, create_groups(cfg))
    except ConfigError as error:
        return "refused", str(error)
    return part.kind, message


def _bfloat16(cfg: Config, device: str = "auto") -> Config:
    return replace(cfg, run=replace(cfg.run, dtype="bfloat16", device=device))


@pytest.mark.parity
def test_auto_takes_the_all_to_all_where_deepep_cannot_run_and_says_why(pool):
    """Named, it is refused there."""
    auto = {"world_size": 2, "dispatcher": "auto"}
    named = _bfloat16(tiny(world_size=2, ep=2))
    named = replace(named, parallel=replace(named.parallel, dispatcher="deepep"))
    recipes = [
        (tiny(ep=2, **auto), "deep_ep supports only bfloat16, and run.dtype='float64'"),
        (_bfloat16(tiny(ep=2, **auto)), "deep_ep needs CUDA GPUs, and this run is on the CPU"),
        (_bfloat16(tiny(etp=2, **auto)), "deep_ep moves whole experts' tokens, and parallel.etp=2 shards the experts"),
    ]
    *found, refused = run_each(pool, 2, _selected, *((recipe,) for recipe, _ in recipes), (named,))
    for ranks, (_, reason) in zip(found, recipes, strict=True):
        assert ranks == [("alltoall", f"parallel.dispatcher='auto' took alltoall: {reason}")] * 2
    message = (
        "parallel.dispatcher='deepep' cannot run: deep_ep needs CUDA GPUs, and this run is on the CPU; "
        "choose 'alltoall'"
    )
    assert refused == [("refused", message)] * 2


@pytest.mark.parity
def test_where_there_is_nowhere_to_go_auto_stays_and_says_so(pool):
    note = "parallel.dispatcher='auto' took local: ep = etp = 1, so no token leaves its rank"
    assert pool.run(1, _selected, tiny(world_size=1, dispatcher="auto")) == [("local", note)]
    assert pool.run(1, _selected, tiny(world_size=1)) == [("alltoall", "")]
