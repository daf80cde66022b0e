"""Oracle optimizers: AdamW and Muon, one parameter and one matrix at a time.

Muon follows the formulas of arXiv:2502.16982 sec. 2.2 literally: no transposed or batched matrices.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.optim.lr_schedule import learning_rate

MUON_GROUP_PATTERNS = {
    r"\.attention\.w(q|k|v|g|o|a|b|c|a_down|a_up|g_down|g_up|q_down|q_up|kv_down|kv_up)$": "attention",
    r"\.attention\.indexer\.w(q|k)$": "attention",
    r"\.ffn\.w_(gate|up|down)$": "dense_mlp",
    r"\.ffn\.experts\.w_(gate|up|down)$": "experts",
    r"\.ffn\.(shared\.w_(gate|up|down)|latent_(down|up)\.weight)$": "shared_experts",
    r"\.ffn\.router\.weight$": "router",
    r"\.projection$": "mtp",
    r"\.attention\.lora\.w\w+_(a|b)$": "attention",
    r"\.ffn\.lora\.w\w+_(a|b)$": "dense_mlp",
    r"\.ffn\.experts\.lora\.w\w+_(a|b)$": "experts",
    r"\.ffn\.shared\.lora\.w\w+_(a|b)$": "shared_experts",
}


class OracleOptimizer:
    """Reference optimizer that updates weights in place from unclipped gradients."""

    def __init__(self, cfg: Config, weights: Mapping[str, Tensor]) -> None:
        self.cfg = cfg
        self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
        self._steps = 0
        self._moment_updates = 0
        self._pending: dict[str, Tensor] = {}
        self._last_update: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], norm: float) -> None:
        """Update all weights once; `norm` is the global gradient norm, used for clipping."""
        train = self.cfg.train
        self._steps += 1
        rate = learning_rate(train, self.cfg.run.steps, self._steps)
        clip = min(1.0, train.clip_grad / (norm + 1e-6)) if train.clip_grad else 1.0
        clipped = {name: gradient * clip for name, gradient in gradients.items()}
        if train.gradient_delay:
            self._pending, clipped = clipped, self._pending
        self._moment_updates += bool(clipped)
        for name, weight in weights.items():
            if name not in clipped:
                continue
            before = weight.clone()
            is_matrix = weight.dim() > 1 and ".experts.b_" not in name
            weight.mul_(1 - rate * (train.weight_decay if is_matrix else 0.0))
            update = self._muon if self._uses_muon(name) else self._adamw
            weight.sub_(rate * update(name, clipped[name]))
            if train.delay_correction:
                change = before - weight
                weight.sub_(train.delay_correction * (change - self._last_update.get(name, 0.0)))
                self._last_update[name] = change
        if train.reset_moments_every and self._steps % train.reset_moments_every == 0:
            self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
            self._moment_updates = 0

    def _uses_muon(self, name: str) -> bool:
        if self.cfg.train.optimizer != "muon":
            return False
        groups = [group for pattern, group in MUON_GROUP_PATTERNS.items() if re.search(pattern, name)]
        return bool(groups) and groups[0] in self.cfg.train.muon_groups and not self._has_a_row_per_head(name)

    def _has_a_row_per_head(self, name: str) -> bool:
        """Return whether a matrix of attention has one row for each head: decays, write strengths, gates of heads."""
        found = re.search(r"layers\.(\d+)\.attention\.w([abg])$", name)
        if found is None:
            return False
        model = self.cfg.model
        if not model.all_block_kinds[int(found[1])].endswith("L"):
            return model.attention_gate_width == "head"
        narrow = {"gated_deltanet": "ab", "kda": "b"}.get(model.linear_attention, "")
        return found[2] in narrow

    def _adamw(self, name: str, gradient: Tensor) -> Tensor:
        train = self.cfg.train
        first, second = self._moments[name]
        first.mul_(train.beta1).add_((1 - train.beta1) * gradient)
        second.mul_(train.beta2).add_((1 - train.beta2) * gradient.square())
        mean = first / (1 - train.beta1**self._moment_updates)
        rms = (second / (1 - train.beta2**self._moment_updates)).sqrt()
        return mean / (rms + train.eps)

    def _muon(self, name: str, gradient: Tensor) -> Tensor:
        train = self.cfg.train
        momentum = self._moments[name][0]
        momentum.mul_(train.muon_momentum).add_(gradient)
        nesterov = gradient + train.muon_momentum * momentum
        update = torch.zeros_like(nesterov)
        for index in matrix_indices(self.cfg.model, name, nesterov):
            update[index] = (
                0.2 * max(nesterov[index].shape) ** 0.5 * newton_schulz(nesterov[index], train.muon_ns_steps)
            )
        return update


def matrix_indices(model: ModelConfig, name: str, weight: Tensor) -> Iterator[int | Tensor]:
    """Yield the index of each logical matrix in a parameter: an expert index, or rows."""
    if weight.dim() == 3:
        yield from range(len(weight))
        return
    rows = torch.arange(len(weight))
    if name.endswith("wkv_down"):
        is_first = rows < model.kv_lora_rank
    elif name.endswith("wkv_up"):
        is_first = rows % (model.qk_nope_head_dim + model.v_head_dim) < model.qk_nope_head_dim
    else:
        is_first = rows >= 0
    yield rows[is_first]
    if not is_first.all():
        yield rows[~is_first]


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Iterate Newton-Schulz, X -> 3.4445 X - 4.775 (X X^T) X + 2.0315 (X X^T)^2 X, to orthogonalise a matrix."""
    x = matrix / (matrix.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x
