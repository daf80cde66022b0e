import shutil

import pytest
import torch

from moefold.bench.ranks import (
    ATTENTION,
    COMMUNICATION,
    GEMMS,
    KINDS,
    TENSORS,
    OperationClock,
    RankTimes,
    _ChargedGemm,
    kind_of,
    shares,
)
from moefold.kernels.c_library import COMPILERS
from moefold.model.gemm import LIBRARY


def test_kinds_of_operations():
    assert kind_of("aten", "mm") == GEMMS
    assert kind_of("mkldnn", "_linear_pointwise") == GEMMS
    assert kind_of("aten", "_scaled_dot_product_flash_attention_for_cpu_backward") == ATTENTION
    assert kind_of("c10d", "alltoall_base_") == COMMUNICATION
    assert kind_of("aten", "add") == TENSORS


def test_the_clock_sees_products_of_both_passes_and_attention():
    x = torch.randn(256, 256, requires_grad=True)
    with OperationClock() as clock:
        heads = (x @ x).view(1, 4, 64, 256)
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
        LIBRARY.product(x.detach(), x.detach())
    assert clock.cpu_s[GEMMS] > 0
    assert clock.cpu_s[ATTENTION] > 0
    assert clock.cpu_s[TENSORS] > 0
    assert clock.cpu_s[COMMUNICATION] == 0
    before = clock.cpu_s[GEMMS]
    torch.mm(x, x)
    assert clock.cpu_s[GEMMS] == before


def test_shares_are_of_all_ranks():
    ranks = [RankTimes(dict.fromkeys(KINDS, seconds), 9.0, 5.0) for seconds in (1.0, 3.0)]
    ranks[0].cpu_s[GEMMS] = 5.0
    assert shares(ranks)[GEMMS] == 8 / 24
    assert [shares(ranks)[kind] for kind in KINDS if kind != GEMMS] == [4 / 24] * 4


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="needs a C compiler")
def test_products_in_c_are_charged_while_a_clock_is_there():
    class Rank:
        clock = None

    rank, x = Rank(), torch.randn(256, 256)
    gemm = _ChargedGemm(rank)
    expected = gemm.product(x, x)
    with OperationClock() as rank.clock:
        assert torch.equal(gemm.product(x, x), expected)
    assert rank.clock.cpu_s[GEMMS] > 0
