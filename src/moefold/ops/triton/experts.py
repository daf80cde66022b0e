"""Triton implementation of `ExpertOps`. Torch's grouped_mm is used where measured to be faster."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from moefold.ops.autotune import Autotuner, TuningKey
from moefold.ops.expert_ops import ExpertOptions, ExpertWeights, GatheredRows, PermuteMap, unit_stride
from moefold.ops.grouped_experts import GroupedExpertOps
from moefold.ops.swiglu import ClampedSwiGLUActivation, ExpertActivation, SwiGLUActivation
from moefold.ops.torch_experts import GroupedMMExpertOps, supports_grouped_mm
from moefold.ops.triton.fc1 import Fc1Output, fc1, fc1_tile_configs
from moefold.ops.triton.grouped_gemm import (
    TileConfig,
    combine_rows,
    grouped_gemm,
    grouped_gemm_weight_grad,
    tile_configs,
)
from moefold.ops.triton.swiglu import activation_backward, activation_forward

ResultT = TypeVar("ResultT")
GROUPED_MM = GroupedMMExpertOps()


@dataclass(frozen=True)
class TritonExpertOps(GroupedExpertOps):
    """Expert operations that gather rows while reading, without device syncs."""

    autotuner: Autotuner

    def fc1_activation(
        self,
        rows: GatheredRows,
        weights: ExpertWeights,
        offsets_E: Tensor,
        options: ExpertOptions,
        probs_R: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See base class. One kernel computes both projections and the activation where that is faster."""
        if not has_kernel(options.activation):
            return super().fc1_activation(rows, weights, offsets_E, options, probs_R)

        def fused(rows: GatheredRows, tile_config: TileConfig) -> tuple[Tensor, tuple[Tensor, ...]]:
            out = _fc1_output(rows, weights, writes_fc1=options.saves_fc1, writes_hidden=True)
            _fc1_of_rows(rows, weights, offsets_E, out, tile_config, probs_R, clamp_params(options.activation))
            assert out.hidden_RF is not None
            return out.hidden_RF, out.projections

        def apart(rows: GatheredRows) -> tuple[Tensor, tuple[Tensor, ...]]:
            return super(TritonExpertOps, self).fc1_activation(rows, weights, offsets_E, options, probs_R)

        key = *_fc1_key(weights), options.saves_fc1, probs_R is None
        return self._run_autotuned("fc1 activation", (rows,), key, self._fc1_candidates(rows, weights, fused, apart))

    def fc1(self, rows: GatheredRows, weights: ExpertWeights, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
        """See base class. One kernel computes both projections where that is faster."""

        def fused(rows: GatheredRows, tile_config: TileConfig) -> tuple[Tensor, Tensor]:
            out = _fc1_output(rows, weights, writes_fc1=True, writes_hidden=False)
            _fc1_of_rows(rows, weights, offsets_E, out, tile_config)
            g, u = out.projections
            return g, u

        def apart(rows: GatheredRows) -> tuple[Tensor, Tensor]:
            return super(TritonExpertOps, self).fc1(rows, weights, offsets_E)

        return self._run_autotuned("fc1", (rows,), _fc1_key(weights), self._fc1_candidates(rows, weights, fused, apart))

    def fc1_tile_configs(self, x: Tensor) -> tuple[TileConfig, ...]:
        """Return the tile configs of the kernel of both projections. Empty means they are computed separately."""
        return fc1_tile_configs(x)

    def _fc1_candidates(
        self,
        rows: GatheredRows,
        weights: ExpertWeights,
        fused: Callable[..., ResultT],
        apart: Callable[[GatheredRows], ResultT],
    ) -> dict[str, Callable[..., ResultT]]:
        """Return the candidates of both projections, the best guess first."""
        candidates: dict[str, Callable[..., ResultT]] = {}
        if _have_same_strides(weights):
            for tile_config in self.fc1_tile_configs(rows.values):
                name = f"fused {tile_config.block_m}x{tile_config.block_n}"
                candidates[name] = partial(fused, tile_config=tile_config)
        if supports_grouped_mm(rows.values, rows.num_rows, *weights.gate_EHF.shape[1:]):
            return {"apart": apart, **candidates}
        return {**candidates, "apart": apart}

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See base class."""
        if second is not None:
            second = unit_stride(second[0]), second[1]
        candidates: dict[str, Callable[..., Tensor]] = {}
        if supports_grouped_mm(rows.values, rows.num_rows, *w_EKN.shape[1:]):
            candidates["torch"] = partial(GROUPED_MM.grouped_gemm, w_EKN=w_EKN, offsets_E=offsets_E, second=second)
        for tile_config in tile_configs(rows.values):
            candidates[f"triton {tile_config.block_m}x{tile_config.block_n}"] = partial(
                _grouped_gemm_of_rows, w_EKN=w_EKN, offsets_E=offsets_E, second=second, tile_config=tile_config
            )
        key = w_EKN.shape, w_EKN.stride(2) == 1, second is not None
        return self._run_autotuned("product", (rows,), key, candidates)

    def grouped_gemm_combine(
        self,
        rows: GatheredRows,
        w_EKN: Tensor,
        offsets_E: Tensor,
        permute_map: PermuteMap | None,
        second: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See base class.

        The faster way is used. Two products are summed in one accumulator or by the combine. Rows that are only
        reordered are written by the GEMM or reordered after it.
        """
        if permute_map is None:
            return self.grouped_gemm(rows, w_EKN, offsets_E, second)
        if second is not None:
            second = unit_stride(second[0]), second[1]

        def summed_by_gemm(rows: GatheredRows) -> Tensor:
            return self.combine(self.grouped_gemm(rows, w_EKN, offsets_E, second), permute_map)

        def summed_by_combine(rows: GatheredRows, second: tuple[Tensor, Tensor]) -> Tensor:
            y_RN = self.grouped_gemm(rows, w_EKN, offsets_E)
            second_RN = self.grouped_gemm(GatheredRows(second[0]), second[1], offsets_E)
            return combine_rows(y_RN, permute_map.row_TK, permute_map.kept_TK, second_RH=second_RN)

        candidates: dict[str, Callable[..., Tensor]] = {"summed by gemm": summed_by_gemm}
        if second is not None:
            candidates["summed by combine"] = partial(summed_by_combine, second=second)
        if permute_map.is_bijective:
            for tile_config in self.scatter_tile_configs(rows.values):
                candidates[f"scattered {tile_config.block_m}x{tile_config.block_n}"] = partial(
                    _grouped_gemm_of_rows, w_EKN=w_EKN, offsets_E=offsets_E, target_R=permute_map.source_R,
                    second=second, tile_config=tile_config,
                )  # fmt: skip
        # torch's GEMMs cannot sum: the combine adds the products. Our kernel can write a row anywhere.
        uses_torch = supports_grouped_mm(rows.values, rows.num_rows, *w_EKN.shape[1:])
        best_guess = "summed by combine" if uses_torch else "scattered"
        candidates = dict(sorted(candidates.items(), key=lambda item: not item[0].startswith(best_guess)))
        map_key = permute_map.row_TK.shape[1], permute_map.is_bijective
        key = w_EKN.shape, w_EKN.stride(2) == 1, second is not None, *map_key
        return self._run_autotuned("product and combine", (rows,), key, candidates)

    def scatter_tile_configs(self, x: Tensor) -> tuple[TileConfig, ...]:
        """Return the tile configs of the GEMM that writes rows to their places. Empty: rows are reordered after it."""
        return tile_configs(x)

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """See base class."""
        candidates: dict[str, Callable[..., Tensor]] = {}
        width = grad.values.shape[1]
        if supports_grouped_mm(rows.values, rows.num_rows, width):
            candidates["torch"] = partial(GROUPED_MM.weight_gradient, offsets_E=offsets_E)
        for tile_config in tile_configs(rows.values):
            candidates[f"triton {tile_config.block_m}x{tile_config.block_n}"] = partial(
                _weight_gradient_of_rows, offsets_E=offsets_E, tile_config=tile_config
            )
        return self._run_autotuned("weights", (rows, grad), (len(offsets_E), width), candidates)

    def activation(self, activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None) -> Tensor:
        """See base class."""
        if not has_kernel(activation):
            return super().activation(activation, g_RF, u_RF, probs_R)
        return activation_forward(g_RF, u_RF, probs_R, clamp_params(activation))

    def activation_backward(
        self, activation: ExpertActivation, grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See base class."""
        if not has_kernel(activation):
            return super().activation_backward(activation, grad_RF, g_RF, u_RF, probs_R)
        return activation_backward(grad_RF, g_RF, u_RF, probs_R, clamp_params(activation))

    def swiglu(self, g_MF: Tensor, u_MF: Tensor) -> Tensor:
        """See `moefold.ops.swiglu.SwiGLUKernel`."""
        return activation_forward(g_MF.contiguous(), u_MF.contiguous(), None, None)

    def swiglu_backward(self, grad_MF: Tensor, g_MF: Tensor, u_MF: Tensor) -> tuple[Tensor, Tensor]:
        """See `moefold.ops.swiglu.SwiGLUKernel`."""
        _, grad_g, grad_u, _ = activation_backward(
            grad_MF.contiguous(), g_MF.contiguous(), u_MF.contiguous(), None, None
        )
        return grad_g, grad_u

    def combine(self, rows_RH: Tensor, permute_map: PermuteMap) -> Tensor:
        """See base class."""
        return combine_rows(unit_stride(rows_RH), permute_map.row_TK, permute_map.kept_TK)

    def _run_autotuned(
        self,
        op: str,
        operands: tuple[GatheredRows, ...],
        shape: tuple[Hashable, ...],
        candidates: dict[str, Callable[..., ResultT]],
    ) -> ResultT:
        """Run the fastest candidate. While candidates are timed, each gathers rows that are not materialized yet."""
        rows = operands[0]
        needs_gather = tuple(not operand.is_materialized for operand in operands)
        key = TuningKey(op, rows.num_rows, (rows.values.shape[1], needs_gather, *shape, rows.values.dtype))

        def timed(candidate: Callable[..., ResultT]) -> ResultT:
            return candidate(*(o if o.is_materialized else replace(o) for o in operands))

        timed_candidates = {name: partial(timed, candidate) for name, candidate in candidates.items()}
        return candidates[self.autotuner.choose(key, timed_candidates)](*operands)


def _grouped_gemm_of_rows(rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, **options: Any) -> Tensor:
    """Compute the Triton kernel's `grouped_gemm`, which gathers rows in its loads unless they are materialized."""
    values, source_R = _kernel_operand(rows)
    return grouped_gemm(values, w_EKN, offsets_E, source_R=source_R, **options)


def _fc1_key(weights: ExpertWeights) -> tuple[Hashable, ...]:
    """Return the properties of the weights that determine the candidates and the fastest of them."""
    w_EHF = weights.gate_EHF
    return w_EHF.shape, w_EHF.stride(2) == 1, _have_same_strides(weights), weights.gate_bias_EF is None


def _have_same_strides(weights: ExpertWeights) -> bool:
    return weights.gate_EHF.stride() == weights.up_EHF.stride()


def _fc1_output(rows: GatheredRows, weights: ExpertWeights, *, writes_fc1: bool, writes_hidden: bool) -> Fc1Output:
    """Allocate the outputs of the kernel of both projections."""
    hidden, g, u = (
        rows.values.new_empty(rows.num_rows, weights.gate_EHF.shape[2]) if is_written else None
        for is_written in (writes_hidden, writes_fc1, writes_fc1)
    )
    return Fc1Output(hidden, g, u)


def _fc1_of_rows(
    rows: GatheredRows,
    weights: ExpertWeights,
    offsets_E: Tensor,
    out: Fc1Output,
    tile_config: TileConfig,
    probs_R: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
) -> None:
    """Compute both projections, see `_grouped_gemm_of_rows`."""
    x, source_R = _kernel_operand(rows)
    fc1(x, weights, offsets_E, out, source_R=source_R, probs_R=probs_R, clamp=clamp, tile_config=tile_config)


def _weight_gradient_of_rows(
    rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor, tile_config: TileConfig
) -> Tensor:
    """Compute the Triton kernel's weight gradient of rows that are gathered first, once for all GEMMs that read them.

    A kernel that gathers in its loads over the rows would have fewer copies in flight.
    """
    x = unit_stride(rows.materialized)
    return grouped_gemm_weight_grad(x, unit_stride(grad.materialized), offsets_E, tile_config=tile_config)


def _kernel_operand(rows: GatheredRows) -> tuple[Tensor, Tensor | None]:
    """Return (values, source_R) for a kernel. Materialized rows are read directly."""
    if rows.is_materialized:
        return unit_stride(rows.materialized), None
    return unit_stride(rows.values), rows.source_R


def has_kernel(activation: ExpertActivation) -> bool:
    """Return whether the kernels compute an activation. A part of another package has torch operations."""
    return isinstance(activation, SwiGLUActivation | ClampedSwiGLUActivation)


def clamp_params(activation: ExpertActivation) -> tuple[float, float] | None:
    """Return (alpha, limit) of the clamped activation, None for SwiGLU."""
    return (activation.alpha, activation.limit) if isinstance(activation, ClampedSwiGLUActivation) else None
