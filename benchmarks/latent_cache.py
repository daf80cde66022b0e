"""What decoding with latent attention should remember: heads, or latents that are expanded or absorbed in each step.

`python benchmarks/latent_cache.py [cpu|cuda]` takes one attention layer of the size of DeepSeek-V2-Lite and prints, for
each type, context and batch, the bytes that a token needs in the cache and the tokens per second of the layer, in the
best of ten steps.
"""

import sys
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
WAYS = ("heads", "expanded", "absorbed")
STEPS = 12
"""Of one token each; the first two warm up."""


class ExpandingAttention(LatentAttention):
    """Keeps latents, and makes heads of all of them in each step."""

    def _absorbed_attention(self, plain: Tensor, turned: Tensor, kept_BLR: Tensor, seen_BSL: Tensor) -> Tensor:
        latent, key = kept_BLR.split((self.wkv_up.shape[1], self.qk_rope_head_dim), -1)
        heads = linear(latent, self.wkv_up).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim)).transpose(1, 2)
        plain_key, value = heads.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        key = torch.cat((plain_key, key.unsqueeze(1).expand(*plain_key.shape[:-1], -1)), -1)
        query = torch.cat((plain, turned), -1).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen_BSL.unsqueeze(1), scale=self._scale)
        return out.permute(2, 0, 1, 3)


@torch.no_grad()
def main() -> None:
    """Measure the three on one device."""
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for context in (512, 4096):
            for batch_size in (1, 8):
                found = {name: _measure(name, dtype, context, batch_size, device) for name in WAYS}
                print(dtype, f"context {context}, batch {batch_size}:", found, flush=True)


def _measure(name: str, dtype: torch.dtype, context: int, batch_size: int, device: torch.device) -> str:
    torch.manual_seed(0)
    layer = (ExpandingAttention if name == "expanded" else LatentAttention)(MODEL).to(device, dtype)
    for parameter in layer.parameters():
        parameter.normal_(0.0, 0.02)
    span = DecodePositions(torch.zeros(0, 0, dtype=torch.int64, device=device), 0, True)
    capacity = context + STEPS + 1
    cache: CachedAttention | LatentCache
    if name == "heads":
        cache = layer.core_attention = CachedAttention(span, capacity)
    else:
        cache = layer.latent_cache = LatentCache(span, capacity)
    times_s = []
    for first, count in ((0, context), *((context + i, 1) for i in range(STEPS))):
        x = torch.randn(count, batch_size, MODEL.hidden_size, dtype=dtype, device=device)
        positions = torch.arange(first, first + count, device=device)
        span.positions_SB, span.num_keys = positions.unsqueeze(1).expand(-1, batch_size), first + count
        span.is_prefill = first == 0
        turn = build_rope(MODEL, positions, dtype)
        started_s = time.perf_counter()
        layer(x, turn)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
    step_s = min(times_s[3:])
    token_bytes = cache.nbytes // (capacity * batch_size)
    return f"{token_bytes} bytes a token, {batch_size / step_s:.0f} tokens/s"


if __name__ == "__main__":
    main()
