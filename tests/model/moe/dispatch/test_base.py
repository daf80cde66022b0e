"""Test rows that are sent in 8 bits: the values that arrive and come back, and the bytes that are sent."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm import collectives
from moefold.comm.groups import ParallelGroups
from moefold.model.moe.dispatch import RoutingMap
from moefold.ops.quantization.formats import straight_through_quantize
from moefold.parts.dispatcher.leastloaded.module import RebalanceRule
from moefold.topology.layout import fold
from tests.model.moe.dispatch.building import make_dispatcher
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity

E, H, K, T = 4, 256, 2, 24
DISPATCHERS = ("alltoall", "allgather", "leastloaded")


def _journey(groups: ParallelGroups, name: str, dtype: torch.dtype, *, packs: bool, slots: int | None = None) -> Any:
    """Return the rows of the experts, and the gradients of tokens and weights for some gradient of the results."""
    generator = torch.Generator().manual_seed(groups.rank)
    x = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(T, K, generator=generator).requires_grad_()
    # Most copies go to expert 0.
    first = torch.where(torch.arange(T) < 18, 0, torch.arange(T) % E)
    ids = torch.stack([first, (first + 1) % E], 1)
    kept = None if slots is None else torch.arange(T)[:, None].expand(T, K) < slots
    dispatcher = make_dispatcher(name, groups.moe, E, RebalanceRule(1.3, 1.1, 1), fp8_dispatch=packs)
    tokens = x if packs else straight_through_quantize(x)
    rows, plan = dispatcher.dispatch(tokens, RoutingMap(ids, probs, kept, slots))
    weights_R, plan = dispatcher.dispatch_probs(plan)
    home = dispatcher.combine(rows * weights_R.unsqueeze(1).to(dtype), plan)
    grads = torch.autograd.grad(home.float().square().sum(), (x, probs))
    return rows.detach(), weights_R.detach(), home.detach(), *grads


def _apart(sizes: dict[str, Any], dtype: torch.dtype) -> dict[str, list[float]]:
    """Largest differences to rows that are rounded first and then sent as they are, over the largest value."""
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    apart = {}
    for name in DISPATCHERS:
        for slots in (None, T) if name != "leastloaded" else (None,):
            found = _journey(groups, name, dtype, packs=True, slots=slots)
            expected = _journey(groups, name, dtype, packs=False, slots=slots)
            pairs = zip(found, expected, strict=True)
            apart[f"{name} {slots}"] = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    return apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_arrive_rounded_and_their_gradients_come_back_as_they_are(pool, dtype):
    for apart in pool.run(2, _apart, {"world_size": 2, "ep": 2}, dtype):
        assert apart == {name: [0.0] * 5 for name in apart}


def test_rows_that_travel_on_to_the_parts_of_an_expert_are_hardly_changed(pool):
    """Their scales are found anew, of values in bfloat16: within its rounding."""
    for apart in pool.run(4, _apart, {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}, torch.bfloat16):
        for name, (rows, weights, *others) in apart.items():
            assert rows <= 2.0**-8, name
            assert weights == 0.0
            assert max(others) <= 2.0**-6, name


def _sent_bytes(name: str, packs: bool) -> list[int]:
    """Bytes that this rank brings to each exchange of rows of bfloat16, weights and counts left out."""
    groups = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
    sent = []

    def counting(whole: Any) -> Any:
        def call(out: Tensor, x: Tensor, *args: Any, **options: Any) -> Any:
            if x.dim() == 2 and x.shape[1] >= H:
                sent.append(x.nbytes)
            return whole(out, x, *args, **options)

        return call

    names = [(dist, "all_to_all_single"), (collectives, "_all_gather"), (collectives, "_reduce_scatter")]
    with ExitStack() as stack:
        for module, function in names:
            stack.enter_context(mock.patch.object(module, function, counting(getattr(module, function))))
        _journey(groups, name, torch.bfloat16, packs=packs)
    return sent


def test_the_way_to_the_experts_takes_half_the_bytes_and_no_other(pool):
    """In order: dispatch, combine, and their gradients in reverse."""
    sent_rows = {"alltoall": T * K, "allgather": T}
    asked = [(name, packs) for name in sent_rows for packs in (False, True)]
    found = run_each(pool, 2, _sent_bytes, *asked)
    sums = {each: [sum(parts) for parts in zip(*ranks, strict=True)] for each, ranks in zip(asked, found, strict=True)}
    for name, rows in sent_rows.items():
        wide = sums[name, False]
        narrow = sums[name, True]
        assert len(wide) == 4
        assert wide[0] == 2 * rows * 2 * H
        assert narrow[0] == 2 * rows * (H + 4 * H // 128)
        assert narrow[1:] == wide[1:]
