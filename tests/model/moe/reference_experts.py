"""Reference implementation of the routed experts: plain autograd, one expert after another."""

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.expert_ops import ExpertOptions, ExpertWeights


def reference_experts(
    x_RH: Tensor, weights: ExpertWeights, options: ExpertOptions, probs_R: Tensor | None = None
) -> Tensor:
    """Compute w_down(activation(x w_gate, x w_up)) of each expert, [R, H], times the probabilities of its rows.

    Every `ExpertOps` equals this definition, its gradients included.
    """
    assert options.permute_map is None, "rows are sorted by expert"
    outputs = []
    for e, x in enumerate(x_RH.split(list(options.tokens_per_expert))):
        g = x @ weights.gate_EHF[e]
        u = x @ weights.up_EHF[e]
        if weights.gate_bias_EF is not None and weights.up_bias_EF is not None:
            g = g + weights.gate_bias_EF[e]
            u = u + weights.up_bias_EF[e]
        y = options.activation.forward(g, u) @ weights.down_EFH[e]
        if weights.down_bias_EH is not None:
            first, stop, _ = options.bias_slice.indices(y.shape[1])
            y = y + F.pad(weights.down_bias_EH[e], (first, y.shape[1] - stop))
        outputs.append(y)
    y_RH = torch.cat(outputs)
    return y_RH if probs_R is None else y_RH * probs_R.unsqueeze(1)
