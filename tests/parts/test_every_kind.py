"""Every built-in kind, found by its file: its facts equal its module, and its formula equals what the module computes.

A new part is tested by these without an edit, if its settings have defaults that fit a small model; else `NEEDS` of
`every_kind.py` has them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from moefold.comm.groups import fake_rank
from moefold.config.chosen import chosen, groups
from moefold.config.find import find_group, find_part
from moefold.config.parallel import ParallelConfig
from moefold.config.part import Part
from moefold.config.schema import Config
from moefold.convert.weights import parameter_shapes
from moefold.cost.layer_spec import model_weights
from moefold.errors import ConfigError
from moefold.model.local_param import local_tensor
from moefold.model.transformer import build_model
from moefold.parallel.parallelize import build_sharded_stages
from moefold.validate.config import check_config
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from tests.parts.every_kind import OF_LAYERS, kinds_of, variants
from tests.verify.oracle import TOLERANCE
from tests.verify.recipes import tiny

LAYER_KINDS = kinds_of(OF_LAYERS)
NO_STEP = {"advantage", "alignment", "correction", "kl", "objective"}
"""Groups of losses of a program, judged in tests/verify/test_objectives.py."""
JUDGED = [
    (group, kind)
    for group, kind in kinds_of(tuple(dict.fromkeys((*OF_LAYERS, *(base.group for base in groups())))))
    if group not in NO_STEP and find_part(group, kind).changes_maths
]


def recipes(group: str, kind: str) -> Iterator[Config]:
    """Yield the legal recipes with a kind; its first variant must be one."""
    for number, found in enumerate(variants(group, kind)):
        try:
            cfg = tiny(**found)
        except ConfigError:
            if not number:
                raise
            continue
        assert number or has_kind(cfg, group, kind)
        if has_kind(cfg, group, kind):
            yield cfg


def has_kind(cfg: Config, group: str, kind: str) -> bool:
    """Return whether a recipe has a part of this kind."""
    parts = [part for layer in cfg.model.all_layers for part in layer.parts()]
    if group not in OF_LAYERS:
        parts.append(chosen(cfg, find_group(group)))
    return any(isinstance(part, Part) and (part.group, part.kind) == (group, kind) for part in parts)


def shapes(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in tensors]


@pytest.mark.parametrize(("group", "kind"), LAYER_KINDS)
def test_its_parameters_and_shards_are_the_module(group, kind):
    """Names, shapes and order, and the shapes on a rank of tensor, expert and expert tensor parallelism."""
    for cfg in recipes(group, kind):
        weights = model_weights(cfg.model)
        with torch.device("meta"):
            built = build_model(cfg)
        assert [(name, weight.shape) for name, weight in weights.items()] == shapes(built.named_parameters())
        everything = shapes([*built.named_parameters(), *built.named_buffers()])
        assert list(parameter_shapes(cfg.model).items()) == everything
        _check_shards(cfg, ParallelConfig(world_size=4, tp=2, ep=2, etp=2))


def _check_shards(cfg: Config, parallel: ParallelConfig) -> None:
    cfg = replace(cfg, parallel=parallel)
    try:
        check_config(cfg)
    except ConfigError:
        return
    with fake_rank(parallel, 0) as of_rank:
        [stage] = build_sharded_stages(cfg, of_rank, for_training=True).stages
        local = shapes((name, local_tensor(parameter)) for name, parameter in stage.named_parameters())
    dp = {False: parallel.dp * parallel.cp, True: parallel.edp}
    assert set(dp.values()) == {2, 1}
    for name, shape in local:
        shard = model_weights(cfg.model)[name].shard(parallel.tp, parallel.ep, parallel.etp)
        assert shard.dp_shards(dp[shard.is_expert]).numel(0) == torch.Size(shape).numel(), name


@pytest.mark.parity
@pytest.mark.parametrize(("group", "kind"), JUDGED)
def test_its_formula_is_what_the_module_computes(pool, group, kind):
    """Losses, gradients, updates and routing of two steps, and of one with each setting that can be on or off."""
    for number, cfg in enumerate(recipes(group, kind)):
        steps = 1 if number else 2
        worst = compare_records(run_oracle(cfg, steps), pool.run(1, run_distributed, cfg, steps))[0]
        assert worst.error <= TOLERANCE, (worst, cfg.model)
