"""Sizes of one micro-batch on one rank; each part of a layer counts its memory with them."""

from functools import cached_property

from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.micro_batch_sizes import MicroBatchSizes
from moefold.cost.saved_tensors import BytesByPart


class BlockSizes(MicroBatchSizes):
    """Sizes of one micro-batch on one rank that decide the saved tensors of a block."""

    @cached_property
    def experts(self) -> ExpertMemory:
        """Memory of the routed experts."""
        return ExpertMemory(self)

    def hidden_norm(self) -> int:
        """Return the bytes that a norm of the residual stream saves besides its input and output.

        LayerNorm saves two numbers per token.
        """
        return self.norm(self.tokens, self.model.hidden_size) * self.model.decoder_layers[0].norm.saved_numbers

    def norm_with_output(self, *, saves_output: bool, part: str = "") -> BytesByPart:
        """Return the bytes of a norm of the residual stream with its output, or with the output gathered over tp.

        A norm of the block's output saves its input, which nothing else saves.
        """
        saved = BytesByPart()
        hidden = self.model.hidden_size
        layer = self.model.decoder_layers[0]
        if layer.residual.norms_output:
            saved["norms"] += self.hidden_norm() + self.hidden_bytes
        if "norms" not in self.recompute and layer.residual.norms_input:
            saved["norms"] += self.hidden_norm()
            saved["norms"] += self.hidden_bytes if saves_output else 0
        if self.parallel.tp > 1 and part:
            saved[part] += self.gathered_bytes(hidden)
        return saved

    def core_attention(self, heads: int, value_width: int) -> BytesByPart:
        """Return the bytes of the output of this rank's heads, and of the logarithms of their softmax sums."""
        p = self.parallel
        # Ulysses saves the output twice: all tokens of some heads, and some tokens of all heads.
        copies = 2 if p.cp > 1 and chosen_in(p, ContextPart).shards_heads else 1
        output = self.gathered_bytes(heads * value_width) * copies
        is_recomputed = "core_attention" in self.recompute
        log_sum = 0 if is_recomputed else self.gathered_tokens * heads * self.high_precision_bytes
        return BytesByPart({"core attention": output + log_sum})
