"""Latent attention that decodes from latents gives each token the result of the whole sequence."""

from functools import partial

import pytest
import torch

from moefold.model.attention import CausalAttention
from moefold.model.layer_cache import CurrentPass
from moefold.model.paged_cache import PagedLatents
from moefold.model.part_modules import build_attention
from moefold.model.rope import build_rope
from moefold.ops.documents import PackedDocuments
from tests.model.paged_rows import SMALL_PAGE, pass_rows, to_rows
from tests.models import config_of

S, B, PAGES = 9, 3, 3
SIZES = {
    "attention": "mla",
    "hidden_size": 12,
    "attention.num_heads": 3,
    "attention.kv_lora_rank": 5,
    "attention.qk_nope_head_dim": 3,
    "attention.qk_rope_head_dim": 4,
    "attention.v_head_dim": 6,
    "rope.theta": 30.0,
    "vocab_size": 16,
}
YARN = {
    "rope.scaling": "yarn",
    "rope.scaling.factor": 6.0,
    "rope.scaling.original_seq_len": 12,
    "rope.interleaved": True,
}
YARN |= {
    "rope.scaling.beta_fast": 2.0,
    "rope.scaling.beta_slow": 0.5,
    "rope.scaling.mscale": 0.7,
    "rope.scaling.mscale_all_dim": 1.2,
}
KINDS = [{}, {"attention.q_lora_rank": 7, "attention.v_head_dim": 11}, YARN, YARN | {"attention.v_head_dim": 9}]


class Example:
    """One layer in float64 and hidden states [S, B, H]."""

    def __init__(self, kind: dict[str, object], window: int) -> None:
        limits = {"layers.attention": "window", "sliding_window": window} if window else {}
        self.cfg = config_of({"model": SIZES | kind | limits}).model
        self.layer = build_attention(self.cfg.decoder_layers[0], self.cfg).double()
        self.current_pass = CurrentPass()
        generator = torch.Generator().manual_seed(4)
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.5, generator=generator)
        self.x = torch.randn(S + 4, B, self.cfg.hidden_size, generator=generator, dtype=torch.float64)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Without a cache."""
        assert self.layer.latent_cache is None
        return self.layer(x, build_rope(self.cfg.rope_settings, torch.arange(len(x)), torch.float64))

    def cached(self, window: int) -> PagedLatents:
        """Give the layer a cache."""
        self.layer.latent_cache = cache = PagedLatents(self.current_pass, B * PAGES, SMALL_PAGE, window)
        return cache

    def piece(self, spans: list[range]) -> torch.Tensor:
        """The next tokens of each sample, with one, [R, 1, H]."""
        self.current_pass.rows = rows = pass_rows(spans, PAGES)
        return self.layer(to_rows(self.x, spans), build_rope(self.cfg.rope_settings, rows.positions_R, torch.float64))


def refused(*args: object) -> None:
    raise AssertionError("heads were made of what is kept")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize(
    "ends",
    [[(9, 9, 9)], [(i, i, i) for i in range(1, 10)], [(4, 1, 2), (5, 7, 2), (5, 8, 9), (9, 9, 9)]],
    ids=["whole", "one by one", "uneven"],
)
def test_latent_attention_in_pieces_equals_one_pass(kind, window, ends):
    example = Example(kind, window)
    expected = example.whole(example.x[:S])
    cache = example.cached(window)
    example.layer.core_attention = refused
    starts = (0,) * B
    for stops in ends:
        spans = [range(start, stop) for start, stop in zip(starts, stops, strict=True)]
        torch.testing.assert_close(example.piece(spans), to_rows(expected, spans), rtol=1e-12, atol=1e-12)
        starts = stops
    assert cache.nbytes == B * PAGES * SMALL_PAGE * (5 + 4) * 8
    assert cache.page_path == ""


@pytest.mark.parametrize(
    "kind",
    [
        {"attention.v_head_dim": 6},
        {"attention.v_head_dim": 7},
        {"attention.v_head_dim": 11},
        YARN,
        YARN | {"attention.v_head_dim": 5},
    ],
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
        monkeypatch.setattr(
            "moefold.parts.attention.mla.module.sdpa_supports_narrow_values",
            lambda device, is_narrow=is_narrow: is_narrow,
        )
        example = Example(kind, window)
        example.layer.core_attention = partial(attend, example.layer.core_attention)
        out = example.layer(
            example.x[:S], build_rope(example.cfg.rope_settings, torch.arange(S), torch.float64), documents
        )
        out.square().sum().backward()
        runs.append([out, *(parameter.grad for parameter in example.layer.parameters())])
    for padded, narrow in zip(*runs, strict=True):
        torch.testing.assert_close(narrow, padded, rtol=1e-11, atol=1e-12)
    has_scale = (
        window == 0 and not packed and example.cfg.attention.v_head_dim <= example.cfg.softmax_attention.head_dim
    )
    assert [scale is not None for scale in scales] == [False, has_scale]
