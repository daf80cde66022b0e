"""Inference model: forward passes through the stages of all pipeline ranks, for evaluation and generation."""

import torch
from torch import Tensor, nn

from moefold.comm.collectives import broadcast, gather_to_first
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.model.head import Head
from moefold.model.kv_cache import CachedAttention, DecodePositions, LatentCache
from moefold.model.mla import LatentAttention
from moefold.model.tp_interface import SequenceParallel
from moefold.parallel.forward_chain import ForwardChain
from moefold.parallel.parallelize import build_sharded_stages
from moefold.parallel.tensor_parallel import UnevenSequenceParallel


class InferenceModel:
    """This rank's stage of a model without gradients; a checkpoint reader must load its weights.

    Args:
        cfg: a recipe that `check_config` passed, without virtual stages.
        groups: the process groups of its mapping.
    """

    def __init__(self, cfg: Config, groups: ParallelGroups) -> None:
        sharded = build_sharded_stages(cfg, groups, for_training=False)
        (self.stage,) = sharded.stages
        self.stage.eval().requires_grad_(False)
        self.cfg = cfg
        self.groups = groups
        self.chain = ForwardChain(sharded.stages, sharded.stage_plan, cfg, groups)
        self.positions = sharded.positions
        """Sequence positions of this rank, int64 [S/cp]."""

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank by their names in the full model."""
        return dict(self.stage.named_parameters())

    @property
    def named_buffers(self) -> dict[str, Tensor]:
        """All buffers of this rank by their names in the full model."""
        return dict(self.stage.named_buffers())

    def forward(self, tokens: Tensor, num_local_tokens: int | None = None) -> Tensor | None:
        """Run this rank's stage on one batch; pipeline ranks send activations on, and work on several batches at once.

        Collective over all ranks: with dp, each rank has its own batch of the same shape.

        Args:
            tokens: int64 [B, S/cp]; on other stages than the first only its shape matters.
            num_local_tokens: tokens per sample on this rank between the sub-layers; None: S/(cp*tp).

        Returns:
            On the last stage the logits [S/cp, B, V/tp], elsewhere None.
        """
        num_rows = tokens.shape[1] // self.groups.attn.tp.size if num_local_tokens is None else num_local_tokens
        return self.chain.forward(tokens, num_rows)

    def wait_send(self) -> None:
        """Wait until the next stage has received the last activations."""
        self.chain.wait_send()

    def gather_to_first(self, x: Tensor) -> Tensor | None:
        """Stack the tensors of this stage's ranks, [dp*cp*tp, ...], on its first rank; None elsewhere. Collective."""
        return gather_to_first(x, self.groups.attn.stage)

    def broadcast_from_last_stage(self, x: Tensor) -> Tensor:
        """Broadcast a tensor from tp rank 0 of the last stage to every rank; collective. Not with dp or cp.

        Args:
            x: the tensor to send; elsewhere a tensor of the same shape and dtype.
        """
        groups = self.groups
        view = groups.layout.attention
        world = groups.world
        source = next(
            member
            for member, rank in enumerate(world.ranks)
            if view.coordinate(rank, "pp") == groups.pp.size - 1 and view.coordinate(rank, "tp") == 0
        )
        return broadcast(x, world, source)


class LastTokenOnly:
    """Passes one token of each sample to the head, so that only its logits are computed."""

    def __init__(self, inner: SequenceParallel) -> None:
        self._inner = inner
        self.last_token_B = torch.zeros(0, dtype=torch.int64)
        """Index of that token in each sample, int64 [B]."""

    def gather(self, x: Tensor) -> Tensor:
        """Gather the tokens of all tp ranks and select one per sample: [S/tp, B, H] -> [1, B, H]."""
        x = self._inner.gather(x)
        return x[self.last_token_B, torch.arange(x.shape[1], device=x.device)].unsqueeze(0)

    def scatter(self, x: Tensor) -> Tensor:
        """Raise NotImplementedError: the head scatters nothing."""
        raise NotImplementedError("the head gathers only")


class KVCacheDecoder:
    """Context manager for decoding one batch of samples with a KV cache, or with a cache of MLA latents.

    Replaces three attributes of modules and restores them: attention by cached attention, sequence parallelism by one
    for any number of tokens, and the input of the head.

    Args:
        model: under any tp, pp, ep and etp; not with cp or dp.
        max_seq_len: positions that a sample can have.
    """

    def __init__(self, model: InferenceModel, max_seq_len: int) -> None:
        assert model.groups.attn.dp_cp.size == 1, "decoding does not support cp and dp"
        self._model = model
        self._max_seq_len = max_seq_len
        device = model.groups.device
        self._decode_positions = DecodePositions(torch.zeros(0, 0, dtype=torch.int64, device=device), 0, True)
        self._sequence_parallel = UnevenSequenceParallel(model.groups.attn.tp)
        self._last_token_only: LastTokenOnly | None = None
        self._replaced: list[tuple[nn.Module, str, object]] = []

    def __enter__(self) -> "KVCacheDecoder":
        for module in self._model.stage.modules():
            # Duck typing: any attention or feed-forward layer may have these attributes.
            if isinstance(window := getattr(module, "window", None), int):
                if isinstance(module, LatentAttention):
                    self._replace(
                        module, "latent_cache", LatentCache(self._decode_positions, self._max_seq_len, window)
                    )
                else:
                    self._replace(
                        module, "core_attention", CachedAttention(self._decode_positions, self._max_seq_len, window)
                    )
            if isinstance(module, Head):
                inner: SequenceParallel = (
                    self._sequence_parallel if self._model.groups.attn.tp.size > 1 else module.sequence_parallel
                )
                self._last_token_only = LastTokenOnly(inner)
                self._replace(module, "sequence_parallel", self._last_token_only)
            elif hasattr(module, "sequence_parallel") and self._model.groups.attn.tp.size > 1:
                self._replace(module, "sequence_parallel", self._sequence_parallel)
        return self

    def __exit__(self, *error: object) -> None:
        self._model.wait_send()
        for module, attribute, before in self._replaced:
            setattr(module, attribute, before)
        self._model.stage.set_positions(self._model.positions)

    def _replace(self, module: nn.Module, attribute: str, replacement: object) -> None:
        self._replaced.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, replacement)

    def forward(self, tokens: Tensor, first_position_B: Tensor, last_token_B: Tensor, num_keys: int) -> Tensor:
        """Run the next tokens of every sample; collective over all ranks.

        Args:
            tokens: int64 [B, S], shorter samples right-padded with any id.
            first_position_B: position of the first of them in its sample, int64 [B]; all 0 at the start.
            last_token_B: index in S of the token whose logits are returned, int64 [B].
            num_keys: one more than the largest position.

        Returns:
            Logits [B, V], float32 or higher, the same on every rank of the last stage; elsewhere zeros of that shape
            and dtype.
        """
        model = self._model
        device = self._model.groups.device
        num_tokens = tokens.shape[1]
        assert num_keys <= self._max_seq_len, (num_keys, self._max_seq_len)
        positions_SB = torch.arange(num_tokens, device=device).unsqueeze(1) + first_position_B.to(device)
        is_start = num_keys == num_tokens
        self._decode_positions.positions_SB = positions_SB
        self._decode_positions.num_keys = num_keys
        self._decode_positions.is_prefill = is_start
        if self._last_token_only is not None:
            self._last_token_only.last_token_B = last_token_B.to(device)
        model.stage.set_positions(positions_SB)
        logits = model.forward(tokens.to(device), self._sequence_parallel.set_num_tokens(num_tokens))
        dtype = torch.promote_types(model.stage.dtype, torch.float32)
        if logits is None:
            return torch.zeros(tokens.shape[0], model.cfg.model.vocab_size, dtype=dtype, device=device)
        return model.stage.head.vocab_parallel.gather(logits[0]).to(dtype)
