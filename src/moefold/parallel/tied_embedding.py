"""Tied embedding of a pipeline: the first and the last stage each have a copy."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from moefold.comm.groups import Group
from moefold.model.transformer import Transformer
from moefold.topology.pipeline_layout import StagePlan


@torch.no_grad()
def sync_tied_embedding(stages: list[Transformer]) -> None:
    """Copy the embedding of the first stage to the last stage, if one rank has both.

    The optimizer and checkpoints contain only the first copy. Call it while no parameter is gathered.
    """
    for first, copy in pairwise(_embeddings(stages)):
        copy.data.copy_(first.data)


@torch.no_grad()
def allreduce_tied_embedding_grad(stages: list[Transformer], stage_plan: StagePlan, pp: Group) -> None:
    """Sum the gradients of the two copies of a tied embedding, on the first and the last stage.

    If the copies are on different ranks, both get the sum, collective over these two ranks. If they are on one rank,
    the first gets it.
    """
    ends = stage_plan.embedding_ranks
    if pp.size == 1 or pp.rank not in ends:
        return
    copies = _embeddings(stages)
    if ends[0] == ends[1]:
        first, last = copies
        assert first.grad is not None
        assert last.grad is not None
        first.grad += last.grad
        last.grad = None
        return
    (copy,) = copies
    assert isinstance(copy.grad, DTensor)
    own_grad = copy.grad.to_local()
    peer_grad = torch.empty_like(own_grad)
    peer = pp.ranks[ends[1] if pp.rank == ends[0] else ends[0]]
    pp.recorder.set_phase("all-reducing the gradient of the tied embedding")
    operations = [
        dist.P2POp(dist.isend, own_grad, peer, pp.handle),
        dist.P2POp(dist.irecv, peer_grad, peer, pp.handle),
    ]
    with pp.comm_timer.waiting():
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    own_grad += peer_grad


def _embeddings(stages: list[Transformer]) -> list[nn.Parameter]:
    return [stage.embedding.weight for stage in stages if hasattr(stage, "embedding")]
