"""Runs that train adapters: the base stays, checkpoints have only adapters, and merged weights compute the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.stored_tensors import stored_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.run import RunConfig
from moefold.convert.weight_sources import load_merged_weights
from moefold.cost.adapter_spec import adapter_weights, is_adapter
from moefold.errors import ConfigError
from moefold.model.transformer import build_model
from moefold.model.weight_init import init_weights
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.signals import StopSignals
from moefold.train.train_step import TrainingStep
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from moefold.verify.distributed_run import gather_full_tensors, open_samples, run_distributed
from tests.slow import slow
from tests.train.policy_runs import recipe as rl_recipe
from tests.train.policy_runs import records, under
from tests.verify.lora_cases import LORA, MIXED
from tests.verify.oracle import errors_of_broken_run
from tests.verify.recipes import tiny
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity


def _groups(cfg: Config) -> ParallelGroups:
    return ParallelGroups.create(check_config(cfg), torch.device("cpu"))


def _train_and_gather(cfg: Config) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the losses of two steps, and all weights before and after them."""
    groups = _groups(cfg)
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    before = gather_full_tensors(model)
    loader = BatchSharder(open_samples(cfg).train, cfg.batch_shape, groups, model.positions)
    losses = [training.run(loader.batch(i * cfg.train.global_batch_size), i + 1).loss for i in range(2)]
    return losses, before, gather_full_tensors(model)


@pytest.mark.parametrize("dtype", ["bfloat16", *slow([("float64",)])])
def test_new_adapters_change_no_bit_and_training_leaves_the_base(pool, dtype):
    """With B = 0 the loss has the bits of the base model; two steps change every adapter and nothing else.

    The base is in the compute type, as it is read.
    """
    model = MIXED | {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True}
    cfg = tiny(model=model, lora=LORA, world_size=2, ep=2, zero=3)
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype))
    losses, before, after = pool.run(2, _train_and_gather, cfg)[0]
    plain_losses, plain_before, _ = pool.run(2, _train_and_gather, replace(cfg, lora=LoraConfig()))[0]
    assert losses[0] == plain_losses[0]
    assert losses[1] != plain_losses[1]
    assert all(torch.equal(before[name], weight.to(before[name].dtype)) for name, weight in plain_before.items())
    assert before["embedding.weight"].dtype == getattr(torch, dtype)
    assert before["layers.1.ffn.router.weight"].dtype == torch.promote_types(torch.float32, getattr(torch, dtype))
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed == set(adapter_weights(cfg.model, cfg.lora))


def _run_without_sum(cfg: Config, *axes: int) -> Any:
    """As if the gradients of adapters stayed the parts of each rank."""
    from moefold.parallel import parallel_model

    whole = parallel_model.sum_replicated_gradients

    def broken(parameters, group, axis="tp"):
        if axis != "etp":
            whole(parameters, group, axis)

    parallel_model.sum_replicated_gradients = broken
    return run_distributed(cfg, 1)


def test_a_missing_sum_over_etp_is_noticed(fresh_pool):
    cfg = tiny(model={"layers": 2}, lora=LORA, world_size=2, etp=2)
    names = {found.name for found in errors_of_broken_run(fresh_pool, _run_without_sum, cfg)}
    assert "gradients layers.0.ffn.experts.lora.w_gate_a" in names
    assert "gradients layers.0.ffn.experts.lora.w_down_b" in names
    assert "gradients layers.0.ffn.experts.lora.w_down_a" not in names


def _train(cfg: Config) -> int:
    return Trainer(cfg, _groups(cfg)).run(StopSignals())


def _recipe(folder: Path, name: str, base: str = "", **mapping: Any) -> Config:
    cfg = tiny(
        model=MIXED,
        lora=LORA if base else {},
        train={"eval_every": 4, "eval_samples": 4, "lr_schedule": "constant"},
        **mapping,
    )
    run = RunConfig(dir=str(folder / name), seed=3, steps=4, device="cpu", dtype="float64")
    return replace(cfg, run=run, checkpoint=CheckpointConfig(every=2, init_from=base))


@pytest.fixture(scope="module")
def base(pool, tmp_path_factory) -> str:
    """A run of all weights, the base of the adapters."""
    cfg = _recipe(tmp_path_factory.mktemp("base"), "base")
    pool.run(1, _train, cfg)
    return cfg.run.dir


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"world_size": 2, "tp": 2, "etp": 2}, {"world_size": 2, "pp": 2}),
        *slow([({"world_size": 4, "ep": 4, "zero": 3}, {"world_size": 4, "tp": 2, "cp": 2, "etp": 2, "zero": 1})]),
    ],
)
def test_adapters_resume_under_another_mapping_and_merge(pool, tmp_path, base, before, after):
    """The losses equal an uninterrupted run's, and the merged weights have its loss on the held-out samples."""
    straight = _recipe(tmp_path, "straight", base)
    pool.run(1, _train, straight)
    first = _recipe(tmp_path, "resumed", base, **before)
    second = _recipe(tmp_path, "resumed", base, **after)
    run_each(pool, before["world_size"], _train, (replace(first, run=replace(first.run, steps=2)),), (second,))
    losses = [[record["loss"] for record in records(cfg)] for cfg in (straight, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    saved = Path(second.run.dir) / "checkpoints" / "step-000004"
    assert all(is_adapter(tensor.name.removeprefix("optimizer.")) for tensor in stored_tensors(saved))
    assert read_meta(saved).lora["base"] == str(Path(base) / "checkpoints" / "step-000004")
    merged = pool.run(1, _evaluate_merged, replace(second, parallel=straight.parallel, lora=LoraConfig()), str(saved))
    assert merged == pytest.approx([records(second)[-1]["eval_loss"]], rel=1e-12)


@pytest.mark.slow
def test_reference_of_the_start_has_the_adapters_of_the_start(pool, tmp_path):
    """With adapters of an earlier run, the policy of the first step is the reference: their divergence is 0."""
    first = replace(rl_recipe(tmp_path, 2, kl=0.1), lora=LoraConfig(**LORA))
    first = replace(first, checkpoint=replace(first.checkpoint, every=2))
    pool.run(1, _train, first)
    saved = str(Path(first.run.dir) / "checkpoints" / "step-000002")
    second = replace(under(first, tmp_path / "second"), lora=LoraConfig(**LORA, init_from=saved))
    pool.run(1, _train, second)
    assert abs(records(second)[0]["rl"]["kl"]) < 1e-12
    assert records(second)[1]["rl"]["kl"] > 1e-9


def _evaluate_merged(cfg: Config, saved: str) -> float:
    """Return the loss of the merged weights on the held-out samples of a run's evaluation."""
    groups = _groups(cfg)
    model = parallelize(cfg, groups)
    load_merged_weights(Path(saved), model.named_parameters, model.named_buffers)
    sharder = BatchSharder(open_samples(cfg).validation, cfg.batch_shape, groups, model.positions)
    count = cfg.train.eval_samples // cfg.train.global_batch_size
    batches = [sharder.batch(i * cfg.train.global_batch_size) for i in range(count)]
    return TrainingStep(model, cfg).evaluate(batches) / count


@pytest.mark.parametrize(
    ("mapping", "sampling"),
    [
        ({"world_size": 2, "ep": 2, "zero": 3}, {"tp": 2, "ep": 1}),
        *slow(
            [
                ({"world_size": 4, "tp": 2, "ep": 2, "zero": 3}, {}),
                ({"world_size": 4, "tp": 2, "pp": 2, "etp": 2}, {"experts": "fetch", "ep": 2, "tp": 1, "etp": 1}),
                ({"world_size": 2, "pp": 2}, {}),
            ]
        ),
    ],
)
def test_rollouts_come_from_the_adapted_policy(pool, tmp_path, mapping, sampling):
    """One rank samples with the adapters, another mapping with merged weights: the same tokens, losses and KL."""
    cfg = replace(rl_recipe(tmp_path, 2, kl=0.1), lora=LoraConfig(**LORA))
    pool.run(1, _train, cfg)
    other = under(cfg, tmp_path / "mapped", **mapping)
    other = replace(other, rollout=replace(other.rollout, **sampling))
    pool.run(mapping["world_size"], _train, other)
    for expected, found in zip(records(cfg), records(other), strict=True):
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12)
        assert found["rl"]["kl"] == pytest.approx(expected["rl"]["kl"], rel=1e-8, abs=1e-12)
    texts = [[record["completion"] for record in records(one, "rollouts.jsonl")] for one in (cfg, other)]
    assert texts[0] == texts[1]
    assert records(cfg)[-1]["rl"]["kl"] > 1e-9


def test_a_changed_or_missing_base_is_refused(pool, tmp_path, base):
    cfg = _recipe(tmp_path, "run", base)
    pool.run(1, _train, replace(cfg, run=replace(cfg.run, steps=2)))
    saved = Path(cfg.run.dir) / "checkpoints" / "step-000002"
    model = build_model(replace(cfg, lora=LoraConfig()))
    init_weights(model, cfg.model, 0)
    moved = Path(base).rename(Path(base).with_name("moved"))
    with pytest.raises(ConfigError, match=r"which does not exist; put the folder back there, or .* --base DIR"):
        load_merged_weights(saved, dict(model.named_parameters()), {})
    moved.rename(base)
    manifest = Path(base) / "checkpoints" / "step-000004" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text + "\n")
    with pytest.raises(ConfigError, match=r"has adapters of other weights than .* has now; restore the folder"):
        load_merged_weights(saved, dict(model.named_parameters()), {})
    manifest.write_text(text)
