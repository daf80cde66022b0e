"""The model without gradients: tokens go through the stages of all pipeline ranks, for evaluation and generation."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.config.schema import Config
from moefold.model.cache import CachedAttention, LatentCache, Span
from moefold.model.latent_attention import LatentAttention
from moefold.model.seams import Tokens
from moefold.model.transformer import Head
from moefold.parallel.collectives import all_gather, broadcast, gather_to_first, receive, start_send
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.parallelize import cut_model
from moefold.parallel.tensor import UnevenTokens


class StagedModel:
    """This rank's stage of a model that does not learn; its weights are to be filled by a reader.

    Args:
        cfg: one that `check_config` passed, without virtual stages.
        groups: of its mapping.
    """

    def __init__(self, cfg: Config, groups: ParallelGroups) -> None:
        cut = cut_model(cfg, groups, is_trained=False)
        (self.stage,) = cut.stages
        self.stage.eval().requires_grad_(False)
        self.cfg = cfg
        self.groups = groups
        self.positions = cut.positions
        """Positions of a sample that this rank reads, int64 [S/cp]."""
        self._sent: tuple[dist.Work, Tensor] | None = None

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank by their names in the whole model."""
        return dict(self.stage.named_parameters())

    @property
    def named_buffers(self) -> dict[str, Tensor]:
        """All that is part of the model and has no gradient, by its name in the whole model."""
        return dict(self.stage.named_buffers())

    @torch.no_grad()
    def forward(self, tokens: Tensor, num_rows: int | None = None) -> Tensor | None:
        """Run my stage on one batch; pipeline ranks hand it on, and work on several batches at the same time.

        Collective over all ranks: with dp, each has a batch of its own of the same shape.

        Args:
            tokens: int64 [B, S/cp]; off the first stage only its shape counts.
            num_rows: tokens of each sample that this rank holds between the sub-layers; None stands for S/(cp*tp).

        Returns:
            On the last stage the logits [S/cp, B, V/tp], elsewhere None.
        """
        stage, pp = self.stage, self.groups.pp
        if stage.is_first:
            x = tokens
        else:
            rows = tokens.shape[1] // self.groups.attn.tp.size if num_rows is None else num_rows
            shape = (rows, tokens.shape[0], self.cfg.model.hidden_size)
            x = receive(torch.empty(shape, dtype=stage.dtype, device=self.groups.device), pp, pp.rank - 1)
        y: Tensor = stage(x)
        if stage.is_last:
            return y
        self.finish()
        y = y.contiguous()
        work = start_send(y, pp, pp.rank + 1)
        self._sent = None if work is None else (work, y)
        return None

    def finish(self) -> None:
        """Wait until the next stage has what I sent last."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None

    def whole_logits(self, logits: Tensor) -> Tensor:
        """[..., V/tp] -> [..., V] on every tp rank; collective over tp."""
        tp = self.groups.attn.tp
        return all_gather(logits.movedim(-1, 0), tp).movedim(0, -1) if tp.size > 1 else logits

    def collect(self, x: Tensor) -> Tensor | None:
        """Stack what the ranks of my stage hold, [dp*cp*tp, ...], on its first rank; None elsewhere. Collective."""
        return gather_to_first(x, self.groups.attn.stage)

    def from_last_stage(self, x: Tensor) -> Tensor:
        """The tensor of the first tensor-parallel rank of the last stage, on every rank; collective. Not with dp, cp.

        Args:
            x: there, what is to be known; elsewhere a tensor of the same shape and type.
        """
        groups = self.groups
        view, world = groups.layout.attention, groups.world
        source = next(
            member
            for member, rank in enumerate(world.ranks)
            if view.coordinate(rank, "pp") == groups.pp.size - 1 and view.coordinate(rank, "tp") == 0
        )
        return broadcast(x, world, source)


class PickedTokens:
    """Lets one token of each sample through to the head: the logits of the others are not wanted."""

    def __init__(self, inner: Tokens) -> None:
        self._inner = inner
        self.rows_B = torch.zeros(0, dtype=torch.int64)
        """The token that counts of each sample, int64 [B]."""

    def gather(self, x: Tensor) -> Tensor:
        """[S/tp, B, H] of every tp rank -> [1, B, H]."""
        x = self._inner.gather(x)
        return x[self.rows_B, torch.arange(x.shape[1], device=x.device)].unsqueeze(0)

    def scatter(self, x: Tensor) -> Tensor:
        """The head scatters nothing."""
        raise NotImplementedError("the head gathers only")


class Decoder:
    """Context manager: inside, the model decodes one batch of samples with a cache of keys and values, or of latents.

    Replaces three seams and puts them back: attention by one that remembers, the sequence parallelism by one that takes
    any number of tokens, and what the head reads.

    Args:
        model: under any tp, pp, ep and etp; not with cp or dp.
        capacity: positions that a sample can have.
    """

    def __init__(self, model: StagedModel, capacity: int) -> None:
        assert model.groups.attn.dp_cp.size == 1, "a token at a time cannot be shared out over cp and dp"
        self._model = model
        self._capacity = capacity
        device = model.groups.device
        self._span = Span(torch.zeros(0, 0, dtype=torch.int64, device=device), 0, True)
        self._tokens = UnevenTokens(model.groups.attn.tp)
        self._picked: PickedTokens | None = None
        self._before: list[tuple[nn.Module, str, object]] = []

    def __enter__(self) -> "Decoder":
        for module in self._model.stage.modules():
            # Whatever attention or feed-forward layer it is: it has the seam or it has not.
            if isinstance(window := getattr(module, "window", None), int):
                if isinstance(module, LatentAttention):
                    self._replace(module, "kept", LatentCache(self._span, self._capacity, window))
                else:
                    self._replace(module, "core", CachedAttention(self._span, self._capacity, window))
            if isinstance(module, Head):
                inner: Tokens = self._tokens if self._model.groups.attn.tp.size > 1 else module.tokens
                self._picked = PickedTokens(inner)
                self._replace(module, "tokens", self._picked)
            elif hasattr(module, "tokens") and self._model.groups.attn.tp.size > 1:
                self._replace(module, "tokens", self._tokens)
        return self

    def __exit__(self, *error: object) -> None:
        self._model.finish()
        for module, seam, before in self._before:
            setattr(module, seam, before)
        self._model.stage.place(self._model.positions)

    def _replace(self, module: nn.Module, seam: str, now: object) -> None:
        self._before.append((module, seam, getattr(module, seam)))
        setattr(module, seam, now)

    def forward(self, tokens: Tensor, first_B: Tensor, picked_B: Tensor, num_keys: int) -> Tensor:
        """Run the next tokens of every sample; collective over all ranks.

        Args:
            tokens: int64 [B, S], shorter samples filled up behind with any id.
            first_B: position of the first of them in its sample, int64 [B]; all 0 at the start.
            picked_B: the one of the S whose logits are wanted, int64 [B].
            num_keys: one more than the largest position.

        Returns:
            Logits [B, V], float32 or wider, the same on every rank of the last stage; elsewhere zeros of that shape and
            type.
        """
        model, device = self._model, self._model.groups.device
        num_tokens = tokens.shape[1]
        assert num_keys <= self._capacity, (num_keys, self._capacity)
        positions_SB = torch.arange(num_tokens, device=device).unsqueeze(1) + first_B.to(device)
        is_start = num_keys == num_tokens
        self._span.positions_SB, self._span.num_keys, self._span.is_start = positions_SB, num_keys, is_start
        if self._picked is not None:
            self._picked.rows_B = picked_B.to(device)
        model.stage.place(positions_SB)
        logits = model.forward(tokens.to(device), self._tokens.begin(num_tokens))
        dtype = torch.promote_types(model.stage.dtype, torch.float32)
        if logits is None:
            return torch.zeros(tokens.shape[0], model.cfg.model.vocab_size, dtype=dtype, device=device)
        return model.whole_logits(logits[0]).to(dtype)
