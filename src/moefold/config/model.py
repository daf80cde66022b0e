"""The [model] section of a recipe: sizes and kinds of a decoder-only transformer and of its layers."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

from moefold.config.base.field import POSITIVE, SAME_TENSORS, MaxMagnitude, VerifyAs, at_least
from moefold.config.base.layer_words import LayerWords, parse_layers
from moefold.config.base.limits import MAX_LAYERS, MAX_WIDTH
from moefold.config.base.part import KindOf, Section
from moefold.config.groups.ffn import Networks, RoutedPart
from moefold.config.groups.rope_scaling import RopeConfig, RopeSettings
from moefold.config.layers import Layer, layers_of
from moefold.config.sections.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Sizes and kinds of a decoder-only transformer. `preset` sets the keys that the recipe leaves out."""

    preset: Annotated[str, SAME_TENSORS, VerifyAs.SIZE] = ""
    """Named model shape (see `moefold train --keys`). Keys of the recipe take precedence."""
    layers: Annotated[int | str, MaxMagnitude(MAX_LAYERS)] = 4
    """Transformer layers, L: their number, or names with counts and one level of brackets, such as "3 dense, 58 moe",
    "12 x (3 linear, full)" and "chunk/dense, full/nope/moe". A name has a word of one or more of four lists, the first
    word being the default: (1) attention: full, window (model.sliding_window), chunk (model.attention_chunk_size) or
    linear (model.linear_attention), (2) rope or nope (no position embedding), (3) own or shared (the keys that the
    nearest layer with an indexer before it selected, arXiv:2603.12201), (4) moe (model.ffn.moe) or dense
    (model.ffn.dense). MTP layers have their own indexer."""
    hidden_size: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH), VerifyAs.SIZE] = 256
    """Width of the residual stream, H."""
    attention: Annotated[Any, KindOf("attention", "not is_recurrent")] = "gqa"
    """Softmax attention."""
    vocab_size: Annotated[int, at_least(1), MaxMagnitude(2**31), VerifyAs.SIZE] = 256
    """Rows of the embedding, V. If the recipe does not set it and data.tokenizer has more ids than the preset or the
    default: their number, rounded up to a multiple of 64."""
    mtp_layers: Annotated[int, at_least(0, "0: none"), MaxMagnitude(MAX_LAYERS)] = 0
    """Additional tokens that each position predicts in training (multi-token prediction, MTP, arXiv:2412.19437 sec.
    2.2), each through one more layer after the others, of the kind of the last one. 0 means none."""
    sliding_window: Annotated[int, at_least(0, "0: no such layer"), SAME_TENSORS] = 0
    """Sliding window of a layer 'window': each token attends to itself and the tokens right before it, this many in
    all. 0 means no such layers."""
    attention_chunk_size: Annotated[int, at_least(0, "0: no such layer"), SAME_TENSORS] = 0
    """Tokens of an attention chunk of a layer 'chunk': a document is divided into chunks of this length from its
    start on, and each token attends to the tokens before it in its chunk (Llama 4). 0 means no such layers."""
    linear_attention: Annotated[Any, KindOf("attention", "is_recurrent")] = "gated_deltanet"
    """Layers 'linear' of model.layers: attention without a softmax, or a convolution in its place."""
    ffn: Networks = field(default_factory=Networks)
    """Feed-forward networks of the layers."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary position embedding."""
    norm: Annotated[Any, KindOf("norm")] = "rmsnorm"
    """Norms of the residual stream, including the last one and MTP layers' norms. Norms of heads, of latents and inside
    linear attention are always RMSNorm."""
    residual: Annotated[Any, KindOf("residual")] = "pre"
    """Place of the norms of attention and of the feed-forward network."""
    embedding_multiplier: Annotated[float, POSITIVE] = 1.0
    """Factor of the token embeddings (Granite)."""
    logits_divisor: Annotated[float, POSITIVE] = 1.0
    """Divisor of the logits (Granite's logits_scaling)."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    head_bias: bool = False
    """Bias on the logits, one for each token of the vocabulary (Phi-3.5-MoE)."""
    init_std: Annotated[float, POSITIVE, SAME_TENSORS, VerifyAs.START] = 0.02
    """Standard deviation of the initial weights. Output projections use init_std / sqrt(2 * num_layers)."""

    @cached_property
    def softmax_attention(self) -> Any:
        """Attention of the non-recurrent layers: an `AttentionPart` with resolved widths and without a span."""
        return self.attention.with_heads(self.hidden_size)

    @property
    def num_router_choices(self) -> int:
        """Number of choices of the router: the experts, then the zero-computation experts."""
        return self.ffn.moe.num_choices

    @cached_property
    def rope_settings(self) -> RopeSettings:
        """RoPE settings, with the width of the heads of the layers with RoPE."""
        part = self.softmax_attention
        temperature = part.temperature if part.has_temperature else None
        return RopeSettings(
            theta=self.rope.theta,
            rotary_dim=int(part.rotary_dim),
            interleaved=self.rope.interleaved,
            scaling=self.rope.scaling,
            temperature_scale=temperature.scale if temperature else 0.0,
            temperature_tokens=temperature.tokens if temperature else 1,
        )

    @cached_property
    def layer_words(self) -> tuple[LayerWords, ...]:
        """Words of each layer in order."""
        return parse_layers(self.layers)

    @property
    def num_layers(self) -> int:
        """Number of layers, without MTP layers."""
        return len(self.layer_words)

    @cached_property
    def all_layers(self) -> tuple[Layer, ...]:
        """`decoder_layers`, then the MTP (multi-token prediction) layers."""
        return layers_of(self)

    @cached_property
    def decoder_layers(self) -> tuple[Layer, ...]:
        """Each layer in order, with its attention and its feed-forward network."""
        return self.all_layers[: self.num_layers]

    @cached_property
    def mtp_layer(self) -> Layer:
        """Layer of MTP (multi-token prediction): like the last layer, with its own indexer."""
        return replace(self, mtp_layers=1).all_layers[-1]

    @cached_property
    def has_windows(self) -> bool:
        """Return whether any layer limits the context of a query."""
        return any(layer.window for layer in self.decoder_layers)

    @property
    def has_linear_attention(self) -> bool:
        """Return whether some layers have linear attention or a convolution, with states of a fixed size."""
        return any(layer.attention.is_recurrent for layer in self.decoder_layers)

    @property
    def has_softmax_attention(self) -> bool:
        """Return whether some layers have softmax attention."""
        return not all(layer.attention.is_recurrent for layer in self.decoder_layers)

    @cached_property
    def block_kinds(self) -> tuple[Layer, ...]:
        """Kind of each layer in order, see `Layer.kind`."""
        return tuple(layer.kind for layer in self.decoder_layers)

    @cached_property
    def all_block_kinds(self) -> tuple[Layer, ...]:
        """`block_kinds` followed by the kinds of the MTP (multi-token prediction) layers."""
        return tuple(layer.kind for layer in self.all_layers)

    @cached_property
    def distinct_kinds(self) -> tuple[Layer, ...]:
        """Kinds of layers that the model has, MTP layers included, in order."""
        return tuple(dict.fromkeys(self.all_block_kinds))

    @cached_property
    def routed(self) -> RoutedPart | None:
        """Feed-forward network of all MoE layers, or None if the model has no MoE layers."""
        return next((layer.ffn.routed for layer in self.all_layers if layer.ffn.routed), None)

    @property
    def experts(self) -> RoutedPart:
        """Feed-forward network of all MoE layers of a model that has such layers."""
        assert self.routed is not None, "the model has no MoE layers"
        return self.routed

    @property
    def has_shortcut(self) -> bool:
        """Return whether the output of routed experts is added after the next layer."""
        return self.routed is not None and self.routed.shortcut

    @property
    def selected_keys(self) -> int:
        """Maximum keys of a query of sparse attention. 0 means that no layer has sparse attention."""
        return next((layer.attention.selector.top_k for layer in self.decoder_layers if layer.attention.selector), 0)

    def trains_indexers_only(self, train: TrainConfig) -> bool:
        """Return whether only the indexers of sparse attention learn: their warm-up stage."""
        return self.attention.selector is not None and train.indexer_stage == "warmup"

    @property
    def moe_layer_numbers(self) -> tuple[int, ...]:
        """Numbers of the MoE layers, MTP layers included."""
        return tuple(i for i, layer in enumerate(self.all_layers) if layer.ffn.is_routed)

    @property
    def has_rope(self) -> bool:
        """Return whether a layer of softmax attention applies RoPE."""
        return any(layer.attention.has_rope and not layer.attention.is_recurrent for layer in self.decoder_layers)

    @property
    def last_stage_needs_embedding(self) -> bool:
        """Return whether the last pipeline stage also needs the embedding (tied embeddings or MTP)."""
        return self.tie_embeddings or self.mtp_layers > 0

    @property
    def has_moe_layers(self) -> bool:
        """Return whether any layer is an MoE layer."""
        return any(layer.ffn.is_routed for layer in self.decoder_layers)

    @property
    def has_dense_layers(self) -> bool:
        """Return whether any layer is dense (SwiGLU)."""
        return not all(layer.ffn.is_routed for layer in self.decoder_layers)
