"""The operator clock of a benchmark attributes times of both passes, of all ranks, to the right kinds."""

import shutil

import pytest
import torch

from benchmarks.rank_times import (
    ATTENTION,
    CATEGORIES,
    COMMUNICATION,
    GEMMS,
    TENSOR_OPS,
    OpCpuTimer,
    RankCpuTimes,
    _TimedGemm,
    op_category,
    time_shares,
)
from moefold.ops.cpu.build import COMPILERS
from moefold.ops.gemm import TORCH_GEMM


def test_kinds_of_operations():
    assert op_category("aten", "mm") == GEMMS
    assert op_category("mkldnn", "_linear_pointwise") == GEMMS
    assert op_category("aten", "_scaled_dot_product_flash_attention_for_cpu_backward") == ATTENTION
    assert op_category("c10d", "alltoall_base_") == COMMUNICATION
    assert op_category("aten", "add") == TENSOR_OPS


def test_the_clock_sees_products_of_both_passes_and_attention():
    x = torch.randn(256, 256, requires_grad=True)
    with OpCpuTimer() as clock:
        heads = (x @ x).view(1, 4, 64, 256)
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
        TORCH_GEMM.matmul(x.detach(), x.detach())
    assert clock.cpu_s[GEMMS] > 0
    assert clock.cpu_s[ATTENTION] > 0
    assert clock.cpu_s[TENSOR_OPS] > 0
    assert clock.cpu_s[COMMUNICATION] == 0
    before = clock.cpu_s[GEMMS]
    torch.mm(x, x)
    assert clock.cpu_s[GEMMS] == before


def test_shares_are_of_all_ranks():
    ranks = [RankCpuTimes(dict.fromkeys(CATEGORIES, seconds), 9.0, 5.0) for seconds in (1.0, 3.0)]
    ranks[0].cpu_s[GEMMS] = 5.0
    assert time_shares(ranks)[GEMMS] == 8 / 24
    assert [time_shares(ranks)[kind] for kind in CATEGORIES if kind != GEMMS] == [4 / 24] * 4


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="needs a C compiler")
def test_products_in_c_are_charged_while_a_clock_is_there():
    class Rank:
        timer = None

    rank, x = Rank(), torch.randn(256, 256)
    gemm = _TimedGemm(rank)
    expected = gemm.matmul(x, x)
    with OpCpuTimer() as rank.timer:
        assert torch.equal(gemm.matmul(x, x), expected)
    assert rank.timer.cpu_s[GEMMS] > 0
