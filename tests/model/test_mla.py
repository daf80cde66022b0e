"""Latent attention that decodes from latents gives each token what the whole sequence gives it."""

from functools import partial

import pytest
import torch

from moefold.config.load import config_from_dict
from moefold.model.attention import CausalAttention
from moefold.model.kv_cache import DecodePositions, LatentCache
from moefold.model.mla import LatentAttention
from moefold.model.rope import build_rope
from moefold.ops.documents import PackedDocuments

S, B, CAPACITY = 9, 3, 12
SIZES = {
    "attention": "mla",
    "hidden_size": 12,
    "num_attention_heads": 3,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_theta": 30.0,
    "vocab_size": 16,
}
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 6.0, "rope_original_seq_len": 12, "rope_interleaved": True}
YARN |= {"rope_beta_fast": 2.0, "rope_beta_slow": 0.5, "rope_mscale": 0.7, "rope_mscale_all_dim": 1.2}
KINDS = [{}, {"q_lora_rank": 7, "v_head_dim": 11}, YARN, YARN | {"v_head_dim": 9}]


class Example:
    """One layer in float64 and hidden states [S, B, H]."""

    def __init__(self, kind: dict[str, object], window: int) -> None:
        self.cfg = config_from_dict({"model": SIZES | kind}).model
        self.layer = LatentAttention(self.cfg, window).double()
        self.span = DecodePositions(torch.zeros(0, 0, dtype=torch.int64), 0, True)
        generator = torch.Generator().manual_seed(4)
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.5, generator=generator)
        self.x = torch.randn(S + 4, B, self.cfg.hidden_size, generator=generator, dtype=torch.float64)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Without a cache."""
        assert self.layer.latent_cache is None
        return self.layer(x, build_rope(self.cfg, torch.arange(len(x)), torch.float64))

    def piece(self, x: torch.Tensor, positions_SB: torch.Tensor) -> torch.Tensor:
        """The next tokens, with one."""
        self.span.positions_SB, self.span.num_keys = positions_SB, int(positions_SB.max()) + 1
        self.span.is_prefill = self.span.num_keys == len(positions_SB)
        return self.layer(x, build_rope(self.cfg, positions_SB, torch.float64))


def refused(*args: object) -> None:
    raise AssertionError("heads were made of what is kept")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("pieces", [[9], [1] * 9, [4, 1, 3, 1]], ids=str)
def test_pieces_equal_the_whole(kind, window, pieces):
    example = Example(kind, window)
    expected = example.whole(example.x[:S])
    example.layer.latent_cache = cache = LatentCache(example.span, CAPACITY, window)
    found, done = [], 0
    for size in pieces:
        positions = torch.arange(done, done + size).unsqueeze(1).expand(size, B)
        found.append(example.piece(example.x[done : done + size], positions))
        done += size
        example.layer.core_attention = refused
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=1e-12)
    assert cache.nbytes == B * CAPACITY * (5 + 4) * 8


@torch.no_grad()
def test_samples_of_different_lengths_do_not_see_what_fills_them_up():
    example = Example(YARN, 0)
    lengths, samples = torch.tensor([5, 2, 4]), torch.arange(B)
    expected = [example.whole(example.x[:, b : b + 1]) for b in range(B)]
    example.layer.latent_cache = LatentCache(example.span, CAPACITY)
    example.piece(example.x[:5], torch.arange(5).unsqueeze(1).expand(5, B))
    for i in range(4):
        places = lengths + i
        found = example.piece(example.x[places, samples].unsqueeze(0), places.unsqueeze(0))
        for b in range(B):
            torch.testing.assert_close(found[0, b], expected[b][places[b], 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kind", [{"v_head_dim": 6}, {"v_head_dim": 7}, {"v_head_dim": 11}, YARN, YARN | {"v_head_dim": 5}]
)
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_values_without_padding_give_the_same(monkeypatch, kind, window, packed):
    """As on CUDA: SDPA takes values narrower than the keys, and the scale of the scores."""
    starts = torch.tensor([0, 0, 0, 3, 3, 3, 6, 6, 6]).unsqueeze(1).expand(S, B)
    documents = PackedDocuments.of_starts(starts if packed else torch.zeros_like(starts))
    scales = []

    def attend(core, q, k, v, *others):
        scales.append(others[-1])
        return CausalAttention.__call__(core, q, k, v, *others)

    runs = []
    for is_narrow in (False, True):
        monkeypatch.setattr("moefold.model.mla.takes_narrow_values", lambda device, is_narrow=is_narrow: is_narrow)
        example = Example(kind, window)
        example.layer.core_attention = partial(attend, example.layer.core_attention)
        out = example.layer(example.x[:S], build_rope(example.cfg, torch.arange(S), torch.float64), documents)
        out.square().sum().backward()
        runs.append([out, *(parameter.grad for parameter in example.layer.parameters())])
    for padded, narrow in zip(*runs, strict=True):
        torch.testing.assert_close(narrow, padded, rtol=1e-11, atol=1e-12)
    has_scale = window == 0 and not packed and example.cfg.v_head_dim <= example.cfg.head_size
    assert [scale is not None for scale in scales] == [False, has_scale]
