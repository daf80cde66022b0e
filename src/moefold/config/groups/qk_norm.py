"""Norms of the queries and keys of softmax attention."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moefold.config.param_spec import ParamSpec


@dataclass(frozen=True, kw_only=True)
class QueryKeyNorm:
    """RMSNorm over the queries and over the keys."""

    over_all_heads: bool
    """Root mean square of all heads of a token together, not of each head."""
    after_rope: bool
    has_weight: bool
    in_nope: bool
    """Whether layers without RoPE have it."""

    def params(self, heads: int, kv_heads: int, head_dim: int) -> Iterator[ParamSpec]:
        """Yield the weights of both norms."""
        query, key = (
            ParamSpec("query_norm.weight", (head_dim,), "norms"),
            ParamSpec("key_norm.weight", (head_dim,), "norms"),
        )
        if self.over_all_heads:
            yield replace(query, shape=(heads * head_dim,), tp_dim=0)
            yield replace(key, shape=(kv_heads * head_dim,), tp_dim=0, tp_heads=kv_heads)
        elif self.has_weight:
            yield from (query, key)
