"""Bytes that one micro-batch leaves in memory for its backward pass, by part of the model. Torch-free.

Each formula lists the tensors that the operations of a part keep; tests hold the sums to within 10 % of what a ledger
of real runs finds. Letters as everywhere: T tokens between the sub-layers, S*B/(cp*tp); N tokens inside them, S*B/cp;
R rows of the routed experts; H, F, A, D, V, E, K sizes (docs/notation.md).
"""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from moefold.config.schedules import SCHEDULES
from moefold.config.schema import Config
from moefold.metrics.expert_memory import ExpertMemory
from moefold.metrics.kept_parts import CUDA, INT_BYTES, Kernels, Parts
from moefold.metrics.state_memory import compute_bytes
from moefold.parallel.stage_plan import Stage

CHUNK_LOGITS, LEAST_CHUNK = 1 << 24, 256
"""Of train.loss_chunk = -1."""
LOSS_TOKENS, LOSS_PARTS, LEAST_LOSS_ROWS = 512, 8, 256
"""Tokens and parts of the vocabulary whose logits are there in the compute type, where the loss works by parts."""


class ActivationFormula:
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
        kernels: Kernels = CUDA,
        imbalance: float = 1.0,
    ) -> None:
        p, train = cfg.parallel, cfg.train
        self._cfg, self._kernels = cfg, kernels
        self.recompute = frozenset(train.recompute if recompute is None else recompute)
        self._imbalance = imbalance
        self._item = compute_bytes(cfg)
        self._wide = max(4, self._item)
        self._inside = train.seq_len // p.cp * train.micro_batch_size
        self._tokens = self._inside // p.tp
        self._postpones = p.pp > 1 and SCHEDULES[p.schedule].splits_backward
        self.experts = ExpertMemory(cfg, self.recompute, kernels, imbalance)

    @property
    def hidden(self) -> int:
        """One hidden state of every token between the sub-layers."""
        return self._tokens * self._cfg.model.hidden_size * self._item

    def layer(self, kind: str) -> Parts:
        """A layer of kind "D" or "M" behind its input."""
        if "layer" in self.recompute:
            # The next layer's input, which is this one's result.
            return Parts({"residual stream": self.hidden}) + (self.experts.places() if kind == "M" else Parts())
        kept = self._norm_and_its_result(keeps_result=self._cfg.parallel.tp == 1, part="attention") + self._attention()
        kept += self._moe() if kind == "M" else self._dense()
        kept["residual stream"] += 2 * self.hidden
        return kept

    def stage(self, stage: Stage) -> Parts:
        """All that a stage keeps of one micro-batch in flight."""
        kept = self.before_layers(stage)
        for kind, count in Counter(self.kinds(stage)).items():
            for part, size in self.layers[kind].items():
                kept[part] += count * size
        return kept + self.behind_layers(stage)

    def forward(self, stage: Stage) -> Parts:
        """The fullest moment of a stage's forward pass."""
        now = self.before_layers(stage)
        best = now
        for kind in self.kinds(stage):
            now = now + self.layers[kind]
            full = now + self.passing[kind]
            best = full if full.total() > best.total() else best
        now = now + self.behind_layers(stage)
        now["logits"] += self.transient_logits if stage.is_last else 0
        return now if now.total() >= best.total() else best

    def backward(self, stage: Stage, *, splits: bool) -> Parts:
        """The fullest moment of a stage's backward pass: what a layer makes again is there, and those behind are gone.

        Args:
            stage: one.
            splits: what the layers behind have postponed is there too.
        """
        now = self.before_layers(stage)
        left = self.postponed(stage) if splits else Parts()
        best = now + left
        for kind in self.kinds(stage):
            now = now + self.layers[kind]
            # Most of what the layer itself postpones is what it has kept, or takes its place.
            left = left - self.postponed_layer(kind) if splits else left
            beside = self.postponed_beside(kind) if splits else Parts()
            full = now + self.again[kind] + self.passing[kind] + left + beside
            best = full if full.total() > best.total() else best
        return best

    @property
    def further_kind(self) -> str:
        """The kind of the layers of multi-token prediction."""
        return self._cfg.model.layer_kinds[-1]

    def kinds(self, stage: Stage) -> list[str]:
        """Of the layers of a stage, without those of multi-token prediction."""
        return [self._cfg.model.layer_kinds[i] for i in stage.parts.layers]

    def before_layers(self, stage: Stage) -> Parts:
        """What a stage keeps of what stands before its layers."""
        return self.embedding() if stage.is_first else Parts()

    def behind_layers(self, stage: Stage) -> Parts:
        """What a stage keeps of what stands behind its layers."""
        if not stage.is_last:
            return Parts()
        kept = self.head()
        for _ in range(stage.parts.num_further):
            kept += self.further()
        return kept

    def embedding(self) -> Parts:
        """What the embedding keeps."""
        return Parts(embedding=self.hidden)

    @property
    def transient_logits(self) -> int:
        """What the loss has in memory beside what it keeps."""
        rows = self._cfg.model.vocab_size // self._cfg.parallel.tp
        if not self._chunk:
            if not self._kernels.loss_by_parts or self._postpones:
                return self._inside * rows * self._item
            part = min(rows, max(LEAST_LOSS_ROWS, rows // LOSS_PARTS))
            # A narrow product beside its wide copy, or where it is taken wide a copy of its operands.
            width = min(LOSS_TOKENS, self._inside) + self._cfg.model.hidden_size
            return part * width * self._item if self._item < self._wide else 0
        # The logits of two chunks, as the last ones go when the next ones are there.
        narrow = self._item if self._item < self._wide else 0
        return self._chunk * rows * (2 * self._wide + narrow)

    def postponed(self, stage: Stage) -> Parts:
        """What a split backward pass leaves of a micro-batch until its weight gradients are computed."""
        left = Parts()
        for kind in self.kinds(stage):
            left += self.postponed_layer(kind)
        for _ in range(stage.parts.num_further):
            left += self.postponed_further()
        if stage.is_last:
            left["logits"] += (1 + stage.parts.num_further) * self.postponed_head
        return left

    def postponed_further(self) -> Parts:
        """Of a layer of multi-token prediction without its head: of the layer, and of the projection to its input."""
        projection = 3 * self._tokens * self._cfg.model.hidden_size * self._item
        return self.postponed_layer(self.further_kind) + Parts({"residual stream": projection})

    @property
    def postponed_head(self) -> int:
        """Of one product with the output head; in chunks of the loss it makes its weights' gradients at once."""
        width = self._cfg.model.hidden_size + self._cfg.model.vocab_size // self._cfg.parallel.tp
        return 0 if self._chunk else self._inside * self._item * width

    def postponed_layer(self, kind: str) -> Parts:
        """The inputs of the products of a layer and the gradients of their results."""
        model, p, left = self._cfg.model, self._cfg.parallel, Parts()
        item, hidden = self._inside * self._item, model.hidden_size
        query, key_value = self._head_widths
        left["attention"] = item * (2 * hidden + 2 * query + key_value)
        if kind == "D":
            left["dense MLP"] = item * (2 * hidden + 3 * model.ffn_hidden_size // p.tp)
            return left
        if p.dispatcher != "leastloaded":
            left["experts"] = self.experts.rows * self._item * (2 * hidden + 3 * model.moe_ffn_hidden_size // p.etp)
        if model.shared_expert_ffn_hidden_size:
            left["shared experts"] = item * (2 * hidden + 3 * model.shared_expert_ffn_hidden_size // p.tp)
        return left

    def postponed_beside(self, kind: str) -> Parts:
        """What a layer postpones while it still has all that it kept: the hidden values and inner gradients of experts.

        Experts that run one after another let go of their inner projections when the last of them is through.
        """
        model, p = self._cfg.model, self._cfg.parallel
        if kind == "D" or self._kernels.grouped_experts or p.dispatcher == "leastloaded":
            return Parts()
        # The gradient of the results takes the place of the results, where these are kept.
        width = 3 * model.moe_ffn_hidden_size // p.etp + model.hidden_size * self._cfg.moe.weight_in_expert
        return Parts(experts=self.experts.rows * self._item * width)

    @cached_property
    def layers(self) -> dict[str, Parts]:
        """What each kind of layer keeps."""
        return {kind: self.layer(kind) for kind in set(self._cfg.model.all_layer_kinds)}

    @cached_property
    def whole(self) -> "ActivationFormula":
        """What is there while a layer runs again: what it would keep if no larger part of it ran again."""
        # A norm is over before the next one runs again, and so are experts that run one after another.
        brief = {"norms"} if self._kernels.grouped_experts else {"norms", "expert_activation"}
        if self.recompute <= brief:
            return self
        return ActivationFormula(self._cfg, self.recompute & brief, self._kernels, self._imbalance)

    @cached_property
    def again(self) -> dict[str, Parts]:
        """What is there of each kind of layer while it runs again, beside what it keeps."""
        return {kind: self.whole.layers[kind] - kept for kind, kept in self.layers.items()}

    @cached_property
    def passing(self) -> dict[str, Parts]:
        """What passes while each kind of layer runs, for the first time or again."""
        return {kind: (self._passing_experts() if kind == "M" else Parts()) + self.passing_norm for kind in self.layers}

    @property
    def passing_norm(self) -> Parts:
        """A norm whose result is made again: what it works with, and the result."""
        if "norms" not in self.recompute:
            return Parts()
        return Parts(norms=self._norm(self._tokens, self._cfg.model.hidden_size) + self.hidden)

    def _passing_experts(self) -> Parts:
        """The largest moment of the routed experts: one of them at work, or the sum of the results of all."""
        p, summing = self._cfg.parallel, self.experts.summing()
        if p.ep * p.etp > 1:
            # Results in the order of experts and of senders; before, the parts from all etp ranks are added up.
            both = 2 * self.experts.rows * self.experts.row
            added = self.experts.rows * self.experts.row if p.etp > 1 else 0
            summing = Parts({"dispatch buffers": both + max(summing.total(), added)})
            summing = max(summing, self.experts.gathered_sums(), key=Parts.total)
        return max(self.experts.at_work(), summing, key=Parts.total)

    @property
    def _head_widths(self) -> tuple[int, int]:
        """Queries, and keys with values, of this rank's heads."""
        model, tp = self._cfg.model, self._cfg.parallel.tp
        heads = model.num_attention_heads // tp
        if model.attention == "mla":
            return heads * model.head_size, heads * (model.head_size + model.v_head_dim)
        groups = max(1, model.num_query_groups // tp)
        return heads * model.head_size, 2 * groups * model.head_size

    @property
    def _chunk(self) -> int:
        """Tokens whose logits are there at a time; 0: all."""
        chunk, model, p = self._cfg.train.loss_chunk, self._cfg.model, self._cfg.parallel
        if chunk < 0:
            chunk = max(LEAST_CHUNK, CHUNK_LOGITS * p.tp // model.vocab_size)
        return chunk if 0 < chunk < self._inside else 0

    def _norm(self, tokens: int, width: int, *, over_heads: bool = False) -> int:
        """What a norm keeps beside its input in the compute type and its result: one number a token.

        That over all heads together is made of single operations: it also keeps the normalised values, and in bfloat16
        these and its input in float32.
        """
        if not over_heads:
            return tokens * self._wide
        return tokens * (width * self._wide * (1 if self._item == self._wide else 2) + self._wide)

    def _norm_and_its_result(self, *, keeps_result: bool, part: str) -> Parts:
        """A norm of the residual stream, with its result or the copy of it that is gathered over tp."""
        kept, hidden = Parts(), self._cfg.model.hidden_size
        recalled = "norms" in self.recompute
        if not recalled:
            kept["norms"] += self._norm(self._tokens, hidden)
            kept["norms"] += self.hidden if keeps_result else 0
        if self._cfg.parallel.tp > 1 and part:
            kept[part] += self._inside * hidden * self._item
        return kept

    def _attention(self) -> Parts:
        model, kept, n = self._cfg.model, Parts(), self._inside
        query, key_value = self._head_widths
        if model.attention == "mla":
            kept += self._latents()
        else:
            kept["attention"] += n * self._item * (query + key_value)
            if model.qk_norm:
                width = query + key_value // 2
                over_heads = model.qk_norm_width == "all_heads"
                kept["norms"] += self._norm(n, width, over_heads=over_heads) + n * self._item * width
        heads = model.num_attention_heads // self._cfg.parallel.tp
        value = heads * (model.v_head_dim if model.attention == "mla" else model.head_size)
        # Ulysses keeps the result with all tokens of some heads, and with some tokens of all heads.
        copies = 2 if self._cfg.parallel.cp > 1 and self._cfg.parallel.context == "ulysses" else 1
        kept["core attention"] += n * self._item * value * copies
        if "core_attention" not in self.recompute:
            kept["core attention"] += n * heads * self._wide
        return kept

    def _latents(self) -> Parts:
        """The latents that heads are made of, and the heads."""
        model, p, kept = self._cfg.model, self._cfg.parallel, Parts()
        heads, n = model.num_attention_heads // p.tp, self._inside
        rank, rope, query_rank = model.kv_lora_rank, model.qk_rope_head_dim, model.q_lora_rank
        gathered = (query_rank or model.hidden_size) + rank + rope
        kept["attention"] += n * self._item * gathered + self._tokens * self._item * (query_rank + rank + rope)
        kept["norms"] += self._norm(self._tokens, query_rank + rank)
        if "mla_up" not in self.recompute:
            width = max(model.head_size, model.v_head_dim)
            values = width if width > model.v_head_dim else model.qk_nope_head_dim + model.v_head_dim
            kept["attention"] += n * self._item * heads * (2 * width + values)
        return kept

    def _dense(self) -> Parts:
        if "dense_mlp" in self.recompute:
            return self._norm_and_its_result(keeps_result=True, part="")
        kept = self._norm_and_its_result(keeps_result=self._cfg.parallel.tp == 1, part="dense MLP")
        kept["dense MLP"] += self._swiglu(self._cfg.model.ffn_hidden_size)
        return kept

    def _swiglu(self, width: int) -> int:
        """Gate, its SiLU, up and their product."""
        return (3 if self._kernels.fused_swiglu else 4) * self._inside * self._item * width // self._cfg.parallel.tp

    def _moe(self) -> Parts:
        model, p = self._cfg.model, self._cfg.parallel
        if "moe" in self.recompute:
            return self._norm_and_its_result(keeps_result=True, part="") + self.experts.places()
        is_narrow = self._item < self._wide
        has_shared = model.shared_expert_ffn_hidden_size > 0
        whole_shared = has_shared and (p.tp == 1 or "shared_experts" in self.recompute)
        kept = self._norm_and_its_result(keeps_result=whole_shared or not is_narrow, part="")
        if has_shared and "shared_experts" not in self.recompute:
            kept["shared experts"] += self._swiglu(model.shared_expert_ffn_hidden_size)
            kept["shared experts"] += self._inside * model.hidden_size * self._item if p.tp > 1 else 0
        choices = 2 * model.num_experts * self._wide + model.top_k * (self._wide + INT_BYTES)
        kept["router"] += self._tokens * choices
        copies_input = is_narrow and not self._kernels.narrow_router
        kept["router"] += self._tokens * model.hidden_size * self._wide if copies_input else 0
        return kept + self.experts.kept()

    def head(self) -> Parts:
        """The last norm, and the logits or what is kept instead."""
        model, p, kept = self._cfg.model, self._cfg.parallel, Parts()
        kept["norms"] += self._norm(self._tokens, model.hidden_size)
        gathers = p.tp > 1
        kept["logits" if gathers else "norms"] += self._inside * model.hidden_size * self._item
        if self._chunk:
            kept["logits"] += self._inside * (2 * self._wide + INT_BYTES)
        else:
            kept["logits"] += self._inside * (model.vocab_size // p.tp * self._wide + INT_BYTES + 1)
        return kept

    def further(self) -> Parts:
        """A layer of multi-token prediction: three norms, the projection's input, the layer, and logits once more."""
        kept = self.layer(self.further_kind) + self.head()
        kept["norms"] += 2 * self._norm(self._tokens, self._cfg.model.hidden_size)
        kept["residual stream"] += 4 * self.hidden
        return kept
