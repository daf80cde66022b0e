"""Layers that one kernel computes as a whole in the passes of a decoder. See `ops.decode`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moefold.comm.private_torch import has_forward_hooks
from moefold.model.attention import TokenMixer
from moefold.model.block import Block, LayerInputs
from moefold.model.head import Head
from moefold.model.layer_cache import CurrentPass
from moefold.model.local_param import local_param
from moefold.model.mlp import SwiGLU
from moefold.model.moe.dispatch.local import LocalDispatcher
from moefold.model.moe.experts import Experts
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router_replay import RouterOverride
from moefold.model.moe.token_group import TokenPositions
from moefold.model.norm import RMSNorm
from moefold.model.paged_cache import PagedAttention
from moefold.model.tp_interface import SequenceParallel
from moefold.ops.decode import LayerWeights, LinearWeights
from moefold.ops.rope import Rope

if TYPE_CHECKING:
    from moefold.ops.cpu.decode import CDecode, CDecodeHead, CDecodeLayer, CDecodePass

MOE_PARAMETERS = frozenset(
    ("router.weight", "router.bias", "experts.w_gate", "experts.w_up", "experts.w_down", "shared_gate")
)
"""Parameters that `FusedBlock` reads, without the shared expert. A layer with other parameters keeps its modules."""
BLOCK_MODULES = {"attention_norm", "attention", "ffn_norm", "ffn"}


def supports_fused(block: nn.Module) -> bool:
    """Return whether `FusedBlock` computes a layer."""
    return not fused_unsupported_reason(block)


def fused_unsupported_reason(block: nn.Module) -> str:
    """Return the reason why `FusedBlock` does not compute a layer, for the log, or "" if it does.

    It computes grouped-query attention and SwiGLU, only in layers of the classes, parameters and kernels that it
    supports.
    """
    return next((reason for reason, holds in _unsupported(block) if holds), "")


def _unsupported(block: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield each reason against a layer and whether it holds. A check may presume that earlier reasons do not hold."""
    attention = getattr(block, "attention", None)
    refusal = attention.fused_refusal if isinstance(attention, TokenMixer) else ""
    yield refusal, bool(refusal)
    yield "a layer of another class", type(block) is not Block
    assert isinstance(block, Block)
    attention = block.attention
    kernel = attention.kernels.decode
    yield "no kernels in C, as of run.kernels='plain', float64, no compiler or no AVX", kernel is None
    assert kernel is not None
    yield "norms of outputs", bool({name for name, _ in block.named_children()} - BLOCK_MODULES)
    yield "no norms of inputs", {name for name, _ in block.named_children()} != BLOCK_MODULES
    yield "LayerNorm", any(type(norm) is not RMSNorm for norm in (block.attention_norm, block.ffn_norm))
    yield "no RoPE", not block.has_rope
    yield "interleaved RoPE", block.is_rope_interleaved
    yield "model.residual.multiplier", block.residual_multiplier != 1
    yield from attention.fused_obstacles()
    yield from _unsupported_ffn(block.ffn, kernel)
    kernels = attention.kernels
    kernel_choices = kernels.norm, kernels.rope, kernels.paged_attention, kernels.linear_backend, kernels.gemm
    yield "other kernels", not all(map(kernel.replaces, kernel_choices)) or kernels.qk_norm_rope is not None
    yield "forward hooks", any(has_forward_hooks(m) for m in block.modules() if m is not block)


def _unsupported_ffn(ffn: nn.Module, kernel: "CDecode") -> Iterator[tuple[str, bool]]:
    if type(ffn) is SwiGLU:
        return
    yield "a feed-forward layer of another class", type(ffn) is not MoELayer
    assert isinstance(ffn, MoELayer)
    yield "a shortcut around attention", ffn.is_shortcut
    yield "experts of other ranks", type(ffn.dispatcher) is not LocalDispatcher
    assert isinstance(ffn.dispatcher, LocalDispatcher)
    yield "adapters", type(ffn.experts) is not Experts
    yield "zero-computation experts", ffn.has_zero_experts
    yield "moe.weight_in_expert", ffn.experts.applies_probs
    names = {name for name, _ in ffn.named_parameters() if not name.startswith("shared.")}
    yield "biases of experts", any(name.startswith("experts.b_") for name in names)
    yield "latent experts", ffn.latent_down is not None
    yield "parameters of experts that it does not know", bool(names - MOE_PARAMETERS)
    yield "another activation of experts than SwiGLU", not kernel.replaces(ffn.experts.activation)
    yield "a router in float64", ffn.router.logits_dtype(torch.float32) != torch.float32
    ops = ffn.experts.ops, ffn.dispatcher.permute_ops
    yield "other kernels of experts", not all(map(kernel.replaces, ops)) or ffn.dispatcher.fp8_dispatch


class FusedBlock:
    """Forward pass of a layer over the rows of a decoder's pass, by a kernel for the whole layer.

    Shared experts and dense feed-forward layers stay modules, with the same variants as in training. A router that the
    kernel does not support stays a module too, and chooses the experts between the two calls of the kernel.

    Args:
        block: a layer that `supports_fused`. Its weights must not change as long as this object is used.
    """

    def __init__(
        self, block: Block, decode_pass: "CDecodePass", current_pass: CurrentPass, cache: PagedAttention
    ) -> None:
        self._ffn = block.ffn
        self._kind = type(block.ffn).__name__
        self._router = block.ffn.router if isinstance(block.ffn, MoELayer) else None
        self._block = block
        self._choice = block.attention.kernels.decode_choice
        self._decode_pass = decode_pass
        self._current_pass = current_pass
        self._cache = cache
        self._layer: CDecodeLayer | None = None
        self._chooses = False

    @torch.no_grad()
    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Compute the output of the layer for rows [R, 1, H] of the current pass, by its modules where faster."""
        if not len(x):
            return x
        if self._choice is None:
            return self._run(x, inputs.rope)

        def run_modules() -> Tensor:
            output = self._block.run_modules(x, inputs)
            assert output.routed is None, "no shortcut"
            return output.y

        if self._choice.chooses_fused(
            self._kind, len(x), self._dry_run(lambda: self._run(x, inputs.rope)), self._dry_run(run_modules)
        ):
            return self._run(x, inputs.rope)
        return run_modules()

    def _dry_run(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return a run whose choices of experts are not recorded. The rows that it caches are written again."""

        def trial() -> None:
            with _unrecorded(self._ffn):
                run()

        return trial

    def _run(self, x: Tensor, rope: Rope) -> Tensor:
        x_RH = x.squeeze(1)
        if self._layer is None:
            self._layer = self._build(x_RH)
        layer = self._layer
        ffn = self._ffn
        if self._chooses and _has_no_choices(self.override):
            y_RH, ids_LRK = self._decode_pass.compute((layer,), x_RH, self._current_pass.decode_rows(rope))
            self.record(ids_LRK[0])
            return y_RH.unsqueeze(1)
        y_RH, normed_RH, logits_RE = layer.attend(x_RH, self._current_pass.decode_rows(rope))
        if logits_RE is None:
            return y_RH.unsqueeze(1) + ffn(normed_RH.unsqueeze(1))
        assert isinstance(ffn, MoELayer)
        positions = TokenPositions(ffn.micro_batch_group, len(x), self._current_pass.single_sample)
        routing = ffn.router.route(logits_RE, x.dtype, positions)
        shared = None if ffn.shared is None else ffn.run_shared_expert(normed_RH.unsqueeze(1)).squeeze(1)
        layer.add_experts(y_RH, normed_RH, routing.ids_TK, routing.probs_TK, shared)
        return y_RH.unsqueeze(1)

    @property
    def override(self) -> RouterOverride | None:
        """The override of the router, if there are any."""
        return None if self._router is None else self._router.override

    def record(self, ids_RK: Tensor) -> None:
        """Pass the experts that the kernel chose to the override of the router, which only records them."""
        if self.override is not None:
            self.override.apply(ids_RK, self._current_pass.single_sample)

    def single_call(self, num_rows: int) -> "CDecodeLayer | None":
        """Return the layer if the kernel computes it in one call for a number of rows. None before the first pass."""
        if not self._chooses:
            return None
        is_chosen = self._choice is None or self._choice.has_chosen_fused(self._kind, num_rows)
        return self._layer if is_chosen and _has_no_choices(self.override) else None

    def _build(self, like: Tensor) -> "CDecodeLayer":
        """Return the layer with its pages, which this call allocates."""
        weights = layer_weights(self._block, like)
        self._chooses = weights.routing is not None
        num_groups = len(weights.attention.key.weight) // weights.attention.head_dim
        return self._decode_pass.layer(weights, *self._cache.kernel_pages(num_groups, weights.attention.head_dim, like))


class FusedLayers:
    """Forward pass of all layers of a stage: one call if the kernel computes whole layers, otherwise layer by layer.

    Args:
        blocks: in their order. They share the pass of the decoder.
    """

    def __init__(self, blocks: Sequence[FusedBlock], decode_pass: "CDecodePass", current_pass: CurrentPass) -> None:
        self._blocks = blocks
        self._decode_pass = decode_pass
        self._current_pass = current_pass

    @torch.no_grad()
    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Compute the layers for rows [R, 1, H] of the current pass."""
        layers = [block.single_call(len(x)) for block in self._blocks]
        single_calls = [layer for layer in layers if layer is not None]
        if len(single_calls) < len(layers) or len({layer.top_k for layer in single_calls}) > 1 or not len(x):
            for block in self._blocks:
                x = block(x, inputs)
            return x
        rows = self._current_pass.decode_rows(inputs.rope)
        y_RH, ids_LRK = self._decode_pass.compute(single_calls, x.squeeze(1), rows)
        for i, block in enumerate(self._blocks):
            # A view for each layer takes longer than the question.
            if block.override is not None:
                block.record(ids_LRK[i])
        return y_RH.unsqueeze(1)


def _has_no_choices(override: RouterOverride | None) -> bool:
    """Return whether nothing changes the choices of a router in evaluation."""
    return override is None or override.only_records


@contextmanager
def _unrecorded(ffn: nn.Module) -> Iterator[None]:
    if not isinstance(ffn, MoELayer):
        yield
        return
    override, ffn.router.override = ffn.router.override, None
    try:
        yield
    finally:
        ffn.router.override = override


class FusedHead:
    """Logits of the rows of a decoder's pass whose next token is drawn, by the kernel of its layers.

    Args:
        head: a head that `supports_fused_head`. Its weights must not change as long as this object is used.
    """

    def __init__(self, head: Head, kernel: "CDecode") -> None:
        self._head = head
        self._kernel = kernel
        self._fused: CDecodeHead | None = None

    @torch.no_grad()
    def __call__(self, x_RH: Tensor, picked_N: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Compute the logits [N, V/tp] of picked rows, float32."""
        if self._fused is None:
            norm = self._head.norm
            assert isinstance(norm, RMSNorm)
            weight = self._head.weight_shard(x_RH, tied_weight)
            self._fused = self._kernel.head(norm.local_weight(x_RH), weight, norm.eps)
        return self._fused(x_RH, picked_N)


def supports_fused_head(head: Head, kernel: "CDecode") -> bool:
    """Return whether `FusedHead` computes a head with the same bits: all of it is computed by kernels in C."""
    return (
        type(head) is Head
        and type(head.norm) is RMSNorm
        and kernel.replaces(head.norm.kernels.norm)
        and kernel.replaces(head.gemm)
        and head.bias is None
        and head.input_factor == 1.0
        and type(head.sequence_parallel) is SequenceParallel
        and not any(map(has_forward_hooks, head.modules()))
    )


def layer_weights(block: Block, like: Tensor) -> LayerWeights:
    """Return the weights of a layer for rows of the dtype of a tensor."""
    assert isinstance(block.attention_norm, RMSNorm)
    assert isinstance(block.ffn_norm, RMSNorm)
    router = None
    experts = None
    top_k = 0
    routing = None
    if isinstance(ffn := block.ffn, MoELayer):
        bias = ffn.router.bias
        router = LinearWeights(
            local_param(ffn.router.weight, torch.float32), None if bias is None else local_param(bias, torch.float32)
        )
        matrix_dtype = ffn.experts.ops.weight_dtype(like)
        gate, up, down = (local_param(weight, matrix_dtype) for weight in ffn.experts.computed_weights)
        experts = gate, up, down
        top_k = ffn.router.top_k
        kernels = ffn.router.kernels
        is_known = kernels.decode is not None and kernels.decode.replaces(kernels.router_softmax)
        routing = ffn.router.softmax_routing() if is_known and ffn.shared is None else None
    return LayerWeights(
        attention=block.attention.fused_weights(like),
        attention_norm=block.attention_norm.local_weight(like),
        ffn_norm=block.ffn_norm.local_weight(like),
        eps=block.attention_norm.eps,
        router=router,
        experts=experts,
        top_k=top_k,
        routing=routing,
    )
