"""Triton implementation of `ExpertOps`; torch's grouped_mm is used where measured to be faster."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from moefold.ops.autotune import Autotuner
from moefold.ops.grouped_experts import GroupedExpertOps
from moefold.ops.interface import GatheredRows, PermuteMap
from moefold.ops.swiglu import ClampedSwiGLUActivation, ExpertActivation
from moefold.ops.torch_experts import GroupedMMExpertOps, supports_grouped_mm
from moefold.ops.triton.grouped_gemm import combine_rows, grouped_gemm, grouped_gemm_weight_grad, tile_configs
from moefold.ops.triton.swiglu import activation_backward, activation_forward

GROUPED_MM = GroupedMMExpertOps()


@dataclass(frozen=True)
class TritonExpertOps(GroupedExpertOps):
    """Expert operations that gather rows while reading; no device syncs.

    Args:
        autotuner: chooses the fastest candidate for a shape.
    """

    autotuner: Autotuner

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See base class."""
        x = unit_stride(rows.values)
        if second is not None:
            second = unit_stride(second[0]), second[1]
        candidates: dict[str, Callable[[], Tensor]] = {}
        if supports_grouped_mm(x, rows.num_rows, *w_EKN.shape[1:]):
            candidates["torch"] = partial(GROUPED_MM.grouped_gemm, rows, w_EKN, offsets_E, second)
        for tile_config in tile_configs(x):
            candidates[f"triton {tile_config.block_m}x{tile_config.block_n}"] = partial(
                grouped_gemm,
                x,
                w_EKN,
                offsets_E,
                rows.num_rows,
                source_R=rows.source_R,
                second=second,
                tile_config=tile_config,
            )
        return self._run_autotuned(
            "product", rows, w_EKN.shape, w_EKN.stride(2) == 1, second is not None, candidates=candidates
        )

    def grouped_gemm_combine(
        self,
        rows: GatheredRows,
        w_EKN: Tensor,
        offsets_E: Tensor,
        permute_map: PermuteMap,
        second: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See base class; scatter-adds outputs where that is faster and a non-deterministic order is allowed."""
        x = unit_stride(rows.values)
        target = permute_map.source_R, len(permute_map.row_TK)

        def scatter() -> Tensor:
            second_term = None if second is None else (unit_stride(second[0]), second[1])
            y_TN = grouped_gemm(
                x, w_EKN, offsets_E, rows.num_rows, source_R=rows.source_R, second=second_term, target=target
            )
            return y_TN.to(x.dtype)

        candidates = {
            "gather": lambda: self.combine(self.grouped_gemm(rows, w_EKN, offsets_E, second), permute_map),
            "scatter": scatter,
        }
        return self._run_autotuned(
            "combined", rows, w_EKN.shape, w_EKN.stride(2) == 1, second is not None, candidates=candidates
        )

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """See base class."""
        x = unit_stride(rows.values)
        g = unit_stride(grad.values)
        candidates: dict[str, Callable[[], Tensor]] = {}
        if supports_grouped_mm(x, rows.num_rows, g.shape[1]):
            candidates["torch"] = partial(GROUPED_MM.weight_gradient, rows, grad, offsets_E)
        for tile_config in tile_configs(x):
            candidates[f"triton {tile_config.block_m}x{tile_config.block_n}"] = partial(
                grouped_gemm_weight_grad,
                x,
                g,
                offsets_E,
                source_R=rows.source_R,
                grad_source_R=grad.source_R,
                tile_config=tile_config,
            )
        return self._run_autotuned(
            "weights", rows, (len(offsets_E), g.shape[1]), grad.source_R is not None, candidates=candidates
        )

    def activation(self, activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None) -> Tensor:
        """See base class."""
        return activation_forward(g_RF, u_RF, probs_R, clamp_params(activation))

    def activation_backward(
        self, activation: ExpertActivation, grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See base class."""
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
        self, op: str, rows: GatheredRows, *shape: Hashable, candidates: dict[str, Callable[[], Tensor]]
    ) -> Tensor:
        # Row counts change every step: counts between two powers of two share a choice.
        key = (op, rows.num_rows.bit_length(), rows.values.shape[1], rows.source_R is not None, *shape)
        return self.autotuner.run(key, candidates, rows.values.device)


def clamp_params(activation: ExpertActivation) -> tuple[float, float] | None:
    """Return (alpha, limit) of the clamped activation, None for SwiGLU."""
    return (activation.alpha, activation.limit) if isinstance(activation, ClampedSwiGLUActivation) else None


def unit_stride(x: Tensor) -> Tensor:
    """Return x with a contiguous last dim, as kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()
