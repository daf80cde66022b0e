"""Ranks of the pool as a job of ranks that train and ranks that sample."""

from datetime import timedelta

import torch.distributed as dist

from moefold.comm.trainer_sampler_link import JobLink, JobSplit
from moefold.config.schema import Config

TIMEOUT = timedelta(seconds=100)


def split_pool(cfg: Config) -> JobLink:
    """Give the ranks that train and those that sample a default process group each, and connect all of them."""
    split = JobSplit(cfg.parallel.world_size, cfg.rollout.ranks)
    rank = dist.get_rank()
    ranks = split.ranks_like(rank)
    store = dist.distributed_c10d._get_default_store()
    # A rank that closes its connections early breaks those that others are still making.
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"from {ranks.start}", store),
        rank=rank - ranks.start,
        world_size=len(ranks),
        timeout=TIMEOUT,
    )
    return JobLink.connect(split, rank, store)
