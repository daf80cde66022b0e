"""Layers of a transformer: attention and a feed-forward network on a residual stream, and their settings."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moefold.comm.resumable import Resumable, ResumableTask
from moefold.config.groups.ffn import FeedForwardFrame
from moefold.config.model import ModelConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.activation_checkpoint import OutputCheckpoint, no_checkpoint
from moefold.model.attention import SelfAttention, TokenMixer
from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.gradient_paths import pass_gradient
from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.linear import linear
from moefold.model.local_param import local_param
from moefold.model.moe.layer import LayerOutput, MoELayer
from moefold.model.moe.token_group import NO_COLUMNS, TokenColumns
from moefold.model.norm import Norm
from moefold.model.part_modules import build_attention, build_ffn, build_norm
from moefold.ops.documents import PackedDocuments
from moefold.ops.rope import Rope
from moefold.topology.selection_groups import selection_sources, shares_selections

if TYPE_CHECKING:
    from moefold.model.indexer import Selection


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


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer besides the residual stream."""

    rope: Rope
    columns: TokenColumns = NO_COLUMNS
    """Columns of the micro-batch that an MoE layer may need."""
    documents: PackedDocuments | None = None
    selection: "Selection | None" = None
    """Keys of sparse attention that layers share."""


class Block(nn.Module):
    """Transformer layer: attention, then a dense or MoE feed-forward, each added to the residual stream.

    `model.residual` sets the places of the norms. Missing norms are None.

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
        self.fused: Callable[[Tensor, LayerInputs], Tensor] | None = None
        self.is_frozen = model.trains_indexers_only(settings.train)
        """True if only the indexer has gradients: the rest of the layer is computed without a graph."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> LayerOutput:
        """Compute the layer, [S/(cp*tp), B, H] -> same."""
        if self.fused is not None:
            return LayerOutput(self.fused(x, inputs))
        return self.run_modules(x, inputs)

    def run_modules(self, x: Tensor, inputs: LayerInputs) -> LayerOutput:
        """Compute `forward` by the modules of the layer."""
        source = x
        selection = self._selection_with_loss(inputs.selection)
        x = self._attend(self._detached(x), inputs.rope, inputs.documents, selection)
        with self._normalized(self.ffn_norm, x) as (normed,):
            is_moe = isinstance(self.ffn, MoELayer)
            output = self.ffn(normed, inputs.columns) if is_moe else LayerOutput(self.ffn(normed))
            return self._connected(source, self._add_ffn(x, output), selection)

    def forward_resumable(self, x: Tensor, inputs: LayerInputs) -> Resumable[LayerOutput]:
        """Compute `forward`, yielding at each MoE all-to-all. No hook may be registered on the MoE layer."""
        source = x
        selection = self._selection_with_loss(inputs.selection)
        x = self._attend(self._detached(x), inputs.rope, inputs.documents, selection)
        with self._normalized(self.ffn_norm, x) as (normed,):
            if not isinstance(self.ffn, MoELayer):
                return self._connected(source, self._add_ffn(x, LayerOutput(self.ffn(normed))), selection)
            moe = ResumableTask(self.ffn.forward_resumable(normed, inputs.columns))
            # `normed` is read up to the first yield only. At each yield another micro-batch may run.
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
        """Return the output of the layer. A frozen one adds the loss of its indexer and is connected to its input."""
        if not self.is_frozen:
            return output
        hidden = pass_gradient(source, output.y)
        if selection is not None:
            hidden = selection.attach_dense_loss(hidden)
        return output._replace(y=hidden)

    def _add_ffn(self, x: Tensor, output: LayerOutput) -> LayerOutput:
        """Add the output of the feed-forward network. With a shortcut, the routed part is returned instead."""
        if output.routed is None:
            return LayerOutput(self._add(x, output.y, self.ffn_output_norm))
        return LayerOutput(self._add(x, output.y, None), self._scale(output.routed))

    def _attend(
        self, x: Tensor, rope: Rope, documents: PackedDocuments | None, selection: "Selection | None"
    ) -> Tensor:
        """Add attention to the residual stream."""
        shared = () if selection is None else (selection,)
        with self._normalized(self.attention_norm, x) as (normed,):
            y = self.attention(normed, rope if self.has_rope else rope.no_rope, documents, *shared)
            return self._add(x, y, self.attention_output_norm)

    def _normalized(self, norm: Norm | None, x: Tensor) -> AbstractContextManager[tuple[Tensor, ...]]:
        """Return a context with the input of attention or of the feed-forward network."""
        if norm is None:
            return nullcontext((x,))
        return self.norms_checkpoint(norm.normalize, x, *norm.local_parameters(x))

    def _add(self, x: Tensor, y: Tensor, norm: Norm | None) -> Tensor:
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

    def forward(self, x: Tensor, inputs: LayerInputs, embedded: Tensor | None = None) -> LayerOutput:
        """Compute normalised hidden states from those before and token embeddings, all [S/(cp*tp), B, H]."""
        return self._normalized_output(super().forward(self._project(x, embedded), inputs))

    def forward_resumable(
        self, x: Tensor, inputs: LayerInputs, embedded: Tensor | None = None
    ) -> Resumable[LayerOutput]:
        """Compute `forward`, yielding at each MoE all-to-all."""
        output = yield from super().forward_resumable(self._project(x, embedded), inputs)
        return self._normalized_output(output)

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

    def _normalized_output(self, output: LayerOutput) -> LayerOutput:
        assert output.routed is None, "a layer with a shortcut is followed by a dense one"
        normed: Tensor = self.output_norm(self._detached(output.y))
        return LayerOutput(pass_gradient(output.y, normed) if self.is_frozen else normed)


class Shortcut:
    """Adds the routed output of an MoE layer after the layer that follows it (`model.ffn.moe.shortcut`)."""

    def __init__(self) -> None:
        self._routed: Tensor | None = None

    def add(self, output: LayerOutput) -> Tensor:
        """Return the hidden states after a layer, and keep its routed output for the next layer."""
        added, self._routed = self._routed, output.routed
        if added is None:
            return output.y
        assert output.routed is None, "a layer with a shortcut is followed by a dense one"
        return output.y + added

    def end(self) -> None:
        """Check that no routed output is left: the stage would lose it."""
        assert self._routed is None, "a stage does not end with a layer with a shortcut"


def _new_selection() -> "Selection":
    """Return an empty selection. Only a model with sparse attention imports its module."""
    from moefold.model.indexer import Selection

    return Selection()


class Selections:
    """The selection of the current layer and of the layers that share it. Selections of earlier layers are freed."""

    def __init__(self) -> None:
        self._source = -1
        self._selection: Selection | None = None

    def of(self, block: Block) -> "Selection | None":
        """Return the selection that a layer makes or reads, or None if no layers share selections."""
        if block.shared_selection is None:
            return None
        if block.shared_selection != self._source:
            self._source = block.shared_selection
            self._selection = _new_selection()
        return self._selection
