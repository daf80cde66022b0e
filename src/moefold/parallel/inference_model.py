"""Inference model: forward passes through the stages of all pipeline ranks, for evaluation and generation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from torch import Tensor, nn

from moefold.comm.collectives import gather_to_first
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.parallel.forward_chain import ForwardChain
from moefold.parallel.kernels.timed import recall_choices, settle_choices
from moefold.parallel.parallel_model import ShardedStages
from moefold.parallel.parallelize import build_sharded_stages
from moefold.parallel.peer_experts import PeerExperts
from moefold.topology.rollout_mapping import fetches_experts


class InferenceModel(ShardedStages):
    """This rank's stage of a model without gradients; a checkpoint reader must load its weights, in `writing_weights`.

    Args:
        sharded: the stage.
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
        """Record the times of kernels that the passes of one rank measured; return the chosen kernels, to log."""
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
        """Allow changes of the weights inside this context; collective where ranks read each other's experts.

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
        """Run this rank's stage on one batch; pipeline ranks send activations on, and work on several batches at once.

        Collective over all ranks: with dp, each rank has its own batch of the same shape.

        Args:
            tokens: int64 [B, S/cp]; on other stages than the first only its shape matters.
            num_local_tokens: tokens per sample on this rank between the sub-layers; None: S/(cp*tp).
            is_token: tokens that are not padding, bool [B, S/cp]; None: all. Padding is not routed.

        Returns:
            On the last stage the logits [S/cp, B, V/tp], elsewhere None.
        """
        num_rows = tokens.shape[1] // self.groups.attn.tp.size if num_local_tokens is None else num_local_tokens
        return self.chain.forward(tokens, num_rows, None if is_token is None else is_token.float())

    def wait_send(self) -> None:
        """Wait until the next stage has received the last activations."""
        self.chain.wait_send()

    def gather_to_first(self, x: Tensor) -> Tensor | None:
        """Stack the tensors of this stage's ranks, [dp*cp*tp, ...], on its first rank; None elsewhere. Collective."""
        return gather_to_first(x, self.groups.attn.stage)
