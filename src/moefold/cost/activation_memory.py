"""Bytes that one micro-batch leaves in memory for its backward pass, by part of the model. Torch-free.

Each formula lists the tensors that the operations of a part keep; tests hold the sums to within 10 % of what a ledger
of real runs finds. Letters as everywhere: T tokens between the sub-layers, S*B/(cp*tp); N tokens inside them, S*B/cp;
R rows of the routed experts; H, F, A, D, V, E, K sizes (docs/notation.md).
"""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from moefold.config.schema import Config
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.saved_tensors import CUDA_KERNELS, INT_BYTES, BytesByPart, KernelProfile
from moefold.cost.state_memory import compute_dtype_bytes
from moefold.topology.dispatchers import dispatcher_of
from moefold.topology.schedule_tables import SCHEDULES
from moefold.topology.stages import Stage

CHUNK_LOGITS, MIN_CHUNK_TOKENS = 1 << 24, 256
"""Of train.loss_chunk = -1."""
LOSS_TILE_TOKENS, LOSS_VOCAB_TILES, MIN_LOSS_VOCAB_ROWS = 512, 8, 256
"""Tokens and parts of the vocabulary whose logits are there in the compute type, where the loss works by parts."""


class ActivationMemory:
    """What the layers of a config keep on one rank.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that run again; None takes those of the recipe.
        kernels: of the device.
        imbalance: rows of the fullest rank's experts over the mean of all ranks.
    """

    def __init__(
        self,
        cfg: Config,
        recompute: Iterable[str] | None = None,
        kernels: KernelProfile = CUDA_KERNELS,
        imbalance: float = 1.0,
    ) -> None:
        p, train = cfg.parallel, cfg.train
        self._cfg, self._kernels = cfg, kernels
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
        """One hidden state of every token between the sub-layers."""
        return self._tokens * self._cfg.model.hidden_size * self._item_bytes

    def layer_saved(self, kind: str) -> BytesByPart:
        """A layer of kind "D" or "M" behind its input."""
        if "layer" in self.recompute:
            # The next layer's input, which is this one's result.
            return BytesByPart({"residual stream": self.hidden_bytes}) + (
                self.experts.permute_indices() if kind == "M" else BytesByPart()
            )
        kept = self._norm_with_output(saves_output=self._cfg.parallel.tp == 1, part="attention") + self._attention()
        kept += self._moe() if kind == "M" else self._dense_mlp()
        kept["residual stream"] += 2 * self.hidden_bytes
        return kept

    def stage_saved(self, stage: Stage) -> BytesByPart:
        """All that a stage keeps of one micro-batch in flight."""
        kept = self.embedding_part(stage)
        for kind, count in Counter(self.kinds(stage)).items():
            for part, size in self.saved_by_kind[kind].items():
                kept[part] += count * size
        return kept + self.head_part(stage)

    def forward_peak(self, stage: Stage) -> BytesByPart:
        """The fullest moment of a stage's forward pass."""
        now = self.embedding_part(stage)
        best = now
        for kind in self.kinds(stage):
            now = now + self.saved_by_kind[kind]
            full = now + self.transient[kind]
            best = full if full.total() > best.total() else best
        now = now + self.head_part(stage)
        now["logits"] += self.transient_logits if stage.is_last else 0
        return now if now.total() >= best.total() else best

    def backward_peak(self, stage: Stage, *, splits_backward: bool) -> BytesByPart:
        """The fullest moment of a stage's backward pass: what a layer makes again is there, and those behind are gone.

        Args:
            stage_saved: one.
            splits_backward: what the layers behind have postponed is there too.
        """
        now = self.embedding_part(stage)
        left = self.delayed_wgrad(stage) if splits_backward else BytesByPart()
        best = now + left
        for kind in self.kinds(stage):
            now = now + self.saved_by_kind[kind]
            # Most of what the layer itself postpones is what it has kept, or takes its place.
            left = left - self.delayed_wgrad_layer(kind) if splits_backward else left
            beside = self.delayed_wgrad_concurrent(kind) if splits_backward else BytesByPart()
            full = now + self.recompute_peak[kind] + self.transient[kind] + left + beside
            best = full if full.total() > best.total() else best
        return best

    @property
    def mtp_kind(self) -> str:
        """The kind of the layers of multi-token prediction."""
        return self._cfg.model.layer_kinds[-1]

    def kinds(self, stage: Stage) -> list[str]:
        """Of the layers of a stage, without those of multi-token prediction."""
        return [self._cfg.model.layer_kinds[i] for i in stage.parts.layers]

    def embedding_part(self, stage: Stage) -> BytesByPart:
        """What a stage keeps of what stands before its layers."""
        return self.embedding() if stage.is_first else BytesByPart()

    def head_part(self, stage: Stage) -> BytesByPart:
        """What a stage keeps of what stands behind its layers."""
        if not stage.is_last:
            return BytesByPart()
        kept = self.head()
        for _ in range(stage.parts.num_mtp_layers):
            kept += self.mtp_layer()
        return kept

    def embedding(self) -> BytesByPart:
        """What the embedding keeps."""
        return BytesByPart(embedding=self.hidden_bytes)

    @property
    def transient_logits(self) -> int:
        """What the loss has in memory beside what it keeps."""
        rows = self._cfg.model.vocab_size // self._cfg.parallel.tp
        if not self._loss_chunk_tokens:
            if not self._kernels.tiled_loss or self._delays_wgrad:
                return self._gathered_tokens * rows * self._item_bytes
            part = min(rows, max(MIN_LOSS_VOCAB_ROWS, rows // LOSS_VOCAB_TILES))
            # A narrow product beside its wide copy, or where it is taken wide a copy of its operands.
            width = min(LOSS_TILE_TOKENS, self._gathered_tokens) + self._cfg.model.hidden_size
            return part * width * self._item_bytes if self._item_bytes < self._high_precision_bytes else 0
        # The logits of two chunks, as the last ones go when the next ones are there.
        narrow = self._item_bytes if self._item_bytes < self._high_precision_bytes else 0
        return self._loss_chunk_tokens * rows * (2 * self._high_precision_bytes + narrow)

    def delayed_wgrad(self, stage: Stage) -> BytesByPart:
        """What a split backward pass leaves of a micro-batch until its weight gradients are computed."""
        left = BytesByPart()
        for kind in self.kinds(stage):
            left += self.delayed_wgrad_layer(kind)
        for _ in range(stage.parts.num_mtp_layers):
            left += self.delayed_wgrad_mtp()
        if stage.is_last:
            left["logits"] += (1 + stage.parts.num_mtp_layers) * self.delayed_wgrad_head
        return left

    def delayed_wgrad_mtp(self) -> BytesByPart:
        """Of a layer of multi-token prediction without its head: of the layer, and of the projection to its input."""
        projection = 3 * self._tokens * self._cfg.model.hidden_size * self._item_bytes
        return self.delayed_wgrad_layer(self.mtp_kind) + BytesByPart({"residual stream": projection})

    @property
    def delayed_wgrad_head(self) -> int:
        """Of one product with the output head; in chunks of the loss it makes its weights' gradients at once."""
        width = self._cfg.model.hidden_size + self._cfg.model.vocab_size // self._cfg.parallel.tp
        return 0 if self._loss_chunk_tokens else self._gathered_tokens * self._item_bytes * width

    def delayed_wgrad_layer(self, kind: str) -> BytesByPart:
        """The inputs of the products of a layer and the gradients of their results."""
        model, p, left = self._cfg.model, self._cfg.parallel, BytesByPart()
        item, hidden = self._gathered_tokens * self._item_bytes, model.hidden_size
        query, key_value = self._qkv_widths
        left["attention"] = item * (2 * hidden + 2 * query + key_value)
        if kind == "D":
            left["dense MLP"] = item * (2 * hidden + 3 * model.ffn_hidden_size // p.tp)
            return left
        if not dispatcher_of(self._cfg).moves_experts:
            left["experts"] = (
                self.experts.expert_tokens * self._item_bytes * (2 * hidden + 3 * model.moe_ffn_hidden_size // p.etp)
            )
        if model.shared_expert_ffn_hidden_size:
            left["shared experts"] = item * (2 * hidden + 3 * model.shared_expert_ffn_hidden_size // p.tp)
        return left

    def delayed_wgrad_concurrent(self, kind: str) -> BytesByPart:
        """What a layer postpones while it still has all that it kept: the hidden values and inner gradients of experts.

        Experts that run one after another let go of their inner projections when the last of them is through.
        """
        model, p = self._cfg.model, self._cfg.parallel
        if kind == "D" or self._kernels.grouped_experts or dispatcher_of(self._cfg).moves_experts:
            return BytesByPart()
        # The gradient of the results takes the place of the results, where these are kept.
        width = 3 * model.moe_ffn_hidden_size // p.etp + model.hidden_size * self._cfg.moe.weight_in_expert
        return BytesByPart(experts=self.experts.expert_tokens * self._item_bytes * width)

    @cached_property
    def saved_by_kind(self) -> dict[str, BytesByPart]:
        """What each kind of layer keeps."""
        return {kind: self.layer_saved(kind) for kind in set(self._cfg.model.all_layer_kinds)}

    @cached_property
    def without_recompute(self) -> "ActivationMemory":
        """What is there while a layer runs again: what it would keep if no larger part of it ran again."""
        # A norm is over before the next one runs again, and so are experts that run one after another.
        brief = {"norms"} if self._kernels.grouped_experts else {"norms", "expert_activation"}
        if self.recompute <= brief:
            return self
        return ActivationMemory(self._cfg, self.recompute & brief, self._kernels, self._imbalance)

    @cached_property
    def recompute_peak(self) -> dict[str, BytesByPart]:
        """What is there of each kind of layer while it runs again, beside what it keeps."""
        return {kind: self.without_recompute.saved_by_kind[kind] - kept for kind, kept in self.saved_by_kind.items()}

    @cached_property
    def transient(self) -> dict[str, BytesByPart]:
        """What passes while each kind of layer runs, for the first time or again."""
        return {
            kind: (self._transient_experts() if kind == "M" else BytesByPart()) + self.transient_norm
            for kind in self.saved_by_kind
        }

    @property
    def transient_norm(self) -> BytesByPart:
        """A norm whose result is made again: what it works with, and the result."""
        if "norms" not in self.recompute:
            return BytesByPart()
        return BytesByPart(norms=self._norm(self._tokens, self._cfg.model.hidden_size) + self.hidden_bytes)

    def _transient_experts(self) -> BytesByPart:
        """The largest moment of the routed experts: one of them at work, or the sum of the results of all."""
        p, summing = self._cfg.parallel, self.experts.combine_buffer()
        if p.ep * p.etp > 1:
            # Results in the order of experts and of senders; before, the parts from all etp ranks are added up.
            both = 2 * self.experts.expert_tokens * self.experts.token_bytes
            added = self.experts.expert_tokens * self.experts.token_bytes if p.etp > 1 else 0
            summing = BytesByPart({"dispatch buffers": both + max(summing.total(), added)})
            summing = max(summing, self.experts.allgather_combine_buffer(), key=BytesByPart.total)
        return max(self.experts.expert_transient(), summing, key=BytesByPart.total)

    @property
    def _qkv_widths(self) -> tuple[int, int]:
        """Queries, and keys with values, of this rank's heads."""
        model, tp = self._cfg.model, self._cfg.parallel.tp
        heads = model.num_attention_heads // tp
        if model.attention == "mla":
            return heads * model.head_size, heads * (model.head_size + model.v_head_dim)
        groups = max(1, model.num_query_groups // tp)
        return heads * model.head_size, 2 * groups * model.head_size

    @property
    def _loss_chunk_tokens(self) -> int:
        """Tokens whose logits are there at a time; 0: all."""
        chunk, model, p = self._cfg.train.loss_chunk, self._cfg.model, self._cfg.parallel
        if chunk < 0:
            chunk = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS * p.tp // model.vocab_size)
        return chunk if 0 < chunk < self._gathered_tokens else 0

    def _norm(self, tokens: int, width: int, *, full_width: bool = False) -> int:
        """What a norm keeps beside its input in the compute type and its result: one number a token.

        That over all heads together is made of single operations: it also keeps the normalised values, and in bfloat16
        these and its input in float32.
        """
        if not full_width:
            return tokens * self._high_precision_bytes
        return tokens * (
            width * self._high_precision_bytes * (1 if self._item_bytes == self._high_precision_bytes else 2)
            + self._high_precision_bytes
        )

    def _norm_with_output(self, *, saves_output: bool, part: str) -> BytesByPart:
        """A norm of the residual stream, with its result or the copy of it that is gathered over tp."""
        kept, hidden = BytesByPart(), self._cfg.model.hidden_size
        recalled = "norms" in self.recompute
        if not recalled:
            kept["norms"] += self._norm(self._tokens, hidden)
            kept["norms"] += self.hidden_bytes if saves_output else 0
        if self._cfg.parallel.tp > 1 and part:
            kept[part] += self._gathered_tokens * hidden * self._item_bytes
        return kept

    def _attention(self) -> BytesByPart:
        model, kept, n = self._cfg.model, BytesByPart(), self._gathered_tokens
        query, key_value = self._qkv_widths
        if model.attention == "mla":
            kept += self._mla()
        else:
            kept["attention"] += n * self._item_bytes * (query + key_value)
            if model.qk_norm:
                width = query + key_value // 2
                over_heads = model.qk_norm_width == "all_heads"
                kept["norms"] += self._norm(n, width, full_width=over_heads) + n * self._item_bytes * width
        heads = model.num_attention_heads // self._cfg.parallel.tp
        value = heads * (model.v_head_dim if model.attention == "mla" else model.head_size)
        # Ulysses keeps the result with all tokens of some heads, and with some tokens of all heads.
        copies = 2 if self._cfg.parallel.cp > 1 and self._cfg.parallel.context == "ulysses" else 1
        kept["core attention"] += n * self._item_bytes * value * copies
        if "core_attention" not in self.recompute:
            kept["core attention"] += n * heads * self._high_precision_bytes
        return kept

    def _mla(self) -> BytesByPart:
        """The latents that heads are made of, and the heads."""
        model, p, kept = self._cfg.model, self._cfg.parallel, BytesByPart()
        heads, n = model.num_attention_heads // p.tp, self._gathered_tokens
        rank, rope, query_rank = model.kv_lora_rank, model.qk_rope_head_dim, model.q_lora_rank
        gathered = (query_rank or model.hidden_size) + rank + rope
        kept["attention"] += n * self._item_bytes * gathered + self._tokens * self._item_bytes * (
            query_rank + rank + rope
        )
        kept["norms"] += self._norm(self._tokens, query_rank + rank)
        if "mla_up" not in self.recompute:
            width = max(model.head_size, model.v_head_dim)
            values = width if width > model.v_head_dim else model.qk_nope_head_dim + model.v_head_dim
            kept["attention"] += n * self._item_bytes * heads * (2 * width + values)
        return kept

    def _dense_mlp(self) -> BytesByPart:
        if "dense_mlp" in self.recompute:
            return self._norm_with_output(saves_output=True, part="")
        kept = self._norm_with_output(saves_output=self._cfg.parallel.tp == 1, part="dense MLP")
        kept["dense MLP"] += self._swiglu(self._cfg.model.ffn_hidden_size)
        return kept

    def _swiglu(self, width: int) -> int:
        """Gate, its SiLU, up and their product."""
        return (
            (3 if self._kernels.fused_swiglu else 4)
            * self._gathered_tokens
            * self._item_bytes
            * width
            // self._cfg.parallel.tp
        )

    def _moe(self) -> BytesByPart:
        model, p = self._cfg.model, self._cfg.parallel
        if "moe" in self.recompute:
            return self._norm_with_output(saves_output=True, part="") + self.experts.permute_indices()
        is_narrow = self._item_bytes < self._high_precision_bytes
        has_shared = model.shared_expert_ffn_hidden_size > 0
        whole_shared = has_shared and (p.tp == 1 or "shared_experts" in self.recompute)
        kept = self._norm_with_output(saves_output=whole_shared or not is_narrow, part="")
        if has_shared and "shared_experts" not in self.recompute:
            kept["shared experts"] += self._swiglu(model.shared_expert_ffn_hidden_size)
            kept["shared experts"] += self._gathered_tokens * model.hidden_size * self._item_bytes if p.tp > 1 else 0
        choices = 2 * model.num_experts * self._high_precision_bytes + model.top_k * (
            self._high_precision_bytes + INT_BYTES
        )
        kept["router"] += self._tokens * choices
        copies_input = is_narrow and not self._kernels.low_precision_router
        kept["router"] += self._tokens * model.hidden_size * self._high_precision_bytes if copies_input else 0
        return kept + self.experts.saved()

    def head(self) -> BytesByPart:
        """The last norm, and the logits or what is kept instead."""
        model, p, kept = self._cfg.model, self._cfg.parallel, BytesByPart()
        kept["norms"] += self._norm(self._tokens, model.hidden_size)
        gathers = p.tp > 1
        kept["logits" if gathers else "norms"] += self._gathered_tokens * model.hidden_size * self._item_bytes
        if self._loss_chunk_tokens:
            kept["logits"] += self._gathered_tokens * (2 * self._high_precision_bytes + INT_BYTES)
        else:
            kept["logits"] += self._gathered_tokens * (
                model.vocab_size // p.tp * self._high_precision_bytes + INT_BYTES + 1
            )
        return kept

    def mtp_layer(self) -> BytesByPart:
        """A layer of multi-token prediction: three norms, the projection's input, the layer, and logits once more."""
        kept = self.layer_saved(self.mtp_kind) + self.head()
        kept["norms"] += 2 * self._norm(self._tokens, self._cfg.model.hidden_size)
        kept["residual stream"] += 4 * self.hidden_bytes
        return kept
