"""Decoder-only transformer, or one pipeline stage of it."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moefold.comm.resumable import Resumable, ResumableTask, run_to_end
from moefold.config.chosen import chosen_in
from moefold.config.groups.ffn import FeedForwardFrame
from moefold.config.groups.loss import LossPart
from moefold.config.lora import LoraConfig
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.train import TrainConfig
from moefold.model.activation_checkpoint import OutputCheckpoint, no_checkpoint
from moefold.model.attention import SelfAttention, TokenMixer
from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.frozen import connect_loss, pass_gradient
from moefold.model.head import Head, ModelOutput
from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.linear import linear
from moefold.model.local_param import local_param
from moefold.model.lora import attach_adapters
from moefold.model.loss_function import LossFunction, metrics_of, weighted_sum
from moefold.model.loss_metrics import LossMetricRecorder
from moefold.model.moe.layer import LayerOutput, MoELayer
from moefold.model.moe.token_group import NO_COLUMNS, TokenColumns
from moefold.model.norm import LayerNorm, Norm, RMSNorm
from moefold.model.part_modules import build_attention, build_ffn, build_norm
from moefold.model.rope import RopeTable, build_rope, rope_frequencies
from moefold.model.tp_interface import SequenceParallel, VocabParallel
from moefold.ops.documents import DocumentBounds, PackedDocuments
from moefold.ops.rope import Rope
from moefold.topology.selection_groups import selection_sources, shares_selections

if TYPE_CHECKING:
    from moefold.model.indexer import LightningIndexer, Selection

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class ModuleSettings:
    """Settings that the modules of a model read besides its shape, which `ModelConfig` has."""

    train: TrainConfig
    lora: LoraConfig
    ffn: FeedForwardFrame
    dtype: str
    """Compute dtype, a key of `TORCH_DTYPES`."""
    cp: int
    """Context-parallel ranks, which share the tokens of the loss."""
    vocab_rows: int
    """Rows of the vocabulary on a rank."""
    overlaps_experts: bool
    """True if layers run by `forward_resumable`, one micro-batch during the all-to-alls of another."""


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


class Block(nn.Module):
    """Transformer layer: attention, then a dense or MoE feed-forward, each added to the residual stream.

    `model.residual` sets the places of the norms; missing norms are None.

    `parallelize` replaces `norms_checkpoint`, where the outputs of the norms are not saved for backward. A decoder sets
    `fused`, which computes the whole layer for the rows of its passes.
    """

    def __init__(self, model: ModelConfig, settings: ModuleSettings, number: int) -> None:
        super().__init__()
        layer = model.all_layers[number]
        hidden = model.hidden_size
        residual = layer.residual
        self.attention_norm: Norm | None = build_norm(layer.norm, hidden) if residual.norms_input else None
        self.attention: TokenMixer = build_attention(layer, model)
        if layer.chunk:
            assert isinstance(self.attention, SelfAttention)
            self.attention.limit_to_chunks(layer.chunk)
        self.attention_output_norm: Norm | None = build_norm(layer.norm, hidden) if residual.norms_output else None
        self.ffn_norm: Norm | None = build_norm(layer.norm, hidden) if residual.norms_input else None
        self.ffn = build_ffn(layer, settings.ffn, number)
        self.ffn_output_norm: Norm | None = build_norm(layer.norm, hidden) if residual.norms_output else None
        self.has_rope = layer.attention.has_rope
        self.is_rope_interleaved = model.rope.interleaved
        self.shared_selection: int | None = None
        """Number of the layer that selects the keys of this layer, if layers share selections."""
        if shares_selections(model) and layer.attention.selector is not None:
            self.shared_selection = selection_sources(model)[number]
        self.residual_multiplier = layer.residual.multiplier
        self.norms_checkpoint: OutputCheckpoint = no_checkpoint
        self.fused: Callable[[Tensor, Rope, TokenColumns], LayerOutput] | None = None
        self.is_frozen = settings.train.trains_indexers_only(model)
        """True if only the indexer has gradients: the rest of the layer is computed without a graph."""

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        columns: TokenColumns = NO_COLUMNS,
        documents: PackedDocuments | None = None,
        selection: "Selection | None" = None,
    ) -> LayerOutput:
        """Compute the layer, [S/(cp*tp), B, H] -> same; with a shortcut (`model.ffn.moe.shortcut`), see `LayerOutput`.

        An MoE layer may need `columns` of the micro-batch, and sparse attention the `selection` that layers share.
        """
        if self.fused is not None:
            return self.fused(x, rope, columns)
        return self.run_modules(x, rope, columns, documents, selection)

    def run_modules(
        self,
        x: Tensor,
        rope: Rope,
        columns: TokenColumns = NO_COLUMNS,
        documents: PackedDocuments | None = None,
        selection: "Selection | None" = None,
    ) -> LayerOutput:
        """Compute `forward` by the modules of the layer."""
        source = x
        selection = self._selection_with_loss(selection)
        x = self._attend(self._detached(x), rope, documents, selection)
        with self._normalized(self.ffn_norm, x) as (normed,):
            y = self.ffn(normed, columns) if isinstance(self.ffn, MoELayer) else self.ffn(normed)
            return self._connected(source, self._add_ffn(x, y), selection)

    def forward_resumable(
        self,
        x: Tensor,
        rope: Rope,
        columns: TokenColumns = NO_COLUMNS,
        documents: PackedDocuments | None = None,
        selection: "Selection | None" = None,
    ) -> Resumable[LayerOutput]:
        """Compute `forward`, yielding at each MoE all-to-all; no hook may be registered on the MoE layer."""
        source = x
        selection = self._selection_with_loss(selection)
        x = self._attend(self._detached(x), rope, documents, selection)
        with self._normalized(self.ffn_norm, x) as (normed,):
            if not isinstance(self.ffn, MoELayer):
                return self._connected(source, self._add(x, self.ffn(normed), self.ffn_output_norm), selection)
            moe = ResumableTask(self.ffn.forward_resumable(normed, columns))
            # `normed` is read up to the first yield only; at each yield another micro-batch may run.
            moe.resume()
        return self._connected(source, self._add_ffn(x, (yield from moe.remaining())), selection)

    def _detached(self, x: Tensor) -> Tensor:
        """Return the input of a frozen layer, whose gradient `_connected` passes on."""
        return x.detach() if self.is_frozen else x

    def _selection_with_loss(self, selection: "Selection | None") -> "Selection | None":
        """Return a selection that takes the loss of a frozen layer's indexer."""
        is_needed = self.is_frozen and self.attention.selects_keys and selection is None
        return _new_selection() if is_needed else selection

    def _connected(self, source: Tensor, output: LayerOutput, selection: "Selection | None") -> LayerOutput:
        """Return the output of the layer; if it is frozen, with the loss of its indexer and connected to its input."""
        if not self.is_frozen:
            return output
        hidden = pass_gradient(source, output if isinstance(output, Tensor) else output[0])
        if selection is not None:
            hidden = selection.attach_dense_loss(hidden)
        return hidden if isinstance(output, Tensor) else (hidden, output[1])

    def _add_ffn(self, x: Tensor, y: LayerOutput) -> LayerOutput:
        """Add the output of the feed-forward network; with a shortcut, the routed part is returned instead."""
        if isinstance(y, Tensor):
            return self._add(x, y, self.ffn_output_norm)
        shared, routed = y
        return self._add(x, shared, None), self._scale(routed)

    def _attend(
        self, x: Tensor, rope: Rope, documents: PackedDocuments | None, selection: "Selection | None"
    ) -> Tensor:
        """Add attention to the residual stream."""
        shared = () if selection is None else (selection,)
        with self._normalized(self.attention_norm, x) as (normed,):
            y = self.attention(normed, rope if self.has_rope else rope.no_rope, documents, *shared)
            return self._add(x, y, self.attention_output_norm)

    def _normalized(self, norm: RMSNorm | LayerNorm | None, x: Tensor) -> AbstractContextManager[tuple[Tensor, ...]]:
        """Return a context with the input of attention or of the feed-forward network."""
        if norm is None:
            return nullcontext((x,))
        return self.norms_checkpoint(norm.normalize, x, *norm.local_parameters(x))

    def _add(self, x: Tensor, y: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
        """Add an output to the residual stream."""
        return x + self._scale(y if norm is None else norm(y))

    def _scale(self, y: Tensor) -> Tensor:
        """Multiply an output by its factor in the residual stream."""
        return y if self.residual_multiplier == 1.0 else y * self.residual_multiplier


class MTPBlock(Block):
    """Multi-token prediction (MTP) layer: predicts one token further than its predecessor (arXiv:2412.19437 sec. 2.2).

    Its input at position i: the predecessor's hidden state and the embedding of the token that the predecessor
    predicts.
    """

    def __init__(self, model: ModelConfig, settings: ModuleSettings, number: int) -> None:
        super().__init__(model, settings, number)
        hidden = model.hidden_size
        norm = model.decoder_layers[0].norm
        self.embedding_norm = build_norm(norm, hidden)
        self.hidden_norm = build_norm(norm, hidden)
        self.projection = nn.Parameter(torch.empty(hidden, 2 * hidden))
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.kernels: Kernels = TORCH_KERNELS
        self.output_norm = build_norm(norm, hidden)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        columns: TokenColumns = NO_COLUMNS,
        documents: PackedDocuments | None = None,
        selection: "Selection | None" = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """Compute the MTP layer from normalised hidden states and token embeddings, both [S/(cp*tp), B, H].

        Returns:
            Normalised hidden states, `[S/(cp*tp), B, H]`.
        """
        y = super().forward(self._project(x, embedded), rope, columns, documents, selection)
        return self._normalized_output(y)

    def forward_resumable(
        self,
        x: Tensor,
        rope: Rope,
        columns: TokenColumns = NO_COLUMNS,
        documents: PackedDocuments | None = None,
        selection: "Selection | None" = None,
        embedded: Tensor | None = None,
    ) -> Resumable[Tensor]:
        """Compute `forward`, yielding at each MoE all-to-all."""
        x = self._project(x, embedded)
        y = yield from super().forward_resumable(x, rope, columns, documents, selection)
        return self._normalized_output(y)

    def _project(self, x: Tensor, embedded: Tensor | None) -> Tensor:
        """Combine hidden states and token embeddings."""
        assert embedded is not None
        joint = torch.cat((self.embedding_norm(self._detached(embedded)), self.hidden_norm(self._detached(x))), -1)
        projected = linear(
            joint,
            local_param(self.projection, x.dtype),
            wgrad_store=self.wgrad_store,
            linear_backend=self.kernels.linear_backend,
        )
        return pass_gradient(x, projected) if self.is_frozen else projected

    def _normalized_output(self, y: LayerOutput) -> Tensor:
        assert isinstance(y, Tensor), "a layer with a shortcut is followed by a dense one"
        normed: Tensor = self.output_norm(self._detached(y))
        return pass_gradient(y, normed) if self.is_frozen else normed


class _Shortcut:
    """Adds the routed output of an MoE layer after the layer that follows it (`model.ffn.moe.shortcut`)."""

    def __init__(self) -> None:
        self._routed: Tensor | None = None

    def add(self, output: LayerOutput) -> Tensor:
        """Return the hidden states after a layer, and keep its routed output for the next layer."""
        if isinstance(output, Tensor):
            x = output if self._routed is None else output + self._routed
            self._routed = None
            return x
        assert self._routed is None, "a layer with a shortcut is followed by a dense one"
        x, self._routed = output
        return x

    def end(self) -> None:
        """Check that no routed output is left: the stage would lose it."""
        assert self._routed is None, "a stage does not end with a layer with a shortcut"


def _new_selection() -> "Selection":
    """Return an empty selection; only a model with sparse attention imports its module."""
    from moefold.model.indexer import Selection

    return Selection()


class _Selections:
    """The selection of the current layer and of the layers that share it; selections of earlier layers are freed."""

    def __init__(self) -> None:
        self._source = -1
        self._selection: Selection | None = None

    def of(self, block: Block) -> "Selection | None":
        """Return the selection that a layer makes or reads; None if no layers share selections."""
        if block.shared_selection is None:
            return None
        if block.shared_selection != self._source:
            self._source = block.shared_selection
            self._selection = _new_selection()
        return self._selection


class Embedding(nn.Module):
    """Token embedding, weight [V, H]; also the output head where embeddings are tied."""

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
        self.is_frozen = train.trains_indexers_only(model)
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
        self.fused: Callable[[Tensor, Rope, TokenColumns], Tensor] | None = None
        """All layers together, while the model generates; None: one by one."""

    def set_loss(self, loss: LossFunction) -> None:
        """Set the loss of the last stage. Call it on every stage: all need the names of its terms and metrics."""
        self.loss = loss
        self.loss_metrics = LossMetricRecorder(metrics_of(loss))

    def set_positions(self, positions: Tensor) -> None:
        """Set the positions of this rank's tokens in their sample, int64 [S/cp] or [S/cp, B]; call before `forward`."""
        self.positions = positions
        self._find_frequencies(positions.device)
        self.rope = self._build_rope(positions)

    def set_rope(self, positions: Tensor, rope: Rope) -> None:
        """Set positions with a known RoPE, such as from `rope_table`; replaces `set_positions`."""
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
            document_bounds: bounds of the documents in the column "document_starts"; None if the CPU reads it.
            columns: the columns of the micro-batch; see `Batch`.

        Returns:
            Hidden states [S/(cp*tp), B, H]; from the last stage the terms of the loss, `loss_terms`; or, without
            labels, the logits [S/cp, B, V/tp].
        """
        return run_to_end(self._run(x, columns, document_bounds, _run_module))

    def forward_resumable(
        self, x: Tensor, *, document_bounds: DocumentBounds | None = None, **columns: Tensor
    ) -> Resumable[Tensor]:
        """Compute `forward`, yielding at each MoE all-to-all."""
        return (yield from self._run(x, columns, document_bounds, _run_resumable))

    def _run(
        self,
        x: Tensor,
        columns: Mapping[str, Tensor],
        bounds: DocumentBounds | None,
        run_block: Callable[..., Resumable[Any]],
    ) -> Resumable[Tensor]:
        """Run the layers of this stage, each by `run_block`, which gets the layer and its arguments."""
        args = self._block_args(columns, bounds)
        x = self._embed(x) if self.is_first else x
        if self.fused is not None:
            x = self.fused(x, *args[:2])
        else:
            shortcut = _Shortcut()
            selections = _Selections()
            for block in self._blocks():
                x = shortcut.add((yield from run_block(block, x, *args, selections.of(block))))
            shortcut.end()
        if not self.is_last:
            return self._hidden_output(x)
        if "labels" not in columns:
            return self.head(x, self._tied_weight)
        x = self._final_norm(x)
        terms = self.loss(self._output(x), columns)
        mtp_losses = []
        for depth, block in enumerate(self._mtp_blocks()):
            x = yield from run_block(block, x, *args, None, self.embedding(_mtp_tokens(columns, depth)))
            mtp_losses.append(self._mtp_loss(x, columns, depth))
        terms = self._with_mtp_term(terms, mtp_losses)
        return connect_loss(x, terms) if self.is_frozen else terms

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens; where the embedding is frozen, the vectors have a gradient, which reaches every layer."""
        x: Tensor = self.embedding(tokens)
        return x.requires_grad_() if self.freezes_weights and torch.is_grad_enabled() else x

    def _blocks(self) -> list[Block]:
        """Return the layers of this stage, without the layers of multi-token prediction."""
        return [block for block in self.layers.values() if isinstance(block, Block) and not isinstance(block, MTPBlock)]

    def _mtp_blocks(self) -> list[MTPBlock]:
        """Return the layers of multi-token prediction, which run in training only."""
        return [block for block in self.layers.values() if isinstance(block, MTPBlock) and self.training]

    def _block_args(
        self, columns: Mapping[str, Tensor], bounds: DocumentBounds | None
    ) -> tuple[Rope, TokenColumns, PackedDocuments | None]:
        """Return the arguments of all blocks: RoPE, columns of the MoE layers and documents."""
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
        return self._rope_for(document_starts, positions), token_columns, documents

    def _hidden_output(self, x: Tensor) -> Tensor:
        # A stage without layers returns a new view of its input: the pipeline keeps input and output apart.
        return x if self.is_first or len(self.layers) else x.view_as(x)

    def _final_norm(self, x: Tensor) -> Tensor:
        if not self.is_frozen:
            return self.head.norm(x)
        return pass_gradient(x, self.head.norm(x.detach()))

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

    def _with_mtp_term(self, terms: Tensor, mtp_losses: list[Tensor]) -> Tensor:
        """Append the mean of the MTP losses, times its coefficient, if the model has MTP layers; 0 in evaluation."""
        if not self.config.mtp_layers:
            return terms
        mtp_loss = sum(mtp_losses, terms.new_zeros(1))
        return torch.cat((terms, mtp_loss * (self.settings.train.mtp_loss / self.config.mtp_layers)))

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


def _run_module(block: Block, *args: Any) -> Resumable[Any]:
    """Run a layer with its hooks; yields nothing."""
    yield from ()
    return block(*args)


def _run_resumable(block: Block, *args: Any) -> Resumable[Any]:
    return block.forward_resumable(*args)


def _mtp_tokens(columns: Mapping[str, Tensor], depth: int) -> Tensor:
    """Return the tokens that an MTP layer embeds, int64 [B, S/cp]: the targets of the layer before it."""
    return columns["labels"] if depth == 0 else columns["mtp_labels"][:, depth - 1]


def build_model(cfg: Config) -> Transformer:
    """Build the whole model on one rank, on the current default device; weights are not initialised."""
    return Transformer(cfg.model, module_settings(cfg), range(cfg.model.num_layers), is_first=True, is_last=True)
