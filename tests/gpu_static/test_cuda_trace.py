"""A trace notices host waits, copies, operators in both directions, collectives and their bytes."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cuda_trace import CUDA, Trace, trace_cuda
from benchmarks.sent_bytes import sent_bytes
from moefold.comm.private_torch import cuda_flash_attention

pytest.importorskip("triton")


def on_device(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device=CUDA)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: int(x[0]),
        lambda x: bool(x[0] > 0),
        lambda x: x[0].item(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.Event().synchronize(),
        lambda x: torch.ones(4).to(CUDA),
        lambda x: torch.tensor([1.0, 2.0], device=CUDA),
    ],
)
def test_a_host_wait_is_noticed(read):
    with trace_cuda(Trace(num_rows=8)) as trace:
        read(on_device(4))
    assert len(trace.of("wait")) == 1


def test_a_copy_without_a_wait_is_none():
    with trace_cuda(Trace(num_rows=8)) as trace:
        counts = on_device(4, dtype=torch.int64).to("cpu", non_blocking=True)
    assert not trace.of("wait")
    assert len(trace.of("copy")) == 1
    assert counts.tolist() == [2, 2, 2, 2]


def test_lines_of_other_packages_are_not_of_moefold():
    read = eval(compile("lambda x: x.tolist()", "/home/me/moefold/.venv/lib/torch/_dynamo/eval_frame.py", "eval"))
    with trace_cuda(Trace(num_rows=8)) as trace:
        read(on_device(4))
    (wait,) = trace.of("wait")
    assert wait.source == "autograd"


def test_meta_tensors_report_a_cuda_device_in_the_backward_pass_too():
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append((grad.device, grad.is_cuda))
            return grad * torch.ones(1, device=grad.device)

    with trace_cuda(Trace()) as trace:
        x = on_device(4, 8).requires_grad_()
        Doubled.apply(x).sum().backward()
    assert seen == [(CUDA, True)]
    assert x.grad.is_meta
    assert [event.name for event in trace.of("op")] == ["mul", "sum", "ones_like", "ones", "mul"]
    assert torch.empty(1).device.type == "cpu"


def test_bytes_and_flops_of_a_matrix_product():
    with trace_cuda(Trace()) as trace:
        on_device(8, 16) @ on_device(16, 4)
    (product,) = trace.of("op")
    assert (product.moved_bytes, product.flops, product.contraction) == (4 * (128 + 64 + 32), 2 * 8 * 16 * 4, 16)


def test_an_output_tensor_is_written_and_few_elements_are_scattered():
    with trace_cuda(Trace()) as trace:
        x, y = on_device(100, 200), on_device(100, 200)
        torch.add(x, x, out=y)
        y.scatter_add_(1, on_device(100, 1, dtype=torch.int64), on_device(100, 1))
    added, scattered = trace.of("op")
    assert added.moved_bytes == 3 * 4 * 20_000
    # Indices and values, and the elements twice.
    assert scattered.moved_bytes == 100 * (8 + 4) + 2 * 100 * 4


def test_flops_of_fused_attention():
    def heads():
        return on_device(2, 4, 64, 16, dtype=torch.bfloat16).requires_grad_()

    products = 2 * (2 * 4 * 64 * 64) * 16
    for is_causal, share in ((False, 1.0), (True, 0.5)):
        with trace_cuda(Trace()) as trace:
            F.scaled_dot_product_attention(heads(), heads(), heads(), is_causal=is_causal).sum().backward()
        flops = {event.name: event.flops for event in trace.of("op") if event.flops}
        assert flops == {"sdpa": 2 * products * share, "sdpa backward": 5 * products * share}


@pytest.mark.parametrize(
    ("is_causal", "window", "keys"),
    [(False, {}, 64), (True, {}, 32), (True, {"window_size_left": 7, "window_size_right": 0}, 8 - 8 * 8 / 128)],
)
def test_flops_of_the_flash_kernel(is_causal, window, keys):
    with trace_cuda(Trace()) as trace:
        q, k, v = (on_device(2, 64, 4, 16, dtype=torch.bfloat16) for _ in range(3))
        cuda_flash_attention()(q, k, v, None, None, 64, 64, 0.0, is_causal, False, **window)
    (event,) = [event for event in trace.of("op") if event.flops]
    assert event.flops == 2 * 2 * (2 * 4 * 64 * keys) * 16


@pytest.mark.parametrize(("is_causal", "keys"), [(False, 64), (True, 32)])
def test_flops_of_cudnn_attention(is_causal, keys):
    with trace_cuda(Trace()) as trace:
        q, k, v = (on_device(2, 4, 64, 16, dtype=torch.bfloat16) for _ in range(3))
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False)
    (event,) = [event for event in trace.of("op") if event.flops]
    assert event.flops == 2 * 2 * (2 * 4 * 64 * keys) * 16


def test_bytes_sent_exclude_this_rank():
    x = torch.empty(8, 4)
    out = torch.empty(32, 4)
    assert sent_bytes("alltoall_base_", (x, x), 4) == 128 * 3 / 4
    assert sent_bytes("_allgather_base_", (out, x), 4) == 128 * 3
    assert sent_bytes("_reduce_scatter_base_", (x, out), 4) == 512 * 3 / 4
    assert sent_bytes("allreduce_", ([x],), 4) == 2 * 128 * 3 / 4
