"""Tensor with sequence parallelism (arXiv:1909.08053, arXiv:2205.05198): the seams of the maths that communicate."""

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
    """Between the sub-layers each tp rank holds S/(cp*tp) tokens; inside them all S/cp."""

    def __init__(self, tp: Group) -> None:
        self._tp = tp

    def gather(self, x: Tensor) -> Tensor:
        """All-gather along the sequence; the gradient is reduce-scattered."""
        return all_gather(x, self._tp)

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter along the sequence; the gradient is all-gathered."""
        return reduce_scatter(x, self._tp)


class UnevenSequenceParallel(SequenceParallel):
    """As `SequenceParallelTokens` where tp need not divide the tokens: the first ranks hold one more, and some perhaps none.

    One object for all modules of a stage, which is told before each forward pass how many tokens there are.
    """

    def __init__(self, tp: Group) -> None:
        self._tp = tp
        self._split_sizes = [0] * tp.size

    def set_num_tokens(self, num_tokens: int) -> int:
        """The next forward pass has so many tokens of each sample; returns how many of them this rank holds."""
        base, extra = divmod(num_tokens, self._tp.size)
        self._split_sizes = [base + (member < extra) for member in range(self._tp.size)]
        return self._split_sizes[self._tp.rank]

    def gather(self, x: Tensor) -> Tensor:
        """All-gather along the sequence; the gradient is reduce-scattered."""
        return all_gather_uneven(x, self._tp, self._split_sizes)

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter along the sequence; the gradient is all-gathered."""
        return reduce_scatter_uneven(x, self._tp, self._split_sizes)


class TPVocabParallel:
    """Each tp rank holds V/tp consecutive rows of the embedding and of the head."""

    def __init__(self, tp: Group, vocab_size: int) -> None:
        self._vocab_per_rank = vocab_size // tp.size
        top_of = partial(all_reduce_max, group=tp)
        sum_of = partial(all_reduce_sum, group=tp)
        self._vocab_range = VocabRange(tp.rank * self._vocab_per_rank, top_of, sum_of)

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """My rows' share of the token vectors: zeros where another rank holds the row."""
        row = tokens - self._vocab_range.start
        is_mine = (row >= 0) & (row < self._vocab_per_rank)
        return F.embedding(row.where(is_mine, 0), weight) * is_mine.unsqueeze(-1)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over all rows; two all-reduces over tp, of one and of two numbers a token."""
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
        """The same from hidden states and my rows of the head, with the same two all-reduces."""
        return chunked_cross_entropy(
            x, weight, labels, chunk, self._vocab_range, saves_exponentials=saves_exponentials, gemm=gemm
        )


def kv_rows(cfg: ModelConfig, tp: Group) -> slice:
    """The rows of the local wk and wv that this rank's query heads attend to.

    Where tp divides the query groups the local rows are exactly those. Where tp is larger, wk and wv are whole on
    each rank, and tp / num_query_groups neighbours share one group.
    """
    if cfg.num_query_groups % tp.size == 0:
        return slice(None)
    group = tp.rank * cfg.num_query_groups // tp.size
    return slice(group * cfg.head_size, (group + 1) * cfg.head_size)


class TPSumOfSquares:
    """Squares of a token's heads, summed over those of all tp ranks; see `FullWidthQKNorm`."""

    def __init__(self, tp: Group, num_heads: int) -> None:
        self._tp = tp
        # Where tp is larger than the number of heads, so many neighbours hold the same one.
        self._num_replicas = max(1, tp.size // num_heads)

    def __call__(self, squares: Tensor) -> Tensor:
        """Sum over tp, each head once."""
        return differentiable_all_reduce(squares, self._tp) / self._num_replicas


def local_positions(positions: Tensor, tp: Group) -> Tensor:
    """Positions of this rank's tokens between the sub-layers, [S/(cp*tp)] of [S/cp]."""
    return torch.chunk(positions, tp.size)[tp.rank]
