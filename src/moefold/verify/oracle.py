"""The reference that every mapping must equal: one process, float64, plain maths, no line shared with the trainer.

Written to be read beside `docs/notation.md`, not to be fast: attention with an explicit mask, every expert over every
token, AdamW by hand. It knows parameters by their names alone. What a router does is in `oracle_routing`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.metrics.moe import MoELayerMetrics
from moefold.train.lr_schedule import learning_rate
from moefold.verify.oracle_routing import Moment, OracleRouter, RoutedBatch

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
    moe_layers: tuple[MoELayerMetrics, ...]


@dataclass(frozen=True)
class _Terms:
    """The terms of the loss over a global batch, and what routed it: for each MoE layer its micro-batches."""

    lm: Tensor
    aux: dict[int, Tensor]
    z: dict[int, Tensor]
    routed: dict[int, list[RoutedBatch]]

    def total(self) -> Tensor:
        """What is optimised."""
        return torch.stack([self.lm, *self.aux.values(), *self.z.values()]).sum()


class Oracle:
    """Trains `weights` (float64, by name) step by step.

    Args:
        cfg: the recipe; its mapping matters only through `chunks`, and through dp for `aux_kind = "global_batch"`.
        weights: initial values of every parameter by name.
        chunks: for `drop_scope = "sub_sequence"`, the positions that each rank of a micro-batch holds.
    """

    def __init__(self, cfg: Config, weights: Weights, chunks: Sequence[Sequence[int]] = ()) -> None:
        self.cfg = cfg
        self.weights = {name: w.detach().double().requires_grad_() for name, w in weights.items()}
        self.router = OracleRouter(cfg, chunks or [range(cfg.train.seq_len)])
        self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()}
        self._steps = 0

    def step(self, samples: Tensor) -> OracleStep:
        """One optimizer step on a global batch, int64 [global_batch_size, S+1]."""
        for weight in self.weights.values():
            weight.grad = None
        terms = self.loss(samples, is_training=True)
        terms.total().backward()
        gradients = {name: _gradient(w) for name, w in self.weights.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        self._adamw(gradients, norm)
        layers = []
        for layer, batches in terms.routed.items():
            aux, z = float(terms.aux[layer].detach()), float(terms.z[layer].detach())
            layers.append(self.router.metrics(layer, batches, aux, z))
            self.router.end_step(layer, batches)
        return OracleStep(
            loss=float(terms.lm.detach()),
            aux_loss=sum(layer.aux_loss for layer in layers),
            z_loss=sum(layer.z_loss for layer in layers),
            grad_norm=norm,
            dropped=sum(batch.dropped for batches in terms.routed.values() for batch in batches),
            gradients=gradients,
            moe_layers=tuple(layers),
        )

    def evaluate(self, samples: Tensor) -> float:
        """Mean cross-entropy over the target tokens of int64 [n, S+1]."""
        with torch.no_grad():
            return float(self.loss(samples, is_training=False).lm)

    def loss(self, samples: Tensor, *, is_training: bool) -> _Terms:
        """The terms of the loss, each as docs/notation.md defines it."""
        size = self.cfg.train.micro_batch_size
        lm = torch.zeros((), dtype=torch.float64)
        routed: dict[int, list[RoutedBatch]] = {}
        for number, micro in enumerate(samples.split(size)):
            logits = self._logits(micro[:, :-1], Moment(self._steps + 1, number * size, is_training), routed)
            chosen = logits.log_softmax(-1).gather(-1, micro[:, 1:, None])
            lm = lm - chosen.sum() / samples[:, 1:].numel()
        aux = {
            layer: self.cfg.moe.aux_coefficient * self.router.aux(layer, batches) for layer, batches in routed.items()
        }
        z = {
            layer: self.cfg.moe.z_loss * torch.stack([b.logits.logsumexp(-1).square().mean() for b in batches]).mean()
            for layer, batches in routed.items()
        }
        return _Terms(lm, aux, z, routed)

    def _logits(self, tokens: Tensor, moment: Moment, routed: dict[int, list[RoutedBatch]]) -> Tensor:
        """[B, S] -> [B, S, V]; adds what each MoE layer decided."""
        model = self.cfg.model
        x = self.weights["embedding.weight"][tokens]
        for i, kind in enumerate(model.layer_kinds):
            name = f"layers.{i}"
            x = x + self._attention(f"{name}.attention", self._norm(f"{name}.attention_norm", x))
            normed = self._norm(f"{name}.ffn_norm", x)
            if kind == "D":
                x = x + self._swiglu(f"{name}.ffn", normed)
                continue
            batch = self.router.route(i, normed, self.weights[f"{name}.ffn.router.weight"], moment)
            routed.setdefault(i, []).append(batch)
            x = x + self._moe(f"{name}.ffn", normed, batch)
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

    def _moe(self, name: str, x: Tensor, routed: RoutedBatch) -> Tensor:
        model = self.cfg.model
        y = torch.zeros_like(x)
        for expert in range(model.num_experts):
            gate, up, down = (self.weights[f"{name}.experts.{w}"][expert] for w in ("w_gate", "w_up", "w_down"))
            gated = x @ gate
            weight = (routed.weights * (routed.experts == expert)).sum(-1, keepdim=True)
            y = y + weight * ((gated * torch.sigmoid(gated) * (x @ up)) @ down)
        if model.shared_expert_ffn_hidden_size:
            shared = self._swiglu(f"{name}.shared", x)
            if model.shared_expert_gate:
                shared = shared * torch.sigmoid(x @ self.weights[f"{name}.shared_gate"].T)
            y = y + shared
        return y

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
