"""Arguments of a kernel that computes fused layers of decoding (`ops/cpu/decode.py`), and the choice to use it."""

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LinearWeights:
    """Weight [N, K] of any strides, and bias [N] in the dtype of the rows."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class SoftmaxRouting:
    """Choice of the largest logits, weighted by their softmax."""

    is_post: bool
    """Softmax over the chosen logits. False: over all logits."""
    scale: float
    """Factor of the weights."""


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """Weights of grouped-query attention, in the dtype of the rows."""

    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    output: LinearWeights
    query_norm: Tensor | None
    """Norm of each query head, [D], or None if there is no QK norm."""
    key_norm: Tensor | None
    sinks: Tensor | None
    """A logit for each query head, [A]. See `fold_in_sinks`."""
    head_dim: int
    window: int
    """Maximum number of keys of a query, its own included. 0: no limit."""
    query_key_eps: float
    """Epsilon of the norms of queries and keys."""


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of one layer, in the dtype of the rows unless stated otherwise."""

    attention: HeadWeights
    attention_norm: Tensor
    ffn_norm: Tensor
    eps: float
    """Epsilon of the two norms of the layer."""
    router: LinearWeights | None
    """Router of an MoE layer, in float32. None means a dense layer."""
    experts: tuple[Tensor, Tensor, Tensor] | None
    """Gate [E, H, F], up [E, H, F] and down [E, F, H] projections, in the dtype that `ExpertOps.weight_dtype` names."""
    top_k: int
    routing: SoftmaxRouting | None
    """Expert choice of the kernel, or None if the caller chooses."""


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a pass, which all layers share."""

    slots_R: Tensor
    """Index of each row in the cache, page * positions of a page + offset, int64 [R]."""
    page_table: Tensor
    """Pages of each row, int32 [R, pages]."""
    lengths: Tensor
    """Keys that each row attends to, its own included, int32 [R]."""
    cos: Tensor
    """Cosines of RoPE, [R, 1, 1, rotated dims], with equal halves."""
    sin: Tensor


logger = logging.getLogger(__name__)

MAX_ROUNDS = 3
"""Timed runs of each way, after a run that allocates."""
MAX_ROUND_S = 0.02
"""Minimum time for which one round is enough: noise is a small part of a long run."""
MODULES_GAIN = 0.95
"""Modules are chosen only if they take at most this share of the kernel's time. The kernel's results do not depend on
the number of rows, but the results of library GEMMs may."""


class DecodeChoice:
    """Choice of the faster way to compute a layer, measured once for each power of two of the number of rows.

    A choice holds as long as this object, which a model has for all its layers of a kind. So a run computes equal
    passes in the same way, though another run may choose another way.

    Args:
        clock: returns seconds. None means the CPU time of this thread, which other processes do not lengthen.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.thread_time
        self._chose_fused: dict[tuple[Hashable, int], bool] = {}

    def chooses_fused(
        self, kind: Hashable, num_rows: int, fused: Callable[[], object], modules: Callable[[], object]
    ) -> bool:
        """Return whether to compute a layer by the kernel. Run both ways in the first pass of this number of rows.

        Args:
            kind: kind of the layer. Layers of a kind take equally long.
            num_rows: rows of the pass.
            fused: computes the layer by the kernel.
            modules: computes it by its modules.
        """
        key = kind, num_rows.bit_length()
        if key not in self._chose_fused:
            fused_s, modules_s = self._measure(fused, modules)
            self._chose_fused[key] = fused_s * MODULES_GAIN <= modules_s
            logger.info(
                "decoding a layer (%s) of %d rows takes %.3g ms in C and %.3g ms by modules: %s is chosen",
                *(kind, num_rows, 1e3 * fused_s, 1e3 * modules_s, "C" if self._chose_fused[key] else "the modules"),
            )
        return self._chose_fused[key]

    def has_chosen_fused(self, kind: Hashable, num_rows: int) -> bool:
        """Return whether `chooses_fused` has chosen the kernel for this number of rows, or False if it has not run."""
        return self._chose_fused.get((kind, num_rows.bit_length()), False)

    def _measure(self, *candidates: Callable[[], object]) -> list[float]:
        """Return the shortest time of each function. They run alternately."""
        for candidate in candidates:
            candidate()
        best = [float("inf")] * len(candidates)
        for _ in range(MAX_ROUNDS):
            for i, candidate in enumerate(candidates):
                start = self._clock()
                candidate()
                best[i] = min(best[i], self._clock() - start)
            if sum(best) > MAX_ROUND_S:
                break
        return best
