"""Comparison of a recipe on its ranks with the one-process float64 oracle."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from moefold.config.chosen import chosen_in
from moefold.config.groups.router import BalanceScopePart
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.data.dataset import ProgramData
from moefold.launch.rank_pool import WorkerPool
from moefold.verify.compare import NamedError, OracleRecord, compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, create_groups, run_distributed, run_on_groups
from tests.verify.recipes import without_mapping

TOLERANCE = 1e-9
STEPS = 2


def assert_equals_oracle(pool: WorkerPool, cfg: Config, num_steps: int = STEPS) -> None:
    """Run a recipe on its ranks and assert that every number and tensor is the oracle's."""
    worst = compare(pool, cfg, num_steps)[0]
    assert worst.error <= TOLERANCE, worst


def compare(pool: WorkerPool, cfg: Config, num_steps: int = STEPS) -> list[NamedError]:
    """Return all differences between a recipe on its ranks and the oracle, largest first."""
    ranks = pool.run(cfg.parallel.world_size, run_distributed, cfg, num_steps)
    return compare_records(oracle_of(cfg, num_steps), ranks)


def errors_of_broken_run(
    pool: WorkerPool, broken: Callable[..., DistributedRecord], cfg: Config, num_steps: int = 1, *args: int
) -> list[NamedError]:
    """Run a function that breaks one rule on the ranks of a recipe; return the differences from the oracle."""
    ranks = pool.run(cfg.parallel.world_size, broken, cfg, *args)
    return [found for found in compare_records(oracle_of(cfg, num_steps), ranks) if found.error > TOLERANCE]


def forget_the_adjoint_of_sums() -> None:
    """Break the sums over ranks in this process: each member has only its own gradient of a sum."""
    from moefold.comm import collectives

    differentiable = collectives._differentiable

    def without_adjoint(x, group, collective, adjoint):
        is_sum = collective is adjoint
        return differentiable(x, group, collective, (lambda grad: grad) if is_sum else adjoint)

    collectives._differentiable = without_adjoint


def oracle_of(cfg: Config, num_steps: int = STEPS, data: ProgramData | None = None) -> OracleRecord:
    """Return the oracle's record; recipes share it if they differ only in settings that it does not depend on."""
    if cfg.moe.drop_scope.kind == "sub_sequence":
        return _oracle_of_mapping(cfg, num_steps, data)
    if cfg.moe.aux_kind.kind == "global_batch":
        # It depends on the mapping only by dp.
        return _oracle_of_mapping(replace(cfg, parallel=ParallelConfig(world_size=cfg.parallel.dp)), num_steps, data)
    return _oracle_of_mapping(without_mapping(cfg), num_steps, data)


@lru_cache(maxsize=64)
def _oracle_of_mapping(cfg: Config, num_steps: int, data: ProgramData | None) -> OracleRecord:
    return run_oracle(cfg, num_steps, data=data)


def assert_all_equal_oracle(pool: WorkerPool, cfgs: Mapping[str, Config], data: ProgramData | None = None) -> None:
    """Run recipes of one mapping, by name, by the same ranks, and assert that each equals the oracle."""
    recipes = list(cfgs.values())
    ranks = pool.run(recipes[0].parallel.world_size, _run_all, recipes, data, timeout_s=280.0)
    worst = {
        name: compare_records(oracle_of(cfg, steps_of(cfg), data), [records[i] for records in ranks])[0]
        for i, (name, cfg) in enumerate(cfgs.items())
    }
    assert {name: found for name, found in worst.items() if found.error > TOLERANCE} == {}


def _run_all(cfgs: list[Config], data: ProgramData | None) -> list[DistributedRecord]:
    """Run recipes of one mapping one after another on the same process groups. Collective."""
    groups = create_groups(cfgs[0])
    return [run_on_groups(groups, cfg, steps_of(cfg), data=data) for cfg in cfgs]


def steps_of(cfg: Config) -> int:
    """Return one step, or two if the second one routes with what the first has left, or with other noise."""
    router = cfg.model.ffn.moe.router
    has_noise = cfg.moe.input_jitter or router.noise_width(1, 1)
    has_state = router.expert_bias or chosen_in(cfg.moe, BalanceScopePart).keeps_counts
    return STEPS if has_noise or has_state else 1
