"""Oracle routing: scores, top-k choice, token dropping, balancing and auxiliary losses, token by token.

Shapes are batch-first, [B, S, ...]. No code is shared with the trainer.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moefold.config.chosen import chosen_in
from moefold.config.groups.drop import DropPart, DropScopePart, QueueEntry
from moefold.config.groups.router import BalanceScopePart, ChoiceFormula, ChoicePart, OracleScores, ScoreFormula
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.run import RunConfig
from moefold.metrics.moe_metrics import MoELayerMetrics
from moefold.verify.no_formula import formula_of

UINT64_MASK = 2**64 - 1
SAMPLING_STREAM = 0xBF58476D1CE4E5B9
"""Constant whose XOR with the seed of the input jitter is the seed of sampled choices."""


@dataclass(frozen=True)
class RoutingContext:
    """Step and micro-batch of a routing call."""

    step: int
    first_sample: int
    """Index of the micro-batch's first sample in the global batch."""
    is_training: bool
    is_token: Tensor
    """Tokens of the micro-batch that are not padding, bool [B, S]."""


@dataclass(frozen=True)
class RoutedBatch:
    """Routing of one micro-batch in one MoE layer."""

    experts: Tensor
    """Chosen experts, [B, S, K]."""
    weights: Tensor
    """Combine weights, [B, S, K], or 0 for a dropped choice."""
    scores: Tensor
    """Router scores, [B, S, E], summing to 1."""
    logits: Tensor
    inputs: OracleScores
    """Input of the choice."""
    num_dropped: int
    is_token: Tensor
    """Tokens that are not padding, bool [B, S]."""

    def tokens_per_expert(self) -> Tensor:
        """Count the tokens of each sample that chose each expert, [B, E]."""
        one_hot = torch.nn.functional.one_hot(self.experts, self.logits.shape[-1])
        return (one_hot.sum(2) * self.is_token[..., None]).sum(1).double()


class OracleRouter:
    """Reference router. Owns the expert biases and the counts of the last global batch.

    Args:
        run, model, moe: sections of the recipe.
        num_micro_batches: micro-batches of a data-parallel rank and step.
        chunks: for `drop_scope = "sub_sequence"`, the sequence positions of each rank of a micro-batch.
    """

    def __init__(
        self,
        run: RunConfig,
        model: ModelConfig,
        moe: MoEConfig,
        num_micro_batches: int,
        chunks: Sequence[Sequence[int]],
    ) -> None:
        self._run = run
        self._model = model
        self._moe = moe
        self._num_micro_batches = num_micro_batches
        self._chunks = chunks
        self._layer_numbers = model.moe_layer_numbers
        zeros = torch.zeros(model.num_router_choices, dtype=torch.float32)
        names = [bias_name(i) for i in self._layer_numbers] if model.ffn.moe.router.expert_bias else []
        self.biases = {name: zeros.clone() for name in names}
        self._score: ScoreFormula = formula_of(model.ffn.moe.router)
        self._choice: ChoiceFormula = formula_of(chosen_in(moe, ChoicePart))
        self._in_kept_order = formula_of(chosen_in(moe, DropPart))
        self._drop_scopes = formula_of(chosen_in(moe, DropScopePart))
        scope = chosen_in(moe, BalanceScopePart)
        self._balanced_pairs = formula_of(scope)
        uses_last_batch_load = self.aux_coefficient > 0 and scope.keeps_counts
        empty = torch.zeros(model.num_router_choices, dtype=torch.int64)
        self.last_counts = (
            {last_counts_name(i): empty.clone() for i in self._layer_numbers} if uses_last_batch_load else {}
        )

    @property
    def aux_coefficient(self) -> float:
        """Coefficient of the load-balancing loss, or 0 if the choice has no such loss."""
        # A product, so that the key counts as read with every choice.
        return self._moe.aux_loss * self._choice.has_aux_loss

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent state, by name."""
        return self.biases | self.last_counts

    def route(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, context: RoutingContext) -> RoutedBatch:
        """Route x [B, S, H] with the router weight [E, H] and the optional logit bias [E]."""
        model = self._model
        moe = self._moe
        if moe.input_jitter and context.is_training:
            x = x * (1 + moe.input_jitter * (2 * self._noise(layer, x.shape, context) - 1))
        logits = x @ weight.T + (bias if bias is not None and model.ffn.moe.router.bias else 0)
        raw = self._score.scores(logits)
        expert_bias = self.biases.get(bias_name(layer))
        biased = raw if expert_bias is None else raw + expert_bias.double()
        inputs = OracleScores(logits.detach(), raw.detach(), biased.detach(), context.is_token, model.ffn.moe.top_k)
        mixed = None
        if self._score.choose is not None:
            mixed = self._score.choose(logits, model.ffn.moe.top_k, self._choice_noise(layer, logits, context))
            experts = mixed.experts
        else:
            values = self._choice.ranking(inputs) if context.is_training else inputs.biased
            experts = torch.tensor(
                [[self._top_k_experts(values, b, s) for s in range(x.shape[1])] for b in range(x.shape[0])]
            )
        if moe.replay and context.is_training:
            experts = self._replayed_choices(layer, context, len(x))
        combined = self._score.weights(raw.gather(-1, experts)) if mixed is None else mixed.weights
        weights = combined * model.ffn.moe.router.scaling_factor
        drops = list(self._dropped_choices(experts, weights, context))
        is_kept = context.is_token[..., None].expand_as(weights).to(weights.dtype).clone()
        for index in drops:
            is_kept[index] = 0.0
        scores = raw / raw.sum(-1, keepdim=True)
        return RoutedBatch(experts, weights * is_kept, scores, logits, inputs, len(drops), context.is_token)

    def _choice_noise(self, layer: int, logits: Tensor, context: RoutingContext) -> Tensor | None:
        """Return the uniform numbers of choices that are sampled in training, [B, S, N]."""
        if self._score.noise_width is None or not context.is_training:
            return None
        width = self._score.noise_width(self._model.ffn.moe.top_k, logits.shape[-1])
        return self._noise(layer, torch.Size((*logits.shape[:2], width)), context, stream=SAMPLING_STREAM)

    def _replayed_choices(self, layer: int, context: RoutingContext, batch_size: int) -> Tensor:
        """Read the choices of a micro-batch from the routing trace, [B, S, K]."""
        folder = Path(self._moe.replay)
        folder = folder / "routing" if (folder / "routing").is_dir() else folder
        choices = np.load(folder / f"step-{context.step:06d}.npy")[self._layer_numbers.index(layer)]
        return torch.from_numpy(choices[context.first_sample :][:batch_size].astype(np.int64))

    def aux_loss(self, layer: int, batches: Sequence[RoutedBatch]) -> Tensor:
        """Return the load-balancing loss of one layer, averaged over the micro-batches of a global batch."""
        if not self.aux_coefficient:
            return torch.zeros((), dtype=torch.float64)
        pairs = self._balanced_pairs(batches, self.last_counts.get(last_counts_name(layer)), self._num_micro_batches)
        # Each token of the global batch has the same weight. Padding has weight 0.
        num_tokens = max(1, sum(int(batch.is_token.sum()) for batch in batches))
        shares = [(counts / counts.sum().clamp(min=1) * scores).sum() for counts, scores in pairs]
        return self._model.num_router_choices * torch.stack(shares).sum() / num_tokens

    def metrics(self, layer: int, batches: Sequence[RoutedBatch], aux: float, z: float) -> MoELayerMetrics:
        """Return the step's metrics of one layer."""
        all_counts = [float(c) for c in torch.stack([batch.tokens_per_expert().sum(0) for batch in batches]).sum(0)]
        num_experts = self._model.ffn.moe.num_experts
        counts = all_counts[:num_experts]
        mean = sum(counts) / len(counts)
        deviation = math.sqrt(sum((count - mean) ** 2 for count in counts) / len(counts))
        entropies = [-(batch.scores * batch.scores.log()).sum(-1)[batch.is_token].detach() for batch in batches]
        bias = self.biases.get(bias_name(layer))
        return MoELayerMetrics(
            layer=layer,
            load=max(counts) / mean,
            load_cv=deviation / mean,
            dead_experts=counts.count(0),
            dropped_fraction=sum(batch.num_dropped for batch in batches) / sum(all_counts),
            zero_fraction=sum(all_counts[num_experts:]) / sum(all_counts),
            router_entropy=float(torch.cat(entropies).mean()),
            aux_loss=aux,
            z_loss=z,
            bias_min=None if bias is None else float(bias[:num_experts].min()),
            bias_max=None if bias is None else float(bias[:num_experts].max()),
        )

    def end_step(self, layer: int, batches: Sequence[RoutedBatch]) -> None:
        """Update the expert bias of one layer after a step, and store its counts for the next step."""
        counts = torch.stack([batch.tokens_per_expert().sum(0) for batch in batches]).sum(0)
        if last_counts_name(layer) in self.last_counts:
            self.last_counts[last_counts_name(layer)] = counts.long()
        name = bias_name(layer)
        if name not in self.biases:
            return
        rate = self._moe.bias_update_rate
        if self._choice.bias is not None:
            self.biases[name] = self._choice.bias([batch.inputs for batch in batches]).float()
            return
        model = self._model
        target = counts.mean()
        if model.ffn.moe.active_experts:
            target = counts.sum() * (model.ffn.moe.active_experts / (model.ffn.moe.top_k * model.ffn.moe.num_experts))
        for expert, count in enumerate(counts[: model.ffn.moe.num_experts]):
            if count != target:
                up = bool(count < target)
                step = torch.tensor(rate, dtype=torch.float32)
                self.biases[name][expert] += step if up else -step

    def _top_k_experts(self, values: Tensor, b: int, s: int) -> list[int]:
        """Return the chosen experts of one token, best first."""
        model = self._model
        if self._choice.forced is not None:
            return self._choice.forced(s * values.shape[0] + b, model.ffn.moe.top_k, model.num_router_choices)
        value = values[b, s].tolist()
        return sorted(self._allowed_experts(value), key=lambda e: (-value[e], e))[: model.ffn.moe.top_k]

    def _allowed_experts(self, value: list[float]) -> list[int]:
        """Return the experts of the best groups, by the scores of one token."""
        model = self._model
        experts = list(range(len(value)))
        num_chosen = model.ffn.moe.router.top_groups
        if model.ffn.moe.router.num_groups == 1:
            return experts
        size = len(value) // model.ffn.moe.router.num_groups
        groups = [experts[i : i + size] for i in range(0, len(value), size)]
        group_scores = [
            sum(sorted((value[e] for e in group), reverse=True)[: self._score.num_summed]) for group in groups
        ]
        best = sorted(range(len(groups)), key=lambda g: (-group_scores[g], g))[:num_chosen]
        return [e for g in best for e in groups[g]]

    def _dropped_choices(
        self, experts: Tensor, weights: Tensor, context: RoutingContext
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (sample, position, choice) of each dropped choice."""
        moe = self._moe
        model = self._model
        factor = moe.capacity_factor
        if not context.is_training and moe.eval_capacity_factor >= 0:
            factor = moe.eval_capacity_factor
        batch, length, top_k = experts.shape
        if factor == 0:
            return
        for positions in self._drop_scopes(length, self._chunks):
            tokens = int(context.is_token[:, list(positions)].sum())
            capacity = max(1, math.ceil(tokens * top_k / model.num_router_choices * factor))
            queues: dict[int, list[QueueEntry]] = {}
            for b in range(batch):
                for s in positions:
                    if not context.is_token[b, s]:
                        continue
                    for k in range(top_k):
                        entry = float(weights[b, s, k].detach()), s * batch + b, (b, s, k)
                        queues.setdefault(int(experts[b, s, k]), []).append(entry)
            for expert, queue in queues.items():
                if expert >= model.ffn.moe.num_experts:
                    continue
                yield from (choice for *_, choice in self._in_kept_order(queue)[capacity:])

    def _noise(self, layer: int, shape: torch.Size, context: RoutingContext, stream: int = 0) -> Tensor:
        """Return uniform noise in [0, 1) for each feature of each token, by SplitMix64."""
        name = f"{self._run.seed}:layers.{layer}.ffn.router.jitter"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        golden = 0x9E3779B97F4A7C15
        seed = (int.from_bytes(digest, "little") >> 1) ^ stream
        key = _splitmix64(seed + context.step * golden)
        noise = torch.empty(shape, dtype=torch.float64)
        for b in range(shape[0]):
            sample_key = _splitmix64(key + (context.first_sample + b) * golden)
            for s in range(shape[1]):
                token_key = _splitmix64(sample_key + (s + 1) * golden)
                bits = [_splitmix64(token_key + (h + 1) * golden) >> 11 for h in range(shape[2])]
                noise[b, s] = torch.tensor([mantissa / 2**53 for mantissa in bits], dtype=torch.float64)
        return noise


def bias_name(layer: int) -> str:
    """Return the name of a layer's expert bias in the whole model."""
    return f"layers.{layer}.ffn.router.expert_bias"


def last_counts_name(layer: int) -> str:
    """Return the name, in the whole model, of a layer's expert counts of the previous step."""
    return f"layers.{layer}.ffn.last_counts_E"


def _splitmix64(value: int) -> int:
    value &= UINT64_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & UINT64_MASK
    return value ^ (value >> 31)
