"""Test that the facts of every built-in kind equal its module, and its formula the module's results.

A new part is tested by these without an edit, if its settings have defaults that fit a small model; else `NEEDS` of
`every_kind.py` has them.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moefold.comm.groups import fake_rank
from moefold.config.base.part_registry import find_part, groups
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.convert.weight_sources import parameter_shapes
from moefold.cost.layer_spec import model_weights
from moefold.errors import ConfigError
from moefold.model.local_param import local_tensor
from moefold.model.transformer import build_model
from moefold.parallel.parallelize import build_sharded_stages
from moefold.validate.config import check_config
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from tests.cost.measured_memory import assert_memory_close, memory_config
from tests.cost.measured_memory import measure_one_rank as memory_of_one_rank
from tests.inference.example import write_checkpoint
from tests.inference.kept_bytes import kept_bytes
from tests.parts.every_kind import OF_LAYERS, kinds_of, merged, recipes, settings, switched
from tests.verify.oracle import TOLERANCE
from tests.verify.recipes import tiny
from tests.verify.shared_ranks import Call, SharedRanks

ATTENTIONS = kinds_of(("attention",))
LAYER_KINDS = kinds_of(OF_LAYERS)
NO_STEP = {"advantage", "alignment", "correction", "kl", "objective"}
"""Groups of losses of a program, judged in tests/verify/test_objectives.py."""
OF_SEVERAL_STEPS = ("balance_scope", "choice", "lr_schedule", "optimizer")
"""Groups whose parts in a step read what the step before has left."""
JUDGED = [
    (group, kind)
    for group, kind in kinds_of(tuple(dict.fromkeys((*OF_LAYERS, *(base.group for base in groups())))))
    if group not in NO_STEP and find_part(group, kind).changes_maths
]


def shapes(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in tensors]


@pytest.mark.parametrize(("group", "kind"), LAYER_KINDS)
def test_its_parameters_and_shards_are_the_module(group, kind):
    """Names, shapes and order, and the shapes on a rank of tensor, expert and expert tensor parallelism."""
    for weights, cfg in {tuple(model_weights(cfg.model).items()): cfg for cfg in recipes(group, kind)}.items():
        with torch.device("meta"):
            built = build_model(cfg)
        assert [(name, weight.shape) for name, weight in weights] == shapes(built.named_parameters())
        everything = shapes([*built.named_parameters(), *built.named_buffers()])
        assert list(parameter_shapes(cfg.model).items()) == everything
        _assert_shards(cfg, ParallelConfig(world_size=4, tp=2, ep=2, etp=2))


def _assert_shards(cfg: Config, parallel: ParallelConfig) -> None:
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


@pytest.fixture(scope="module")
def rank_of_kinds(pool) -> SharedRanks:
    """The rank that trains the first recipe of each kind."""

    def call(group: str, kind: str) -> Call:
        return Call(1, run_distributed, (next(recipes(group, kind)), 2 if group in OF_SEVERAL_STEPS else 1))

    return SharedRanks(pool, {" ".join(each): call(*each) for each in JUDGED})


@pytest.mark.parity
@pytest.mark.parametrize(("group", "kind"), JUDGED)
def test_its_formula_equals_the_module(rank_of_kinds, group, kind):
    """Losses, gradients, updates and routing."""
    name = f"{group} {kind}"
    cfg, steps = rank_of_kinds.calls[name].args
    worst = compare_records(run_oracle(cfg, steps), rank_of_kinds.results(name))[0]
    assert worst.error <= TOLERANCE, (worst, cfg.model)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize(("group", "kind"), [each for each in JUDGED if any(switched(*each))])
def test_its_formula_has_each_setting_that_can_be_on_or_off(pool, group, kind):
    found = list(recipes(group, kind))[1:]
    if not found:
        pytest.skip("the small recipe has no use for its settings")
    for cfg in found:
        worst = compare_records(run_oracle(cfg, 1), pool.run(1, run_distributed, cfg, 1))[0]
        assert worst.error <= TOLERANCE, (worst, cfg.model)


MEASURED_SIZES = {
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 20,
    "attention.qk_nope_head_dim": 12,
    "attention.qk_rope_head_dim": 4,
    "attention.v_head_dim": 16,
    "linear_attention.num_key_heads": 2,
    "linear_attention.num_value_heads": 4,
    "linear_attention.key_head_dim": 32,
    "linear_attention.value_head_dim": 48,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "attention.indexer.top_k": 24,
    "attention.indexer.head_dim": 16,
    "ffn.moe.latent_size": 24,
}
"""Sizes whose tensors are large compared with the short-lived memory of a step."""
MEASURED = kinds_of((*OF_LAYERS, "activation", "router_score", "router_softmax", "wire"))


def measured_recipe(dtype: str, model: dict[str, object] | None = None, **sections: dict[str, object]) -> Config:
    sizes = {key: MEASURED_SIZES.get(key, value) if value else value for key, value in (model or {}).items()}
    return memory_config(dtype, model=sizes, **sections)


@pytest.mark.parametrize(("group", "kind"), MEASURED)
def test_its_saved_bytes_are_measured(group, kind):
    cfg = next(recipes(group, kind, partial(measured_recipe, "float32")))
    assert_memory_close(cfg, [memory_of_one_rank(cfg)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "kind"), MEASURED)
def test_its_saved_bytes_are_measured_with_each_setting_that_can_be_on_or_off(group, kind, dtype):
    for cfg in recipes(group, kind, partial(measured_recipe, dtype)):
        assert_memory_close(cfg, [memory_of_one_rank(cfg)])


def attend(q, k, v, documents=None, sinks=None, scale=None):
    """Attention over all keys, by products that torch counts."""
    k, v = (heads.repeat_interleave(q.shape[2] // heads.shape[2], 2).permute(1, 2, 0, 3) for heads in (k, v))
    return ((q.permute(1, 2, 0, 3) @ k.mT).softmax(-1) @ v).permute(2, 0, 1, 3)


@pytest.mark.parametrize("kind", [kind for _, kind in ATTENTIONS if not find_part("attention", kind).is_recurrent])
def test_its_core_flops_are_counted(kind):
    """By torch, with keys as wide as values, which would be padded else."""
    cfg = tiny(**merged(settings("attention", kind), {"model": {"attention.v_head_dim": 6}}))
    layer = cfg.model.decoder_layers[0]
    model = build_model(cfg)
    model.set_positions(torch.arange(16))
    module = model.layers["0"].attention.double()
    module.core_attention = attend
    x = torch.randn(16, 2, cfg.model.hidden_size, dtype=torch.float64)
    with FlopCounterMode(display=False) as counted:
        module(x, model.rope)
    matrices = sum(2 * weight.numel for weight in layer.attention.params(cfg.model.hidden_size) if weight.is_matrix)
    assert counted.get_total_flops() == 16 * 2 * (matrices + layer.core.flops(16))


@pytest.mark.parity
@pytest.mark.parametrize(("group", "kind"), [*ATTENTIONS, *kinds_of(("indexer",))])
def test_its_cache_is_as_large_as_computed(pool, tmp_path, group, kind):
    cfg = tiny(**settings(group, kind))
    cfg = replace(cfg, run=replace(cfg.run, dir=str(tmp_path)))
    pool.run(1, write_checkpoint, cfg)
    [((cache, _), (computed, _))] = pool.run(1, kept_bytes, tmp_path, {"dtype": "float32"}, "latents")
    assert cache == computed > 0
