"""A decoder-only transformer, or one pipeline stage of it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moefold.config.schema import Config, ModelConfig
from moefold.model.attention import Attention
from moefold.model.gemm import LIBRARY, Gemm
from moefold.model.init import named_seed
from moefold.model.latent_attention import LatentAttention
from moefold.model.later import Later
from moefold.model.linear import Products, linear
from moefold.model.mlp import SwiGLU
from moefold.model.norm import RMSNorm
from moefold.model.parameter import local
from moefold.model.recall import Recall, all_kept
from moefold.model.rope import Rotation, Turn, rotation
from moefold.model.seams import Tokens, Vocabulary, WholeTokens, WholeVocabulary
from moefold.model.steps import Begun, Steps, finish
from moefold.moe.layer import MoELayer

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

CHUNK_LOGITS = 1 << 24
"""Logits of a chunk of the loss that nobody sized: 64 MiB in float32."""
LEAST_CHUNK = 256
CPU_CHUNK = 512
"""Tokens of a chunk on a CPU where the logits of all are kept: no larger temporary is made (docs/log.md)."""


class Block(nn.Module):
    """Attention, then a dense or an MoE feed-forward, each behind a norm and added to the residual stream.

    `parallelize` replaces `recall`, where the results of the norms are not to be kept, and `pauses`, where somebody
    works meanwhile: nothing may hook into the call of a layer then, or into that of its feed-forward part.
    """

    def __init__(self, cfg: Config, number: int) -> None:
        super().__init__()
        model = cfg.model
        is_moe = model.all_layer_kinds[number] == "M"
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_eps)
        window = model.all_layer_windows[number]
        self.attention = LatentAttention(model, window) if model.attention == "mla" else Attention(model, window)
        self.ffn_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.ffn = _moe_layer(cfg, number) if is_moe else SwiGLU(model.hidden_size, model.ffn_hidden_size)
        self.recall: Recall = all_kept
        self.pauses = False

    def forward(self, x: Tensor, rotation: Rotation, *more: Tensor | None) -> Tensor:
        """All of `steps` at once."""
        return finish(self.steps(x, rotation, *more))

    def steps(
        self, x: Tensor, rotation: Rotation, samples: Tensor | None = None, starts: Tensor | None = None
    ) -> Steps[Tensor]:
        """[S/(cp*tp), B, H] -> [S/(cp*tp), B, H], with a pause wherever rows of an MoE layer travel, if it `pauses`.

        An MoE layer may want to know which samples these are.
        """
        with self.recall(self.attention_norm.normalise, x, self.attention_norm.local_weight(x)) as (normed,):
            x = x + self.attention(normed, rotation, starts)
        with self.recall(self.ffn_norm.normalise, x, self.ffn_norm.local_weight(x)) as (normed,):
            if not isinstance(self.ffn, MoELayer):
                return x + self.ffn(normed)
            if not self.pauses:
                return x + self.ffn(normed, samples)
            moe = Begun(self.ffn.steps(normed, samples))
            # Up to its first pause it reads the result of the norm, and another micro-batch may work at each.
            moe.go_on()
        return x + (yield from moe.rest())


class FurtherTokenBlock(Block):
    """A layer that predicts one token further ahead than the one before it (arXiv:2412.19437 sec. 2.2).

    It reads what its predecessor made of the tokens up to i, and the token after the one that that predicted.
    """

    def __init__(self, cfg: Config, number: int) -> None:
        super().__init__(cfg, number)
        hidden, eps = cfg.model.hidden_size, cfg.model.norm_eps
        self.embedding_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.projection = nn.Parameter(torch.empty(hidden, 2 * hidden))
        self.later: Later | None = None
        self.products: Products | None = None
        self.output_norm = RMSNorm(hidden, eps)

    def steps(
        self,
        x: Tensor,
        rotation: Rotation,
        samples: Tensor | None = None,
        starts: Tensor | None = None,
        embedded: Tensor | None = None,
    ) -> Steps[Tensor]:
        """Hidden states behind a norm and token vectors, both [S/(cp*tp), B, H] -> the same, behind a norm again."""
        assert embedded is not None
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), -1)
        x = linear(both, local(self.projection, x.dtype), later=self.later, products=self.products)
        return self.output_norm((yield from super().steps(x, rotation, samples, starts)))


class Embedding(nn.Module):
    """Token vectors, weight [V, H]; also the output head where embeddings are tied."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.dtype = dtype
        self.tokens: Tokens = WholeTokens()
        self.vocabulary: Vocabulary = WholeVocabulary()

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [B, S/cp] -> [S/(cp*tp), B, H] in the compute type."""
        vectors = self.vocabulary.embed(tokens.t(), local(self.weight))
        return self.tokens.scatter(vectors.to(self.dtype))


class Head(nn.Module):
    """The last norm and the output projection; its weight [V, H] is absent where embeddings are tied."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.weight = None if cfg.tie_embeddings else nn.Parameter(torch.empty(cfg.vocab_size, cfg.hidden_size))
        self.tokens: Tokens = WholeTokens()
        self.later: Later | None = None
        self.vocabulary: Vocabulary = WholeVocabulary()
        self.gemm: Gemm = LIBRARY

    def forward(self, x: Tensor, tied: Tensor | None) -> Tensor:
        """[S/(cp*tp), B, H] -> logits [S/cp, B, V/tp]."""
        return self.logits(self.norm(x), tied)

    def logits(self, x: Tensor, tied: Tensor | None) -> Tensor:
        """The same of hidden states that are behind a norm already."""
        return linear(self.tokens.gather(x), self._rows(x, tied), later=self.later)

    def losses(self, x: Tensor, tied: Tensor | None, labels: Tensor, chunk: int = 0) -> Tensor:
        """Cross-entropies of labels, int64 [S/cp, B], float32 or wider [S/cp, B].

        Args:
            x: hidden states behind the norm, [S/(cp*tp), B, H].
            tied: the embedding, where it is the head.
            labels: next tokens.
            chunk: tokens whose logits are in memory at a time; 0 or too many: all, and nothing is computed twice.
        """
        is_whole = not 0 < chunk < labels.numel()
        # A GPU is at its best with all tokens at once, and what is postponed is a product over all of them.
        if is_whole and (x.device.type != "cpu" or self.later is not None):
            return self.vocabulary.cross_entropy(self.logits(x, tied), labels)
        chunk = CPU_CHUNK if is_whole else chunk
        x_all, rows = self.tokens.gather(x), self._rows(x, tied)
        return self.vocabulary.chunked_cross_entropy(x_all, rows, labels, chunk, keeps=is_whole, gemm=self.gemm)

    def _rows(self, x: Tensor, tied: Tensor | None) -> Tensor:
        """My rows of the head in the type of x, [V/tp, H]."""
        weight = tied if self.weight is None else self.weight
        assert weight is not None
        return local(weight, x.dtype)


class Transformer(nn.Module):
    """Some consecutive layers of the model, with the embedding if they are the first and the head if the last.

    Layers are named by their number in the whole model, so parameter names do not depend on the pipeline. Those of
    multi-token prediction come behind all others, on the last stage.
    """

    def __init__(self, cfg: Config, layers: Iterable[int], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        model = cfg.model
        self.cfg = cfg
        self.dtype = TORCH_DTYPES[cfg.run.dtype]
        self.is_first, self.is_last = is_first, is_last
        self._loss_chunk = loss_chunk(cfg)
        if is_first or (is_last and model.embeds_twice):
            self.embedding = Embedding(model.vocab_size, model.hidden_size, self.dtype)
        self.layers = nn.ModuleDict({str(i): Block(cfg, i) for i in layers})
        if is_last:
            self.head = Head(model)
            further = range(model.num_layers, model.num_layers + model.mtp_layers)
            self.layers.update({str(i): FurtherTokenBlock(cfg, i) for i in further})
        self.positions: Tensor | None = None
        self.rotation: Rotation | None = None
        self.turn: Turn | None = None

    def place(self, positions: Tensor) -> None:
        """Say which positions of their sample this rank's tokens have, int64 [S/cp] or [S/cp, B]; before `forward`."""
        self.positions = positions
        self.rotation = rotation(self.cfg.model, positions, self.dtype, self.turn)

    def forward(self, x: Tensor, *targets: Tensor | None, **named: Tensor | None) -> Tensor:
        """All of `steps` at once."""
        return finish(self.steps(x, *targets, **named))

    def steps(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        samples: Tensor | None = None,
        further_labels: Tensor | None = None,
        further_weights: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Steps[Tensor]:
        """Run the layers of this stage, with their pauses if they have any.

        Args:
            x: tokens, int64 [B, S/cp], on the first stage; else the hidden states of the stage before, [S/(cp*tp), B,
            H].
            labels: next tokens, int64 [B, S/cp]; used by the last stage.
            weights: share of each token in the loss, [B, S/cp]: 1/(target tokens of the global batch), 0 where masked.
            samples: place of each sample in the global batch, int64 [B]; what a layer knows
            about a sample goes by it.
            further_labels: the tokens behind the next, int64 [B, mtp_layers, S/cp], for multi-token prediction.
            further_weights: share of each in the loss of its depth, [B, mtp_layers, S/cp]; 0 behind the sample's end.
            starts: position at which the document of each token begins, int64 [B, S], of whole samples: attention stays
            within a document, and its positions count from there. None: a sample is one document.

        Returns:
            Hidden states [S/(cp*tp), B, H]; from the last stage the terms of the loss, each a weighted sum of token
            losses, [loss_terms]; or, without labels, the logits [S/cp, B, V/tp].
        """
        turn, starts_SB = self._rotation(starts), None if starts is None else starts.t()
        if self.is_first:
            x = self.embedding(x)
        for block in self.layers.values():
            if not isinstance(block, FurtherTokenBlock):
                x = yield from self._through(block, x, turn, samples, starts_SB)
        if not self.is_last:
            # A stage without layers hands on what it gets, as a tensor of its own: the pipeline keeps both.
            return x if self.is_first or len(self.layers) else x.view_as(x)
        tied = self.embedding.weight if self.cfg.model.tie_embeddings else None
        if labels is None:
            return self.head(x, tied)
        normed = self.head.norm(x)
        loss = self._loss(normed, tied, labels, weights)
        if self.cfg.model.mtp_layers == 0:
            return loss
        if not self.training:
            return torch.cat((loss, torch.zeros_like(loss)))
        assert further_labels is not None, "multi-token prediction needs the tokens behind the next"
        further_loss = loss.new_zeros(1)
        read = labels
        for i in range(self.cfg.model.mtp_layers):
            block = self.layers[str(self.cfg.model.num_layers + i)]
            normed = yield from self._through(block, normed, turn, samples, starts_SB, self.embedding(read))
            read = further_labels[:, i]
            further_loss = further_loss + self._loss(
                normed, tied, read, None if further_weights is None else further_weights[:, i]
            )
        return torch.cat((loss, further_loss * (self.cfg.train.mtp_loss / self.cfg.model.mtp_layers)))

    def _through(self, block: nn.Module, *args: Any) -> Steps[Tensor]:
        assert isinstance(block, Block)
        if block.pauses:
            return (yield from block.steps(*args))
        y: Tensor = block(*args)
        return y

    def _loss(self, normed: Tensor, tied: Tensor | None, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Weighted sum of the cross-entropies of labels [B, S/cp], [1]."""
        losses = self.head.losses(normed, tied, labels.t(), self._loss_chunk)
        if weights is not None:
            losses = losses * weights.t()
        return losses.flatten().sum(0, keepdim=True)

    def _rotation(self, starts: Tensor | None) -> Rotation:
        assert self.positions is not None, "place() comes before forward()"
        if starts is None:
            assert self.rotation is not None
            return self.rotation
        # RoPE is relative: to restart its positions changes no score, but lets a document be computed with the very
        # numbers that it would have alone, in narrow types too.
        positions_SB = self.positions[:, None] - starts.t()[self.positions]
        return rotation(self.cfg.model, positions_SB, self.dtype, self.turn)

    def pause(self) -> None:
        """From now on `steps` pauses wherever rows travel."""
        for block in self.layers.values():
            assert isinstance(block, Block)
            block.pauses = True

    def moe_layers(self) -> dict[int, MoELayer]:
        """The MoE layers of this stage by their number in the whole model."""
        return {int(i): block.ffn for i, block in self.layers.items() if isinstance(block.ffn, MoELayer)}


def loss_terms(model: ModelConfig) -> int:
    """Terms of the loss that the last stage returns: that of the next token, and that of the further ones if any."""
    return 2 if model.mtp_layers else 1


def loss_chunk(cfg: Config) -> int:
    """Tokens whose logits are in memory at a time; 0: all of a micro-batch."""
    if cfg.train.loss_chunk >= 0:
        return cfg.train.loss_chunk
    return max(LEAST_CHUNK, CHUNK_LOGITS * cfg.parallel.tp // cfg.model.vocab_size)


def build_model(cfg: Config) -> Transformer:
    """The whole model on one rank, on the current default device; weights are not initialised."""
    return Transformer(cfg, range(cfg.model.num_layers), is_first=True, is_last=True)


def _moe_layer(cfg: Config, number: int) -> MoELayer:
    model = cfg.model
    width = model.shared_expert_ffn_hidden_size
    shared = SwiGLU(model.hidden_size, width) if width else None
    num_micro_batches = cfg.train.global_batch_size // cfg.train.micro_batch_size
    return MoELayer(
        model,
        cfg.moe,
        loss_scale=1.0 / num_micro_batches,
        rounds=cfg.num_micro_batches,
        jitter_seed=named_seed(cfg.run.seed, f"layers.{number}.ffn.router.jitter"),
        shared=shared,
    )
