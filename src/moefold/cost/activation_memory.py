"""Activation memory: bytes that one micro-batch saves for backward, by part of the model. Torch-free.

Each formula lists the tensors that the operations of a part save; tests compare the sums with measurements of real
runs, to within 10 %. Letters: T tokens between the sub-layers, S*B/(cp*tp); N tokens inside them, S*B/cp; R routed
tokens of a rank's experts; H, F, A, D, V, E, K sizes (docs/notation.md).
"""

from collections.abc import Iterable
from functools import cached_property

from moefold.config.schema import Config
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.saved_tensors import CUDA_KERNELS, INT_BYTES, BytesByPart, KernelProfile
from moefold.cost.unit_memory import compute_dtype_bytes
from moefold.topology.dispatchers import dispatcher_of
from moefold.topology.schedule_tables import SCHEDULES

CHUNK_LOGITS = 1 << 24
"""Logits per chunk with train.loss_chunk = -1."""
MIN_CHUNK_TOKENS = 256
"""Minimum tokens per chunk with train.loss_chunk = -1."""

LOSS_TILE_TOKENS = 512
"""Tokens per tile of the tiled loss, whose logits are in memory in the compute type."""
LOSS_VOCAB_TILES = 8
"""Vocabulary tiles of the tiled loss."""
MIN_LOSS_VOCAB_ROWS = 256
"""Minimum rows of a vocabulary tile."""


class ActivationMemory:
    """Activation memory of the layers of a config on one rank.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that are recomputed; None: those of the recipe.
        kernels: kernel profile of the device.
        imbalance: routed tokens of the busiest rank over the mean of all ranks.
    """

    def __init__(
        self,
        cfg: Config,
        recompute: Iterable[str] | None = None,
        kernels: KernelProfile = CUDA_KERNELS,
        imbalance: float = 1.0,
    ) -> None:
        p = cfg.parallel
        train = cfg.train
        self._cfg = cfg
        self._kernels = kernels
        self.recompute = frozenset(train.recompute if recompute is None else recompute)
        self._imbalance = imbalance
        self._item_bytes = compute_dtype_bytes(cfg)
        self._high_precision_bytes = max(4, self._item_bytes)
        self._gathered_tokens = train.seq_len // p.cp * train.micro_batch_size
        self._tokens = self._gathered_tokens // p.tp
        self._delays_wgrad = p.pp > 1 and SCHEDULES[p.schedule].splits_backward
        self.experts = ExpertMemory(cfg, self.recompute, kernels, imbalance)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden state of every token between the sub-layers."""
        return self._tokens * self._cfg.model.hidden_size * self._item_bytes

    def layer_saved(self, kind: str) -> BytesByPart:
        """Return the bytes that a layer of kind "D" or "M" saves for backward, without its input."""
        if "layer" in self.recompute:
            # Only the output, which is the next layer's input.
            return BytesByPart({"residual stream": self.hidden_bytes}) + (
                self.experts.permute_indices() if kind == "M" else BytesByPart()
            )
        saved = self._norm_with_output(saves_output=self._cfg.parallel.tp == 1, part="attention") + self._attention()
        saved += self._moe() if kind == "M" else self._dense_mlp()
        saved["residual stream"] += 2 * self.hidden_bytes
        return saved

    @property
    def mtp_kind(self) -> str:
        """Kind of the MTP (multi-token prediction) layers."""
        return self._cfg.model.layer_kinds[-1]

    @property
    def num_mtp_layers(self) -> int:
        """Number of MTP layers of the model."""
        return self._cfg.model.mtp_layers

    def embedding(self) -> BytesByPart:
        """Return the bytes that the embedding saves."""
        return BytesByPart(embedding=self.hidden_bytes)

    @property
    def transient_logits(self) -> int:
        """Bytes of logits that the loss has in memory in addition to those it saves."""
        rows = self._cfg.model.vocab_size // self._cfg.parallel.tp
        if not self._loss_chunk_tokens:
            if not self._kernels.tiled_loss or self._delays_wgrad:
                return self._gathered_tokens * rows * self._item_bytes
            part = min(rows, max(MIN_LOSS_VOCAB_ROWS, rows // LOSS_VOCAB_TILES))
            # A low-precision GEMM output next to its high-precision copy, or a high-precision copy of its operands.
            width = min(LOSS_TILE_TOKENS, self._gathered_tokens) + self._cfg.model.hidden_size
            return part * width * self._item_bytes if self._item_bytes < self._high_precision_bytes else 0
        # Logits of two chunks: those of one are freed when the next exist.
        low_precision_bytes = self._item_bytes if self._item_bytes < self._high_precision_bytes else 0
        return self._loss_chunk_tokens * rows * (2 * self._high_precision_bytes + low_precision_bytes)

    def delayed_wgrad_mtp(self) -> BytesByPart:
        """Return the delayed weight-gradient bytes of an MTP layer and its input projection, without its head."""
        projection = 3 * self._tokens * self._cfg.model.hidden_size * self._item_bytes
        return self.delayed_wgrad_layer(self.mtp_kind) + BytesByPart({"residual stream": projection})

    @property
    def delayed_wgrad_head(self) -> int:
        """Delayed weight-gradient bytes of one output-head GEMM; 0 for a chunked loss, which delays none."""
        width = self._cfg.model.hidden_size + self._cfg.model.vocab_size // self._cfg.parallel.tp
        return 0 if self._loss_chunk_tokens else self._gathered_tokens * self._item_bytes * width

    def delayed_wgrad_layer(self, kind: str) -> BytesByPart:
        """Return the bytes of a layer's GEMM inputs and output gradients."""
        model = self._cfg.model
        p = self._cfg.parallel
        delayed = BytesByPart()
        item = self._gathered_tokens * self._item_bytes
        hidden = model.hidden_size
        query, key_value = self._qkv_widths
        delayed["attention"] = item * (2 * hidden + 2 * query + key_value)
        if kind == "D":
            delayed["dense MLP"] = item * (2 * hidden + 3 * model.ffn_hidden_size // p.tp)
            return delayed
        if not dispatcher_of(self._cfg).moves_experts:
            delayed["experts"] = (
                self.experts.expert_tokens * self._item_bytes * (2 * hidden + 3 * model.moe_ffn_hidden_size // p.etp)
            )
        if model.shared_expert_ffn_hidden_size:
            delayed["shared experts"] = item * (2 * hidden + 3 * model.shared_expert_ffn_hidden_size // p.tp)
        return delayed

    def delayed_wgrad_concurrent(self, kind: str) -> BytesByPart:
        """Return delayed weight-gradient bytes that exist while the layer's saved tensors do: those of looped experts.

        These are the hidden values and inner gradients. Experts that run one after another free their inner projections
        when the last expert is done.
        """
        model = self._cfg.model
        p = self._cfg.parallel
        if kind == "D" or self._kernels.grouped_experts or dispatcher_of(self._cfg).moves_experts:
            return BytesByPart()
        # The output gradient replaces the output where that is saved.
        width = 3 * model.moe_ffn_hidden_size // p.etp + model.hidden_size * self._cfg.moe.weight_in_expert
        return BytesByPart(experts=self.experts.expert_tokens * self._item_bytes * width)

    @cached_property
    def saved_by_kind(self) -> dict[str, BytesByPart]:
        """Bytes that each kind of layer saves for backward."""
        return {kind: self.layer_saved(kind) for kind in set(self._cfg.model.all_layer_kinds)}

    @cached_property
    def without_recompute(self) -> "ActivationMemory":
        """Memory of a layer while it is recomputed: parts inside a larger recomputed part are saved."""
        # A norm is done before the next one is recomputed, and so are experts that run one after another.
        brief = {"norms"} if self._kernels.grouped_experts else {"norms", "expert_activation"}
        if self.recompute <= brief:
            return self
        return ActivationMemory(self._cfg, self.recompute & brief, self._kernels, self._imbalance)

    @cached_property
    def recompute_peak(self) -> dict[str, BytesByPart]:
        """Bytes that each kind of layer has while it is recomputed, in addition to those it saves."""
        return {kind: self.without_recompute.saved_by_kind[kind] - saved for kind, saved in self.saved_by_kind.items()}

    @cached_property
    def transient(self) -> dict[str, BytesByPart]:
        """Peak of temporary bytes while each kind of layer runs or is recomputed."""
        return {
            kind: (self._transient_experts() if kind == "M" else BytesByPart()) + self.transient_norm
            for kind in self.saved_by_kind
        }

    @property
    def transient_norm(self) -> BytesByPart:
        """Temporary bytes of a recomputed norm: its statistics and its output."""
        if "norms" not in self.recompute:
            return BytesByPart()
        return BytesByPart(norms=self._norm(self._tokens, self._cfg.model.hidden_size) + self.hidden_bytes)

    def _transient_experts(self) -> BytesByPart:
        """Return the peak of temporary bytes of the routed experts: one expert at work, or the combine."""
        p = self._cfg.parallel
        combine_bytes = self.experts.combine_buffer()
        if p.ep * p.etp > 1:
            # Outputs in expert order and in sender order; before that, the partial sums of all etp ranks are added.
            sorted_bytes = 2 * self.experts.expert_tokens * self.experts.token_bytes
            reduce_bytes = self.experts.expert_tokens * self.experts.token_bytes if p.etp > 1 else 0
            combine_bytes = BytesByPart({"dispatch buffers": sorted_bytes + max(combine_bytes.total(), reduce_bytes)})
            combine_bytes = max(combine_bytes, self.experts.allgather_combine_buffer(), key=BytesByPart.total)
        return max(self.experts.expert_transient(), combine_bytes, key=BytesByPart.total)

    @property
    def _qkv_widths(self) -> tuple[int, int]:
        """Widths of this rank's queries, and of its keys and values together."""
        model = self._cfg.model
        tp = self._cfg.parallel.tp
        heads = model.num_attention_heads // tp
        if model.attention == "mla":
            return heads * model.head_size, heads * (model.head_size + model.v_head_dim)
        groups = max(1, model.num_query_groups // tp)
        return heads * model.head_size, 2 * groups * model.head_size

    @property
    def _loss_chunk_tokens(self) -> int:
        """Tokens whose logits are in memory at a time; 0: all."""
        chunk = self._cfg.train.loss_chunk
        model = self._cfg.model
        p = self._cfg.parallel
        if chunk < 0:
            chunk = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS * p.tp // model.vocab_size)
        return chunk if 0 < chunk < self._gathered_tokens else 0

    def _norm(self, tokens: int, width: int, *, full_width: bool = False) -> int:
        """Return the bytes that a norm saves besides its input and output: one number per token.

        A norm over all heads together consists of single operations: it also saves the normalised values, and in
        bfloat16 these and its input in float32.
        """
        if not full_width:
            return tokens * self._high_precision_bytes
        return tokens * (
            width * self._high_precision_bytes * (1 if self._item_bytes == self._high_precision_bytes else 2)
            + self._high_precision_bytes
        )

    def _norm_with_output(self, *, saves_output: bool, part: str) -> BytesByPart:
        """Return the bytes of a norm of the residual stream with its output, or with the output gathered over tp."""
        saved = BytesByPart()
        hidden = self._cfg.model.hidden_size
        is_recomputed = "norms" in self.recompute
        if not is_recomputed:
            saved["norms"] += self._norm(self._tokens, hidden)
            saved["norms"] += self.hidden_bytes if saves_output else 0
        if self._cfg.parallel.tp > 1 and part:
            saved[part] += self._gathered_tokens * hidden * self._item_bytes
        return saved

    def _attention(self) -> BytesByPart:
        model = self._cfg.model
        saved = BytesByPart()
        n = self._gathered_tokens
        query, key_value = self._qkv_widths
        if model.attention == "mla":
            saved += self._mla()
        else:
            saved["attention"] += n * self._item_bytes * (query + key_value)
            if model.qk_norm:
                width = query + key_value // 2
                over_heads = model.qk_norm_width == "all_heads"
                saved["norms"] += self._norm(n, width, full_width=over_heads) + n * self._item_bytes * width
        heads = model.num_attention_heads // self._cfg.parallel.tp
        value = heads * (model.v_head_dim if model.attention == "mla" else model.head_size)
        # Ulysses saves the output twice: all tokens of some heads, and some tokens of all heads.
        copies = 2 if self._cfg.parallel.cp > 1 and self._cfg.parallel.context == "ulysses" else 1
        saved["core attention"] += n * self._item_bytes * value * copies
        if "core_attention" not in self.recompute:
            saved["core attention"] += n * heads * self._high_precision_bytes
        return saved

    def _mla(self) -> BytesByPart:
        """Return the bytes that MLA saves: the latents, and the heads projected from them."""
        model = self._cfg.model
        p = self._cfg.parallel
        saved = BytesByPart()
        heads = model.num_attention_heads // p.tp
        n = self._gathered_tokens
        rank = model.kv_lora_rank
        rope = model.qk_rope_head_dim
        query_rank = model.q_lora_rank
        gathered = (query_rank or model.hidden_size) + rank + rope
        saved["attention"] += n * self._item_bytes * gathered + self._tokens * self._item_bytes * (
            query_rank + rank + rope
        )
        saved["norms"] += self._norm(self._tokens, query_rank + rank)
        if "mla_up" not in self.recompute:
            width = max(model.head_size, model.v_head_dim)
            values = width if width > model.v_head_dim else model.qk_nope_head_dim + model.v_head_dim
            saved["attention"] += n * self._item_bytes * heads * (2 * width + values)
        return saved

    def _dense_mlp(self) -> BytesByPart:
        if "dense_mlp" in self.recompute:
            return self._norm_with_output(saves_output=True, part="")
        saved = self._norm_with_output(saves_output=self._cfg.parallel.tp == 1, part="dense MLP")
        saved["dense MLP"] += self._swiglu(self._cfg.model.ffn_hidden_size)
        return saved

    def _swiglu(self, width: int) -> int:
        """Return the bytes that a SwiGLU saves: gate, its SiLU, up and their product."""
        return (
            (3 if self._kernels.fused_swiglu else 4)
            * self._gathered_tokens
            * self._item_bytes
            * width
            // self._cfg.parallel.tp
        )

    def _moe(self) -> BytesByPart:
        model = self._cfg.model
        p = self._cfg.parallel
        if "moe" in self.recompute:
            return self._norm_with_output(saves_output=True, part="") + self.experts.permute_indices()
        is_low_precision = self._item_bytes < self._high_precision_bytes
        has_shared = model.shared_expert_ffn_hidden_size > 0
        saves_input = has_shared and (p.tp == 1 or "shared_experts" in self.recompute)
        saved = self._norm_with_output(saves_output=saves_input or not is_low_precision, part="")
        if has_shared and "shared_experts" not in self.recompute:
            saved["shared experts"] += self._swiglu(model.shared_expert_ffn_hidden_size)
            saved["shared experts"] += self._gathered_tokens * model.hidden_size * self._item_bytes if p.tp > 1 else 0
        routing_bytes = 2 * model.num_experts * self._high_precision_bytes + model.top_k * (
            self._high_precision_bytes + INT_BYTES
        )
        saved["router"] += self._tokens * routing_bytes
        copies_input = is_low_precision and not self._kernels.low_precision_router
        saved["router"] += self._tokens * model.hidden_size * self._high_precision_bytes if copies_input else 0
        return saved + self.experts.saved()

    def head(self) -> BytesByPart:
        """Return the bytes that the last norm and the output head save; a chunked loss saves no logits."""
        model = self._cfg.model
        p = self._cfg.parallel
        saved = BytesByPart()
        saved["norms"] += self._norm(self._tokens, model.hidden_size)
        gathers = p.tp > 1
        saved["logits" if gathers else "norms"] += self._gathered_tokens * model.hidden_size * self._item_bytes
        if self._loss_chunk_tokens:
            saved["logits"] += self._gathered_tokens * (2 * self._high_precision_bytes + INT_BYTES)
        else:
            saved["logits"] += self._gathered_tokens * (
                model.vocab_size // p.tp * self._high_precision_bytes + INT_BYTES + 1
            )
        return saved

    def mtp_layer(self) -> BytesByPart:
        """Return the bytes of an MTP layer: three norms, the input projection, the layer, and another output head."""
        saved = self.layer_saved(self.mtp_kind) + self.head()
        saved["norms"] += 2 * self._norm(self._tokens, self._cfg.model.hidden_size)
        saved["residual stream"] += 4 * self.hidden_bytes
        return saved
