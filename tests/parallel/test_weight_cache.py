"""Weights that are quantised once a step give the bits of those that are quantised in every GEMM."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from torch import Tensor

from moefold.config.schema import Config
from moefold.cost.state_bytes import caches_quantized_weights, quantized_copy_bytes, unit_weights
from moefold.ops.quantization.emulated import EmulatedExpertOps, EmulatedLinear
from moefold.ops.quantization.formats import QUANT_FORMATS, fake_quantize
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.parallel.kernels import low_precision, select
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.slow import slow
from tests.verify.feature_cases import LOAN
from tests.verify.recipes import LATENT, tiny
from tests.verify.same_bits import assert_equal_bits
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity
FORMAT = replace(QUANT_FORMATS["fp8-blockwise"], block_size=8, weight_block_rows=8)
MICRO_BATCHES = 2


@dataclass(frozen=True)
class CachingLinear(EmulatedLinear):
    """Reads weights as the kernels of `fp8-blockwise` do, and counts how often one is quantised."""

    weight_cache: WeightCache
    counted: list[int] = field(default_factory=list)

    def quantized_matmul(self, a_MK: Tensor, b_NK: Tensor, b_block_rows: int) -> Tensor:
        """Compute the GEMM of the base class; `weight_cache` tells weights from the operands of weight gradients."""
        quantize = partial(self._quantize, block_rows=b_block_rows)
        return (fake_quantize(a_MK, FORMAT) @ self.weight_cache.get(b_NK, quantize).t()).to(a_MK.dtype)

    def _quantize(self, b_NK: Tensor, block_rows: int) -> Tensor:
        if block_rows > 1:
            self.counted.append(1)
        return fake_quantize(b_NK, FORMAT, block_rows)


def _run(cfg: Config, num_steps: int, weight_cache: WeightCache | None = None) -> tuple[DistributedRecord, int]:
    """Run a recipe and return how often a weight was quantised too."""
    is_shared = caches_quantized_weights(cfg.train, cfg.num_micro_batches, cfg.parallel.zero)
    weight_cache = weight_cache or WeightCache(is_enabled=is_shared)
    linear = CachingLinear(FORMAT, weight_cache)
    kernels = select.SelectedKernels(
        expert_ops=EmulatedExpertOps(linear), linear_backend=linear, weight_cache=weight_cache
    )
    low_precision.low_precision_kernels = lambda cfg, device, autotuner: kernels
    return run_distributed(cfg, num_steps), len(linear.counted)


NO_CACHE = WeightCache(is_enabled=False)


class EndlessCache(WeightCache):
    """Cache that outlives the step."""

    def step(self):
        """Keep the cached weights."""
        self._results = self._results or {}
        return nullcontext()


@dataclass(frozen=True)
class CacheCase:
    """A mapping, and the fraction of quantisations that are left in two steps and an evaluation."""

    parallel: dict[str, object]
    remaining: float
    train: dict[str, object] = field(default_factory=dict)
    moe: dict[str, object] = field(default_factory=dict)
    model: dict[str, object] = field(default_factory=dict)

    def config(self) -> Config:
        """Return the recipe, in bfloat16."""
        parallel = {"world_size": 2} | self.parallel
        samples = parallel["world_size"] // parallel.get("pp", 1) * MICRO_BATCHES
        cfg = tiny(
            {"layers.ffn": "dense, moe", "ffn.moe.shared.intermediate_size": 8} | self.model,
            self.moe,
            {"global_batch_size": samples, "precision": "fp8-blockwise"} | self.train,
            **parallel,
        )
        return replace(cfg, run=replace(cfg.run, dtype="bfloat16"))


# Each of two micro-batches of a step reads a weight in the forward pass and once more for the gradient of the input;
# the evaluation quantises for each of its two.
SHARED = (2 * 2 + 2) / (2 * 4 + 2)
CASES = {
    "zero 0": CacheCase({"zero": 0}, SHARED),
    "zero 1": CacheCase({"zero": 1, "ep": 2}, SHARED),
    "zero 2, recomputation": CacheCase({"zero": 2}, (2 * 2 + 2) / (2 * 6 + 2), {"recompute": ("layer",)}),
    "zero 3": CacheCase({"zero": 3}, 1.0),
    "pipeline": CacheCase({"pp": 2}, SHARED),
    "one rank": CacheCase({"world_size": 1}, SHARED),
    "overlap": CacheCase({"ep": 2, "zero": 1, "overlap_experts": True}, SHARED),
}
FAST = ("zero 2, recomputation", "overlap")


def _records(runs: list[tuple[DistributedRecord, int]], others: list[tuple[DistributedRecord, int]]):
    return zip((record for record, _ in runs), (record for record, _ in others), strict=True)


@pytest.mark.parametrize("name", [*FAST, *slow((name,) for name in CASES if name not in FAST)])
def test_a_step_gives_the_bits_of_weights_that_are_quantised_in_every_gemm(fresh_pool, name):
    """Compare gradients, two updates and an evaluation with the run without a cache."""
    cfg = CASES[name].config()
    cached, uncached = run_each(fresh_pool, cfg.parallel.world_size, _run, (cfg, 2), (cfg, 2, NO_CACHE))
    assert_equal_bits(_records(uncached, cached))
    for (_, count), (_, all_of_them) in zip(cached, uncached, strict=True):
        assert count == pytest.approx(CASES[name].remaining * all_of_them)


def test_migrated_experts_are_not_cached(fresh_pool):
    """`leastloaded` receives the weights of other experts in each micro-batch, in tensors that are not parameters."""
    cfg = CacheCase({"ep": 2, "dispatcher": "leastloaded"}, 0.0, moe=LOAN).config()
    cached, uncached = run_each(fresh_pool, 2, _run, (cfg, 2), (cfg, 2, NO_CACHE))
    assert_equal_bits(_records(uncached, cached))
    assert all(count < all_of_them for (_, count), (_, all_of_them) in zip(cached, uncached, strict=True))


def test_a_stale_weight_would_be_noticed(fresh_pool):
    cfg = CASES["zero 1"].config()
    uncached, stale = run_each(fresh_pool, 2, _run, (cfg, 2, NO_CACHE), (cfg, 2, EndlessCache()))
    with pytest.raises(AssertionError, match="weights"):
        assert_equal_bits(_records(uncached, stale))


def _cached_bytes(cfg: Config) -> int:
    """Return the bytes of all quantised weights of a step, one a value."""
    cache = EndlessCache()
    _run(cfg, 1, cache)
    return sum(weight.numel() for weight in cache._results.values())


@pytest.mark.parametrize("attention", [LATENT, *slow([({},)])])
def test_the_memory_formula_counts_every_quantised_weight(fresh_pool, attention):
    model = {"mtp_layers": 1, "ffn.moe.bias": True}
    cfg = CacheCase({"ep": 2}, 0.0, model=model | attention).config()
    units = (*cfg.model.decoder_layers, "mtp")
    weights = [weight.shard(1, 2, 1) for unit in units for weight in unit_weights(cfg.model, cfg.lora, unit)]
    assert fresh_pool.run(2, _cached_bytes, cfg) == [quantized_copy_bytes(weights)] * 2
