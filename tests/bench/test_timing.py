"""The peak of live memory counts tensors that are alive together, and nothing twice."""

import torch

from moefold.bench.timing import StorageMeter

MIB = 2**20


def _floats(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes // 4)


def test_peak_of_live_memory_counts():
    with StorageMeter() as meter:
        for _ in range(3):
            x = _floats(MIB)
            y = x + 1
            del x, y
        z = _floats(MIB)
    assert meter.peak_bytes == 2 * MIB
    assert z.numel()


def test_views_and_results_in_place_take_nothing_more():
    before = _floats(MIB)
    with StorageMeter() as meter:
        x = _floats(MIB)
        views = [x.view(2, -1), x[:4], x.add_(1), before.view(2, -1)]
    assert meter.peak_bytes == MIB
    assert len(views) == 4


def test_saved_tensors_are_live_until_the_backward_pass():
    w = torch.zeros(MIB // 4, requires_grad=True)
    with StorageMeter() as meter:
        loss = (w.exp() * w).sum()
        held = meter.peak_bytes
        loss.backward()
    # exp(w) and the product; the product is gone before the backward pass makes gradients.
    assert held == 2 * MIB + 4
    assert 3 * MIB <= meter.peak_bytes <= 5 * MIB
