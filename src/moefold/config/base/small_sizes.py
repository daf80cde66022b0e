"""Sizes of the small recipe that `moefold verify --shrink` makes, as parts read them."""

from dataclasses import dataclass
from math import lcm
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class SmallSizes:
    """Degrees of a small recipe, and sizes for `Part.shrink`."""

    head_dim: ClassVar[int] = 8
    """Width of a head."""
    shard_width: ClassVar[int] = 8
    """Inner width of a feed-forward network on each rank."""
    span: ClassVar[int] = 5
    """Maximum tokens of a window or chunk: well below the shortest sequence, and not a divisor of its length."""
    conv_kernel: ClassVar[int] = 3
    """Maximum tokens of a convolution, so that a segment of the shortest sequence holds all its earlier tokens."""
    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    shards_heads: bool
    """True if the ranks of cp share the heads (`ContextPart.shards_heads`)."""
    num_groups: int
    """Groups of experts."""
    top_groups: int
    """Groups from which the experts of a token are chosen."""
    large_seq_len: int
    """Tokens of a sample of the large recipe."""
    seq_len: int
    """Tokens of a sample of the small recipe."""
    lr: float
    """Peak learning rate of the small recipe."""
    rotary_dim: int = 0
    """Dims with RoPE of a head of the small recipe."""

    def key_value_heads(self, heads: int) -> int:
        """Return the smallest number of heads of keys and values that is sharded like `heads`."""
        fewest_heads = self.tp if heads % self.tp == 0 else heads
        ranks = self.tp * self.cp
        return lcm(fewest_heads, ranks) if self.shards_heads and heads % ranks == 0 else fewest_heads

    def query_heads(self, heads: int, key_value_heads: int) -> int:
        """Return the smallest number of query heads: two per head of keys and values if the large model has that many.

        Args:
            heads: query heads of the large model.
            key_value_heads: heads of keys and values of the large model.
        """
        return lcm(self.key_value_heads(key_value_heads), self.tp * self.cp) * min(2, heads // key_value_heads)

    def experts(self, num_experts: int, top_k: int) -> int:
        """Return the number of experts: enough for `top_k` of the best groups, two per ep rank and two per group."""
        step = lcm(self.ep, self.num_groups)
        if self.num_groups > 1:
            fewest = max(-(-top_k * self.num_groups // self.top_groups), 2 * self.num_groups)
        else:
            # One more expert, so that the router has a choice.
            fewest = 2 * top_k
        return min(num_experts, step * -(-max(fewest, 2 * self.ep) // step))
