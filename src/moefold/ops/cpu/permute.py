"""Combine of expert outputs on a CPU in C, and its gradients, a a `PermuteOps`, whose other operations are torch's."""

import torch
from torch import Tensor

from moefold.ops.cpu.build import NUMBER, POINTER, SIZE, address_of, declare, load_library
from moefold.ops.expert_ops import Permutation
from moefold.ops.permute import TorchPermuteOps

DTYPES = (torch.float32, torch.bfloat16)


class CPermuteOps(TorchPermuteOps):
    """Permutation whose weighted sums are computed in float32 in one order, for rows of float32 or bfloat16.

    Decoding of whole layers (`ops.cpu.decode`) calls the same function, so that it has the same bits. Other dtypes,
    devices and float64 probabilities use torch's operations.
    """

    def __init__(self) -> None:
        library = load_library("permute")
        shape = (*[SIZE] * 3, NUMBER, NUMBER)
        self._combine = declare(library.combine, *[POINTER] * 4, *shape)
        self._combine_backward = declare(library.combine_backward, *[POINTER] * 6, *shape)

    def combine(self, y_RH: Tensor, permutation: Permutation, probs_TK: Tensor | None) -> Tensor:
        """See `PermuteOps`."""
        weights_TK = None if probs_TK is None else probs_TK.detach()
        if permutation.kept_TK is not None:
            kept_TK = permutation.kept_TK
            weights_TK = kept_TK.float() if weights_TK is None else weights_TK * kept_TK
        is_supported = y_RH.is_cpu and y_RH.dtype in DTYPES and len(y_RH) > 0
        if not is_supported or (weights_TK is not None and weights_TK.dtype == torch.float64):
            return super().combine(y_RH, permutation, probs_TK)
        row_TK = permutation.row_TK.contiguous()
        y_RH = y_RH.contiguous()
        if weights_TK is not None:
            weights_TK = weights_TK.float().contiguous()
        tokens, top_k = row_TK.shape
        width = y_RH.shape[1]
        out_TH = y_RH.new_empty(tokens, width)
        self._combine(
            y_RH.data_ptr(),
            row_TK.data_ptr(),
            address_of(weights_TK),
            out_TH.data_ptr(),
            tokens,
            top_k,
            width,
            y_RH.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return out_TH

    def combine_backward(
        self, grad_TH: Tensor, y_RH: Tensor, permutation: Permutation, probs_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `PermuteOps`. A row without a token, or a token without a row, takes torch operations."""
        has_all = permutation.kept_TK is None and permutation.non_padding_R is None and len(y_RH) == probs_TK.numel()
        is_supported = y_RH.is_cpu and y_RH.dtype == grad_TH.dtype in DTYPES and probs_TK.dtype == torch.float32
        if not has_all or not is_supported or len(y_RH) == 0:
            return super().combine_backward(grad_TH, y_RH, permutation, probs_TK)
        tokens, top_k = probs_TK.shape
        width = y_RH.shape[1]
        row_TK = permutation.row_TK.contiguous()
        grad_TH, y_RH, probs_TK = (x.detach().contiguous() for x in (grad_TH, y_RH, probs_TK))
        # The C code has no bounds checks.
        assert row_TK.shape == (tokens, top_k), (row_TK.shape, probs_TK.shape)
        assert grad_TH.shape == (tokens, width), (grad_TH.shape, tokens, width)
        grad_RH = torch.empty_like(y_RH)
        grad_TK = torch.empty_like(probs_TK)
        tensors = (grad_TH, y_RH, row_TK, probs_TK, grad_RH, grad_TK)
        addresses = (x.data_ptr() for x in tensors)
        is_bfloat16 = y_RH.dtype == torch.bfloat16
        self._combine_backward(*addresses, tokens, top_k, width, is_bfloat16, torch.get_num_threads())
        return grad_RH, grad_TK
