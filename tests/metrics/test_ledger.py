"""The ledger sees every tensor from its first byte to its last."""

import torch

from moefold.metrics.ledger import Ledger


def test_current_and_peak_by_part():
    with Ledger() as ledger:
        with ledger.part("a"):
            kept = torch.zeros(100)
        with ledger.part("b"):
            brief = torch.zeros(1000)
            del brief
            small = torch.zeros(10)
    assert ledger.current() == {"a": 400, "b": 40}
    assert ledger.peak().total == 4400
    assert ledger.peak().by_part == {"a": 400, "b": 4000}
    assert ledger.peak(lambda part: part == "b").total == 4000
    assert kept.numel() + small.numel() == 110


def test_views_and_changes_in_place_are_no_new_memory():
    with Ledger() as ledger:
        x = torch.ones(50)
        y = x.view(5, 10).t()
        x.add_(1)
    assert ledger.current() == {"other": 200}
    assert y.sum() == 100


def test_memory_that_is_given_back_and_taken_again_by_resizing():
    x = torch.ones(50)
    with Ledger() as ledger:
        ledger.settle("weights", (x,))
        x.untyped_storage().resize_(0)
        assert ledger.current() == {"gathered weights": 0}
        x.untyped_storage().resize_(200)
    assert ledger.current() == {"gathered weights": 200}
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_what_a_backward_pass_makes_is_workspace_until_it_is_found_to_stay():
    w = torch.ones(10, requires_grad=True)
    with Ledger() as ledger:
        ledger.settle("weights", (w,))
        ledger.phase = "forward"
        with ledger.part("layer"):
            loss = (w * w).sum()
        ledger.phase = "backward"
        loss.backward()
        assert ledger.current()["workspace"] >= 40
        assert w.grad is not None
        ledger.settle("gradients", (w.grad,))
        del loss
    assert ledger.current() == {"weights": 40, "gradients": 40}
    assert ledger.peak().by_part["workspace"] > 0
