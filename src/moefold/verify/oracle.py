"""Oracle: float64 reference training in one process, without code of the trainer.

Every mapping must equal it. Written for readability next to `docs/formulas.md`, not for speed: attention with an
explicit mask, every expert over every token. Parameters are addressed by name only. The formula of a part is in the
part's folder. `oracle_routing` has the router, `oracle_attention` RoPE and the selection of sparse attention,
`oracle_optimizer` the frame of the optimizers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter

import torch
from torch import Tensor

from moefold.config.base.field import VerifyAs
from moefold.config.base.param_spec import ParamSpec
from moefold.config.chosen import chosen, chosen_in, read_key
from moefold.config.groups.attention import LinearFormula, SoftmaxHeads, SoftmaxInput
from moefold.config.groups.block import ResidualFormula
from moefold.config.groups.dispatcher import WirePart
from moefold.config.groups.loss import LossPart, OracleLoss, OracleOutput
from moefold.config.groups.optimizer import ForwardOnlyStep, OptimizerPart
from moefold.config.keys.annotations import verification_by_key
from moefold.config.layers import LAYER_KEYS
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import training_weights
from moefold.message_text import format_list
from moefold.metrics.moe_metrics import MoELayerMetrics
from moefold.model.weight_init import seed_for
from moefold.topology.selection_groups import selection_sources
from moefold.validate.unused import idle_keys, is_within
from moefold.verify.no_formula import formula_of, no_formula, no_formula_of_weights
from moefold.verify.oracle_attention import OracleIndexer, apply_rope, document_positions, hidden_keys, is_warmup
from moefold.verify.oracle_lora import AdaptedWeights, ModuleWeights
from moefold.verify.oracle_optimizer import OracleOptimizer, oracle_rate
from moefold.verify.oracle_routing import OracleRouter, RoutedBatch, RoutingContext
from moefold.verify.read_record import ReadRecord

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class OracleStep:
    """Results of one optimizer step: loss terms, gradient norm before clipping, and all gradients."""

    loss: float
    aux_loss: float
    z_loss: float
    mtp_loss: float
    indexer_loss: float
    grad_norm: float
    dropped: int
    gradients: Weights
    moe_layers: tuple[MoELayerMetrics, ...]


@dataclass(frozen=True)
class OracleBatch:
    """Batch of n samples."""

    tokens: Tensor
    """Token ids, int64 [n, S+1]."""
    documents: Tensor
    """Document index of each token, [n, S+1]."""
    weights: Tensor
    """Loss weight of each target, float64 [n, S]. The first token of a document always has weight 0."""
    weight_scale: Tensor
    """Factor of each target's share of the loss, float64 [n, S]."""
    is_token: Tensor
    """Inputs that are not padding, bool [n, S]. MoE layers route these."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Other columns for an objective, [n, ...] each."""


@dataclass(frozen=True)
class _LossTerms:
    """Loss terms of a global batch, and for each MoE layer its routed micro-batches."""

    lm: Tensor
    aux: dict[int, Tensor]
    z: dict[int, Tensor]
    mtp: Tensor
    indexer: Tensor
    routed: dict[int, list[RoutedBatch]]

    def total(self) -> Tensor:
        """Return the optimised loss, the sum of all terms."""
        return torch.stack([self.lm, self.mtp, self.indexer, *self.aux.values(), *self.z.values()]).sum()


class Oracle:
    """Reference trainer of `weights` (float64, by name).

    Args:
        cfg: the recipe. Of its mapping, only `chunks`, and dp for `aux_kind = "global_batch"`, have an effect.
        weights: initial value of every parameter by name.
        chunks: for `drop_scope = "sub_sequence"`, the sequence positions of each rank of a micro-batch.
        objective: the loss of a micro-batch. None means `train.loss`.
        is_frozen_expert: whether a routed expert, by its index, is not trained, or None if all are trained.
        reads: record of the keys that are read, shared with other oracles. None means a new record.

    Raises:
        NoFormulaError: the oracle has no formula for a kind, a key or a parameter. `step` and `check_keys` raise it.
    """

    def __init__(
        self,
        cfg: Config,
        weights: Weights,
        chunks: Sequence[Sequence[int]] = (),
        objective: OracleLoss | None = None,
        is_frozen_expert: Callable[[int], bool] | None = None,
        reads: ReadRecord | None = None,
    ) -> None:
        self._recipe = cfg
        self.reads = ReadRecord() if reads is None else reads
        cfg = self.reads.watch(cfg)
        self.cfg = cfg
        self._is_frozen_expert = is_frozen_expert
        self._objective: OracleLoss = objective or formula_of(chosen_in(cfg.train, LossPart))
        self._residual_norm = formula_of(cfg.model.decoder_layers[0].norm)
        for name in LAYER_KEYS:
            # A test shows that a formula reads each field of its part.
            read_key(cfg, name)
        self.weights: Weights = {
            name: w.detach().double().requires_grad_(_is_trained(cfg.model, cfg.train, cfg.lora, name))
            for name, w in weights.items()
        }
        self._weights = AdaptedWeights(self.weights, cfg.lora)
        self._index_losses: list[Tensor] = []
        self._indexers: dict[int, OracleIndexer] = {}
        self.router = OracleRouter(
            cfg.run, cfg.model, cfg.moe, cfg.num_micro_batches, chunks or [range(cfg.train.seq_len)]
        )
        needs_gradients = chosen_in(cfg.train, OptimizerPart).needs_gradients
        self._optimizer = OracleOptimizer(cfg.run, cfg.train) if needs_gradients else None
        self._round_dispatched = formula_of(chosen(cfg, WirePart))
        self._steps = 0

    def step(self, batch: OracleBatch) -> OracleStep:
        """Run one optimizer step on a global batch."""
        gradients: Weights = {}
        if self._optimizer is not None:
            terms = self.loss(batch, is_training=True)
            self._check_parameters()
            gradients = self._gradients(terms)
            frozen = self._freeze_experts(gradients)
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
            self._optimizer.step(self.weights, gradients, norm, self._specs)
            for (name, expert), values in frozen.items():
                with torch.no_grad():
                    self.weights[name][expert] = values
            passes = [terms]
        else:
            passes, norm = self._forward_only_step(batch)
            self._check_parameters()
            terms = passes[-1]
        self._steps += 1
        layers = []
        for layer, batches in terms.routed.items():
            aux = float(terms.aux[layer].detach())
            z = float(terms.z[layer].detach())
            layers.append(self.router.metrics(layer, batches, aux, z))
            if not (is_warmup(self.cfg.model, self.cfg.train) or self.cfg.lora.rank):
                self.router.end_step(layer, batches)
        return OracleStep(
            loss=sum(float(terms.lm.detach()) for terms in passes) / len(passes),
            aux_loss=sum(layer.aux_loss for layer in layers),
            z_loss=sum(layer.z_loss for layer in layers),
            mtp_loss=sum(float(terms.mtp.detach()) for terms in passes) / len(passes),
            indexer_loss=float(terms.indexer.detach()),
            grad_norm=norm,
            dropped=sum(batch.num_dropped for batches in terms.routed.values() for batch in batches),
            gradients=gradients,
            moe_layers=tuple(layers),
        )

    def check_keys(self, *, has_rounds: bool = False) -> None:
        """Refuse a recipe that sets a key that no formula has read, after steps and an evaluation.

        Keys without effect in this recipe are ignored: a preset may set them. `has_rounds`: rounds of sites are also
        compared.

        Raises:
            NoFormulaError: there is such a key.
        """
        counted = {None, VerifyAs.ROUNDS} if has_rounds else {None}
        if unread := [name for name in self.reads.unread(self._recipe) if verification_by_key().get(name) in counted]:
            idle = idle_keys(self._recipe)
            values = [
                f"{name}={attrgetter(name)(self._recipe)!r}"
                for name in unread
                if not any(is_within(name, key) for key in idle)
            ]
            if values:
                no_formula(format_list(values))

    def _check_parameters(self) -> None:
        """Refuse parameters that no formula has read in a training pass."""
        if unread := [name for name in self.weights if name not in self._weights.reads]:
            no_formula_of_weights("the parameter", unread, self._recipe.model)

    def _gradients(self, terms: _LossTerms) -> Weights:
        for weight in self.weights.values():
            weight.grad = None
        terms.total().backward()
        trained = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        if constant := [name for name, weight in trained.items() if weight.grad is None]:
            no_formula_of_weights("the gradient of", constant, self._recipe.model)
        return {name: weight.grad.clone() for name, weight in trained.items() if weight.grad is not None}

    def _freeze_experts(self, gradients: Weights) -> dict[tuple[str, int], Tensor]:
        """Zero the gradients of frozen experts, and return their weights, by name and index."""
        frozen = {}
        for name, gradient in gradients.items():
            for expert in range(len(gradient) if ".experts." in name and self._is_frozen_expert else 0):
                assert self._is_frozen_expert is not None
                if self._is_frozen_expert(expert):
                    gradient[expert] = 0.0
                    frozen[name, expert] = self.weights[name][expert].detach().clone()
        return frozen

    @cached_property
    def _specs(self) -> Mapping[str, ParamSpec]:
        """Shapes and groups of the weights, by name. Other parameters have been refused."""
        return training_weights(self._recipe.model, self._recipe.lora)

    @torch.no_grad()
    def _forward_only_step(self, batch: OracleBatch) -> tuple[list[_LossTerms], float]:
        """Update the weights by the losses of forward passes, and return the losses and the norm of the gradient."""
        passes: list[_LossTerms] = []

        def loss() -> float:
            passes.append(self.loss(batch, is_training=True))
            return float(passes[-1].total())

        number = self._steps + 1
        step = ForwardOnlyStep(
            number,
            oracle_rate(self.cfg.train, self.cfg.run.steps, number),
            self._specs,
            {name: w for name, w in self.weights.items() if w.requires_grad and name in self._specs},
            loss,
            partial(seed_for, self.cfg.run.seed),
        )
        norm = formula_of(chosen_in(self.cfg.train, OptimizerPart))(step)
        return passes, float(norm)

    def evaluate(self, batch: OracleBatch) -> float:
        """Return the weighted mean cross-entropy of the targets."""
        with torch.no_grad():
            return float(self.loss(batch, is_training=False).lm)

    def loss(self, batch: OracleBatch, *, is_training: bool) -> _LossTerms:
        """Compute the loss terms as defined in docs/formulas.md."""
        size = self.cfg.train.micro_batch_size
        lm = mtp = torch.zeros((), dtype=torch.float64)
        routed: dict[int, list[RoutedBatch]] = {}
        self._index_losses = []
        weights = [self._target_weights(batch, depth) for depth in range(1 + self.cfg.model.mtp_layers)]
        for number, micro in enumerate(batch.tokens.split(size)):
            rows = slice(number * size, (number + 1) * size)
            context = RoutingContext(self._steps + 1, number * size, is_training, batch.is_token[rows])
            documents = batch.documents[rows, :-1]
            hidden = self._hidden_states(micro[:, :-1], documents, context, routed)
            columns = {name: values[rows] for name, values in batch.columns.items()} | {"weights": weights[0][rows]}
            output = OracleOutput(logits=self._logits(hidden), targets=micro[:, 1:], is_training=is_training)
            lm = lm + self._objective(output, columns)
            if is_training:
                mtp = mtp + self._mtp_loss(
                    micro, documents, hidden, [weight[rows] for weight in weights], context, routed
                )
        aux = {
            layer: self.router.aux_coefficient * self.router.aux_loss(layer, batches)
            for layer, batches in routed.items()
        }
        z = {
            layer: self.cfg.moe.z_loss
            * torch.cat([b.logits[b.is_token].logsumexp(-1).square() for b in batches]).mean()
            for layer, batches in routed.items()
        }
        indexer = torch.stack([lm.new_zeros(()), *self._index_losses]).sum() / batch.is_token.sum()
        return _LossTerms(lm, aux, z, mtp, indexer * self.cfg.train.indexer_loss, routed)

    def _target_weights(self, batch: OracleBatch, depth: int) -> Tensor:
        """Return the loss weights of the targets `depth` positions after the next token, [n, S - depth].

        Their sum is 1, or the mean of the scales.
        """
        is_within = batch.documents[:, : -1 - depth] == batch.documents[:, 1 + depth :]
        weights = torch.where(is_within, batch.weights[:, depth:], 0.0)
        return weights / weights.sum() * batch.weight_scale[:, depth:]

    def _hidden_states(
        self, tokens: Tensor, documents: Tensor, context: RoutingContext, routed: dict[int, list[RoutedBatch]]
    ) -> Tensor:
        """Return the hidden states [B, S, H] after the final norm of tokens [B, S]. Append each layer's routing."""
        x = self._weights["embedding.weight"][tokens] * self.cfg.model.embedding_multiplier
        self._shortcut = torch.zeros_like(x)
        for i in range(self.cfg.model.num_layers):
            x = self._layer(i, x, documents, context, routed)
        return self._hidden_norm("head.norm", x)

    def _layer(
        self, i: int, x: Tensor, documents: Tensor, context: RoutingContext, routed: dict[int, list[RoutedBatch]]
    ) -> Tensor:
        name = f"layers.{i}"
        layer = self.cfg.model.all_layers[i]
        stream: ResidualFormula = formula_of(layer.residual)

        def norm(of: str) -> Callable[[Tensor], Tensor]:
            return partial(self._hidden_norm, f"{name}.{of}_norm")

        attended = self._attention(
            f"{name}.attention", stream.read(x, norm("attention")), documents, context.is_token, i
        )
        x = x + stream.added(attended, norm("attention_output"))
        output, routed_output = formula_of(layer.ffn)(
            ModuleWeights(self._weights, f"{name}.ffn"),
            stream.read(x, norm("ffn")),
            partial(self._route, i, context, routed),
            self._round_dispatched,
        )
        shortcut, self._shortcut = self._shortcut, torch.zeros_like(x)
        if routed_output is not None and self.cfg.model.ffn.moe.shortcut:
            self._shortcut = stream.added(routed_output, lambda y: y)
        elif routed_output is not None:
            output = routed_output + output
        return x + shortcut + stream.added(output, norm("ffn_output"))

    def _route(
        self,
        i: int,
        context: RoutingContext,
        routed: dict[int, list[RoutedBatch]],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> RoutedBatch:
        """Route the tokens of a layer, and append the result to its routing."""
        batch = self.router.route(i, x, weight, bias, context)
        routed.setdefault(i, []).append(batch)
        return batch

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, n, V] of hidden states [B, n, H]."""
        head = "embedding.weight" if self.cfg.model.tie_embeddings else "head.weight"
        logits = hidden @ self._weights[head].T
        if self.cfg.model.head_bias:
            logits = logits + self._weights["head.bias"]
        return logits / self.cfg.model.logits_divisor

    def _mtp_loss(
        self,
        micro: Tensor,
        documents: Tensor,
        hidden: Tensor,
        target_weights: Sequence[Tensor],
        context: RoutingContext,
        routed: dict[int, list[RoutedBatch]],
    ) -> Tensor:
        """Return a micro-batch's share of the multi-token prediction loss. `micro` is int64 [B, S+1]."""
        model = self.cfg.model
        total = torch.zeros((), dtype=torch.float64)
        length = micro.shape[1] - 1
        for depth in range(1, model.mtp_layers + 1):
            name = f"layers.{model.num_layers + depth - 1}"
            # The input at position i is token i + depth, or token 0 past the end.
            tokens = torch.cat((micro[:, depth:-1], micro[:, -1:], torch.zeros_like(micro[:, : depth - 1])), 1)
            vectors = self._weights["embedding.weight"][tokens] * model.embedding_multiplier
            embedded = self._hidden_norm(f"{name}.embedding_norm", vectors)
            joined = torch.cat((embedded, self._hidden_norm(f"{name}.hidden_norm", hidden)), -1)
            projected = joined @ self._weights[f"{name}.projection"].T
            hidden = self._layer(model.num_layers + depth - 1, projected, documents, context, routed)
            hidden = self._hidden_norm(f"{name}.output_norm", hidden)
            output = OracleOutput(logits=self._logits(hidden[:, : length - depth]), targets=micro[:, depth + 1 :])
            total = total - (output.log_probs() * target_weights[depth]).sum()
        return total * self.cfg.train.mtp_loss / max(1, model.mtp_layers)

    def _hidden_norm(self, name: str, x: Tensor) -> Tensor:
        """Return a norm of the residual stream."""
        bias = self._weights.get(f"{name}.bias")
        return self._residual_norm(x, self._weights[f"{name}.weight"], bias)

    def _qk_norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return an RMSNorm of queries or keys over their last dim."""
        normed = x / (x.square().mean(-1, keepdim=True) + self.cfg.model.norm.eps).sqrt()
        return normed if weight is None else normed * (weight + float(self.cfg.model.norm.zero_centered))

    def _attention(self, name: str, x: Tensor, documents: Tensor, is_token: Tensor, layer: int) -> Tensor:
        model = self.cfg.model
        part = model.all_layers[layer].attention
        formula = formula_of(part)
        if part.is_recurrent:
            return self._linear_attention(formula, name, x, documents)
        positions = document_positions(documents)

        def rotate(y: Tensor, dims: int) -> Tensor:
            return apply_rope(model, y, dims, positions) if part.has_rope else y

        weights = ModuleWeights(self._weights, name)
        score_factor = formula_of(model.rope.scaling).score_factor
        heads: SoftmaxHeads = formula(SoftmaxInput(weights, x, rotate, self._qk_norm, score_factor, positions.double()))
        query = heads.queries
        masked = hidden_keys(model, layer, documents, positions)
        index = None
        if part.selector:
            source = x if heads.index_source is None else heads.index_source
            index = self._select_keys(name, x, source, masked, positions, layer)
            masked = index.masked
        outputs = []
        probabilities = []
        num_heads = query.shape[2]
        for head in range(num_heads):
            group = head * heads.keys.shape[2] // num_heads
            scores = query[:, :, head] @ heads.keys[:, :, group].mT * heads.scale
            scores = scores.masked_fill(masked, -math.inf)
            if heads.sinks is not None:
                sink = heads.sinks[head].expand(*x.shape[:2], 1)
                probabilities.append(torch.cat((scores, sink), -1).softmax(-1)[..., :-1])
            else:
                probabilities.append(scores.softmax(-1))
            attended = probabilities[-1] @ heads.values[:, :, group]
            outputs.append(attended if heads.gates is None else attended * heads.gates[:, :, head])
        if index is not None:
            divergence = index.divergence(torch.stack(probabilities).sum(0).detach())
            num_layers = selection_sources(model).count(selection_sources(model)[layer])
            self._index_losses.append(divergence[is_token].sum() / num_layers)
        result = torch.cat(outputs, -1) @ weights["wo"].T
        return result if heads.bias is None else result + heads.bias

    def _linear_attention(self, formula: LinearFormula, name: str, x: Tensor, documents: Tensor) -> Tensor:
        """Return the output of a layer without softmax for x [B, S, H], separately for each document."""
        weights = ModuleWeights(self._weights, name)
        rows = []
        for sample, numbers in zip(x, documents, strict=True):
            groups = (numbers == number for number in torch.unique_consecutive(numbers))
            rows.append(torch.cat([formula(weights, sample[group], self.cfg.model.norm.eps) for group in groups]))
        return torch.stack(rows)

    def _select_keys(
        self, name: str, x: Tensor, source: Tensor, masked: Tensor, positions: Tensor, layer: int
    ) -> OracleIndexer:
        """Return the selection of a layer: its own, or the shared selection of an earlier layer."""
        model = self.cfg.model
        if selection_sources(model)[layer] != layer:
            return self._indexers[selection_sources(model)[layer]]
        rope_positions = positions if model.all_layers[layer].attention.has_rope else None
        index = OracleIndexer(self.cfg.model, self.cfg.train, self._weights, f"{name}.indexer", rope_positions)
        index.score(x.detach(), source.detach(), masked)
        self._indexers[layer] = index
        return index


def _is_trained(model: ModelConfig, train: TrainConfig, lora: LoraConfig, name: str) -> bool:
    """Return whether a parameter has a gradient."""
    if lora.rank:
        return ".lora." in name
    return not is_warmup(model, train) or ".indexer." in name
