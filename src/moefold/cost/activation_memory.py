"""Activation memory: bytes that one micro-batch saves for backward, by part of the model.

The parts of a layer define their saved tensors. This module adds them up for whole layers, embedding and head. Tests
compare the sums with measurements of real runs, to within 10 %. Letters: T tokens between the sub-layers, S*B/(cp*tp),
N tokens inside them, S*B/cp, R routed tokens of a rank's experts, and H, F, A, D, V, E, K sizes (docs/notation.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from moefold.config.base.loss_chunk import CPU_LOSS_TOKENS, MAX_COPIED_LOGITS, MIN_UPCAST_CHUNK_ROWS, NUM_UPCAST_CHUNKS
from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.config.groups.layer_sizes import KernelProfile, LayerSizes
from moefold.config.groups.schedule import SchedulePart
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import adapted_layer_weights
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.saved_tensors import CUDA_KERNELS, INT_BYTES, BytesByPart
from moefold.cost.state_bytes import compute_dtype_bytes
from moefold.topology.selection_groups import shares_selections


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivationMemory(LayerSizes):
    """Activation memory of the layers of a model on one rank."""

    model: ModelConfig
    train: TrainConfig
    lora: LoraConfig

    @cached_property
    def experts(self) -> ExpertMemory:
        """Memory of the routed experts."""
        return ExpertMemory(self, self.model.experts)

    @cached_property
    def trains_indexers_only(self) -> bool:
        """Return whether only the indexers of sparse attention learn: their warm-up stage."""
        return self.model.trains_indexers_only(self.train)

    @cached_property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary on a rank."""
        return self.parallel.vocab_rows(self.model.vocab_size)

    def layer_saved(self, kind: Layer) -> BytesByPart:
        """Return the bytes that a layer of a kind saves for backward, without its input."""
        selector = kind.attention.selector
        if self.trains_indexers_only:
            if selector is None:
                return BytesByPart()
            return selector.saved_in_warmup(self, kind.core.heads, kind.attention.index_source)
        if "layer" in self.recompute:
            # Only the output, which is the next layer's input.
            saved = BytesByPart({"residual stream": self.hidden_bytes}) + kind.ffn.saved_if_recomputed(self)
            if selector is None or selector.is_shared or not shares_selections(self.model):
                return saved
            # A selection and the tensors for its loss outlive the layer, because later layers use them.
            return saved + selector.selection_bytes(self) + selector.index_bytes(self)
        attention = self._known_or_estimated(kind, kind.attention.saved(self))
        saved = attention + kind.ffn.saved(self) + self._saved_by_adapters(kind)
        saved["residual stream"] += 2 * self.hidden_bytes
        return saved

    def _saved_by_adapters(self, kind: Layer) -> BytesByPart:
        """Return the bytes of the products A x that adapters save. Adapters of experts recompute them.

        The inputs of frozen matrices are saved for their adapters, and the formulas of the layers count them.
        """
        saved = BytesByPart()
        for weight in adapted_layer_weights(kind, self.lora):
            if not weight.is_expert:
                # Over tp, A x is gathered before a column-parallel B, and scattered before the B of a row-parallel W.
                tokens = self.gathered_tokens if weight.tp_dim == 0 else self.tokens
                saved[weight.part.replace("_", " ").replace("mlp", "MLP")] += tokens * self.lora.rank * self.item_bytes
        return saved

    def _transient_in_warmup(self, kind: Layer) -> BytesByPart:
        """Return the temporary bytes of a layer that trains only its indexer: of the loss, or of the experts."""
        experts = kind.ffn.saved(self) + kind.ffn.transient(self)
        experts["residual stream"] += 3 * self.hidden_bytes
        selector = kind.attention.selector
        loss = selector.warmup_loss_bytes(self, kind.core.heads) if selector else 0
        scores = BytesByPart({"core attention": loss, "residual stream": self.hidden_bytes})
        return max(scores, experts, key=BytesByPart.total)

    def _known_or_estimated(self, kind: Layer, known: BytesByPart | None) -> BytesByPart:
        """Return the bytes by the formula of attention, or of its matrices' inputs and outputs, and a norm."""
        if known is not None:
            return known
        tp = self.parallel.tp
        matrices = [w.shard(tp, 1, 1) for w in kind.params if w.name.startswith("attention.") and w.is_matrix]
        width = sum(weight.shape[0] + weight.shape[1] for weight in matrices)
        saved = self.norm_with_output(saves_output=tp == 1, part="attention")
        return saved + BytesByPart(attention=self.gathered_bytes(width))

    def delayed_wgrad_layer(self, kind: Layer) -> BytesByPart:
        """Return the bytes of a layer's GEMM inputs and output gradients."""
        if self.trains_indexers_only:
            return BytesByPart()
        return self._known_or_estimated(kind, kind.attention.delayed_wgrad(self)) + kind.ffn.delayed_wgrad(self)

    def delayed_wgrad_concurrent(self, kind: Layer) -> BytesByPart:
        """Return delayed weight-gradient bytes that exist while the layer's saved tensors do."""
        if self.trains_indexers_only:
            return BytesByPart()
        return kind.ffn.concurrent_wgrad(self)

    @property
    def mtp_kind(self) -> Layer:
        """Kind of the MTP (multi-token prediction) layers."""
        return self.model.mtp_layer.kind

    def embedding(self) -> BytesByPart:
        """Return the bytes that the embedding saves: its output, which the graph holds as the input of the layers."""
        return BytesByPart(embedding=self.hidden_bytes)

    @property
    def head_gradient_sum(self) -> int:
        """Bytes of the gradient of the head's weight that the loss sums over chunks or tiles in high precision.

        0 if the sum is the gradient itself, or if one GEMM computes all tokens.
        """
        if not (self.loss_chunk_tokens or self._tiles_loss) or self.item_bytes == self.high_precision_bytes:
            return 0
        return self.vocab_rows * self.model.hidden_size * self.high_precision_bytes

    @property
    def transient_loss(self) -> int:
        """Bytes that the loss has in memory besides its saved tensors: logits, and the sum of a gradient.

        After the sum, the gradient in the compute type takes the place of the logits. In the warm-up of indexers the
        loss has no graph and saves nothing, so its usual saved tensors are temporary.
        """
        if self.trains_indexers_only:
            return self._saved_by_head().total()
        gradient = self.head_gradient_sum * self.item_bytes // self.high_precision_bytes
        return self.head_gradient_sum + max(self.transient_logits, gradient)

    @property
    def transient_logits(self) -> int:
        """Bytes of logits that the loss has in memory besides its saved tensors."""
        rows = self.vocab_rows
        if not self.loss_chunk_tokens:
            if not self._tiles_loss:
                # Their gradient.
                return self.gathered_tokens * rows * self.item_bytes
            part = min(rows, max(MIN_UPCAST_CHUNK_ROWS, rows // NUM_UPCAST_CHUNKS))
            # A low-precision GEMM output next to its high-precision copy, or a high-precision copy of its operands.
            width = min(CPU_LOSS_TOKENS, self.gathered_tokens) + self.model.hidden_size
            return part * width * self.item_bytes if self.item_bytes < self.high_precision_bytes else 0
        logits = self.loss_chunk_tokens * rows
        # A gradient in high precision is written over the logits.
        gradient_bytes = logits * self.item_bytes if self.item_bytes < self.high_precision_bytes else 0
        copy_bytes = min(logits, MAX_COPIED_LOGITS[self.kernels.device_type]) * self.high_precision_bytes
        return logits * self.high_precision_bytes + max(gradient_bytes, copy_bytes)

    def delayed_wgrad_mtp(self) -> BytesByPart:
        """Return the delayed weight-gradient bytes of an MTP layer and its input projection, without its head."""
        if self.trains_indexers_only:
            return BytesByPart()
        projection = 3 * self.tokens * self.model.hidden_size * self.item_bytes
        return self.delayed_wgrad_layer(self.mtp_kind) + BytesByPart({"residual stream": projection})

    @property
    def delayed_wgrad_head(self) -> int:
        """Delayed weight-gradient bytes of one output-head GEMM, or 0 for a chunked loss, which delays none."""
        if self.loss_chunk_tokens or self.trains_indexers_only:
            return 0
        return self.gathered_tokens * self.item_bytes * (self.model.hidden_size + self.vocab_rows)

    @cached_property
    def saved_by_kind(self) -> dict[Layer, BytesByPart]:
        """Bytes that each kind of layer saves for backward."""
        return {kind: self.layer_saved(kind) for kind in self.model.distinct_kinds}

    @cached_property
    def without_recompute(self) -> "ActivationMemory":
        """Memory of a layer while it is recomputed: parts inside a larger recomputed part are saved."""
        # One norm ends before the next is recomputed. The same holds for experts that run one after another.
        brief = {"norms"} if self.kernels.grouped_experts else {"norms", "expert_activation"}
        if self.recompute <= brief:
            return self
        return replace(self, recompute=self.recompute & brief)

    @cached_property
    def recompute_peak(self) -> dict[Layer, BytesByPart]:
        """Bytes that each kind of layer has while it is recomputed, besides its saved tensors."""
        return {kind: self.without_recompute.saved_by_kind[kind] - saved for kind, saved in self.saved_by_kind.items()}

    @cached_property
    def transient(self) -> dict[Layer, BytesByPart]:
        """Peak of temporary bytes while each kind of layer runs or is recomputed."""
        if self.trains_indexers_only:
            return {kind: self._transient_in_warmup(kind) for kind in self.saved_by_kind}
        return {kind: self._transient_block(kind) + self.transient_norm for kind in self.saved_by_kind}

    def _transient_block(self, kind: Layer) -> BytesByPart:
        """Return the temporary bytes of a layer in excess of the bytes of a layer that saved all.

        While attention runs, forward or backward, the feed-forward network has saved nothing.
        """
        transient = kind.ffn.transient(self)
        attention = kind.attention.transient(self)
        excess = attention.total() - kind.ffn.saved(self.without_recompute).total()
        return BytesByPart({"core attention": excess}) if excess > transient.total() else transient

    @property
    def transient_norm(self) -> BytesByPart:
        """Temporary bytes of a recomputed norm: its statistics and its output."""
        if "norms" not in self.recompute:
            return BytesByPart()
        return BytesByPart(norms=self.hidden_norm() + self.hidden_bytes)

    @property
    def loss_chunk_tokens(self) -> int:
        """Tokens whose logits are in memory at a time. 0: all."""
        chunk = self.train.loss_chunk_tokens(self.kernels.device_type, cp=self.parallel.cp, vocab_rows=self.vocab_rows)
        return chunk if 0 < chunk < self.gathered_tokens else 0

    @property
    def _tiles_loss(self) -> bool:
        p = self.parallel
        delays_wgrad = p.pp > 1 and chosen_in(p, SchedulePart).splits_backward
        return self.kernels.tiled_loss and not delays_wgrad

    def head(self) -> BytesByPart:
        """Return the bytes that the last norm and the output head save: nothing in the warm-up of indexers."""
        return BytesByPart() if self.trains_indexers_only else self._saved_by_head()

    def _saved_by_head(self) -> BytesByPart:
        """Return the bytes that the last norm and the output head save with a graph. A chunked loss saves no logits.

        The loss saves the local row of each label and the log-sum-exp. It saves all logits as the GEMM returns them, or
        tile by tile as exponentials in high precision.
        """
        saved = BytesByPart(norms=self.hidden_norm())
        gathered = self.gathered_tokens * self.model.hidden_size * self.item_bytes
        saved["logits" if self.parallel.tp > 1 else "norms"] += gathered
        if self.model.logits_divisor != 1:
            # The input of the GEMM is divided. The loss also holds the undivided input.
            saved["logits"] += self.hidden_bytes
        saved["logits"] += self.gathered_tokens * (self.high_precision_bytes + INT_BYTES)
        if not self.loss_chunk_tokens:
            logit_bytes = self.high_precision_bytes if self._tiles_loss else self.item_bytes
            saved["logits"] += self.gathered_tokens * self.vocab_rows * logit_bytes
        return saved

    def mtp_layer(self) -> BytesByPart:
        """Return the bytes of an MTP layer: three norms, the input projection, the layer, and another output head."""
        if self.trains_indexers_only:
            # Nothing of the head stays while the layer runs.
            excess = max(0, self.transient[self.mtp_kind].total() - self.transient_loss)
            running = BytesByPart({"core attention": excess, "residual stream": 2 * self.hidden_bytes})
            return self.layer_saved(self.mtp_kind) + running
        saved = self.layer_saved(self.mtp_kind) + self.head()
        saved["norms"] += 2 * self.hidden_norm()
        saved["residual stream"] += 4 * self.hidden_bytes
        return saved


def activation_memory(
    cfg: Config,
    recompute: Iterable[str] | None = None,
    kernels: KernelProfile = CUDA_KERNELS,
    imbalance: float = 1.0,
) -> ActivationMemory:
    """Return the activation memory of a recipe that `check_config` passed.

    Args:
        recompute: parts of a layer that are recomputed. None: as the recipe says.
    """
    layer = cfg.model.decoder_layers[0]
    return ActivationMemory(
        model=cfg.model,
        hidden_size=cfg.model.hidden_size,
        has_windows=cfg.model.has_windows,
        block_norm=layer.norm,
        residual=layer.residual,
        parallel=cfg.parallel,
        shards_heads=chosen_in(cfg.parallel, ContextPart).shards_heads,
        train=cfg.train,
        seq_len=cfg.train.seq_len,
        micro_batch_size=cfg.train.micro_batch_size,
        quantizes_gemms=cfg.train.quantizes_gemms,
        moe=cfg.moe,
        lora=cfg.lora,
        recompute=frozenset(cfg.train.recompute if recompute is None else recompute),
        kernels=kernels,
        kernel_choice=cfg.run.kernels,
        item_bytes=compute_dtype_bytes(cfg.run),
        imbalance=imbalance,
    )
