"""The code of SparseLoCo against a loop over elements, its residual, and its outer step."""

import math

import pytest
import torch

from moefold.config.sections.sites import SitesConfig
from moefold_experiments.sparseloco.module import SparseCode
from moefold_experiments.sparseloco.part import CHUNK, SparseLoCo
from tests.comm.wide_range import vector
from tests.optim.outer_site import Site, assert_residual, assert_same_shard, gradients


def sparse_code(density: float, bits: int, dtype: torch.dtype) -> SparseCode:
    return SparseLoCo(density=density, bits=bits).wire_code(dtype)


SPARSE = [(density, bits) for density in (1 / 4096, 3 / 4096, 1 / 64, 0.6) for bits in (32, 8, 2)]


def sparse_by_hand(x: list[float], kept: int, bits: int) -> list[float]:
    """Decode a vector as the definition says, one chunk and one element after the other."""
    decoded = [0.0] * len(x)
    for first in range(0, len(x), CHUNK):
        chunk = range(first, min(first + CHUNK, len(x)))
        sent = [i for i in sorted(chunk, key=lambda i: -abs(x[i]))[:kept] if x[i]]
        mean = math.fsum(abs(x[i]) for i in sent) / max(len(sent), 1)
        bins: dict[tuple[bool, bool], list[int]] = {}
        for i in sent:
            bins.setdefault((x[i] < 0, abs(x[i]) > mean), []).append(i)
        for members in bins.values():
            for i in members:
                scale = abs(x[sent[0]])
                by_bits = {32: x[i], 8: round(x[i] / scale * 127) / 127 * scale}
                decoded[i] = by_bits.get(bits, math.fsum(x[j] for j in members) / len(members))
    return decoded


@pytest.mark.parametrize(("density", "bits"), SPARSE)
def test_top_k_equals_a_loop_over_elements(density, bits):
    code = sparse_code(density, bits, torch.float32)
    for numel in (0, 1, 100, CHUNK + 77):
        x = vector(numel)
        x[: numel // 2 : 3] = 0
        coded = code.encode(x)
        kept = round(density * CHUNK)
        values = {32: 4 * kept, 8: kept + 4, 2: math.ceil(kept / 4) + 16}[bits]
        assert (
            len(coded) == code.format.num_bytes(numel) == math.ceil(numel / CHUNK) * (3 * math.ceil(kept / 2) + values)
        )
        expected = torch.tensor(sparse_by_hand(x.tolist(), kept, bits))
        scale = float(x.abs().max()) if numel else 0.0
        torch.testing.assert_close(
            code.decode(coded, x), expected, rtol=1e-6, atol=1e-6 * scale if bits == 8 else 1e-40
        )


@pytest.mark.parametrize("bits", [32, 8, 2])
def test_the_code_of_a_chunk_is_the_same_whatever_the_others_are(bits):
    """Ranks that hold the same shard of a weight, and others of the next, must decode the same bits of it."""
    code = sparse_code(1 / 64, bits, torch.float32)
    x = torch.randn(5 * CHUNK)
    apart = [code.encode(chunk) for chunk in x.split(CHUNK)]
    assert torch.equal(code.encode(x), torch.cat(apart))


def test_top_k_keeps_float64_and_survives_values_that_are_not_finite():
    double = torch.randn(CHUNK, dtype=torch.float64)
    decoded = sparse_code(0.5, 32, torch.float64).decode(sparse_code(0.5, 32, torch.float64).encode(double), double)
    assert torch.equal(decoded[decoded != 0], double[decoded != 0])
    assert int((decoded != 0).sum()) == CHUNK // 2
    for bad in (math.nan, math.inf):
        for bits in (32, 8, 2):
            code = sparse_code(1 / 64, bits, torch.float32)
            coded = code.encode(torch.full((CHUNK,), bad))
            assert len(coded) == code.format.num_bytes(CHUNK)


@pytest.mark.parametrize("bits", [32, 8, 2])
def test_ranks_with_the_same_shard_decode_the_same_values(bits):
    assert_same_shard({"method": SparseLoCo(density=1 / 1024, bits=bits)})


@pytest.mark.parametrize("bits", [32, 8, 2])
@pytest.mark.parametrize("beta", [1.0, 0.9])
def test_residual_keeps_the_loss_of_the_code(bits, beta):
    assert_residual(SitesConfig(count=2, residual=beta, method=SparseLoCo(density=1 / 1024, bits=bits)))


def test_sparseloco_is_the_formula_of_its_paper():
    """e = beta e + D; s = topk(e); e = e - s; phi = phi - mean of s (arXiv:2508.15706, algorithm 1)."""
    settings = SitesConfig(count=2, residual=0.95, method=SparseLoCo(density=3 / 4096, bits=32))
    sites = [Site(settings) for _ in range(2)]
    phi = [p.detach().clone() for p in sites[0].parameters.values()]
    e = [[torch.zeros_like(p) for p in phi] for _ in sites]
    for round_ in range(6):
        sent = []
        for number, site in enumerate(sites):
            site.move(gradients(number, round_))
            sparse = []
            for i, theta in enumerate(site.parameters.values()):
                e[number][i] = 0.95 * e[number][i] + (phi[i] - theta.detach())
                largest = e[number][i].flatten().abs().topk(min(3, theta.numel())).indices
                s = torch.zeros(theta.numel(), dtype=theta.dtype)
                s[largest] = e[number][i].flatten()[largest]
                sparse.append(s.view_as(theta))
                e[number][i] = e[number][i] - sparse[-1]
            sent.append(sparse)
        phi = [p - (a + b) / 2 for p, a, b in zip(phi, *sent, strict=True)]
        exchange_coded(sites)
        for site in sites:
            torch.testing.assert_close(site.flat(), torch.cat([p.flatten() for p in phi]), rtol=1e-12, atol=1e-12)


def exchange_coded(sites: list[Site]) -> None:
    own = [site.outer.difference() for site in sites]
    num_coded = sites[0].outer.num_coded((0,))
    code = sites[0].outer.code
    decoded = []
    for values in own:
        part = values[:num_coded]
        decoded.append(torch.cat([code.decode(code.encode(part), part), values[num_coded:]]))
    mean = sum(decoded) / len(sites) + torch.zeros_like(own[0])
    for site, values, read in zip(sites, own, decoded, strict=True):
        site.outer.keep_residual((0,), values, read)
        site.outer.step(values, mean)
