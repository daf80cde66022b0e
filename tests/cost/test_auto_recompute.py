"""`train.recompute = ["auto"]`: of all sets that fit, the one with the least to do again."""

import itertools
from dataclasses import replace

import pytest

from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.auto_recompute import choose_recompute, recompute_overhead
from moefold.cost.peak_memory import compute_rank_memory
from moefold.cost.recompute_parts import recompute_parts
from moefold.cost.saved_tensors import CPU_KERNELS, CUDA_KERNELS
from moefold.errors import ConfigError
from moefold.units import GIB
from moefold.validate.config import check_config
from tests.models import model_of

SHARED = {"ffn.moe.shared.intermediate_size": 512, "layers.ffn": "dense, moe"}
LATENT = {"attention": "mla"}


def _config(model: dict[str, object] | None = None, budget_gib: float = 0.0, **parallel: object) -> Config:
    return Config(
        run=RunConfig(device="cpu"),
        model=model_of({"layers": 8, **(model or {})}),
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(seq_len=2048, global_batch_size=64, recompute=("auto",), memory_budget_gib=budget_gib),
    )


def _worst(cfg: Config, parts: tuple[str, ...]) -> int:
    return max(rank.total for rank in compute_rank_memory(cfg, recompute=parts, kernels=CUDA_KERNELS))


def _legal(cfg: Config, parts: tuple[str, ...]) -> bool:
    try:
        check_config(replace(cfg, train=replace(cfg.train, recompute=parts)))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    "cfg",
    [
        _config(),
        _config(SHARED),
        _config(LATENT | SHARED),
        _config(SHARED, world_size=16, tp=2, pp=4, ep=4, schedule="interleaved", virtual_stages=2),
        _config(SHARED, world_size=8, pp=2, ep=4, schedule="dualpipev", virtual_stages=2, overlap_experts=True),
    ],
    ids=["plain", "shared", "latent", "pipeline", "pairs"],
)
def test_for_every_budget_the_least_work_that_fits(cfg):
    everything = itertools.chain.from_iterable(
        itertools.combinations(recompute_parts(), n) for n in range(len(recompute_parts()) + 1)
    )
    known = {parts: _worst(cfg, parts) for parts in everything if _legal(cfg, parts)}
    extras, chosen = [], set()
    for budget in sorted(set(known.values()), reverse=True)[::9]:
        choice = choose_recompute(cfg, budget)
        assert known[choice.parts] == choice.max_rank_bytes <= budget
        assert choice.extra_flops_fraction == min(
            recompute_overhead(cfg, parts) for parts, size in known.items() if size <= budget
        )
        extras.append(choice.extra_flops_fraction)
        chosen.add(choice.parts)
    assert extras == sorted(extras), "less memory never means less work"
    assert () in chosen
    assert len(chosen) > 1


def test_a_recipe_that_fits_is_not_changed():
    choice = choose_recompute(_config(), 10**12)
    assert (choice.parts, choice.extra_flops_fraction) == ((), 0.0)
    assert "recomputes nothing" in choice.describe(10**12)


def test_norms_go_first_and_whole_layers_last():
    cfg = _config()
    plain = choose_recompute(cfg, 10**12).max_rank_bytes
    assert choose_recompute(cfg, plain - 1).parts == ("norms",)
    assert choose_recompute(cfg, _worst(cfg, ("layer",))).parts == ("layer",)


def test_a_budget_that_holds_nothing_is_refused_with_the_way_out():
    states = (
        r"nine tenths of the smallest GPU, 0.0009313 GiB, are too small.*weights, gradients and optimizer alone "
        r"do not fit: raise parallel.pp \(now 1\), parallel.tp \(now 1\), parallel.ep \(now 1\), "
        r"parallel.zero \(now 1\), or choose train.optimizer.moment_dtype='bfloat16'$"
    )
    with pytest.raises(ConfigError, match=states):
        choose_recompute(_config(), 10**6)
    with pytest.raises(ConfigError, match=r"train.memory_budget_gib=0.0009313 is too small"):
        choose_recompute(_config(budget_gib=10**6 / GIB), 10**6)
    least = _worst(_config(), ("layer",))
    with pytest.raises(ConfigError, match=r"raise parallel.cp \(now 1\) or parallel.tp \(now 1\)$"):
        choose_recompute(_config(), least - 1)
    whole = replace(_config(), train=replace(_config().train, loss_chunk=0))
    with pytest.raises(ConfigError, match=r"parallel.tp \(now 1\), or set train.loss_chunk=-1$"):
        choose_recompute(whole, _worst(whole, ("layer",)) - 1)


@pytest.mark.parametrize(
    ("recompute", "budget", "message"),
    [
        (("auto",), 0.0, "needs train.memory_budget_gib with run.device='cpu'"),
        (("auto", "norms"), 1.0, "names parts with 'auto'"),
        (("norms",), 1.0, "is only read with train.recompute=\\['auto'\\]"),
        (("auto",), 0.001, "is too small, whatever is recomputed"),
        (("auto",), -1.0, "must be at least 0"),
    ],
)
def test_wrong_settings_are_refused(recompute, budget, message):
    cfg = _config(budget_gib=budget)
    with pytest.raises(ConfigError, match=message):
        check_config(replace(cfg, train=replace(cfg.train, recompute=recompute)))


def test_a_budget_that_holds_a_step_passes():
    cfg = _config(budget_gib=_worst(_config(), ()) / GIB)
    check_config(cfg)
    assert choose_recompute(cfg, round(cfg.train.memory_budget_gib * GIB), CPU_KERNELS).parts != ("layer",)
