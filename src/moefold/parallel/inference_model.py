"""Forward passes without gradients through the stages of all pipeline ranks, for evaluation and generation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.comm.collectives import broadcast, gather_to_first, isend, recv
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.model.transformer import Transformer
from moefold.parallel.kernels.timed import recall_choices, settle_choices
from moefold.parallel.parallel_model import ShardedStages
from moefold.parallel.parallelize import build_sharded_stages
from moefold.parallel.peer_experts import PeerExperts
from moefold.topology.pipeline_layout import StagePlan
from moefold.topology.rollout_mapping import fetches_experts


class ForwardChain:
    """Stages of this rank in the chain of all stages. Hidden states are sent point to point between pipeline ranks."""

    fetches_experts = False
    """True if ranks read each other's experts from shared memory."""

    def __init__(self, stages: Sequence[Transformer], stage_plan: StagePlan, groups: ParallelGroups) -> None:
        self.stages = list(stages)
        self.groups = groups
        self._owners = stage_plan.ranks
        self._pending_sends: list[tuple[dist.Work, Tensor]] = []

    @property
    def last_stage(self) -> Transformer | None:
        """The last stage of the model, if this rank has it."""
        return self.stages[-1] if self.stages[-1].is_last else None

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.stages[0].dtype

    @torch.no_grad()
    def forward(self, tokens: Tensor, num_local_tokens: int, token_weights: Tensor | None = None) -> Tensor | None:
        """Run one batch. It is collective over all ranks. Each data-parallel rank has its own batch.

        Args:
            tokens: int64 [B, S]. On a rank without the first stage only its shape matters.
            num_local_tokens: tokens per sample on this rank between the sub-layers.
            token_weights: 0 for padding, which is not routed, otherwise above 0, [B, S/cp], or None without padding.

        Returns:
            The logits of the last stage, [tokens that its head keeps, B, V/tp], or None on other ranks.
        """
        pp = self.groups.pp
        shape = (num_local_tokens, tokens.shape[0], self.stages[0].config.hidden_size)
        x = tokens
        stages = iter(self.stages)
        columns = {} if token_weights is None else {"token_weights": token_weights}
        for number, owner in enumerate(self._owners):
            if owner != pp.rank:
                continue
            if number and self._owners[number - 1] != pp.rank:
                x = recv(torch.empty(shape, dtype=self.dtype, device=self.groups.device), pp, self._owners[number - 1])
            x = next(stages)(x, **columns)
            if number + 1 == len(self._owners):
                return x
            if self._owners[number + 1] != pp.rank:
                x = x.contiguous()
                self.wait_send()
                work = isend(x, pp, self._owners[number + 1])
                if work is not None:
                    self._pending_sends.append((work, x))
        return None

    def wait_send(self) -> None:
        """Wait until the next stages have received the last activations."""
        for work, _ in self._pending_sends:
            work.wait()
        self._pending_sends.clear()

    def broadcast_from_last_stage(self, x: Tensor) -> Tensor:
        """Broadcast a tensor from the last stage to the ranks of its pp group. It is collective over pp.

        Args:
            x: the tensor to send. Elsewhere it is a tensor of the same shape and dtype.
        """
        return broadcast(x, self.groups.pp, self._owners[-1])


class InferenceModel(ShardedStages):
    """This rank's stage of a model without gradients. A checkpoint reader must load its weights, in `writing_weights`.

    Args:
        fetches_experts: whether ranks read each other's experts from shared memory.
    """

    def __init__(self, sharded: ShardedStages, *, fetches_experts: bool = False) -> None:
        groups = sharded.groups
        recalled = recall_choices(sharded.autotuner, groups.device, groups.world)
        message = "; ".join(filter(None, (sharded.message, recalled)))
        super().__init__(**vars(sharded) | {"message": message})
        if groups.world.size > 1:
            # Ranks that serve requests have no common point from which all of them could use the measured times.
            sharded.autotuner.stop_measuring()
        (self.stage,) = self.stages
        self.stage.eval().requires_grad_(False)
        self.chain = ForwardChain(self.stages, self.stage_plan, groups)
        self.chain.fetches_experts = fetches_experts
        self._peer_experts = PeerExperts(self.stage, groups) if fetches_experts else None

    @classmethod
    def build(cls, cfg: Config, groups: ParallelGroups) -> Self:
        """Build the model of a recipe that `check_config` passed, without virtual stages."""
        sharded = build_sharded_stages(cfg, groups, for_training=False)
        return cls(sharded, fetches_experts=fetches_experts(cfg.rollout))

    def record_kernel_times(self) -> str:
        """Record the times of kernels that the passes of one rank measured, and return the chosen kernels, to log."""
        if self.groups.world.size > 1:
            return ""
        return settle_choices(self.autotuner, self.groups.device, self.groups.world)

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank by their names in the full model."""
        return dict(self.stage.named_parameters())

    @property
    def shared_names(self) -> frozenset[str]:
        """Names of the parameters whose values other ranks read."""
        return frozenset() if self._peer_experts is None else self._peer_experts.names

    @contextmanager
    def writing_weights(self) -> Iterator[None]:
        """Allow changes of the weights inside this context. Collective where ranks read each other's experts.

        No rank enters while another rank generates, and all weights are complete at its end.
        """
        if self._peer_experts is None:
            yield
            return
        with self._peer_experts.writing():
            yield

    def forward(
        self, tokens: Tensor, num_local_tokens: int | None = None, is_token: Tensor | None = None
    ) -> Tensor | None:
        """Run this rank's stage on one batch. Pipeline ranks send activations on, and work on several batches at once.

        Collective over all ranks: with dp, each rank has its own batch of the same shape.

        Args:
            tokens: int64 [B, S/cp]. On other stages than the first only its shape matters.
            num_local_tokens: tokens per sample on this rank between the sub-layers. None: S/(cp*tp).
            is_token: tokens that are not padding, bool [B, S/cp]. None means all. Padding is not routed.

        Returns:
            On the last stage the logits [S/cp, B, V/tp], elsewhere None.
        """
        num_rows = tokens.shape[1] // self.groups.attn.tp.size if num_local_tokens is None else num_local_tokens
        return self.chain.forward(tokens, num_rows, None if is_token is None else is_token.float())

    def wait_send(self) -> None:
        """Wait until the next stage has received the last activations."""
        self.chain.wait_send()

    def gather_to_first(self, x: Tensor) -> Tensor | None:
        """Stack the tensors of this stage's ranks on its first rank, [dp*cp*tp, ...]. It is collective."""
        return gather_to_first(x, self.groups.attn.stage)
