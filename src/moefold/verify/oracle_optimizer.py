"""Oracle optimizers: AdamW and Muon, one parameter and one matrix at a time.

Muon follows the formulas of arXiv:2502.16982 sec. 2.2 literally: no transposed or batched matrices.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.config.schema import Config, TrainConfig
from moefold.verify.no_formula import no_formula, unknown_kind
from moefold.verify.oracle_attention import has_a_gate_per_head
from moefold.verify.oracle_schedule import oracle_rate

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


def has_backward_pass(train: TrainConfig) -> bool:
    """Return whether a step has gradients; if not, it is one of SPSA."""
    match train.optimizer:
        case "adamw" | "muon":
            return True
        case "spsa":
            return False
        case unknown:
            unknown_kind("train.optimizer", unknown)


class OracleOptimizer:
    """Reference optimizer that updates weights in place from unclipped gradients.

    The settings are read here and at the start of a step, so that they count as read in a first step without an update.
    """

    def __init__(self, cfg: Config, weights: Mapping[str, Tensor]) -> None:
        self.cfg = cfg
        train = cfg.train
        self._beta1 = train.beta1
        self._beta2 = train.beta2
        self._eps = train.eps
        self._muon_groups: tuple[str, ...] = ()
        match train.optimizer:
            case "adamw":
                pass
            case "muon":
                self._muon_groups = train.muon_groups
                self._muon_momentum = train.muon_momentum
                self._muon_ns_steps = train.muon_ns_steps
            case "spsa":
                raise AssertionError("SPSA has no gradients")
            case unknown:
                unknown_kind("train.optimizer", unknown)
        for group in self._muon_groups:
            if group not in MUON_GROUP_PATTERNS.values():
                no_formula(f"{group!r} in train.muon_groups", "verify/oracle_optimizer.py")
        self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
        self._steps = 0
        self._moment_updates = 0
        self._pending: dict[str, Tensor] = {}
        self._last_update: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], norm: float) -> None:
        """Update all weights once; `norm` is the global gradient norm, used for clipping."""
        train = self.cfg.train
        decay = train.weight_decay
        correction = train.delay_correction
        self._steps += 1
        rate = oracle_rate(train, self.cfg.run.steps, self._steps)
        clip = min(1.0, train.clip_grad / (norm + 1e-6)) if train.clip_grad else 1.0
        clipped = {name: gradient * clip for name, gradient in gradients.items()}
        match train.gradient_delay:
            case 0:
                pass
            case 1:
                self._pending, clipped = clipped, self._pending
            case unknown:
                unknown_kind("train.gradient_delay", unknown)
        self._moment_updates += bool(clipped)
        for name, weight in weights.items():
            if name not in clipped:
                continue
            before = weight.clone()
            is_matrix = weight.dim() > 1 and ".experts.b_" not in name
            weight.mul_(1 - rate * (decay if is_matrix else 0.0))
            update = self._muon if self._uses_muon(name) else self._adamw
            weight.sub_(rate * update(name, clipped[name]))
            if correction:
                change = before - weight
                weight.sub_(correction * (change - self._last_update.get(name, 0.0)))
                self._last_update[name] = change
        if train.reset_moments_every and self._steps % train.reset_moments_every == 0:
            self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
            self._moment_updates = 0

    def _uses_muon(self, name: str) -> bool:
        groups = [group for pattern, group in MUON_GROUP_PATTERNS.items() if re.search(pattern, name)]
        return bool(groups) and groups[0] in self._muon_groups and not self._has_a_row_per_head(name)

    def _has_a_row_per_head(self, name: str) -> bool:
        """Return whether a matrix of attention has one row for each head: decays, write strengths, gates of heads."""
        found = re.search(r"layers\.(\d+)\.attention\.w([abg])$", name)
        if found is None:
            return False
        model = self.cfg.model
        if not model.all_layers[int(found[1])].attention.is_recurrent:
            return has_a_gate_per_head(model)
        match model.linear_attention:
            case "gated_deltanet":
                return found[2] in "ab"
            case "kda":
                return found[2] == "b"
            case "gla" | "short_convolution":
                return False
            case unknown:
                no_formula(f"model.linear_attention={unknown!r}")

    def _adamw(self, name: str, gradient: Tensor) -> Tensor:
        first, second = self._moments[name]
        first.mul_(self._beta1).add_((1 - self._beta1) * gradient)
        second.mul_(self._beta2).add_((1 - self._beta2) * gradient.square())
        mean = first / (1 - self._beta1**self._moment_updates)
        rms = (second / (1 - self._beta2**self._moment_updates)).sqrt()
        return mean / (rms + self._eps)

    def _muon(self, name: str, gradient: Tensor) -> Tensor:
        momentum = self._moments[name][0]
        momentum.mul_(self._muon_momentum).add_(gradient)
        nesterov = gradient + self._muon_momentum * momentum
        update = torch.zeros_like(nesterov)
        for index in matrix_indices(self.cfg.model, name, nesterov):
            orthogonal = newton_schulz(nesterov[index], self._muon_ns_steps)
            update[index] = 0.2 * max(nesterov[index].shape) ** 0.5 * orthogonal
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
