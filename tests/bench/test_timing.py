import pytest
import torch

from moefold.bench.timing import StorageMeter, repeat_short_step

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
