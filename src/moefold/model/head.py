"""Output head: final norm, projection to the vocabulary, and the values that a loss computes from hidden states."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moefold.config.base.loss_chunk import CPU_LOSS_TOKENS
from moefold.config.model import ModelConfig
from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.linear import Fp32OutputLinear, linear
from moefold.model.local_param import local_param
from moefold.model.loss import (
    PLAIN_SOFTMAX,
    ChunkOptions,
    SoftmaxOptions,
    TokenLosses,
    chunked_token_losses,
    token_losses,
)
from moefold.model.loss_metrics import LossMetricRecorder
from moefold.model.norm import Norm
from moefold.model.part_modules import build_norm
from moefold.model.tp_interface import ContextParallel, SequenceParallel, VocabParallel
from moefold.ops.cross_entropy import TORCH_CROSS_ENTROPY_OPS, CrossEntropyOps
from moefold.ops.gemm import TORCH_GEMM, Gemm


class Head(nn.Module):
    """Final norm and output projection. The weight [V, H] is absent where embeddings are tied.

    The bias [V] (`model.head_bias`) is a parameter of the head in any case.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.norm: Norm = build_norm(cfg.decoder_layers[0].norm, cfg.hidden_size)
        self.weight = None if cfg.tie_embeddings else nn.Parameter(torch.empty(cfg.vocab_size, cfg.hidden_size))
        self.bias = nn.Parameter(torch.empty(cfg.vocab_size)) if cfg.head_bias else None
        self.input_factor = 1.0 / cfg.logits_divisor
        self.sequence_parallel: SequenceParallel = SequenceParallel()
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.vocab_parallel: VocabParallel = VocabParallel()
        self.context_parallel: ContextParallel = ContextParallel()
        self.gemm: Gemm = TORCH_GEMM
        self.cross_entropy_ops: CrossEntropyOps = TORCH_CROSS_ENTROPY_OPS
        self.picked_rows_N: Tensor | None = None
        """Tokens whose logits are computed while the model generates, int64 [N], and returned as S/cp. None means all.
        """
        self.fused: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        """Computes the logits [N, V/tp] of picked rows of [R, H] while the model generates. None means by modules."""

    def forward(self, x: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Compute the logits in float32 at least, [S/(cp*tp), B, H] -> [S/cp, B, V/tp]."""
        if self.fused is not None and self.picked_rows_N is not None:
            return self.fused(x.squeeze(1), self.picked_rows_N, tied_weight).unsqueeze(1)
        return self.logits_fp32(self.norm(x), tied_weight)

    def logits_fp32(self, x: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Compute `logits` in float32 at least, as the chunked loss does, with the same bits."""
        return linear(
            self._gathered_input(x),
            self.weight_shard(x, tied_weight),
            self._bias_shard(x),
            wgrad_store=self.wgrad_store,
            linear_backend=Fp32OutputLinear(self.gemm),
        )

    def logits(self, x: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Compute the logits [S/cp, B, V/tp] of hidden states that are normalised already."""
        weight_shard = self.weight_shard(x, tied_weight)
        return linear(self._gathered_input(x), weight_shard, self._bias_shard(x), wgrad_store=self.wgrad_store)

    def losses(
        self,
        x: Tensor,
        tied_weight: Tensor | None,
        labels: Tensor,
        chunk: int = 0,
        softmax: SoftmaxOptions = PLAIN_SOFTMAX,
    ) -> TokenLosses:
        """Compute the values of each token that losses combine (`TokenLosses`), for labels int64 [S/cp, B].

        Args:
            x: normalised hidden states, `[S/(cp*tp), B, H]`.
            chunk: tokens whose logits are in memory at a time. 0 or too many: all, without recomputation.
        """
        is_single_chunk = not 0 < chunk < labels.numel()
        # A GPU is fastest with all tokens at once, and a delayed weight gradient is one GEMM over all of them.
        if is_single_chunk and (x.device.type != "cpu" or self.wgrad_store is not None):
            logits = self.logits(x, tied_weight)
            return token_losses(logits, labels, self.vocab_parallel.vocab_range, self.cross_entropy_ops, softmax)
        chunk = CPU_LOSS_TOKENS if is_single_chunk else chunk
        x_all = self._gathered_input(x)
        weight_shard = self.weight_shard(x, tied_weight)
        options = ChunkOptions(
            chunk,
            self.vocab_parallel.vocab_range,
            saves_exponentials=is_single_chunk,
            gemm=self.gemm,
            ops=self.cross_entropy_ops,
            softmax=softmax,
        )
        return chunked_token_losses(x_all, weight_shard, labels, options, self._bias_shard(x))

    def _gathered_input(self, x: Tensor) -> Tensor:
        """Return the input of the projection, whose factor divides the logits, by an all-gather over tp."""
        x = self.sequence_parallel.gather(x)
        if self.picked_rows_N is not None:
            x = x[self.picked_rows_N]
        return x if self.input_factor == 1.0 else x * self.input_factor

    def weight_shard(self, x: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Return this rank's vocabulary rows of the head in the dtype of x, [V/tp, H]."""
        weight = tied_weight if self.weight is None else self.weight
        assert weight is not None
        return local_param(weight, x.dtype)

    def _bias_shard(self, x: Tensor) -> Tensor | None:
        """Return this rank's biases of the logits in the dtype of x, [V/tp], divided as the logits are."""
        if self.bias is None:
            return None
        bias = local_param(self.bias, x.dtype)
        return bias if self.input_factor == 1.0 else bias * self.input_factor


class ModelOutput:
    """Output of the last stage: normalised hidden states, and methods that compute the head on demand.

    Arguments and results are batch-first, like the columns of a batch. Every tp rank computes the same results.

    Args:
        hidden: normalised hidden states, `[S/(cp*tp), B, H]`.
        chunk: tokens whose logits `cross_entropy` has in memory at a time. 0: all.
        is_training: False in evaluation, whose loss has no terms that only regularise.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        tied_weight: Tensor | None,
        chunk: int,
        metrics: LossMetricRecorder,
        *,
        is_training: bool = True,
    ) -> None:
        self.hidden = hidden
        self.metrics = metrics
        self.is_training = is_training
        self._head = head
        self._tied_weight = tied_weight
        self._chunk = chunk

    def token_losses(self, labels: Tensor, softmax: SoftmaxOptions = PLAIN_SOFTMAX) -> TokenLosses:
        """Compute cross-entropy and log-normalizer of each label in nats, int64 [B, S/cp] -> [B, S/cp] each.

        They are in float32 at least, and losses may use both. The full logits are not in memory if `train.loss_chunk`
        is smaller than the micro-batch.
        """
        losses = self._head.losses(self.hidden, self._tied_weight, labels.t(), self._chunk, softmax)
        entropy = None if losses.entropy is None else losses.entropy.t()
        return TokenLosses(losses.loss.t(), losses.log_normalizer.t(), entropy)

    def cross_entropy(self, labels: Tensor) -> Tensor:
        """Compute the cross-entropy of each label, int64 [B, S/cp] -> [B, S/cp], by `token_losses`."""
        return self.token_losses(labels).loss

    def log_probs(self, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute the log-probability of each next token, int64 [B, S/cp] -> [B, S/cp], by `token_losses`."""
        return -self.token_losses(tokens, SoftmaxOptions(temperature)).loss

    @property
    def context_parallel(self) -> ContextParallel:
        """The ranks that share the samples of this micro-batch. A loss sums over their tokens by `sum_over_context`."""
        return self._head.context_parallel

    def logits(self) -> Tensor:
        """Compute the logits over the whole vocabulary, [B, S/cp, V], by an all-gather over tp.

        They are in float32 at least, and are all in memory: `cross_entropy` needs less.
        """
        shard = self._head.logits_fp32(self.hidden, self._tied_weight)
        return self._head.vocab_parallel.gather(shard).transpose(0, 1)
