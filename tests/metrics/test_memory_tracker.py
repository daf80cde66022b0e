"""The tracker sees every tensor from its first byte to its last."""

import sys
import threading

import torch

from moefold.metrics.memory_tracker import MemoryTracker


def test_current_and_peak_by_part():
    with MemoryTracker() as tracker:
        with tracker.part("a"):
            kept = torch.zeros(100)
        with tracker.part("b"):
            brief = torch.zeros(1000)
            del brief
            small = torch.zeros(10)
    assert tracker.current() == {"a": 400, "b": 40}
    assert tracker.peak().total == 4400
    assert tracker.peak().by_part == {"a": 400, "b": 4000}
    assert tracker.peak(lambda part: part == "b").total == 4000
    assert kept.numel() + small.numel() == 110


def test_views_and_changes_in_place_are_no_new_memory():
    with MemoryTracker() as tracker:
        x = torch.ones(50)
        y = x.view(5, 10).t()
        x.add_(1)
    assert tracker.current() == {"other": 200}
    assert y.sum() == 100


def test_memory_freed_and_reallocated_by_resizing():
    x = torch.ones(50)
    with MemoryTracker() as tracker:
        tracker.tag("weights", (x,))
        x.untyped_storage().resize_(0)
        assert tracker.current() == {"gathered weights": 0}
        x.untyped_storage().resize_(200)
    assert tracker.current() == {"gathered weights": 200}
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_tensors_of_a_backward_pass_are_workspace_until_they_are_found_to_stay():
    w = torch.ones(10, requires_grad=True)
    with MemoryTracker() as tracker:
        tracker.tag("weights", (w,))
        tracker.phase = "forward"
        with tracker.part("layer"):
            loss = (w * w).sum()
        tracker.phase = "backward"
        loss.backward()
        assert tracker.current()["workspace"] >= 40
        assert w.grad is not None
        tracker.tag("gradients", (w.grad,))
        del loss
    assert tracker.current() == {"weights": 40, "gradients": 40}
    assert tracker.peak().by_part["workspace"] > 0


def test_memory_that_other_threads_free_meanwhile():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with MemoryTracker() as tracker:
            for _ in range(5):
                held = [torch.ones(4) for _ in range(1000)]
                thread = threading.Thread(target=held.clear)
                thread.start()
                # At least once: the other thread may be done before this one goes on.
                is_busy = True
                while is_busy:
                    is_busy = thread.is_alive()
                    tracker.tag_remaining("left")
                    made = torch.ones(1)
                    assert tracker.current()["other"] >= 4
                thread.join()
                assert tracker.current() == {"other": 4}
    finally:
        sys.setswitchinterval(interval)
    assert made.item() == 1
    assert tracker.peak().total >= 1000 * 16
    everything = tracker.peak(lambda part: part == "other")
    assert everything.total == sum(everything.by_part.values())


def test_reused_address_is_a_new_allocation():
    with MemoryTracker() as tracker:
        for size in (1 << 20, 1 << 21) * 20:
            with tracker.part(str(size)):
                x = torch.empty(size // 4)
            assert tracker.current() == {str(size): size}
            del x
            with tracker.part("again"):
                y = torch.empty(size // 4)
            assert tracker.current() == {"again": size}
            del y
