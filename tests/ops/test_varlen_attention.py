"""Attention of many tasks equals its definition, task by task, whatever computes it."""

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch

from moefold.ops.block_attention import BlockedWindow, fold_in_sinks
from moefold.ops.cpu.attention import CAttention
from moefold.ops.varlen_attention import TaskAttention
from tests.model.attention_reference import reference_attention, relative_errors
from tests.ops.reference_flash import reference_flash

LENGTHS = ((5, 5), (1, 1), (3, 9), (70, 70), (20, 100), (1, 65), (66, 67), (130, 200))
"""Queries and keys of each task: short and long ones, with and without earlier keys."""
HEADS = ((4, 2, 8), (3, 1, 5))


def _tasks(window: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the queries and of the keys of each task. Keys of tasks overlap, and windows shorten them."""
    counts = np.array([(rows, min(keys, rows + window - 1) if window else keys) for rows, keys in LENGTHS])
    stops = np.cumsum(counts[:, 0])
    key_stops = 200 + 7 * np.arange(len(counts))
    return np.stack((stops - counts[:, 0], stops), 1), np.stack((key_stops - counts[:, 1], key_stops), 1)


def _random(heads: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query_heads, kv_heads, size = heads
    num_rows = sum(rows for rows, _ in LENGTHS)
    shapes = [(num_rows, query_heads, size)] * 2 + [(260, kv_heads, size)] * 2
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def _expected(rows, keys, window: int, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """[out, dq, dk, dv] by the definition, in float64."""
    grad_out, *inputs = (x.double() for x in given)
    q, k, v = (x.requires_grad_() for x in inputs)
    parts = []
    for (row, row_stop), (key, key_stop) in zip(rows.tolist(), keys.tolist(), strict=True):
        places = torch.arange(key_stop - key)
        tensors = (x.unsqueeze(1) for x in (q[row:row_stop], k[key:key_stop], v[key:key_stop]))
        parts.append(reference_attention(*tensors, places[row - row_stop :], places, None, window).squeeze(1))
    out = torch.cat(parts)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


def _errors(heads, window: int, dtype: torch.dtype, kernel=None) -> list[float]:
    rows, keys = _tasks(window)
    given = _random(heads, dtype)
    grad_out, q, k, v = given
    tasks = TaskAttention(rows, keys, window, q.device)
    out, lse = tasks.forward(q, k, v, kernel)
    assert out.dtype == dtype
    found = [out, *tasks.backward((grad_out, q, out, lse), k, v, kernel)]
    return relative_errors(found, _expected(rows, keys, window, given))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [0, 2, 4, 40, 90])
@pytest.mark.parametrize("through_flash", [False, True])
def test_attention_of_many_tasks_equals_its_definition(heads, window, through_flash):
    with reference_flash() if through_flash else nullcontext():
        assert max(_errors(heads, window, torch.float64)) < 1e-12


@pytest.mark.parametrize("window", [0, 2, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("in_c", [False, True])
def test_narrow_types(window, dtype, tolerance, in_c):
    kernel = CAttention() if in_c else None
    assert max(_errors(HEADS[0], window, dtype, kernel)) < tolerance


def test_the_c_kernel_computes_all_tasks_in_one_call():
    kernel = CAttention()
    with mock.patch.object(kernel, "forward", wraps=kernel.forward) as forward:
        _errors(HEADS[0], 0, torch.float32, kernel)
    assert forward.call_count == 1


def test_a_result_of_the_c_kernel_does_not_depend_on_the_task():
    """The rows of a document have the same bits, computed as one task or as two."""
    kernel = CAttention()
    q, k, v = (torch.randn(100, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    whole = TaskAttention(np.array([[0, 100]]), np.array([[0, 100]]), 0, q.device).forward(q, k, v, kernel)
    parts = TaskAttention(np.array([[0, 37], [37, 100]]), np.array([[0, 37], [0, 100]]), 0, q.device)
    for a, b in zip(whole, parts.forward(q, k, v, kernel), strict=True):
        assert torch.equal(a, b)


def test_a_window_of_a_long_task_is_computed_in_blocks():
    rows = np.array([[0, 300]])
    assert BlockedWindow.is_worthwhile(20, 300)
    tensors = [
        torch.randn(300, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(4)
    ]
    tasks = TaskAttention(rows, rows, 20, torch.device("cpu"))
    grad_out, q, k, v = tensors
    out, lse = tasks.forward(q, k, v)
    found = [out, *tasks.backward((grad_out, q, out, lse), k, v)]
    assert max(relative_errors(found, _expected(rows, rows, 20, tensors))) < 1e-12


def test_a_rank_without_tasks():
    none = np.zeros((0, 2), np.int64)
    tasks = TaskAttention(none, none, 0, torch.device("cpu"))
    q, k, v = (torch.zeros(0, 2, 4) for _ in range(3))
    out, lse = tasks.forward(q, k, v, CAttention())
    assert (out.shape, lse.shape) == ((0, 2, 4), (0, 2))
    dq, dk, dv = tasks.backward((out, q, out, lse), k, v)
    assert (dq.shape, dk.shape, dv.shape) == ((0, 2, 4),) * 3


def test_a_task_that_lacks_a_key_is_noticed():
    rows, keys = _tasks(0)
    given = _random(HEADS[0], torch.float64)
    grad_out, q, k, v = given
    wrong = keys.copy()
    wrong[4, 0] += 1
    tasks = TaskAttention(rows, wrong, 0, q.device)
    out, lse = tasks.forward(q, k, v)
    found = [out, *tasks.backward((grad_out, q, out, lse), k, v)]
    assert min(relative_errors(found, _expected(rows, keys, 0, given))) > 1e-3


def test_the_log_sum_exp_takes_sinks():
    rows, keys = _tasks(0)
    _, q, k, v = _random(HEADS[0], torch.float64)
    out, lse = TaskAttention(rows, keys, 0, q.device).forward(q, k, v)
    with_sinks, _ = fold_in_sinks(out.unsqueeze(1), lse.unsqueeze(1), torch.zeros(4, dtype=torch.float64))
    # The first task's first query sees one key: its weight is exp(s) / (exp(s) + 1).
    assert torch.allclose(with_sinks[0, 0], out[0] * torch.sigmoid(lse[0])[:, None])
