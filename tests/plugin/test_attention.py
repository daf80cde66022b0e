"""The attention of the package: equal to the built-in attention of the same formula wherever it is asked for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.cost.flops import count_parameters
from moefold.cost.kv_cache import cache_sizes
from moefold.errors import ConfigError
from moefold.inference.engine.engine import model_cache_sizes
from moefold.launch.rank_pool import WorkerPool
from moefold.model.layer_cache import CacheSize
from moefold.model.transformer import build_model
from moefold.parallel.paged_decoder import PagedDecoder, forward_chain
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from moefold.verify.shrink import shrink
from tests.cost.measured_memory import assert_memory_close, measure_ranks, memory_config
from tests.inference.example import opened, write_checkpoint
from tests.inference.generation import GREEDY, run_generation, run_in_pieces, run_whole, run_without_cache
from tests.model.paged_rows import pass_rows
from tests.plugin.recipes import BUILT_IN, mapped, recipe, words
from tests.slow import slow
from tests.verify.oracle import TOLERANCE

GATED = words("model.attention")


def test_it_has_the_parameters_flops_and_cache_of_the_built_in_one():
    mine, theirs = (recipe(*keys).model for keys in (GATED, BUILT_IN))
    assert count_parameters(mine) == count_parameters(theirs)
    # gqa replicates heads of keys where tp exceeds them; here that is refused.
    mine_by_name, theirs_by_name = (
        {weight.name: replace(weight, tp_heads=0) for weight in model.decoder_layers[0].params}
        for model in (mine, theirs)
    )
    assert mine_by_name == theirs_by_name
    assert mine.decoder_layers[0].core == theirs.decoder_layers[0].core
    with torch.device("meta"):
        built = build_model(recipe(*GATED))
    assert count_parameters(mine).total == sum(weight.numel() for weight in built.parameters())


@pytest.mark.parametrize("key", ["qk_norm", "gate"])
def test_keys_of_built_in_attention_in_its_table_are_refused(key):
    """They would change nothing."""
    with pytest.raises(ConfigError, match=f"model.attention.{key} is not a key of 'gated', whose keys are num_heads, "):
        recipe(*GATED, f"model.attention.{key}={{}}")


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    slow(
        [
            ({"world_size": 2, "tp": 2, "ep": 2},),
            ({},),
            ({"world_size": 2, "cp": 2},),
            ({"world_size": 2, "pp": 2, "schedule": "zero-bubble"},),
        ]
    ),
)
def test_the_oracle_of_the_built_in_one_judges_its_runs(pool: WorkerPool, mapping: dict[str, object]) -> None:
    records = pool.run(int(mapping.get("world_size", 1)), run_distributed, mapped(recipe(*GATED), mapping), 2)
    assert compare_records(run_oracle(recipe(*BUILT_IN), 2), records)[0].error < TOLERANCE


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [{"world_size": 2, "tp": 2}, *slow([({},), ({"world_size": 2, "pp": 2},)])],
)
def test_its_cache_gives_the_tokens_of_the_whole_text(pool: WorkerPool, tmp_path: Path, mapping) -> None:
    path = tmp_path / "run"
    pool.run(1, write_checkpoint, recipe(*GATED, f"run.dir={path}", "train.seq_len=24"))
    [expected] = pool.run(1, run_without_cache, path)
    for found in pool.run(mapping.get("world_size", 1), run_generation, path, mapping, GREEDY):
        assert [completion.tokens for completion in found] == [tuple(ids) for ids in expected]


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [{}, *slow([({"world_size": 2, "tp": 2},), ({"world_size": 2, "pp": 2},)])],
)
@pytest.mark.parametrize("recompute", [(), *slow([(("norms",),), (("layer",),)])])
def test_its_saved_bytes_are_measured(pool: WorkerPool, mapping, recompute) -> None:
    attention = recipe(*GATED).model.attention
    cfg = memory_config(model={"attention": attention}, train={"recompute": recompute}, **mapping)
    assert_memory_close(cfg, measure_ranks(pool, cfg))


def cached_bytes(path: Path, mapping: dict[str, object]) -> tuple[set[str], int, int]:
    """Return the classes of the caches of a pass over a paged cache, its bytes, and the bytes that are counted."""
    model = opened(path, "generate", mapping, 24, 2).model
    tokens, size = torch.arange(2), CacheSize(num_pages=6, page_positions=4)
    with forward_chain(model) as chain, PagedDecoder(chain, size) as decoder:
        decoder.forward(tokens, pass_rows([range(1)] * 2, 3), tokens)
        found = [layer.attention.core_attention for stage in chain.stages for layer in stage.layers.values()]
        return {type(cache).__name__ for cache in found}, decoder.nbytes, model_cache_sizes(model).kv_bytes(24)


@pytest.mark.parity
def test_its_own_cache_gives_equal_logits_and_has_the_counted_bytes(pool, tmp_path) -> None:
    path, pieces = tmp_path / "run", [5, 1, 3, 1, 1]
    pool.run(1, write_checkpoint, recipe(*GATED, f"run.dir={path}", "train.seq_len=24"))
    [whole] = pool.run(1, run_whole, path, sum(pieces))
    ends = torch.tensor(pieces).cumsum(0) - 1
    for mapping in ({}, {"world_size": 2, "tp": 2, "ep": 2}):
        for found in pool.run(mapping.get("world_size", 1), run_in_pieces, path, mapping, pieces):
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, whole[ends], rtol=1e-12, atol=1e-12)
        for classes, held, counted in pool.run(mapping.get("world_size", 1), cached_bytes, path, mapping):
            assert (classes, held) == ({"JointCache"}, counted)


def test_it_shrinks_with_the_recipe():
    small = shrink(recipe(*GATED, "parallel.world_size=2", "parallel.tp=2")).model.attention
    assert (small.kind, small.num_heads, small.head_dim) == ("gated", 2, 8)


def test_its_cache_has_the_bytes_of_the_built_in_one() -> None:
    mine, theirs = (cache_sizes(recipe(*keys), "cpu").kv_bytes(3 * 24) for keys in (GATED, BUILT_IN))
    assert mine == theirs > 0
