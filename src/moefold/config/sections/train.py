"""The [train] section: batch, optimizer, learning rate, memory savings and evaluation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moefold.config.base.field import POSITIVE, Bound, MaxMagnitude, ReadIf, VerifyAs, at_least
from moefold.config.base.limits import MAX_SAMPLE_TOKENS, MAX_STEPS
from moefold.config.base.loss_chunk import automatic_loss_chunk
from moefold.config.base.part import KindOf, Part, Section
from moefold.config.base.path_rules import NO_TILDE

AUTO_RECOMPUTE = "auto"
"""Only value of the list `train.recompute` if the parts follow from the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Section):
    """Batch, optimizer, learning-rate schedule, memory savings and evaluation."""

    seq_len: Annotated[int, at_least(1), MaxMagnitude(MAX_SAMPLE_TOKENS), VerifyAs.SIZE] = 256
    """Tokens per sample, S."""
    micro_batch_size: Annotated[int, at_least(1), MaxMagnitude(2**22)] = 1
    """Samples per micro-batch, B."""
    global_batch_size: Annotated[int, at_least(1), MaxMagnitude(2**22), VerifyAs.SIZE] = 8
    """Samples per optimizer step over all ranks."""
    optimizer: Annotated[str | Part, KindOf("optimizer")] = "adamw"
    """Update of the weights."""
    lr: Annotated[float, POSITIVE] = 3e-4
    """Peak learning rate ([defaults by method](recipe.md#learning-rates-by-method))."""
    warmup_steps: Annotated[int, at_least(0), MaxMagnitude(MAX_STEPS)] = 0
    """Steps of linear warm-up from 0. If the command line sets run.steps too low for it, warmup_steps and decay_steps
    shrink in proportion, and the log reports it. Refused if the command line sets both and they do not fit."""
    lr_schedule: Annotated[str | Part, KindOf("lr_schedule")] = "cosine"
    """Shape of the schedule after the warm-up."""
    reset_moments_every: Annotated[int, at_least(0, "0: never")] = 0
    """Zero the optimizer moments after every this many steps, with the step count of AdamW's bias correction. Weights
    and learning rate are kept ([memory.md](memory.md#resets-of-the-optimizer-state)). 0: never."""
    clip_grad: Annotated[float, at_least(0, "0: off")] = 1.0
    """Maximum global gradient norm. 0 turns clipping off."""
    recompute: Annotated[tuple[str, ...], VerifyAs.SPEED] = ()
    """Parts of the layers that are not saved for backward but recomputed (activation checkpointing): norms,
    core_attention, mla_up, dense_mlp, expert_activation, shared_experts, moe, layer ([memory.md](memory.md)). Bitwise
    the same result. auto, as the only value: the cheapest set of parts whose step fits into memory_budget_gib."""
    memory_budget_gib: Annotated[float, at_least(0, "0: the device's"), VerifyAs.SPEED] = 0.0
    """Estimated peak memory per rank that recompute "auto" may use. 0: 90 % of the smallest GPU's memory, and refused
    on CPU."""
    offload: Annotated[tuple[str, ...], VerifyAs.SPEED] = ()
    """Parts of the layers whose activations are offloaded between the passes: norms, core_attention, dense_mlp,
    expert_activation, shared_experts, moe, layer ([memory.md](memory.md)). Bitwise the same result."""
    offload_to: Annotated[Literal["host", "ssd"], ReadIf("train.offload"), VerifyAs.SPEED] = "host"
    """host: host memory, for GPUs. ssd: an unnamed file in offload_dir that is deleted with the process."""
    offload_optimizer: Annotated[Literal["none", "host", "ssd"], VerifyAs.SPEED] = "none"
    """Place of the optimizer moments between steps: with the weights, in host memory (for GPUs), or in
    memory-mapped files in offload_dir. Bitwise the same result."""
    offload_dir: Annotated[str, NO_TILDE, VerifyAs.SPEED] = ""
    """Folder on a local disk (ssd), created if its parent folder exists."""
    offload_min_kib: Annotated[
        int, at_least(0, "0: all"), ReadIf("train.offload train.offload_optimizer"), VerifyAs.SPEED
    ] = 1024
    """Minimum size of an offloaded block of activations, or of one parameter's moment on one rank, in KiB. Smaller ones
    stay in memory."""
    offload_limit_gib: Annotated[float, at_least(0, "0: no limit"), ReadIf("train.offload"), VerifyAs.SPEED] = 0.0
    """Maximum that a rank offloads at a time, in GiB. The rest stays in memory. 0: no limit. In host memory a block
    counts as the power of two that torch allocates for it."""
    offload_waits: Annotated[bool, ReadIf("train.offload"), VerifyAs.SPEED] = False
    """Let the forward pass wait for the copies: memory use is then minimal however slow the copies are. false: tensors
    that cannot be copied out and back in time stay in memory."""
    precision: Annotated[Literal["dtype", "fp8-blockwise", "mxfp8", "nvfp4"], VerifyAs.FORMAT] = "dtype"
    """Number format of the operands of the layers' GEMMs, forward and backward ([fp8.md](fp8.md)). dtype: run.dtype.
    Embedding, head, router, norms and attention scores stay in run.dtype, master weights in float32."""
    loss: Annotated[str | Part, KindOf("loss"), ReadIf("rl.group_size=0")] = "next_token"
    """Loss of the last stage, on all data except preferences and rollouts."""
    loss_chunk: Annotated[
        int, Bound("must be at least 0 (0: all), or -1 (automatic)", lambda tokens: tokens >= -1), VerifyAs.SPEED
    ] = -1
    """Tokens of a rank whose logits are in memory at a time. The backward pass recomputes them. 0: all tokens of a
    micro-batch, without recomputation. -1: as 0 up to 2**28 logits (1 GiB in float32) of a micro-batch on a rank.
    Above, the tokens with 2**28 logits on a GPU or 2**24 on a CPU, at least 256, which is logged."""
    mtp_loss: Annotated[float, POSITIVE, ReadIf("model.mtp_layers")] = 0.3
    """Coefficient of the mean MTP (multi-token prediction) loss (model.mtp_layers)."""
    indexer_stage: Annotated[Literal["sparse", "warmup"], ReadIf("model.attention.indexer")] = "sparse"
    """Stage of sparse attention (model.attention.indexer). warmup: attention is dense, and only the indexers learn,
    using the attention probabilities over all keys. sparse: attention over selected keys. The model and the indexers
    learn."""
    indexer_loss: Annotated[float, at_least(0, "0: the indexers do not learn"), ReadIf("model.attention.indexer")] = 1.0
    """Coefficient of the indexers' loss: the KL divergence of an indexer's softmax from the attention probabilities,
    mean over the tokens without padding, sum over the layers. It has no gradient for other weights. 0: no learning."""
    eval_every: Annotated[int, at_least(0, "0: never"), MaxMagnitude(MAX_STEPS), VerifyAs.FILES] = 0
    """Evaluate on held-out text every this many steps and after the last one. 0: never."""
    eval_at_start: Annotated[bool, ReadIf("train.eval_every"), ReadIf("rl.group_size=0"), VerifyAs.FILES] = False
    """Also evaluate before the first step: a line of step 0 in metrics.jsonl."""
    eval_samples: Annotated[int, at_least(1), MaxMagnitude(2**26), ReadIf("train.eval_every"), VerifyAs.FILES] = 16
    """Held-out samples per evaluation, each used once, or all samples if there are fewer."""

    @property
    def quantizes_gemms(self) -> bool:
        """Return whether the operands of the layers' GEMMs have a number format other than run.dtype."""
        return self.precision != "dtype"

    @property
    def tokens_per_step(self) -> int:
        """Tokens per global batch."""
        return self.global_batch_size * self.seq_len

    def num_micro_batches(self, dp: int) -> int:
        """Return the micro-batches per data-parallel rank and step, including micro-batches of only padding."""
        return -(-self.global_batch_size // (self.micro_batch_size * dp))

    def num_padding_micro_batches(self, dp: int) -> int:
        """Return the micro-batches of only padding in a step, on the last ranks, or 0 if dp divides the batch."""
        return self.num_micro_batches(dp) * dp - self.global_batch_size // self.micro_batch_size

    def loss_tokens(self, cp: int) -> int:
        """Return the tokens of a micro-batch whose losses a rank computes on its shard of the vocabulary."""
        return self.seq_len * self.micro_batch_size // cp

    def loss_chunk_tokens(self, device_type: str, *, cp: int, vocab_rows: int) -> int:
        """Return the number of tokens whose logits are in memory at a time. 0: all of a micro-batch.

        Args:
            cp: context-parallel ranks.
            vocab_rows: rows of the vocabulary on a rank.
        """
        if self.loss_chunk >= 0:
            return self.loss_chunk
        return automatic_loss_chunk(device_type, self.loss_tokens(cp), vocab_rows)
