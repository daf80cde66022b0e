"""Parts of a trainer that the recipe chooses: the source of its batches, and the callbacks of the features in use.

Modules of unused features are not imported.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from moefold.comm.groups import ParallelGroups
from moefold.config.chosen import chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.schema import Config
from moefold.cost.flops import step_flops_per_token
from moefold.parallel.parallel_model import ParallelModel
from moefold.train.callbacks.callback import Callback, StageCallback
from moefold.train.callbacks.checkpointing import Checkpointing
from moefold.train.callbacks.evaluation import PeriodicEvaluation
from moefold.train.callbacks.metrics import MetricsLogging, RoutingTraceSaving, StragglerDetection
from moefold.train.data_loader import DataLoader
from moefold.train.position import Position

if TYPE_CHECKING:
    from moefold.comm.trainer_sampler_link import JobLink
    from moefold.data.dataset import ProgramData
    from moefold.train.rl.rollout_loader import RolloutLoader


def open_data(
    cfg: Config, model: ParallelModel, position: Position, data: "ProgramData | None"
) -> tuple[DataLoader, list[StageCallback]]:
    """Return the data loader and the callbacks that need it. It is collective."""
    loader = DataLoader(cfg, model, position, data)
    callbacks: list[StageCallback] = [PeriodicEvaluation(cfg.train, cfg.run.steps)]
    if chosen_in(cfg.align, AlignmentPart).has_reference:
        from moefold.train.callbacks.preference_reference import ReferencePass

        callbacks.append(ReferencePass(loader, cfg.checkpoint))
    return loader, callbacks


def open_rollouts(
    cfg: Config, model: ParallelModel, position: Position, link: "JobLink | None", resources: ExitStack
) -> "tuple[RolloutLoader, list[StageCallback]]":
    """Return the source of rollouts and the callbacks that need it. It is collective.

    Args:
        resources: ends the processes that compute rewards.
    """
    from moefold.rl.reward import Reward
    from moefold.train.rl.callbacks import RewardEvaluation, RolloutLogging, RolloutRounds
    from moefold.train.rl.rollout_loader import RolloutLoader

    reward = Reward(cfg.data, cfg.faults, cfg.reward, num_ranks=cfg.num_job_ranks)
    resources.enter_context(reward)
    loader = RolloutLoader(cfg, model, reward, position, link)
    return loader, [
        RolloutRounds(loader),
        RewardEvaluation(loader, cfg.train.eval_every, cfg.run.steps, cfg.rl.reset_patience),
        RolloutLogging(loader, cfg.metrics.rollouts_every),
    ]


def recipe_callbacks(
    cfg: Config,
    groups: ParallelGroups,
    checkpointing: Checkpointing,
    measuring: Sequence[Callback],
    *,
    measures_kernels: bool,
) -> list[StageCallback]:
    """Return the callbacks that need no data.

    Args:
        measuring: callbacks of the program, which may add metrics.
    """
    flops_per_token = step_flops_per_token(cfg.model, cfg.train, cfg.lora)
    callbacks: list[StageCallback] = [
        RoutingTraceSaving(),
        MetricsLogging(cfg.run, cfg.metrics, flops_per_token, groups.device, measuring),
        StragglerDetection(cfg.faults.straggler_factor),
        checkpointing,
    ]
    if measures_kernels:
        from moefold.train.callbacks.kernel_timing import KernelChoices

        callbacks.append(KernelChoices())
    if cfg.parallel.world_size > 1 and cfg.faults.replica_check_every:
        from moefold.train.callbacks.replica_comparison import ReplicaComparison

        drain = checkpointing.saver.drain
        callbacks.append(ReplicaComparison(cfg.run, cfg.parallel, cfg.faults, cfg.checkpoint, drain))
    if cfg.sites.is_active:
        from moefold.train.sites.meeting import equal_settings
        from moefold.train.sites.outer_evaluation import SiteEvaluation
        from moefold.train.sites.rounds import SiteRounds

        settings = equal_settings(cfg.run, cfg.model, cfg.parallel, cfg.train, cfg.lora, cfg.sites)
        callbacks.append(SiteRounds(cfg.run, cfg.model, cfg.train, cfg.sites, settings))
        callbacks.append(SiteEvaluation(cfg.model, cfg.sites))
    return callbacks
