"""The same model as one would write it with torch alone, as a textbook has it: the bench's plain contestant.

It reads the parameters of a `Transformer` or an `MoELayer`, so that the two can be compared number by number, and
shares no computation with them: torch's own operations, each expert over a mask of its tokens, or `grouped_mm` put
together by hand.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.config.schema import Config, ModelConfig
from moefold.model.moe.layer import MoELayer
from moefold.model.rope import frequencies
from moefold.model.transformer import Transformer

ExpertsImplementation = Literal["loop", "grouped_mm"]


def baseline_unsupported_reason(model: ModelConfig, *, with_attention: bool) -> str:
    """Why the plain contestant cannot compute the model; empty if it can."""
    if model.router_score != "softmax" or model.num_groups > 1 or model.expert_bias:
        return "its router is softmax and top-k alone"
    if not with_attention:
        return ""
    if model.attention != "gqa" or model.qk_norm_width == "all_heads" or model.attention_sinks:
        return "its attention is grouped-query attention alone"
    return "it rotates whole heads, unscaled" if model.rope_scaling != "none" else ""


class TorchBaseline:
    """Forward passes in plain torch.

    Args:
        cfg: sizes; the type of the maths is `dtype`.
        dtype: weights are converted to it where they are used, as autocast does.
        experts: how the experts multiply.
    """

    def __init__(self, cfg: Config, dtype: torch.dtype, experts: ExpertsImplementation) -> None:
        self._cfg = cfg
        self._dtype = dtype
        self._experts = experts

    def loss(self, model: Transformer, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of labels, int64 [B, S], plus the balance loss of every layer."""
        x, aux = self.stack(model, F.embedding(tokens, model.embedding.weight).to(self._dtype))
        x = self._norm(x, model.head.norm.weight)
        head = model.embedding.weight if model.head.weight is None else model.head.weight
        logits = F.linear(x, head.to(self._dtype))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + aux

    def stack(self, model: Transformer, x: Tensor) -> tuple[Tensor, Tensor]:
        """All layers over hidden states [B, S, H]; and the sum of the balance losses."""
        total = torch.zeros((), device=x.device)
        blocks: Any = model.layers.values()
        for block in blocks:
            x = x + self._attention(block.attention, self._norm(x, block.attention_norm.weight))
            y, aux = self.layer(block.ffn, self._norm(x, block.ffn_norm.weight))
            x, total = x + y, total + aux
        return x, total

    def layer(self, moe: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
        """One MoE layer over [..., H]; and its balance loss."""
        model = self._cfg.model
        x_TH = x.flatten(0, -2)
        scores_TE = F.linear(x_TH.float(), moe.router.weight.float()).softmax(-1)
        probs_TK, ids_TK = scores_TE.topk(model.top_k, dim=-1)
        if model.router_softmax == "post":
            probs_TK = probs_TK / probs_TK.sum(-1, keepdim=True)
        probs_TK = probs_TK * model.router_scaling_factor
        by = self._experts_loop if self._experts == "loop" else self._experts_grouped_mm
        y_TH = by(moe.experts, x_TH, ids_TK, probs_TK.to(x.dtype))
        shared_expert: Any = moe.shared
        if shared_expert is not None:
            shared = self._swiglu(x_TH, shared_expert.w_gate.t(), shared_expert.w_up.t(), shared_expert.w_down.t())
            if moe.shared_gate is not None:
                shared = shared * torch.sigmoid(F.linear(x_TH, moe.shared_gate.to(x.dtype)))
            y_TH = y_TH + shared
        share_E = F.one_hot(ids_TK, model.num_experts).sum((0, 1)) / ids_TK.numel()
        aux = self._cfg.moe.aux_coefficient * model.num_experts * (share_E * scores_TE.mean(0)).sum()
        return y_TH.view_as(x), aux

    def _experts_loop(self, experts: Any, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
        y_TH = torch.zeros_like(x_TH)
        for e in range(self._cfg.model.num_experts):
            token, copy = torch.where(ids_TK == e)
            mine = self._swiglu(x_TH[token], experts.w_gate[e], experts.w_up[e], experts.w_down[e])
            y_TH = y_TH.index_add(0, token, mine * probs_TK[token, copy, None])
        return y_TH

    def _experts_grouped_mm(self, experts: Any, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
        order = ids_TK.flatten().argsort(stable=True)
        counts_E = torch.bincount(ids_TK.flatten(), minlength=self._cfg.model.num_experts)
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
        """[B, S, H] -> the same, causal."""
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
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self._cfg.model.norm_eps)

    def _apply_rope(self, x_BSAD: Tensor) -> Tensor:
        position = torch.arange(x_BSAD.shape[1], dtype=torch.float64)
        angle_SD = torch.outer(position, frequencies(self._cfg.model)).repeat(1, 2)
        cos, sin = (f.to(x_BSAD)[:, None] for f in (angle_SD.cos(), angle_SD.sin()))
        first, second = x_BSAD.chunk(2, dim=-1)
        return x_BSAD * cos + torch.cat((-second, first), dim=-1) * sin
