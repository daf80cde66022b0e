"""Plain torch baseline of the bench: the same model as a textbook implementation.

It reads the parameters of a `Transformer` or `MoELayer`, so that results can be compared exactly, but shares no
computation with them: torch's own operations, with a loop over the experts or `grouped_mm`.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.race.routing import softmax_kind
from moefold.config.groups.router import aux_coefficient
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.model.moe.layer import MoELayer
from moefold.model.rope import rope_frequencies
from moefold.model.transformer import Transformer

ExpertsImplementation = Literal["loop", "grouped_mm"]


def baseline_unsupported_reason(model: ModelConfig, *, with_attention: bool) -> str:
    """Return the reason why the baseline cannot compute a model, or "" if it can."""
    if (
        model.ffn.moe.router.kind != "softmax"
        or model.ffn.moe.router.num_groups > 1
        or model.ffn.moe.router.expert_bias
        or model.ffn.moe.zero_experts
    ):
        return "its router supports only softmax and top-k"
    if softmax_kind(model) == "sparsemixer":
        return "its router is no SparseMixer"
    if not with_attention:
        return ""
    norm = getattr(model.attention, "qk_norm", None)
    if model.attention.kind != "gqa" or getattr(norm, "over", "head") == "all_heads" or model.attention.sinks:
        return "it supports only grouped-query attention"
    if (
        any(layer.chunk for layer in model.decoder_layers)
        or not getattr(norm, "weight", True)
        or model.ffn.moe.probs_on_input
    ):
        return "it supports neither chunks of attention, norms without weights, nor routing weights on inputs"
    if (
        getattr(norm, "after_rope", False)
        or model.attention.gate
        or model.attention.scale
        or model.residual.kind != "pre"
    ):
        return "it supports only the layer of Llama and Qwen3"
    if model.norm.kind != "rmsnorm" or model.head_bias:
        return "it supports only RMSNorm, and a head without a bias"
    if (model.embedding_multiplier, model.residual.multiplier, model.logits_divisor) != (1.0, 1.0, 1.0):
        return "it has no multipliers"
    if (
        model.rope.interleaved
        or model.attention.rope_fraction < 1
        or not all(layer.attention.has_rope for layer in model.decoder_layers)
    ):
        return "its RoPE rotates all dims of all layers, in halves"
    return ""


class TorchBaseline:
    """Forward passes in plain torch.

    Args:
        cfg: the recipe.
        dtype: compute dtype; weights are cast to it where they are used, as autocast does.
        experts: implementation of the experts.
    """

    def __init__(self, cfg: Config, dtype: torch.dtype, experts: ExpertsImplementation) -> None:
        self._cfg = cfg
        self._dtype = dtype
        self._experts = experts

    def loss(self, model: Transformer, tokens: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean cross-entropy of labels, int64 [B, S], plus the load-balancing loss of every layer."""
        x, aux = self.stack(model, F.embedding(tokens, model.embedding.weight).to(self._dtype))
        x = self._norm(x, model.head.norm.weight)
        head = model.embedding.weight if model.head.weight is None else model.head.weight
        logits = F.linear(x, head.to(self._dtype))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + aux

    def stack(self, model: Transformer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers on hidden states [B, S, H]. Return the output and the sum of the load-balancing losses."""
        total = torch.zeros((), device=x.device)
        blocks: Any = model.layers.values()
        for block in blocks:
            x = x + self._attention(block.attention, self._norm(x, block.attention_norm.weight))
            y, aux = self.layer(block.ffn, self._norm(x, block.ffn_norm.weight))
            x = x + y
            total = total + aux
        return x, total

    def layer(self, moe: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run one MoE layer on [..., H]. Return the output and its load-balancing loss."""
        model = self._cfg.model
        x_TH = x.flatten(0, -2)
        scores_TE = F.linear(x_TH.float(), moe.router.weight.float()).softmax(-1)
        probs_TK, ids_TK = scores_TE.topk(model.ffn.moe.top_k, dim=-1)
        if softmax_kind(model) == "post":
            probs_TK = probs_TK / probs_TK.sum(-1, keepdim=True)
        probs_TK = probs_TK * model.ffn.moe.router.scaling_factor
        run_experts = self._experts_loop if self._experts == "loop" else self._experts_grouped_mm
        y_TH = run_experts(moe.experts, x_TH, ids_TK, probs_TK.to(x.dtype))
        shared_expert: Any = moe.shared
        if shared_expert is not None:
            shared = self._swiglu(x_TH, shared_expert.w_gate.t(), shared_expert.w_up.t(), shared_expert.w_down.t())
            if moe.shared_gate is not None:
                shared = shared * torch.sigmoid(F.linear(x_TH, moe.shared_gate.to(x.dtype)))
            y_TH = y_TH + shared
        share_E = F.one_hot(ids_TK, model.ffn.moe.num_experts).sum((0, 1)) / ids_TK.numel()
        aux = aux_coefficient(self._cfg.moe) * model.ffn.moe.num_experts * (share_E * scores_TE.mean(0)).sum()
        return y_TH.view_as(x), aux

    def _experts_loop(self, experts: Any, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
        y_TH = torch.zeros_like(x_TH)
        for e in range(self._cfg.model.ffn.moe.num_experts):
            token, k = torch.where(ids_TK == e)
            output = self._swiglu(x_TH[token], experts.w_gate[e], experts.w_up[e], experts.w_down[e])
            y_TH = y_TH.index_add(0, token, output * probs_TK[token, k, None])
        return y_TH

    def _experts_grouped_mm(self, experts: Any, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
        order = ids_TK.flatten().argsort(stable=True)
        counts_E = torch.bincount(ids_TK.flatten(), minlength=self._cfg.model.ffn.moe.num_experts)
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        token = order // ids_TK.shape[1]
        x_RH = x_TH[token]
        gate = F.grouped_mm(x_RH, experts.w_gate.to(self._dtype), offs=offsets_E)
        up = F.grouped_mm(x_RH, experts.w_up.to(self._dtype), offs=offsets_E)
        y_RH = F.grouped_mm(F.silu(gate) * up, experts.w_down.to(self._dtype), offs=offsets_E)
        return torch.zeros_like(x_TH).index_add(0, token, y_RH * probs_TK.flatten()[order, None])

    def _swiglu(self, x: Tensor, gate_HF: Tensor, up_HF: Tensor, down_FH: Tensor) -> Tensor:
        gate, up, down = (w.to(self._dtype) for w in (gate_HF, up_HF, down_FH))
        return (F.silu(x @ gate) * (x @ up)) @ down

    def _attention(self, attention: Any, x: Tensor) -> Tensor:
        """Compute causal attention, [B, S, H] -> [B, S, H]."""
        pairs = ((attention.wq, attention.bq), (attention.wk, attention.bk), (attention.wv, attention.bv))
        query, key, value = (
            F.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype)).unflatten(-1, (-1, attention.head_size))
            for w, b in pairs
        )
        if attention.query_norm is not None:
            query = self._norm(query, attention.query_norm.weight)
            key = self._norm(key, attention.key_norm.weight)
        query, key, value = (t.transpose(1, 2) for t in (self._apply_rope(query), self._apply_rope(key), value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return F.linear(attended.transpose(1, 2).flatten(2), attention.wo.to(x.dtype))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self._cfg.model.norm.eps)

    def _apply_rope(self, x_BSAD: Tensor) -> Tensor:
        model, seq_len = self._cfg.model, self._cfg.train.seq_len
        position = torch.arange(x_BSAD.shape[1], dtype=torch.float64)
        angle_SD = torch.outer(position, rope_frequencies(model.rope_settings, seq_len)).repeat(1, 2)
        factor = model.rope.scaling.rotated_factor(seq_len)
        cos, sin = ((factor * f).to(x_BSAD)[:, None] for f in (angle_SD.cos(), angle_SD.sin()))
        first, second = x_BSAD.chunk(2, dim=-1)
        return x_BSAD * cos + torch.cat((-second, first), dim=-1) * sin
