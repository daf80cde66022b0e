"""Interface of kernels that compute a whole transformer layer over rows of a paged KV cache, without gradients.

One call computes all layers. A layer with a shared expert, or with a router that the kernel does not support, needs two
calls: attention up to the logits of the router, and the routed experts; the caller chooses the experts between them.
`ops/cpu/decode.py` implements it. Its reference are the modules of the layer (`model.transformer.Block`); the bits are
the same where the modules use the same kernels.
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """Softmax over the chosen logits; False: over all logits."""
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
    """Norm of each query head, [D]; None if there is no QK norm."""
    key_norm: Tensor | None
    sinks: Tensor | None
    """A logit for each query head, [A]; see `fold_in_sinks`."""
    head_dim: int
    window: int
    """Maximum number of keys of a query, its own included; 0: no limit."""
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
    """Router of an MoE layer, in float32; None: a dense layer."""
    experts: tuple[Tensor, Tensor, Tensor] | None
    """Gate [E, H, F], up [E, H, F] and down [E, F, H] projections, in the dtype that `ExpertOps.weight_dtype` names."""
    top_k: int
    routing: SoftmaxRouting | None
    """Expert choice of the kernel; None if the caller chooses."""


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


class DecodeLayer(Protocol):
    """Decoding of one layer, whose weights and pages it holds."""

    @property
    def top_k(self) -> int:
        """Experts of each row; 0 without experts."""
        ...

    def attend(self, x_RH: Tensor, rows: DecodeRows) -> tuple[Tensor, Tensor, Tensor | None]:
        """Cache the keys and values of the rows, and compute attention with its residual connection.

        Args:
            x_RH: rows of the residual stream, [R, H], R at least 1.
            rows: rows of the pass.

        Returns:
            The residual stream [R, H]; the same rows after the norm of the feed-forward layer, [R, H]; and the logits
            of the router, float32 [R, E], None in a dense layer.
        """
        ...

    def add_experts(
        self, y_RH: Tensor, normed_RH: Tensor, ids_RK: Tensor, probs_RK: Tensor, shared_RH: Tensor | None
    ) -> None:
        """Add the output of the chosen experts to the residual stream, in place; after `attend` of the same rows.

        Args:
            y_RH: residual stream, contiguous.
            normed_RH: input of the experts, as `attend` returned it.
            ids_RK: experts of each row, int64 [R, K]; the experts of a row differ.
            probs_RK: weight of each, float32 [R, K].
            shared_RH: output of shared experts, which is added to the output of the routed experts; None if not added.
        """
        ...


class DecodePass(Protocol):
    """The shared part of the layers of a decoder: memory, and the rows of the pass that runs."""

    def layer(self, weights: LayerWeights, key_pages: Tensor, value_pages: Tensor) -> DecodeLayer:
        """Return the decoding of a layer; the weights and the pages must keep their addresses."""
        ...

    def compute(self, layers: Sequence[DecodeLayer], x_RH: Tensor, rows: DecodeRows) -> tuple[Tensor, Tensor]:
        """Compute layers of this decoder in sequence; the kernel must choose their experts; no shared experts.

        Args:
            layers: at least one layer; all have the same number of experts for each row.
            x_RH: rows of the residual stream, [R, H], R at least 1; unchanged.
            rows: rows of the pass.

        Returns:
            The residual stream [R, H], and the experts of each row in each layer, int64 [layers, R, K].
        """
        ...


class DecodeKernel(Protocol):
    """Kernel of whole layers."""

    @property
    def max_head_dim(self) -> int:
        """Largest supported head dim."""
        ...

    def replaces(self, kernel: object) -> bool:
        """Return whether this kernel may compute the part of a layer that `kernel` computes; None: torch."""
        ...

    def new_pass(self) -> DecodePass:
        """Return the shared part of a new decoder."""
        ...


logger = logging.getLogger(__name__)

MAX_ROUNDS = 3
"""Timed runs of each way, after a run that allocates."""
MAX_ROUND_S = 0.02
"""Minimum time for which one round is enough: noise is a small part of a long run."""
MODULES_GAIN = 0.95
"""Modules are chosen only if they take at most this share of the kernel's time: the kernel's results do not depend on
the number of rows, but the results of library GEMMs may."""


class DecodeChoice:
    """Choice of the faster way to compute a layer, measured once for each power of two of the number of rows.

    A choice holds as long as this object, which a model has for all its layers of a kind. So a run computes equal
    passes in the same way, though another run may choose another way.

    Args:
        clock: returns seconds; None: the CPU time of this thread, which other processes do not lengthen.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.thread_time
        self._is_whole: dict[tuple[Hashable, int], bool] = {}

    def picks_whole(
        self, kind: Hashable, num_rows: int, whole: Callable[[], object], modules: Callable[[], object]
    ) -> bool:
        """Return whether to compute a layer by the kernel; run both ways in the first pass of this number of rows.

        Args:
            kind: kind of the layer; layers of a kind take equally long.
            num_rows: rows of the pass.
            whole: computes the layer by the kernel.
            modules: computes it by its modules.
        """
        key = kind, num_rows.bit_length()
        if key not in self._is_whole:
            whole_s, modules_s = self._measure(whole, modules)
            self._is_whole[key] = whole_s * MODULES_GAIN <= modules_s
            logger.info(
                "decoding a layer (%s) of %d rows takes %.3g ms in C and %.3g ms by modules: %s is chosen",
                *(kind, num_rows, 1e3 * whole_s, 1e3 * modules_s, "C" if self._is_whole[key] else "the modules"),
            )
        return self._is_whole[key]

    def has_picked_whole(self, kind: Hashable, num_rows: int) -> bool:
        """Return whether `picks_whole` has chosen the kernel for this number of rows; False if it has not run."""
        return self._is_whole.get((kind, num_rows.bit_length()), False)

    def _measure(self, *candidates: Callable[[], object]) -> list[float]:
        """Return the shortest time of each function; they run alternately."""
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
