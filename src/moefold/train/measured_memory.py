"""One step of a recipe on this rank under a ledger: what is in memory, by part, at the fullest moment and behind it."""

from dataclasses import dataclass

import torch

from moefold.config.schema import Config
from moefold.data import open_dataset
from moefold.metrics.ledger import GATHERED_WEIGHTS, MemoryTracker
from moefold.metrics.memory_by_part import NOT_ACTIVATIONS
from moefold.parallel.accumulate import Batch
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.layout import fold
from moefold.parallel.memory_parts import track_memory
from moefold.parallel.parallelize import parallelize
from moefold.train.batch import BatchSharder
from moefold.train.step import TrainingStep
from moefold.work_progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class MeasuredMemory:
    """What a rank had in memory during a step, in bytes by part."""

    rank: int
    pp_rank: int
    total: int
    """The most at once."""
    peak: dict[str, int]
    """At that moment."""
    activations: int
    """The most activations at once, which may be another moment."""
    activation_peak: dict[str, int]
    """At that one."""
    gathered: int
    """The gathered weights at that one; while they arrive there are more, of a layer at a time."""
    after: dict[str, int]
    """Behind the backward pass, with all gradients."""
    routed: list[int]
    """Copies of this rank's tokens that the router sent to each expert, all its layers together."""


def measure_rank(cfg: Config, report: ProgressCallback = ignore_progress) -> MeasuredMemory:
    """Train one step on this rank of the default process group, on the CPU; collective."""
    report("building the model")
    p = cfg.parallel
    layout = fold(
        world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order, moe_order=p.moe_order
    )
    groups = ParallelGroups.create(layout, torch.device("cpu"))
    training = TrainingStep(parallelize(cfg, groups), cfg)
    data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
    batch = BatchSharder(data.train, cfg, groups, training.model.positions).batch(0)
    report(f"one step on {groups.world.size} ranks")
    ledger = measure_step(training, batch)
    everything = ledger.peak()
    activations = ledger.peak(lambda part: part not in NOT_ACTIVATIONS)
    kept = {part: size for part, size in activations.by_part.items() if part not in NOT_ACTIVATIONS}
    pp_rank = layout.attention.coordinate(groups.rank, "pp")
    return MeasuredMemory(
        rank=groups.rank,
        pp_rank=pp_rank,
        total=everything.total,
        peak=everything.by_part,
        activations=activations.total,
        activation_peak=kept,
        gathered=activations.by_part.get(GATHERED_WEIGHTS, 0),
        after=ledger.current(),
        routed=[
            sum(counts)
            for counts in zip(
                *(layer.stats.tokens_per_expert_E.tolist() for layer in training.model.moe_layers().values()),
                strict=True,
            )
        ],
    )


def measure_step(training: TrainingStep, batch: Batch) -> MemoryTracker:
    """Run the forward and backward passes of step 1 under a ledger; collective."""
    with track_memory(training.model, training.optimizer, batch.tensors()) as ledger:
        training.begin_step(1)
        training.model.forward_backward(batch)
    return ledger
