"""Tensor parallelism with sequence parallelism (arXiv:1909.08053, arXiv:2205.05198): its collectives."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.comm.collectives import (
    all_gather,
    all_gather_uneven,
    all_reduce_max,
    all_reduce_sum,
    differentiable_all_reduce,
    reduce_scatter,
    reduce_scatter_uneven,
)
from moefold.comm.groups import Group
from moefold.config.schema import ModelConfig
from moefold.model.loss import VocabRange, chunked_cross_entropy, cross_entropy
from moefold.model.tp_interface import SequenceParallel
from moefold.ops.gemm import TORCH_GEMM, Gemm


class SequenceParallelTokens(SequenceParallel):
    """Sequence parallelism: S/(cp*tp) tokens per tp rank between the sub-layers, S/cp inside them."""

    def __init__(self, tp: Group) -> None:
        self._tp = tp

    def gather(self, x: Tensor) -> Tensor:
        """Gather along the sequence (all-gather); the gradient is reduce-scattered."""
        return all_gather(x, self._tp)

    def scatter(self, x: Tensor) -> Tensor:
        """Scatter along the sequence (reduce-scatter); the gradient is all-gathered."""
        return reduce_scatter(x, self._tp)


class UnevenSequenceParallel(SequenceParallel):
    """Sequence parallelism where tp need not divide the tokens: the first ranks hold one more, some may hold none.

    One object is shared by all modules of a stage; `set_num_tokens` must precede each forward pass.
    """

    def __init__(self, tp: Group) -> None:
        self._tp = tp
        self._split_sizes = [0] * tp.size

    def set_num_tokens(self, num_tokens: int) -> int:
        """Set the tokens per sample of the next forward pass; return how many of them this rank holds."""
        base, extra = divmod(num_tokens, self._tp.size)
        self._split_sizes = [base + (member < extra) for member in range(self._tp.size)]
        return self._split_sizes[self._tp.rank]

    def gather(self, x: Tensor) -> Tensor:
        """Gather along the sequence (all-gather); the gradient is reduce-scattered."""
        return all_gather_uneven(x, self._tp, self._split_sizes)

    def scatter(self, x: Tensor) -> Tensor:
        """Scatter along the sequence (reduce-scatter); the gradient is all-gathered."""
        return reduce_scatter_uneven(x, self._tp, self._split_sizes)


class TPVocabParallel:
    """Vocab-parallel embedding and head: V/tp consecutive rows on each tp rank."""

    def __init__(self, tp: Group, vocab_size: int) -> None:
        self._vocab_per_rank = vocab_size // tp.size
        max_over_tp = partial(all_reduce_max, group=tp)
        sum_over_tp = partial(all_reduce_sum, group=tp)
        self._vocab_range = VocabRange(tp.rank * self._vocab_per_rank, max_over_tp, sum_over_tp)

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's summand of the token embeddings: zeros for tokens of other vocab shards."""
        row = tokens - self._vocab_range.start
        is_mine = (row >= 0) & (row < self._vocab_per_rank)
        return F.embedding(row.where(is_mine, 0), weight) * is_mine.unsqueeze(-1)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the vocab-parallel cross-entropy; two all-reduces over tp, of one and of two numbers a token."""
        return cross_entropy(logits, labels, self._vocab_range)

    def chunked_cross_entropy(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        *,
        saves_exponentials: bool = False,
        gemm: Gemm = TORCH_GEMM,
    ) -> Tensor:
        """Compute the cross-entropy from hidden states and the local head shard, with the same two all-reduces."""
        return chunked_cross_entropy(
            x, weight, labels, chunk, self._vocab_range, saves_exponentials=saves_exponentials, gemm=gemm
        )


def kv_rows(cfg: ModelConfig, tp: Group) -> slice:
    """Return the rows of the local wk and wv that the query heads of this rank attend to.

    If tp divides the query groups, these are all local rows. If tp is larger, wk and wv are replicated, and
    tp / num_query_groups neighbouring ranks share one group.
    """
    if cfg.num_query_groups % tp.size == 0:
        return slice(None)
    group = tp.rank * cfg.num_query_groups // tp.size
    return slice(group * cfg.head_size, (group + 1) * cfg.head_size)


class TPSumOfSquares:
    """Sum over tp of the squares of each token's heads; see `FullWidthQKNorm`."""

    def __init__(self, tp: Group, num_heads: int) -> None:
        self._tp = tp
        # If tp exceeds the number of heads, this many neighbouring ranks hold the same head.
        self._num_replicas = max(1, tp.size // num_heads)

    def __call__(self, squares: Tensor) -> Tensor:
        """Sum over tp, each head once."""
        return differentiable_all_reduce(squares, self._tp) / self._num_replicas


def local_positions(positions: Tensor, tp: Group) -> Tensor:
    """Return the positions of this rank's tokens between the sub-layers, [S/(cp*tp)] of [S/cp]."""
    return torch.chunk(positions, tp.size)[tp.rank]
