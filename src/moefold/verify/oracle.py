"""The reference that every mapping must equal: one process, float64, plain maths, no line shared with the trainer.

Written to be read beside `docs/notation.md`, not to be fast: attention with an explicit mask, every expert over every
token, drops by sorting in Python, AdamW by hand. It knows parameters by their names alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.train.lr_schedule import learning_rate

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class OracleStep:
    """One optimizer step: the three terms of the loss, the gradient norm before clipping, and every gradient."""

    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    dropped: int
    gradients: Weights


@dataclass
class _Terms:
    lm: Tensor
    aux: Tensor
    z: Tensor
    dropped: int


class Oracle:
    """Trains `weights` (float64, by name) step by step.

    Args:
        cfg: the recipe; its mapping matters only through `chunks`.
        weights: initial values of every parameter by name.
        chunks: for `drop_scope = "sub_sequence"`, the positions that each rank of a micro-batch holds.
    """

    def __init__(self, cfg: Config, weights: Weights, chunks: Sequence[Sequence[int]] = ()) -> None:
        self.cfg = cfg
        self.weights = {name: w.detach().double().requires_grad_() for name, w in weights.items()}
        self.chunks = chunks or [range(cfg.train.seq_len)]
        self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()}
        self._steps = 0

    def step(self, samples: Tensor) -> OracleStep:
        """One optimizer step on a global batch, int64 [global_batch_size, S+1]."""
        for weight in self.weights.values():
            weight.grad = None
        terms = self.loss(samples)
        (terms.lm + terms.aux + terms.z).backward()
        gradients = {name: _gradient(w) for name, w in self.weights.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        self._adamw(gradients, norm)
        lm, aux, z = (float(term.detach()) for term in (terms.lm, terms.aux, terms.z))
        return OracleStep(lm, aux, z, norm, terms.dropped, gradients)

    def evaluate(self, samples: Tensor) -> float:
        """Mean cross-entropy over the target tokens of int64 [n, S+1]."""
        with torch.no_grad():
            return float(self.loss(samples).lm)

    def loss(self, samples: Tensor) -> _Terms:
        """The terms of the loss, each as docs/notation.md defines it."""
        size = self.cfg.train.micro_batch_size
        micro_batches = samples.split(size)
        zero = torch.zeros((), dtype=torch.float64)
        terms = _Terms(zero, zero, zero, 0)
        for micro in micro_batches:
            part = _Terms(zero, zero, zero, 0)
            logits = self._logits(micro[:, :-1], part)
            chosen = logits.log_softmax(-1).gather(-1, micro[:, 1:, None])
            terms.lm = terms.lm - chosen.sum() / samples[:, 1:].numel()
            terms.aux = terms.aux + self.cfg.moe.aux_loss * part.aux / len(micro_batches)
            terms.z = terms.z + self.cfg.moe.z_loss * part.z / len(micro_batches)
            terms.dropped += part.dropped
        return terms

    def _logits(self, tokens: Tensor, terms: _Terms) -> Tensor:
        """[B, S] -> [B, S, V]; adds the routing terms of this micro-batch."""
        model = self.cfg.model
        x = self.weights["embedding.weight"][tokens]
        for i, kind in enumerate(model.layer_kinds):
            name = f"layers.{i}"
            x = x + self._attention(f"{name}.attention", self._norm(f"{name}.attention_norm", x))
            normed = self._norm(f"{name}.ffn_norm", x)
            x = x + (self._moe(f"{name}.ffn", normed, terms) if kind == "M" else self._swiglu(f"{name}.ffn", normed))
        head = "embedding.weight" if model.tie_embeddings else "head.weight"
        return self._norm("head.norm", x) @ self.weights[head].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return x / (mean_square + self.cfg.model.norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def _swiglu(self, name: str, x: Tensor) -> Tensor:
        gate, up, down = (self.weights[f"{name}.{w}"] for w in ("w_gate", "w_up", "w_down"))
        gated = x @ gate.T
        return (gated * torch.sigmoid(gated) * (x @ up.T)) @ down.T

    def _attention(self, name: str, x: Tensor) -> Tensor:
        model = self.cfg.model
        batch, length, _ = x.shape

        def heads(letter: str, count: int) -> Tensor:
            y = x @ self.weights[f"{name}.w{letter}"].T
            if model.qkv_bias:
                y = y + self.weights[f"{name}.b{letter}"]
            return y.view(batch, length, count, model.head_size)

        query = heads("q", model.num_attention_heads)
        key, value = heads("k", model.num_query_groups), heads("v", model.num_query_groups)
        if model.qk_norm:
            query, key = self._norm(f"{name}.query_norm", query), self._norm(f"{name}.key_norm", key)
        query, key = self._rotate(query), self._rotate(key)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs = []
        for head in range(model.num_attention_heads):
            group = head * model.num_query_groups // model.num_attention_heads
            scores = query[:, :, head] @ key[:, :, group].mT / math.sqrt(model.head_size)
            outputs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[:, :, group])
        return torch.cat(outputs, -1) @ self.weights[f"{name}.wo"].T

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn pair (i, i + half) of each head at position p by the angle p * frequency_i."""
        rotated = round(self.cfg.model.head_size * self.cfg.model.rope_fraction)
        half = rotated // 2
        frequency = torch.tensor([self._frequency(i, rotated) for i in range(half)], dtype=torch.float64)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
        turn = torch.polar(torch.ones_like(angle), angle)[:, None, :]
        turned = torch.complex(x[..., :half], x[..., half:rotated]) * turn
        return torch.cat((turned.real, turned.imag, x[..., rotated:]), -1)

    def _frequency(self, i: int, rotated: int) -> float:
        model = self.cfg.model
        frequency = 1.0 / model.rope_theta ** (2 * i / rotated)
        if model.rope_scaling == "none":
            return frequency
        if model.rope_scaling == "linear":
            return frequency / model.rope_scaling_factor
        wavelength = 2 * math.pi / frequency
        longest = model.rope_original_seq_len / model.rope_low_freq_factor
        shortest = model.rope_original_seq_len / model.rope_high_freq_factor
        if wavelength < shortest:
            return frequency
        if wavelength > longest:
            return frequency / model.rope_scaling_factor
        smooth = (model.rope_original_seq_len / wavelength - model.rope_low_freq_factor) / (
            model.rope_high_freq_factor - model.rope_low_freq_factor
        )
        return (1 - smooth) * frequency / model.rope_scaling_factor + smooth * frequency

    def _moe(self, name: str, x: Tensor, terms: _Terms) -> Tensor:
        model = self.cfg.model
        logits = x @ self.weights[f"{name}.router.weight"].T
        scores = logits.softmax(-1)
        if model.router_softmax == "pre":
            weights, experts = scores.topk(model.top_k, -1)
        else:
            top, experts = logits.topk(model.top_k, -1)
            weights = top.softmax(-1)
        routed = torch.nn.functional.one_hot(experts, model.num_experts).sum((0, 1, 2)).double()
        share = routed / experts.numel()
        terms.aux = terms.aux + model.num_experts * (share * scores.mean((0, 1))).sum()
        terms.z = terms.z + logits.logsumexp(-1).square().mean()
        kept = torch.ones_like(weights)
        for b, s, k in self._drops(experts, weights):
            kept[b, s, k] = 0.0
            terms.dropped += 1
        y = torch.zeros_like(x)
        for expert in range(model.num_experts):
            gate, up, down = (self.weights[f"{name}.experts.{w}"][expert] for w in ("w_gate", "w_up", "w_down"))
            gated = x @ gate
            weight = (weights * kept * (experts == expert)).sum(-1, keepdim=True)
            y = y + weight * ((gated * torch.sigmoid(gated) * (x @ up)) @ down)
        if model.shared_expert_ffn_hidden_size:
            shared = self._swiglu(f"{name}.shared", x)
            if model.shared_expert_gate:
                shared = shared * torch.sigmoid(x @ self.weights[f"{name}.shared_gate"].T)
            y = y + shared
        return y

    def _drops(self, experts: Tensor, weights: Tensor) -> Iterator[tuple[int, int, int]]:
        """(sample, position, choice) of each dropped copy."""
        moe, model = self.cfg.moe, self.cfg.model
        if moe.capacity_factor == 0:
            return
        batch, length, top_k = experts.shape
        scopes = [range(length)] if moe.drop_scope == "full_sequence" else self.chunks
        for positions in scopes:
            tokens = batch * len(positions)
            capacity = max(1, math.ceil(tokens * top_k / model.num_experts * moe.capacity_factor))
            queues: dict[int, list[tuple[float, int, int, int, int]]] = {}
            for b in range(batch):
                for s in positions:
                    for k in range(top_k):
                        first = -float(weights[b, s, k].detach()) if moe.drop_policy == "probs" else 0.0
                        queues.setdefault(int(experts[b, s, k]), []).append((first, s * batch + b, b, s, k))
            for queue in queues.values():
                for *_, b, s, k in sorted(queue)[capacity:]:
                    yield b, s, k

    @torch.no_grad()
    def _adamw(self, gradients: Weights, norm: float) -> None:
        train = self.cfg.train
        self._steps += 1
        rate = learning_rate(train, self.cfg.run.steps, self._steps)
        clip = min(1.0, train.clip_grad / (norm + 1e-6)) if train.clip_grad else 1.0
        for name, weight in self.weights.items():
            first, second = self._moments[name]
            gradient = gradients[name] * clip
            first.mul_(train.beta1).add_((1 - train.beta1) * gradient)
            second.mul_(train.beta2).add_((1 - train.beta2) * gradient.square())
            mean = first / (1 - train.beta1**self._steps)
            spread = (second / (1 - train.beta2**self._steps)).sqrt()
            decay = train.weight_decay if weight.dim() > 1 else 0.0
            weight.copy_(weight * (1 - rate * decay) - rate * mean / (spread + train.eps))


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
