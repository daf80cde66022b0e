"""Decoder-only transformer, or one pipeline stage of it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moefold.comm.resumable import Resumable, run_to_end
from moefold.config.chosen import chosen_in
from moefold.config.groups.ffn import FeedForwardFrame
from moefold.config.groups.loss import LossPart
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.model.block import Block, LayerInputs, ModuleSettings, MTPBlock, Selections, Shortcut
from moefold.model.gradient_paths import connect_loss, pass_gradient
from moefold.model.head import Head, ModelOutput
from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.local_param import local_param
from moefold.model.lora import attach_adapters
from moefold.model.loss_function import LossFunction, metrics_of, weighted_sum
from moefold.model.loss_metrics import LossMetricRecorder
from moefold.model.moe.layer import LayerOutput, MoELayer
from moefold.model.moe.token_group import TokenColumns
from moefold.model.rope import RopeTable, build_rope, rope_frequencies
from moefold.model.tp_interface import SequenceParallel, VocabParallel
from moefold.ops.documents import DocumentBounds, PackedDocuments
from moefold.ops.rope import Rope
from moefold.topology.selection_groups import selection_sources

if TYPE_CHECKING:
    from moefold.model.indexer import LightningIndexer

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
RunBlock = Callable[..., Resumable[LayerOutput]]
"""Function that runs a layer, from the layer and its arguments."""


class Embedding(nn.Module):
    """Token embedding, weight [V, H]. It is also the output head where embeddings are tied."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size))
        self.multiplier = model.embedding_multiplier
        self.dtype = dtype
        self.sequence_parallel: SequenceParallel = SequenceParallel()
        self.vocab_parallel: VocabParallel = VocabParallel()

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens, int64 [B, S/cp] -> [S/(cp*tp), B, H] in the compute dtype."""
        vectors = self.vocab_parallel.embed(tokens.t(), local_param(self.weight))
        vectors = self.sequence_parallel.scatter(vectors.to(self.dtype))
        return vectors if self.multiplier == 1.0 else vectors * self.multiplier


class Transformer(nn.Module):
    """Consecutive layers of the model, with the embedding on the first pipeline stage and the head on the last.

    Layers are named by their number in the whole model, so parameter names do not depend on the pipeline. The layers of
    multi-token prediction (MTP) follow all others, on the last stage. `loss` is computed there.
    """

    def __init__(
        self, model: ModelConfig, settings: ModuleSettings, layers: Iterable[int], *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        train = settings.train
        self.config = model
        self.settings = settings
        self.dtype = TORCH_DTYPES[settings.dtype]
        self.is_first = is_first
        self.is_last = is_last
        self.set_loss(chosen_in(train, LossPart))
        self.is_frozen = model.trains_indexers_only(train)
        self.freezes_weights = self.is_frozen or settings.lora.trains_adapters_only
        """True if the weights are frozen, except for indexers' weights in their warm-up stage."""
        if is_first or (is_last and model.last_stage_needs_embedding):
            self.embedding = Embedding(model, self.dtype)
        self.layers = nn.ModuleDict({str(i): Block(model, settings, i) for i in layers})
        if is_last:
            self.head = Head(model)
            mtp_numbers = range(model.num_layers, model.num_layers + model.mtp_layers)
            self.layers.update({str(i): MTPBlock(model, settings, i) for i in mtp_numbers})
        attach_adapters(self, model, settings.lora)
        for number, indexer in self.indexers().items():
            # The mean over the layers that attend to its selection.
            coefficient = train.indexer_loss / selection_sources(model).count(number)
            indexer.set_training(train.indexer_stage, coefficient, settings.ffn.micro_batches)
        self.positions: Tensor | None = None
        self.rope: Rope | None = None
        self._rope_frequencies: Tensor | None = None
        self.kernels: Kernels = TORCH_KERNELS
        self.sequence_parallel: SequenceParallel = SequenceParallel()
        self.fused: Callable[[Tensor, LayerInputs], Tensor] | None = None
        """All layers together, while the model generates. None means one by one."""

    def set_loss(self, loss: LossFunction) -> None:
        """Set the loss of the last stage. Call it on every stage: all need the names of its terms and metrics."""
        self.loss = loss
        self.loss_metrics = LossMetricRecorder(metrics_of(loss))

    def set_positions(self, positions: Tensor) -> None:
        """Set the positions of this rank's tokens in their sample, int64 [S/cp] or [S/cp, B]. Call before `forward`."""
        self.positions = positions
        self._find_frequencies(positions.device)
        self.rope = self._build_rope(positions)

    def set_rope(self, positions: Tensor, rope: Rope) -> None:
        """Set positions with a known RoPE, such as from `rope_table`. It replaces `set_positions`."""
        self.positions = positions
        self.rope = rope

    def rope_table(self, device: torch.device) -> RopeTable:
        """Return a table of the RoPE of this stage on a device."""
        frequencies = self._find_frequencies(device)
        seq_len = self.settings.train.seq_len
        return RopeTable(self.config.rope_settings, self.dtype, self.kernels.rope, frequencies, seq_len)

    def _find_frequencies(self, device: torch.device) -> Tensor:
        if self._rope_frequencies is None or self._rope_frequencies.device != device:
            self._rope_frequencies = rope_frequencies(self.config.rope_settings, self.settings.train.seq_len).to(device)
        return self._rope_frequencies

    def forward(self, x: Tensor, *, document_bounds: DocumentBounds | None = None, **columns: Tensor) -> Tensor:
        """Run the layers of this stage.

        Args:
            x: tokens, int64 [B, S/cp], on the first stage, or hidden states of the previous stage, [S/(cp*tp), B, H].
            document_bounds: bounds of the documents in the column "document_starts", or None if the CPU reads it.

        Returns:
            Hidden states [S/(cp*tp), B, H]. From the last stage the terms of the loss, `loss_terms`, or, without
            labels, the logits [S/cp, B, V/tp].
        """
        return run_to_end(self._run(x, columns, document_bounds, _run_module))

    def forward_resumable(
        self, x: Tensor, *, document_bounds: DocumentBounds | None = None, **columns: Tensor
    ) -> Resumable[Tensor]:
        """Compute `forward`, yielding at each MoE all-to-all."""
        return (yield from self._run(x, columns, document_bounds, lambda block, *args: block.forward_resumable(*args)))

    def _run(
        self, x: Tensor, columns: Mapping[str, Tensor], bounds: DocumentBounds | None, run_block: RunBlock
    ) -> Resumable[Tensor]:
        """Run the layers of this stage, each by `run_block`, which gets the layer and its arguments."""
        inputs = self._layer_inputs(columns, bounds)
        if self.is_first:
            x = self.embedding(x)
            if self.freezes_weights and torch.is_grad_enabled():
                # The gradient reaches every layer, although the embedding is frozen.
                x.requires_grad_()
        x = self.fused(x, inputs) if self.fused is not None else (yield from self._run_blocks(x, inputs, run_block))
        if not self.is_last:
            # A stage without layers returns a new view of its input: the pipeline keeps input and output apart.
            return x if self.is_first or len(self.layers) else x.view_as(x)
        if "labels" not in columns:
            return self.head(x, self._tied_weight)
        return (yield from self._loss_terms(x, columns, inputs, run_block))

    def _run_blocks(self, x: Tensor, inputs: LayerInputs, run_block: RunBlock) -> Resumable[Tensor]:
        shortcut = Shortcut()
        selections = Selections()
        for block in self._blocks():
            output = yield from run_block(block, x, replace(inputs, selection=selections.of(block)))
            x = shortcut.add(output)
        shortcut.end()
        return x

    def _loss_terms(
        self, x: Tensor, columns: Mapping[str, Tensor], inputs: LayerInputs, run_block: RunBlock
    ) -> Resumable[Tensor]:
        """Compute the terms of the loss from the output of the last layer. It runs the layers of MTP in training."""
        x = pass_gradient(x, self.head.norm(x.detach())) if self.is_frozen else self.head.norm(x)
        terms = self.loss(self._output(x), columns)
        mtp_losses = []
        # These layers run in training only.
        mtp_blocks = [block for block in self.layers.values() if isinstance(block, MTPBlock) and self.training]
        for depth, block in enumerate(mtp_blocks):
            # The targets of the layer before, int64 [B, S/cp].
            tokens = columns["labels"] if depth == 0 else columns["mtp_labels"][:, depth - 1]
            x = (yield from run_block(block, x, inputs, self.embedding(tokens))).y
            mtp_losses.append(self._mtp_loss(x, columns, depth))
        if self.config.mtp_layers:
            # 0 in evaluation.
            mtp_loss = sum(mtp_losses, terms.new_zeros(1))
            terms = torch.cat((terms, mtp_loss * (self.settings.train.mtp_loss / self.config.mtp_layers)))
        return connect_loss(x, terms) if self.is_frozen else terms

    def _blocks(self) -> list[Block]:
        """Return the layers of this stage, without the layers of multi-token prediction."""
        return [block for block in self.layers.values() if isinstance(block, Block) and not isinstance(block, MTPBlock)]

    def _layer_inputs(self, columns: Mapping[str, Tensor], bounds: DocumentBounds | None) -> LayerInputs:
        document_starts = columns.get("document_starts")
        weights = columns.get("token_weights")
        documents = None
        if document_starts is not None:
            starts_SB = document_starts.t()
            bounds = bounds or DocumentBounds.of_starts(document_starts)
            documents = PackedDocuments(bounds, starts_SB, weights)
        elif weights is not None and self.config.selected_keys and self.training:
            # Padding is in samples of one document each, which the indexers' losses leave out. Outside of training
            # there is no such loss, and texts have any length.
            length = self.settings.train.seq_len
            starts_SB = torch.zeros(length, len(weights), dtype=torch.int64, device=weights.device)
            documents = PackedDocuments(DocumentBounds(((0, length),) * len(weights)), starts_SB, weights)
        positions = columns.get("positions")
        token_columns = TokenColumns(
            columns.get("sample_ids"), columns.get("token_weights"), positions, columns.get("token_samples")
        )
        return LayerInputs(self._rope_for(document_starts, positions), token_columns, documents)

    def _output(self, normed: Tensor) -> ModelOutput:
        normed = normed.detach() if self.is_frozen else normed
        settings = self.settings
        chunk = settings.train.loss_chunk_tokens(normed.device.type, cp=settings.cp, vocab_rows=settings.vocab_rows)
        # In evaluation, no rank reads the recorder.
        recorder = self.loss_metrics if self.training else LossMetricRecorder(self.loss_metrics.metrics)
        return ModelOutput(normed, self.head, self._tied_weight, chunk, recorder, is_training=self.training)

    def _mtp_loss(self, normed: Tensor, columns: Mapping[str, Tensor], depth: int) -> Tensor:
        """Sum the weighted cross-entropies of the targets of an MTP layer, [1]."""
        weights = columns.get("mtp_weights")
        losses = self._output(normed).cross_entropy(columns["mtp_labels"][:, depth])
        return weighted_sum(losses, None if weights is None else weights[:, depth])

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """Names of the terms that the last stage returns: terms of the loss, then of multi-token prediction, if any."""
        return (*self.loss.terms, "mtp") if self.config.mtp_layers else tuple(self.loss.terms)

    @property
    def _tied_weight(self) -> Tensor | None:
        return self.embedding.weight if self.config.tie_embeddings else None

    def _rope_for(self, document_starts: Tensor | None, positions: Tensor | None) -> Rope:
        assert self.positions is not None, "set_positions() must be called before forward()"
        if document_starts is None:
            assert self.rope is not None
            return self.rope
        # RoPE is relative: restarting positions changes no score, but makes the result of a document independent of
        # its place in the sample bit by bit, in low precision too.
        if positions is None:
            positions_SB = self.positions[:, None] - document_starts.t()[self.positions]
        else:
            positions_SB = (positions - document_starts).t()
        return self._build_rope(positions_SB)

    def _build_rope(self, positions: Tensor) -> Rope:
        seq_len = self.settings.train.seq_len
        return build_rope(
            self.config.rope_settings, positions, self.dtype, self.kernels.rope, self._rope_frequencies, seq_len
        )

    def moe_layers(self) -> dict[int, MoELayer]:
        """Return the MoE layers of this stage by their number in the whole model."""
        return {int(i): block.ffn for i, block in self.layers.items() if isinstance(block.ffn, MoELayer)}

    def indexers(self) -> "dict[int, LightningIndexer]":
        """Return the indexers of the sparse attention of this stage by the number of their layer in the whole model."""
        by_layer = {int(i): getattr(block.attention, "indexer", None) for i, block in self.layers.items()}
        return {i: indexer for i, indexer in by_layer.items() if indexer is not None}


def _run_module(block: Block, *args: Any) -> Resumable[LayerOutput]:
    """Run a layer with its hooks. It yields nothing."""
    yield from ()
    return block(*args)


def module_settings(cfg: Config) -> ModuleSettings:
    """Return the settings of the modules of a recipe's model."""
    train = cfg.train
    return ModuleSettings(
        train=train,
        lora=cfg.lora,
        ffn=FeedForwardFrame(
            hidden_size=cfg.model.hidden_size,
            moe=cfg.moe,
            micro_batches=train.global_batch_size // train.micro_batch_size,
            rank_micro_batches=cfg.num_micro_batches,
            seed=cfg.run.seed,
        ),
        dtype=cfg.run.dtype,
        cp=cfg.parallel.cp,
        vocab_rows=cfg.vocab_rows,
        overlaps_experts=cfg.parallel.overlap_experts,
    )


def build_model(cfg: Config) -> Transformer:
    """Build the whole model on one rank, on the current default device. Weights are not initialised."""
    return Transformer(cfg.model, module_settings(cfg), range(cfg.model.num_layers), is_first=True, is_last=True)
