"""Compare KV caches for decoding with MLA: expanded heads, or latents that are expanded or absorbed in each step.

`python benchmarks/mla_decode.py [cpu|cuda]` measures one attention layer of the size of DeepSeek-V2-Lite and prints,
for each dtype, context and batch size, the cache bytes of a token and the tokens per second of the layer in the best of
ten steps.
"""

import argparse
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.config.load import config_from_dict
from moefold.model.kv_cache import CachedAttention, DecodePositions, LatentCache
from moefold.model.linear import linear
from moefold.model.mla import LatentAttention
from moefold.model.rope import build_rope

MODEL = config_from_dict({"model": {"preset": "deepseek-v2-lite"}}).model
CACHES = ("heads", "expanded", "absorbed")
STEPS = 12
"""Decoding steps of one token; the first two are warm-up."""


class ExpandingAttention(LatentAttention):
    """Caches latents and expands all of them to heads in each step."""

    def _absorbed_attention(
        self, query_nope_SBAD: Tensor, query_rope_SBAD: Tensor, cache_BLR: Tensor, mask_BSL: Tensor
    ) -> Tensor:
        latent, key_rope = cache_BLR.split((self.wkv_up.shape[1], self.qk_rope_head_dim), -1)
        heads = linear(latent, self.wkv_up).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim)).transpose(1, 2)
        key_nope, value = heads.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        key = torch.cat((key_nope, key_rope.unsqueeze(1).expand(*key_nope.shape[:-1], -1)), -1)
        query = torch.cat((query_nope_SBAD, query_rope_SBAD), -1).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_BSL.unsqueeze(1), scale=self._scale)
        return out.permute(2, 0, 1, 3)


@torch.no_grad()
def main() -> None:
    """Measure the three caches on one device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), default="cpu")
    device = torch.device(parser.parse_args().device)
    for dtype in (torch.float32, torch.bfloat16):
        for context in (512, 4096):
            for batch_size in (1, 8):
                results = {name: _measure(name, dtype, context, batch_size, device) for name in CACHES}
                print(dtype, f"context {context}, batch {batch_size}:", results, flush=True)


def _measure(name: str, dtype: torch.dtype, context: int, batch_size: int, device: torch.device) -> str:
    torch.manual_seed(0)
    layer = (ExpandingAttention if name == "expanded" else LatentAttention)(MODEL).to(device, dtype)
    for parameter in layer.parameters():
        parameter.normal_(0.0, 0.02)
    decode_positions = DecodePositions(torch.zeros(0, 0, dtype=torch.int64, device=device), 0, True)
    capacity = context + STEPS + 1
    cache: CachedAttention | LatentCache
    if name == "heads":
        cache = layer.core_attention = CachedAttention(decode_positions, capacity)
    else:
        cache = layer.latent_cache = LatentCache(decode_positions, capacity)
    times_s = []
    for first, count in ((0, context), *((context + i, 1) for i in range(STEPS))):
        x = torch.randn(count, batch_size, MODEL.hidden_size, dtype=dtype, device=device)
        positions = torch.arange(first, first + count, device=device)
        decode_positions.positions_SB = positions.unsqueeze(1).expand(-1, batch_size)
        decode_positions.num_keys = first + count
        decode_positions.is_prefill = first == 0
        rope = build_rope(MODEL, positions, dtype)
        started_s = time.perf_counter()
        layer(x, rope)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
    step_s = min(times_s[3:])
    token_bytes = cache.nbytes // (capacity * batch_size)
    return f"{token_bytes} bytes a token, {batch_size / step_s:.0f} tokens/s"


if __name__ == "__main__":
    main()
