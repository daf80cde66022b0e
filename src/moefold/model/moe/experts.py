"""Experts: gated feed-forward networks (arXiv:2002.05202) over tokens sorted by expert, and latent projections."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moefold.model.delayed_wgrad import WeightGradSink, WeightGradStoreProtocol, weight_grad_sink
from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.linear import linear
from moefold.model.local_param import local_param
from moefold.model.lora import LowRankAdapters
from moefold.model.moe.dispatch.base import ExpertInput
from moefold.ops.cpu.experts import SequentialExpertOps
from moefold.ops.expert_ops import ALL_COLUMNS, ExpertOps, ExpertOptions, ExpertWeights
from moefold.ops.gemm import TORCH_GEMM
from moefold.ops.swiglu import SWIGLU, ExpertActivation
from moefold.ops.torch_experts import TORCH_EXPERT_OPS

NUM_WEIGHTS = len(fields(ExpertWeights))
NUM_MATRICES = 3
"""Matrices of an expert, which come before its biases."""


class Experts(nn.Module):
    """Routed experts of this rank: each computes activation(x w_gate, x w_up) w_down, with weights [E/ep, H, F/etp].

    Biases b_gate and b_up [E/ep, F/etp] are sharded like the columns that they are added to. b_down [E/ep, H/etp] is
    sharded too. The outputs of the etp ranks are summed, so each rank adds the bias of its own columns, and every
    element is added once. Every weight gets a gradient on every rank, zero for an expert without tokens: the gradient
    reduction requires it.

    `parallelize` sets five attributes. `bias_slice` selects the columns of H of the local part of b_down, and `ops`
    the kernels. `wgrad_store` splits the backward pass in two. `saves_fc1` says if the gate and up projections are
    saved for backward or recomputed. `peer_weights` are the weights of all ep ranks, for inference.

    Args:
        ffn_hidden_size: F, inner width of one expert.
        has_bias: True if the three projections have biases.
        applies_probs: True if the routing probabilities are applied to the hidden values, not to the outputs.
        probs_on_input: True if they are applied to the input instead (Llama 4).
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: ExpertActivation = SWIGLU,
        has_bias: bool = False,
        applies_probs: bool = False,
        probs_on_input: bool = False,
    ) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.w_up = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.w_down = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.b_gate = nn.Parameter(torch.empty(num_experts, ffn_hidden_size)) if has_bias else None
        self.b_up = nn.Parameter(torch.empty(num_experts, ffn_hidden_size)) if has_bias else None
        self.b_down = nn.Parameter(torch.empty(num_experts, hidden_size)) if has_bias else None
        self.activation = activation
        self.applies_probs = applies_probs or probs_on_input
        self.probs_on_input = probs_on_input
        self.bias_slice = ALL_COLUMNS
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.saves_fc1 = True
        self.ops: ExpertOps = TORCH_EXPERT_OPS
        self.lora: LowRankAdapters | None = None
        self.peer_weights: Sequence[Tensor] | None = None
        """Weights of all E experts in the order of `ExpertWeights`, [E, ...]. The parameters are views of a part."""

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters in the order of `ExpertWeights`: three matrices, and three biases if there are any."""
        weights = (self.w_gate, self.w_up, self.w_down, self.b_gate, self.b_up, self.b_down)
        return [weight for weight in weights if weight is not None]

    @property
    def computed_weights(self) -> Sequence[Tensor]:
        """Weights that `forward` computes with, in this order: the parameters, or the weights of all ep ranks."""
        return self.weights if self.peer_weights is None else self.peer_weights

    def forward(self, expert_input: ExpertInput) -> Tensor:
        """Apply each expert to its tokens. Local unless experts are migrated.

        Returns:
            [R, H], under etp a partial sum over F, from this rank's weights. With a `permute_map` [T, H].
        """
        if self.probs_on_input:
            expert_input = _scale_input(expert_input)
        dtype = expert_input.x.dtype
        migration = expert_input.migration
        takes_masters = migration is None and self.lora is None
        matrix_dtype = self.ops.weight_dtype(expert_input.x) if takes_masters else dtype
        weights = self.computed_weights
        local = [local_param(weight, matrix_dtype) for weight in weights[:NUM_MATRICES]]
        local += [local_param(bias, dtype) for bias in weights[NUM_MATRICES:]]
        if migration is None:
            return self._compute(expert_input, local, self.wgrad_store)
        # Gradients of migrated weights are returned by a collective of the backward pass: they cannot be delayed.
        local, received = migration.migrate(local)
        if len(expert_input.tokens_per_expert) == len(local[0]):
            return self._compute(expert_input, local)
        # Two calls, because concatenating the weights would copy all of them.
        own_input, received_input = expert_input.split(len(local[0]))
        return torch.cat((self._compute(own_input, local), self._compute(received_input, received)))

    def _compute(
        self,
        expert_input: ExpertInput,
        weights: Sequence[Tensor],
        wgrad_store: WeightGradStoreProtocol | None = None,
    ) -> Tensor:
        options = ExpertOptions(
            expert_input.tokens_per_expert,
            self.activation,
            self.bias_slice,
            expert_input.permute_map,
            self.saves_fc1,
        )
        if self.lora is not None:
            from moefold.model.moe.adapted_experts import NO_ADAPTER, ExpertAdapters, adapted_experts

            gate, up, down = (
                self.lora.pair(name, expert_input.x.dtype) if name in self.lora else NO_ADAPTER
                for name in ("w_gate", "w_up", "w_down")
            )
            adapters = ExpertAdapters(gate, up, down, self.lora.scale)
            gemm = self.ops.gemm if isinstance(self.ops, SequentialExpertOps) else TORCH_GEMM
            return adapted_experts(
                expert_input.x, ExpertWeights(*weights), adapters, options, expert_input.probs_R, gemm
            )
        return fused_experts(
            expert_input.x, ExpertWeights(*weights), options, self.ops, expert_input.probs_R, wgrad_store
        )


def _scale_input(expert_input: ExpertInput) -> ExpertInput:
    """Multiply each row of the input by its routing probability."""
    assert expert_input.probs_R is not None
    assert expert_input.permute_map is None
    x_RH = (expert_input.x * expert_input.probs_R.unsqueeze(1)).to(expert_input.x.dtype)
    return replace(expert_input, x=x_RH, probs_R=None)


@dataclass(frozen=True)
class _Call:
    """Non-tensor arguments of the autograd function."""

    ops: ExpertOps
    options: ExpertOptions
    wgrad_sink: WeightGradSink


def fused_experts(
    x: Tensor,
    weights: ExpertWeights,
    options: ExpertOptions,
    ops: ExpertOps,
    probs_R: Tensor | None = None,
    wgrad_store: WeightGradStoreProtocol | None = None,
) -> Tensor:
    """Compute the routed experts with the given operations. It does not communicate.

    Args:
        x: tokens sorted by expert [R, H], or with a `permute_map` the unsorted tokens [T, H].
        probs_R: factor of each output row, [R].

    Returns:
        Like `x`: an output for each row, or the sum for each token.
    """
    tensors = [getattr(weights, entry.name) for entry in fields(weights)]
    wgrad_sink, tensors = weight_grad_sink(wgrad_store, x, tensors)
    call = _Call(ops, replace(options, delays_wgrad=wgrad_sink.is_delayed), wgrad_sink)
    return _FusedExperts.apply(x, probs_R, call, *tensors)


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs_R: Tensor | None, call: _Call, *tensors: Any) -> Tensor:
        y, saved = call.ops.forward(x, ExpertWeights(*tensors), call.options, probs_R)
        ctx.save_for_backward(x, probs_R, *tensors, *saved)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, probs_R, *tensors = ctx.saved_tensors
        call: _Call = ctx.call
        weights = ExpertWeights(*tensors[:NUM_WEIGHTS])
        gradients = call.ops.backward(grad, x, weights, call.options, probs_R, tensors[NUM_WEIGHTS:])
        if not call.wgrad_sink.is_delayed and not any(ctx.needs_input_grad[3:]):
            return gradients.x, gradients.probs_R, None, *[None] * NUM_WEIGHTS
        return gradients.x, gradients.probs_R, None, *call.wgrad_sink.resolve(gradients.weights, NUM_WEIGHTS)


class LatentProjection(nn.Module):
    """Linear map of tokens into the narrower space of latent experts, or out of it (arXiv:2502.16927, BigMac).

    The weight [out, in] is replicated over tp. `parallelize` sets `wgrad_store` and `kernels`.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.kernels: Kernels = TORCH_KERNELS

    def forward(self, x_TH: Tensor) -> Tensor:
        """Project the tokens of this rank, [T, in] -> [T, out]. It does not communicate."""
        return linear(
            x_TH,
            local_param(self.weight, x_TH.dtype),
            wgrad_store=self.wgrad_store,
            linear_backend=self.kernels.linear_backend,
        )
