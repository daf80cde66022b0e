"""Reinforcement learning on forked ranks: rewards rise, mappings agree, and a resumed run repeats no step."""

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.checkpoint.safe_metadata import read_metadata
from moefold.cli.main import main
from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RewardConfig, RLConfig, RolloutConfig
from moefold.cost.kv_cache import cache_sizes
from moefold.cost.rollout_memory import gathered_weight_bytes, min_sampling_memory, rollout_weight_bytes
from moefold.data.prompts import Prompt
from moefold.data.tokenizer import load_tokenizer
from moefold.errors import ConfigError
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import Completion, EngineSettings, Request
from moefold.inference.rollouts import RolloutCollector, StopRule
from moefold.inference.sampling import SamplingParams
from moefold.model.local_param import local_tensor
from moefold.parallel.parallelize import parallelize
from moefold.rl.reward import Reward
from moefold.rl.round_statistics import RoundStatistics
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.machine_checks import check_rollout_cache
from moefold.train.rl.kl_reference import ReferenceModel
from moefold.train.rl.rollout_source import RolloutModel
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from moefold.validate.memory_need import min_training_memory
from tests.models import edit_model
from tests.ops.c_kernels import needs_compiler
from tests.slow import slow
from tests.train.policy_runs import recipe, records, train_policy, under, weights

RECIPES = Path(__file__).parents[2] / "recipes"

pytestmark = pytest.mark.parity


class Phases(FlightRecorder):
    """Keeps the names of all phases."""

    def __init__(self) -> None:
        self.names: list[str] = []
        super().__init__()

    def set_phase(self, phase: str) -> None:
        self.names.append(phase)
        super().set_phase(phase)


def _train_for_phases(cfg: Config) -> list[str]:
    recorder = Phases()
    Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu"), recorder)).run(StopSignals())
    return recorder.names


@pytest.mark.parametrize("mapping", [{}, {"world_size": 2, "pp": 2}])
def test_passes_of_sampling_and_of_the_reference_keep_their_phase(pool, tmp_path, mapping):
    """A report of a hang names it; the run has no evaluation, whose passes are alike."""
    cfg = under(recipe(tmp_path, 1, kl=0.1), tmp_path / "run", **mapping)
    for names in pool.run(cfg.parallel.world_size, _train_for_phases, cfg):
        after = {names[i + 1] for i, name in enumerate(names) if name == "sampling rollouts"}
        assert after == {"computing rewards"}
        assert any(name.startswith("log-probabilities of") for name in names)
        assert "evaluation" not in names


@pytest.mark.slow
def test_rewards_rise(pool, tmp_path):
    """As e2e/test_rl.py does by the command line."""
    cfg = recipe(tmp_path, 30, advantage="group_std")
    cfg = replace(cfg, checkpoint=CheckpointConfig(every=0, at_end=False), train=replace(cfg.train, eval_every=30))
    pool.run(1, train_policy, cfg)
    rewards = [record["rl"]["reward"] for record in records(cfg)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert records(cfg)[-1]["rl"]["eval_reward"] > 0.7


@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 2, "tp": 2, "ep": 2},
        *slow(
            (mapping,)
            for mapping in (
                {"world_size": 2, "pp": 2},
                {"world_size": 4, "tp": 2, "ep": 2, "zero": 3},
                {"world_size": 2, "ep": 2},
                {"world_size": 2, "cp": 2},
            )
        ),
    ],
)
# The fast row is the only one of `make test` that trains a policy under tp and compares it with one rank.
def test_every_mapping_samples_and_trains_the_same(pool, tmp_path, mapping):
    cfg = _one_rollout_a_row(tmp_path)
    pool.run(1, train_policy, cfg)
    other = under(cfg, tmp_path / "mapped", **mapping)
    pool.run(mapping["world_size"], train_policy, other)
    for expected, found in zip(records(cfg), records(other), strict=True):
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12)
        for key in ("reward", "mixed_groups", "length_mean"):
            assert found["rl"][key] == expected["rl"][key]
    for one in (cfg, other):
        _assert_counts_equal_the_rollouts(one)
    texts = [[record["completion"] for record in records(one, "rollouts.jsonl")] for one in (cfg, other)]
    assert texts[0] == texts[1]


def _one_rollout_a_row(tmp_path: Path) -> Config:
    """Return a recipe in which no two rollouts fit into a row, and none fills it: each of their tokens is an input."""
    rows = ({"prompt": "p" * 17 + f"{i}:"} for i in range(20))
    cfg = recipe(tmp_path, 2)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return cfg


def _assert_counts_equal_the_rollouts(cfg: Config) -> None:
    """Compare the counted tokens and the rate of sampling with the rollouts of all ranks."""
    rollouts = records(cfg, "rollouts.jsonl")
    total = 0
    for record in records(cfg):
        of_step = [one for one in rollouts if one["step"] == record["step"]]
        sampled = sum(one["tokens"] for one in of_step)
        in_step = sampled + sum(len(one["prompt"].encode()) for one in of_step)
        total += in_step
        assert record["tokens"] == record["tokens_consumed"] == total
        assert record["tokens_per_s"] * record["step_time_s"] == pytest.approx(in_step, rel=1e-12)
        assert record["rl"]["rollout_tokens_per_s"] * record["rl"]["rollout_s"] == pytest.approx(sampled, rel=1e-12)


class _Engine:
    """Stands in for an engine: two tokens for each request."""

    def generate(self, requests: Sequence[Request], *, is_complete: Any = None) -> list[Completion]:
        return [Completion(tokens=[65, 66], log_probs=[0.0, 0.0], finish_reason="length") for _ in requests]


def _seconds_of_a_round(cfg: Config) -> tuple[float, float, float]:
    """Rank 0 samples for 1 s and rank 1 for 9 s; both have the rewards after 10 s."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    tokenizer = load_tokenizer(cfg.data, vocab_size=256)
    reward = Reward(cfg.data, cfg.faults, cfg.reward, num_ranks=cfg.num_job_ranks)
    times_s = iter((0.0, (1.0, 9.0)[groups.rank], 10.0))
    collector = RolloutCollector(
        _Engine(), reward, tokenizer, groups, stop=StopRule(frozenset()), max_tokens=2, clock=times_s.__next__
    )
    found = collector.collect(range(4), lambda index: Prompt("p", "p", (112,)), 2, SamplingParams())
    reward.close()
    statistics = RoundStatistics().add(found.groups, found.rollout_s, found.reward_s)
    return found.rollout_s, found.reward_s, statistics.metrics(found.groups)["rollout_tokens_per_s"]


def test_the_rate_of_sampling_is_of_all_ranks_over_the_slowest(pool, tmp_path):
    cfg = replace(recipe(tmp_path), parallel=ParallelConfig(world_size=2))
    assert pool.run(2, _seconds_of_a_round, cfg) == [(9.0, 1.0, 4 * 2 * 2 / 9)] * 2


DROPPING_REWARD = """
def reward(prompts, completions, completion_ids, **columns):
    if prompts[0] == "p" * 9 + ":":
        raise ValueError("no reward for this prompt")
    return [None if ids[0] % 3 == 0 else sum(token < 64 for token in ids) / 8 for ids in completion_ids]
"""


@pytest.mark.parametrize(
    ("mapping", "loss_mean"),
    [
        ({"world_size": 2, "ep": 2, "zero": 3}, "rollout"),
        *slow(
            [
                ({"world_size": 2, "pp": 2}, "token"),
                ({"world_size": 4, "pp": 2, "tp": 2, "ep": 2}, "token"),
                ({"world_size": 4, "ep": 2, "zero": 3}, "rollout"),
                ({"world_size": 4, "pp": 2, "cp": 2}, "constant"),
                ({"world_size": 4, "cp": 2, "tp": 2, "zero": 3}, "token"),
            ]
        ),
    ],
)
def test_dropped_rewards_and_the_reference_count_the_same_under_every_mapping(pool, tmp_path, mapping, loss_mean):
    """Some rollouts and a whole group have no reward, prompts differ in length, and the KL penalty has a gradient."""
    cfg = recipe(tmp_path, 2, kl=0.3, loss_mean=loss_mean)
    (tmp_path / "reward.py").write_text(DROPPING_REWARD)
    rows = ({"prompt": "p" * (1 + i % 10) + ":"} for i in range(20))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = replace(
        cfg,
        data=replace(cfg.data, validation_fraction=0.0, shuffle=False),
        reward=replace(cfg.reward, on_error="drop"),
        train=replace(cfg.train, micro_batch_size=1),
    )
    pool.run(1, train_policy, cfg)
    other = under(cfg, tmp_path / "mapped", **mapping)
    pool.run(mapping["world_size"], train_policy, other)
    assert records(cfg)[-1]["rl"]["dropped"] >= 1
    assert records(cfg)[-1]["rl"]["kl"] > 1e-6
    for expected, found in zip(records(cfg), records(other), strict=True):
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12)
        for key in ("kl", "entropy", "ratio_max"):
            assert found["rl"][key] == pytest.approx(expected["rl"][key], rel=1e-8, abs=1e-12)
        for key in ("reward", "dropped", "mixed_groups"):
            assert found["rl"][key] == expected["rl"][key]


@pytest.mark.parametrize(
    ("mapping", "sampling"),
    [
        ({"world_size": 2, "ep": 2}, {"tp": 2}),
        *slow(
            [
                ({"world_size": 4, "tp": 2, "ep": 2, "zero": 3}, {"tp": 1, "pp": 2, "ep": 1, "etp": 2}),
                ({"world_size": 4, "pp": 2, "cp": 2, "etp": 2}, {"pp": 1, "ep": 4, "etp": 1}),
                ({"world_size": 4, "ep": 2, "tp": 2, "zero": 1}, {"experts": "whole"}),
                ({"world_size": 4, "tp": 2, "pp": 2, "etp": 2}, {"experts": "fetch", "ep": 2, "tp": 1, "etp": 1}),
            ]
        ),
    ],
)
def test_another_mapping_samples_the_weights_of_the_last_step(pool, tmp_path, mapping, sampling):
    """Two rounds and an evaluation; a sampler with stale weights has other completions in the second round."""
    cfg = _one_rollout_a_row(tmp_path)
    cfg = replace(cfg, train=replace(cfg.train, eval_every=1))
    pool.run(1, train_policy, cfg)
    other = under(cfg, tmp_path / "mapped", **mapping)
    other = replace(other, rollout=replace(other.rollout, **sampling))
    pool.run(mapping["world_size"], train_policy, other)
    for expected, found in zip(records(cfg), records(other), strict=True):
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12)
        for key in ("reward", "eval_reward", "mixed_groups", "length_mean"):
            assert found["rl"][key] == expected["rl"][key]
        assert found["rl"]["reshard_s"] > 0 == expected["rl"]["reshard_s"]
    for one in (cfg, other):
        _assert_counts_equal_the_rollouts(one)
    texts = [[record["completion"] for record in records(one, "rollouts.jsonl")] for one in (cfg, other)]
    assert texts[0] == texts[1]


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [
        ("bfloat16", {"ep": 1, "pp": 2}),
        *slow(
            [
                ("float32", {"experts": "fetch"}),
                ("float32", {"ep": 1, "pp": 2}),
                ("bfloat16", {"experts": "fetch"}),
                ("float32", {"experts": "whole"}),
            ]
        ),
    ],
)
def test_other_pp_and_ep_sample_with_the_bits_of_training(pool, tmp_path, dtype, sampling):
    """Pipeline, data and expert parallelism change no sum: copied weights give the log-probabilities of training."""
    cfg = under(recipe(tmp_path, 2), tmp_path / "mapped", world_size=2, ep=2, zero=3)
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype, kernels="c"), rollout=replace(cfg.rollout, **sampling))
    pool.run(2, train_policy, cfg)
    for record in records(cfg):
        assert record["rl"]["mismatch_equal"] == 1
        assert record["rl"]["reshard_s"] > 0


def _unshared_bytes(cfg: Config) -> int:
    """Bytes of the weights of the model that samples, of those that training has not."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    trained = parallelize(cfg, groups)
    sampler = RolloutModel(cfg, trained)
    sampler.update()
    pointers = {local_tensor(parameter).data_ptr() for parameter in trained.named_parameters.values()}
    sampled = [local_tensor(parameter) for parameter in sampler.model.named_parameters.values()]
    return sum(tensor.nbytes for tensor in sampled if tensor.data_ptr() not in pointers)


@pytest.mark.parametrize(
    ("dtype", "experts"),
    [("bfloat16", "exchange"), ("float64", "fetch"), *slow([("float32", "exchange"), ("bfloat16", "whole")])],
)
def test_the_memory_of_a_second_model_is_counted(pool, tmp_path, dtype, experts):
    cfg = under(recipe(tmp_path), tmp_path, world_size=4, tp=2, pp=2, ep=2, zero=0)
    rollout = replace(cfg.rollout, tp=1, experts=experts)
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype), rollout=rollout)
    counted = pool.run(4, _unshared_bytes, cfg)
    assert tuple(counted) == rollout_weight_bytes(cfg)
    needed = min_training_memory(cfg, "cpu")
    without = min_training_memory(replace(cfg, rollout=RolloutConfig(max_tokens=8)), "cpu")
    assert [a.total() - b.total() for a, b in zip(needed, without, strict=True)] == [
        sum(counted[:2]) // 2,
        sum(counted[2:]) // 2,
    ]


def _gathered_bytes(cfg: Config) -> int:
    """Bytes of the weights that exist only while the model in training samples."""
    model = parallelize(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu")))
    shards = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in model.named_parameters.values()}
    found: list[int] = []

    def count(number: int, token: int) -> None:
        parameters = [parameter for stage in model.stages for parameter in stage.parameters()]
        read = [local_tensor(one) for one in parameters]
        found.append(sum(one.nbytes for one in read if one.untyped_storage().data_ptr() not in shards))

    requests = [Request(prompt=(1, 2), max_tokens=2)]
    GenerationEngine(model, EngineSettings(), SamplingParams()).generate(requests, count)
    return found[-1]


@pytest.mark.parametrize(
    ("mapping", "dtype"),
    [
        ({"world_size": 4, "pp": 2, "ep": 2, "zero": 3}, "bfloat16"),
        *slow(
            [
                ({"world_size": 2, "tp": 2, "zero": 0}, "bfloat16"),
                ({"world_size": 2, "zero": 1}, "float32"),
            ]
        ),
    ],
)
def test_the_weights_gathered_for_sampling_are_counted(pool, tmp_path, mapping, dtype):
    cfg = under(recipe(tmp_path), tmp_path, **mapping)
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype))
    counted = pool.run(mapping["world_size"], _gathered_bytes, cfg)
    by_stage = counted[:: cfg.parallel.world_size // cfg.parallel.pp]
    expected = gathered_weight_bytes(cfg)
    assert tuple(by_stage) == expected
    assert [parts["gathered weights"] for parts in min_sampling_memory(cfg, "cpu")] == list(expected)


def test_the_cache_is_checked_under_the_mapping_that_samples(tmp_path):
    """A rank of tp=2 caches one of two heads."""
    cfg = under(recipe(tmp_path), tmp_path, world_size=2, tp=2)
    page_gib = cache_sizes(cfg, "cpu").kv_bytes(64) / 2**30
    cfg = replace(cfg, rollout=replace(cfg.rollout, cache_gib=page_gib))
    check_rollout_cache(cfg, "cpu")
    with pytest.raises(ConfigError, match=r"rollout\.cache_gib=.* is smaller than one page"):
        check_rollout_cache(replace(cfg, rollout=replace(cfg.rollout, tp=1)), "cpu")


def test_the_cache_is_checked_in_the_pages_of_the_chosen_device(tmp_path):
    """A page has 256 positions on CUDA, also where run.device leaves the choice to the machine."""
    cfg = recipe(tmp_path)
    cfg = replace(cfg, run=replace(cfg.run, device="auto"))
    cfg = replace(cfg, rollout=replace(cfg.rollout, cache_gib=cache_sizes(cfg, "cpu").kv_bytes(128) / 2**30))
    check_rollout_cache(cfg, "cpu")
    with pytest.raises(ConfigError, match=r"rollout\.cache_gib=.* is smaller than one page of 256 tokens"):
        check_rollout_cache(cfg, "cuda")


def test_a_cache_without_a_page_is_refused_before_ranks_start(tmp_path, capsys):
    words = ["data.kind=task", "rl.group_size=4", "train.eval_every=0", "rollout.cache_gib=1e-9", "run.device=cpu"]
    assert main(["train", str(RECIPES / "single.toml"), *words, f"run.dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err
    assert "rollout.cache_gib=1e-09 is smaller than one page of 64 tokens" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_states_of_linear_attention_are_checked_with_the_slots_of_the_recipe(tmp_path):
    cfg = recipe(tmp_path)
    cfg = replace(cfg, model=edit_model(cfg.model, {"layers.attention": "full, linear"}))
    few = replace(cfg, rollout=replace(cfg.rollout, slots=8))
    few = replace(few, rollout=replace(few.rollout, cache_gib=cache_sizes(few, "cpu").total_bytes(1, 8) / 2**30))
    check_rollout_cache(few, "cpu")
    with pytest.raises(ConfigError, match=r"rollout\.cache_gib=.* states .* or fewer rollout\.slots"):
        check_rollout_cache(replace(few, rollout=replace(few.rollout, slots=9)), "cpu")


def _reference_bytes(cfg: Config) -> int:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    reference = ReferenceModel(cfg, groups)
    return sum(local_tensor(tensor).nbytes for tensor in reference.entries().values())


@pytest.mark.parametrize("zero", [0, 3])
def test_the_memory_of_the_reference_is_counted(pool, tmp_path, zero):
    cfg = under(recipe(tmp_path, kl=0.1), tmp_path, world_size=4, pp=2, ep=2, zero=zero)
    cfg = replace(cfg, run=replace(cfg.run, dtype="bfloat16"))
    counted = pool.run(4, _reference_bytes, cfg)
    needed = min_training_memory(cfg, "cpu")
    # RoPE's cosines and sines are counted, and in no checkpoint.
    for stage in (0, 1):
        (rest,) = {needed[stage]["reference weights"] - size for size in counted[2 * stage : 2 * stage + 2]}
        assert 0 <= rest <= needed[stage]["buffers"]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"tp": 3}, "rollouts cannot be sampled under tp=3 pp=1 ep=1 etp=1: rollout.tp=3 must divide"),
        ({"ep": 2, "etp": 4}, "rollout.ep=2 must divide"),
        ({"pp": 4}, "must be at most the 2 layers of the model"),
    ],
)
def test_a_mapping_that_cannot_sample_is_one_line(tmp_path, sampling, message):
    cfg = under(recipe(tmp_path), tmp_path, world_size=4)
    with pytest.raises(ConfigError) as error:
        check_config(replace(cfg, rollout=replace(cfg.rollout, **sampling)))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_crashed_run_goes_on_bit_by_bit(pool, tmp_path, updates):
    cfg = recipe(tmp_path, 4, updates=updates, objective="policy" if updates == 1 else "clip", mixed_only=True)
    pool.run(1, train_policy, cfg)
    crashed = under(cfg, tmp_path / "crashed")
    assert pool.run(1, train_policy, crashed, 3) == [-1]
    assert records(crashed)[-1]["step"] == 3
    pool.run(1, train_policy, crashed)
    whole, repaired = ((Path(one.run.dir) / "rollouts.jsonl").read_bytes() for one in (cfg, crashed))
    assert whole == repaired
    assert weights(cfg) == weights(crashed)
    assert weights(cfg)


class Stop(Callback):
    """Requests a stop in the step after a step, 0 for the first."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, context: TrainingContext) -> None:
        self._request(context, 0)

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        self._request(context, step.number)

    def _request(self, context: TrainingContext, step: int) -> None:
        if step == self.step:
            context.stop.request(signal.SIGTERM)


def _train_and_stop(cfg: Config, step: int = 0) -> int:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    return Trainer(cfg, groups, callbacks=[Stop(step)]).run(StopSignals())


def test_a_stop_waits_for_the_end_of_a_round(pool, tmp_path):
    cfg = recipe(tmp_path, 4, updates=2, objective="cispo")
    assert pool.run(1, _train_and_stop, cfg) == [128 + signal.SIGTERM]
    assert [record["step"] for record in records(cfg)] == [1, 2]
    assert [path.name for path in (Path(cfg.run.dir) / "checkpoints").iterdir()] == ["step-000002"]


def test_an_evaluation_that_a_signal_prevented_is_made_up(pool, tmp_path):
    """It decides about a reset of the reference model."""
    cfg = recipe(tmp_path, 5, kl=0.1, reset_patience=1)
    cfg = replace(cfg, train=replace(cfg.train, eval_every=1, lr=1e-3))
    pool.run(1, train_policy, cfg)
    stopped = under(cfg, tmp_path / "stopped")
    for step in (1, 3):
        assert pool.run(1, _train_and_stop, stopped, step) == [128 + signal.SIGTERM]
    pool.run(1, train_policy, stopped)
    whole, resumed = ([record["rl"] for record in records(one)] for one in (cfg, stopped))
    for name in ("kl", "eval_reward"):
        assert [record[name] for record in whole] == [record[name] for record in resumed]
    assert weights(cfg) == weights(stopped)


def test_the_first_step_is_on_policy_and_next_to_the_reference(pool, tmp_path):
    cfg = recipe(tmp_path, 3, kl=0.1)
    pool.run(1, train_policy, cfg)
    first, *_, last = [record["rl"] for record in records(cfg)]
    assert first["kl"] == 0
    assert last["kl"] > 0
    assert first["ratio_max"] == pytest.approx(1, abs=1e-12)
    assert first["mismatch_max"] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated_deltanet", "kda", "gla", "short_convolution"])
@pytest.mark.parametrize(
    ("mapping", "sampling"),
    [
        ({"world_size": 2, "tp": 2}, {"tp": 1, "ep": 2}),
        ({"world_size": 2, "cp": 2, "zero": 3}, {}),
        ({"world_size": 2, "pp": 2, "ep": 1}, {"pp": 1, "tp": 2}),
    ],
)
def test_hybrid_models_sample_the_trained_weights(pool, tmp_path, kind, mapping, sampling):
    """States of few slots, shared prompts, replayed choices, latent experts: training has the same probabilities."""
    cfg = under(recipe(tmp_path, 3, replay="on"), tmp_path / "run", **mapping)
    heads = {"linear_attention.key_head_dim": 6, "linear_attention.num_value_heads": 8}
    hybrid = {
        # A convolution has no heads.
        **(heads if kind != "short_convolution" else {}),
        "linear_attention": kind,
        "ffn.moe.latent_size": 8,
    }
    cfg = replace(
        cfg,
        model=edit_model(cfg.model, {"layers.attention": "linear, full", "attention.gate": {}, **hybrid}),
        rollout=replace(cfg.rollout, slots=3, pass_tokens=7, **sampling),
    )
    pool.run(2, train_policy, cfg)
    found = records(cfg)
    assert len(found) == 3
    for record in found:
        assert record["grad_norm"] > 0
        assert record["rl"]["mismatch_max"] < 1e-11


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_c_kernels_sample_the_bits_that_are_trained(pool, tmp_path, dtype):
    cfg = recipe(tmp_path, 2, kl=0.1)
    run = replace(cfg.run, dtype=dtype, kernels="c")
    pool.run(1, train_policy, replace(cfg, run=run))
    for record in records(cfg):
        assert record["rl"]["mismatch_equal"] == 1
        assert record["rl"]["ratio_max"] == 1
    assert records(cfg)[0]["rl"]["kl"] == 0


def test_a_resumed_run_has_the_reference_that_it_started_with(pool, tmp_path):
    """rl.reference="start" and checkpoint.init_from names a run, which goes on meanwhile."""
    start = under(recipe(tmp_path, 4), tmp_path / "start")
    pool.run(1, train_policy, start)
    newer = tmp_path / "start/checkpoints/step-000004"
    newer.rename(tmp_path / "newer")
    cfg = recipe(tmp_path, 3, kl=0.1)
    cfg = replace(cfg, checkpoint=CheckpointConfig(every=1, init_from=start.run.dir))
    pool.run(1, train_policy, cfg)
    crashed = under(cfg, tmp_path / "crashed")
    pool.run(1, train_policy, crashed, 2)
    (tmp_path / "newer").rename(newer)
    pool.run(1, train_policy, crashed)
    assert weights(cfg) == weights(crashed)
    # The folder of the reference has other weights now.
    reference = tmp_path / "start/checkpoints/step-000002"
    manifest = (reference / "manifest.json").read_bytes()
    (reference / "manifest.json").write_bytes(manifest + b"\n")
    longer = replace(crashed, run=replace(crashed.run, steps=4))
    with pytest.raises(Exception, match="step-000002, are others now than at its start: restore them"):
        pool.run(1, train_policy, longer)
    (reference / "manifest.json").write_bytes(manifest)
    # Another recipe has another reference.
    other = replace(crashed, rl=replace(cfg.rl, reference=str(newer)), run=replace(crashed.run, steps=4))
    pool.run(1, train_policy, other)
    assert records(other)[-1]["rl"]["kl"] != pytest.approx(records(crashed)[2]["rl"]["kl"], rel=0.01)


def test_a_resumed_run_has_the_adapters_of_the_reference_that_it_started_with(pool, tmp_path):
    """lora.init_from names a run, which goes on meanwhile."""
    base = under(recipe(tmp_path, 1), tmp_path / "base")
    pool.run(1, train_policy, base)
    adapters = {"checkpoint": CheckpointConfig(every=1, init_from=base.run.dir), "lora": LoraConfig(rank=2)}
    start = replace(under(recipe(tmp_path, 1), tmp_path / "start"), **adapters)
    pool.run(1, train_policy, start)
    cfg = replace(recipe(tmp_path, 3, kl=0.1), **adapters | {"lora": LoraConfig(rank=2, init_from=start.run.dir)})
    pool.run(1, train_policy, cfg)
    crashed = under(cfg, tmp_path / "crashed")
    pool.run(1, train_policy, crashed, 2)
    pool.run(1, train_policy, replace(start, run=replace(start.run, steps=2)))
    pool.run(1, train_policy, crashed)
    assert [record["rl"]["kl"] for record in records(cfg)] == [record["rl"]["kl"] for record in records(crashed)]
    assert weights(cfg) == weights(crashed)


def test_a_run_resumes_without_its_reset_reference(pool, tmp_path):
    cfg = recipe(tmp_path, 3, kl=0.1, reset_patience=1)
    cfg = replace(cfg, train=replace(cfg.train, eval_every=1, lr=1e-9), checkpoint=CheckpointConfig(every=1))
    pool.run(1, train_policy, cfg)
    state = json.loads((tmp_path / "run/checkpoints/step-000003/moefold.json").read_text())["states"]["data"]["rl"]
    assert state["num_resets"] > 0
    without = replace(cfg, rl=replace(cfg.rl, kl=0.0, reset_patience=0), run=replace(cfg.run, steps=4))
    pool.run(1, train_policy, without)
    pool.run(1, train_policy, replace(cfg, run=replace(cfg.run, steps=5)))
    assert ["kl" in record["rl"] for record in records(cfg)] == [True, True, True, False, True]


def test_trained_weights_without_a_reference_are_refused(pool, tmp_path):
    start = under(recipe(tmp_path, 2), tmp_path / "start")
    start = replace(start, rl=RLConfig(), reward=RewardConfig(), data=DataConfig(kind="synthetic"))
    pool.run(1, train_policy, start)
    checkpoint = tmp_path / "start/checkpoints/step-000002"
    cfg = recipe(tmp_path, 3, kl=0.1)
    cfg = replace(cfg, checkpoint=CheckpointConfig(every=0, resume=str(checkpoint)))
    with pytest.raises(Exception, match=f"{checkpoint}.* of a run without reinforcement learning.*init_from"):
        pool.run(1, train_policy, cfg)
    cfg = replace(cfg, rl=replace(cfg.rl, reference=str(checkpoint)))
    pool.run(1, train_policy, cfg)
    assert records(cfg)[0]["rl"]["kl"] == 0


def test_the_reference_is_reset_on_a_plateau_and_saved(pool, tmp_path):
    cfg = recipe(tmp_path, 6, kl=0.1, reset_patience=1)
    # Two held-out prompts: the reward stays the same in some steps.
    cfg = replace(cfg, train=replace(cfg.train, eval_every=1, lr=1e-3))
    pool.run(1, train_policy, cfg)
    crashed = under(cfg, tmp_path / "crashed")
    pool.run(1, train_policy, crashed, 5)
    pool.run(1, train_policy, crashed)
    assert weights(cfg) == weights(crashed)
    entries = read_metadata(Path(cfg.run.dir) / "checkpoints" / "step-000006").state_dict_metadata
    assert any(name.startswith("reference.") for name in entries)
    assert [record["rl"]["kl"] for record in records(cfg)] == [record["rl"]["kl"] for record in records(crashed)]
