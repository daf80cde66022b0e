"""Row operations of the cross-entropy on logits: softmax statistics, and the gradient of the logits.

`TorchCrossEntropyOps` is the reference. `ops/triton/cross_entropy.py` has the kernels.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.config.base.loss_chunk import MAX_COPIED_LOGITS


class RowStatistics(NamedTuple):
    """Softmax statistics of the rows of logits, float32 at least, [C]."""

    top_C: Tensor
    """Maximum logit."""
    sum_C: Tensor
    """Sum of the exponentials of the logits minus the maximum."""
    target_C: Tensor
    """Logit of the label, or 0 for a label of another rank."""


class CrossEntropyOps(Protocol):
    """Operations on a matrix of logits [C, V/tp]. It does not communicate, and autograd does not record it."""

    def statistics(self, logits_CV: Tensor, row_C: Tensor) -> RowStatistics:
        """Compute the statistics of each row of logits.

        Args:
            logits_CV: logits of any floating dtype, contiguous.
            row_C: vocabulary row of each label on this rank, int64, or -1 for a label of another rank.
        """
        ...

    def gradient_out(
        self, out_CV: Tensor, logits_CV: Tensor, row_C: Tensor, normalizer_C: Tensor, grads_KC: Tensor
    ) -> None:
        """Write the gradient of the logits into `out`, which may be the logits themselves.

        With probabilities p = exp(logits - normalizer) it is grads[0] * (p - one_hot(row)) + grads[1] * p. Without a
        second row the normalizer has no separate gradient.

        Args:
            out_CV: result in any floating dtype, contiguous, rounded once.
            logits_CV: as in `statistics`.
            row_C: as in `statistics`.
            normalizer_C: log-sum-exp over the whole vocabulary, float32 at least.
            grads_KC: gradients of each token's cross-entropy and, if K is 2, of its normalizer, in the dtype of the
                normalizer.
        """
        ...


class TorchCrossEntropyOps:
    """`CrossEntropyOps` of torch operations, for every device and dtype."""

    def statistics(self, logits_CV: Tensor, row_C: Tensor) -> RowStatistics:
        """See `CrossEntropyOps`."""
        dtype = torch.promote_types(logits_CV.dtype, torch.float32)
        if len(logits_CV) <= _tile_rows(logits_CV):
            return _statistics(logits_CV, row_C, torch.empty_like(logits_CV, dtype=dtype))
        statistics = [
            _statistics(logits, row, torch.empty_like(logits, dtype=dtype))
            for logits, row in zip(_row_tiles(logits_CV), row_C.split(_tile_rows(logits_CV)), strict=True)
        ]
        return RowStatistics(*(torch.cat(values) for values in zip(*statistics, strict=True)))

    def gradient_out(
        self, out_CV: Tensor, logits_CV: Tensor, row_C: Tensor, normalizer_C: Tensor, grads_KC: Tensor
    ) -> None:
        """See `CrossEntropyOps`."""
        tile_rows = _tile_rows(logits_CV)
        grads_2C = grads_KC if len(grads_KC) == 2 else torch.cat((grads_KC, torch.zeros_like(grads_KC)))
        columns = (x.unsqueeze(1).split(tile_rows) for x in (row_C, normalizer_C, *grads_2C))
        for out, logits, row, normalizer, grad, grad_normalizer in zip(
            _row_tiles(out_CV), _row_tiles(logits_CV), *columns, strict=True
        ):
            is_wide = out.dtype == normalizer.dtype
            probs = torch.sub(logits, normalizer, out=out if is_wide else torch.empty_like(out, dtype=normalizer.dtype))
            label = row.clamp(min=0)
            grad_label = probs.exp_().gather(1, label)
            grad_label = (grad_label - (row >= 0).to(grad_label.dtype)) * grad + grad_label * grad_normalizer
            torch.mul(probs, grad + grad_normalizer, out=out)
            # 1 is subtracted before the product, which is rounded.
            out.scatter_(1, label, grad_label.to(out.dtype))


TORCH_CROSS_ENTROPY_OPS = TorchCrossEntropyOps()


def exponentiate_(logits_CV: Tensor, row_C: Tensor) -> RowStatistics:
    """Replace logits, float32 at least, by the exponentials of their distance to the row's maximum."""
    return _statistics(logits_CV, row_C, logits_CV)


def exponential_gradient_out(
    out_CV: Tensor, exps_CV: Tensor, row_C: Tensor, factor_C: Tensor, grads_KC: Tensor
) -> None:
    """Write the result of `CrossEntropyOps.gradient_out` for probabilities factor * exps. `exps` are kept."""
    torch.mul(exps_CV, (grads_KC.sum(0) * factor_C).unsqueeze(1), out=out_CV)
    out_CV.scatter_add_(1, row_C.clamp(min=0).unsqueeze(1), -grads_KC[0].where(row_C >= 0, 0.0).unsqueeze(1))


def _statistics(logits_CV: Tensor, row_C: Tensor, exps_CV: Tensor) -> RowStatistics:
    """Compute the statistics of each row, and its exponentials into a tensor that may be the logits themselves."""
    target_C = logits_CV.gather(1, row_C.clamp(min=0).unsqueeze(1)).squeeze(1).where(row_C >= 0, 0.0)
    top_C = logits_CV.amax(1).to(exps_CV.dtype)
    sum_C = torch.sub(logits_CV, top_C.unsqueeze(1), out=exps_CV).exp_().sum(1)
    return RowStatistics(top_C, sum_C, target_C.to(exps_CV.dtype))


def exponential_dot(logits_CV: Tensor, top_C: Tensor) -> Tensor:
    """Sum z * exp(z) over each row, z the distance of a logit to the row's maximum, in float32 at least, [C].

    Args:
        logits_CV: logits of any floating dtype, unchanged.
        top_C: maximum of each row, float32 at least.
    """
    tops = top_C.unsqueeze(1).split(_tile_rows(logits_CV))
    return torch.cat(
        [log_exponential_dot((logits - top).exp_()) for logits, top in zip(_row_tiles(logits_CV), tops, strict=True)]
    )


def log_exponential_dot(exps_CV: Tensor) -> Tensor:
    """Sum log(e) * e over each row of exponentials, 0 where e is 0, [C]. The exponentials are unchanged."""
    return torch.cat([-torch.special.entr(exps).sum(1) for exps in _row_tiles(exps_CV)])


def _tile_rows(x_CV: Tensor) -> int:
    limit = MAX_COPIED_LOGITS.get(x_CV.device.type, MAX_COPIED_LOGITS["cpu"])
    return max(1, limit // max(1, x_CV.shape[1]))


def _row_tiles(x_CV: Tensor) -> tuple[Tensor, ...]:
    return x_CV.split(_tile_rows(x_CV))
