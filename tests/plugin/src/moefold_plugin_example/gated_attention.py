"""Multi-head attention with a gate on its output (arXiv:2505.06708)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moefold.config.base.field import at_least
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.attention import (
    AttentionCore,
    AttentionFrame,
    AttentionPart,
    SoftmaxFormula,
    SoftmaxHeads,
    SoftmaxInput,
)
from moefold.config.groups.layer_sizes import LayerSizes
from moefold.model.attention import SelfAttention
from moefold.model.layer_cache import CacheSize, CurrentPass, LayerCache
from moefold.model.local_param import local_param
from moefold.model.paged_cache import KeyLimits, PagedCache, attend_pages
from moefold.ops.documents import PackedDocuments
from moefold.ops.rope import NoRope, Rope


@dataclass(frozen=True, kw_only=True)
class Gated(AttentionPart):
    """As many key heads as query heads, and the output scaled by sigmoid(wg x), elementwise."""

    interface: ClassVar[int] = 1

    num_heads: Annotated[int, at_least(1)] = 4
    """Heads of queries, keys and values."""
    head_dim: Annotated[int, at_least(2)] = 32
    """Size of a head."""

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that RoPE is applied to."""
        return self.head_dim

    def tp_unit(self, hidden: int) -> tuple[str, int]:
        """Return the heads, which tensor parallelism divides."""
        return "model.attention.num_heads", self.num_heads

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `GatedAttention`."""
        width = self.num_heads * self.head_dim
        for name in ("wq", "wk", "wv", "wg"):
            yield ParamSpec(name, (width, hidden), "attention", tp_dim=0)
        yield ParamSpec("wo", (hidden, width), "attention", tp_dim=1, drawn="output")

    def shrink(self, small: SmallSizes) -> Self:
        """Return it with few narrow heads, for `moefold verify --shrink`."""
        return replace(self, num_heads=small.query_heads(self.num_heads, self.num_heads), head_dim=small.head_dim)

    def core(self, hidden: int) -> AttentionCore:
        """Return the heads, whose keys and values are cached."""
        heads, head = self.num_heads, self.head_dim
        return AttentionCore(heads=heads, kv_heads=heads, key_width=head, value_width=head, cached_heads=heads)

    def saved(self, sizes: LayerSizes) -> Counter[str]:
        """Return the bytes of queries, keys, values, the sigmoid and the scaled output, and of the core."""
        tp = sizes.parallel.tp
        heads = self.num_heads // tp
        saved = sizes.norm_with_output(saves_output=tp == 1, part="attention")
        saved["attention"] += sizes.gathered_bytes(5 * heads * self.head_dim)
        return saved + sizes.core_attention(heads, self.head_dim)

    def build(self, frame: AttentionFrame) -> "GatedAttention":
        """Return the module."""
        return GatedAttention(self, frame.hidden_size)

    def formula(self) -> SoftmaxFormula:
        """Return queries, keys, values and gates; the oracle has mask, softmax and output projection."""

        def heads(given: SoftmaxInput) -> SoftmaxHeads:
            projections = (given.x @ given.weights[name].T for name in ("wq", "wk", "wv", "wg"))
            query, key, value, gate = (y.unflatten(-1, (self.num_heads, self.head_dim)) for y in projections)
            query, key = given.rotate(query, self.head_dim), given.rotate(key, self.head_dim)
            return SoftmaxHeads(query, key, value, scale=self.head_dim**-0.5, gates=1 / (1 + torch.exp(-gate)))

        return heads


class GatedAttention(SelfAttention):
    """Module of `Gated`."""

    def __init__(self, part: Gated, hidden: int) -> None:
        super().__init__(part.window)
        self.head_dim = part.head_dim
        width = part.num_heads * part.head_dim
        self.wq = nn.Parameter(torch.empty(width, hidden))
        self.wk = nn.Parameter(torch.empty(width, hidden))
        self.wv = nn.Parameter(torch.empty(width, hidden))
        self.wg = nn.Parameter(torch.empty(width, hidden))
        self.wo = nn.Parameter(torch.empty(hidden, width))

    def open_caches(self, current_pass: CurrentPass, size: CacheSize) -> list[LayerCache]:
        """Attend by a cache of this package while the model generates."""
        cache = JointCache(current_pass, size, self.window)
        self.attend_by(cache)
        return [cache]

    def forward(self, x: Tensor, rope: Rope | NoRope, documents: PackedDocuments | None = None) -> Tensor:
        """Compute gated attention, as `SelfAttention.forward`."""
        columns = [(local_param(weight, x.dtype), None) for weight in (self.wq, self.wk, self.wv, self.wg)]
        backend = self.kernels.linear_backend
        *projected, gate = self.sequence_parallel.all_gather_linear(x, columns, self.wgrad_store, backend)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        if isinstance(rope, Rope):
            query, key = rope(query), rope(key)
        attended = self.core_attention(query, key, value, documents)
        gated = _SigmoidGate.apply(attended.flatten(2), gate)
        wo = local_param(self.wo, x.dtype)
        return self.sequence_parallel.linear_reduce_scatter(gated, wo, self.wgrad_store, backend)


class JointCache(PagedCache):
    """Attention over cached heads: keys and values of a token side by side in one tensor of pages.

    Args:
        current_pass: the rows of the pass that runs.
        size: pages and their positions.
        window: most keys that a query attends to; 0: all.
    """

    def __init__(self, current_pass: CurrentPass, size: CacheSize, window: int) -> None:
        super().__init__(current_pass, size.num_pages, size.page_positions)
        self._limits = KeyLimits(window)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments | None = None) -> Tensor:
        """Cache the keys and values [R, 1, A, D] of the rows of a pass, then attend with their queries."""
        if not len(q):
            return q
        pages = self._pages[0].write(torch.cat((k, v), -1).squeeze(1), self._pass.current.slots_R)
        keys, values = pages.chunk(2, -1)
        return attend_pages(q.squeeze(1), keys, values, self._pass.current, self._limits, None, None).unsqueeze(1)


class _SigmoidGate(torch.autograd.Function):
    """values * sigmoid(gate), with a gradient that needs only the sigmoid of all intermediate results."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gate: Tensor) -> Tensor:
        share = gate.sigmoid()
        ctx.save_for_backward(values, share)
        return values * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        values, share = ctx.saved_tensors
        return grad * share, grad * values * share * (1 - share)
