"""A core that remembers gives each token what the whole sequence gives it."""

import pytest
import torch

from moefold.model.attention import CausalAttention
from moefold.model.kv_cache import CachedAttention, DecodePositions

S, B, A, G, D = 9, 3, 4, 2, 6


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(S, B, heads, D, generator=generator, dtype=torch.float64) for heads in (A, G, G))


def step(
    core: CachedAttention, span: DecodePositions, qkv: tuple[torch.Tensor | None, ...], positions_SB: torch.Tensor
) -> torch.Tensor:
    span.positions_SB, span.num_keys = positions_SB, int(positions_SB.max()) + 1
    span.is_prefill = span.num_keys == len(positions_SB)
    return core(*qkv)


@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("pieces", [[9], [1] * 9, [4, 1, 3, 1]])
def test_pieces_equal_the_whole(pieces, window, has_sinks):
    q, k, v = tokens(0)
    sinks = torch.linspace(-1, 2, A, dtype=torch.float64) if has_sinks else None
    span = DecodePositions(torch.zeros(0, 0, dtype=torch.int64), 0, True)
    core, found, done = CachedAttention(span, 12, window), [], 0
    for size in pieces:
        positions = torch.arange(done, done + size).unsqueeze(1).expand(size, B)
        part = tuple(x[done : done + size] for x in (q, k, v))
        found.append(step(core, span, (*part, None, sinks), positions))
        done += size
    torch.testing.assert_close(torch.cat(found), CausalAttention(window)(q, k, v, None, sinks))


def test_samples_of_different_lengths_do_not_see_what_fills_them_up():
    q, k, v = tokens(1)
    lengths = torch.tensor([5, 2, 4])
    span = DecodePositions(torch.zeros(0, 0, dtype=torch.int64), 0, True)
    core = CachedAttention(span, 9)
    step(core, span, tuple(x[:5] for x in (q, k, v)), torch.arange(5).unsqueeze(1).expand(5, B))
    for i in range(4):
        places = (lengths + i, torch.arange(B))
        found = step(core, span, tuple(x[places].unsqueeze(0) for x in (q, k, v)), (lengths + i).unsqueeze(0))
        for b, length in enumerate((lengths + i + 1).tolist()):
            alone = CausalAttention()(*(x[:length, b : b + 1] for x in (q, k, v)))
            torch.testing.assert_close(found[0, b], alone[-1, 0])
