"""Sampling between steps changes no bit of training, and sees every change of the weights."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import Completion, EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from moefold.model.local_param import CastCopy, local_tensor
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.parallel.count_casts import CountCasts
from tests.verify.recipes import tiny

REQUESTS = [Request(prompt=(i, 7, 5, 2), prompt_number=i, max_tokens=5) for i in range(3)]


def interrupted(engine: GenerationEngine) -> None:
    """Start a generation that ends with an error after the second token."""

    def raise_later(number: int, token: int) -> None:
        tokens.append(token)
        if len(tokens) == 2:
            raise KeyError("in sampling")

    tokens: list[int] = []
    with pytest.raises(KeyError, match="in sampling"):
        engine.generate(REQUESTS, on_token=raise_later)


def train(cfg: Config, samples: bool) -> tuple[list[float], list[torch.Tensor], list[list[Completion]]]:
    """Losses and weights of two steps; if `samples`, completions before each, twice, around a failed generation."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    engine = GenerationEngine(model, EngineSettings(slots=2, pass_tokens=8), SamplingParams(temperature=0.7, seed=1))
    losses: list[float] = []
    completions: list[list[Completion]] = []
    for step in (1, 2):
        if samples:
            # The ranks of a stage run different numbers of passes.
            requests = REQUESTS[groups.attn.dp_cp.rank :]
            completions.append(engine.generate(requests))
            interrupted(engine)
            completions.append(engine.generate(requests))
        losses.append(training.run(sharder.batch(step), step).loss)
    return losses, [local_tensor(p.data).clone() for p in training.parameters.values()], completions


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 1, "zero": 0},
        pytest.param({"zero": 0, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"zero": 3}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "cp": 2, "ep": 2, "overlap_experts": True}, marks=pytest.mark.slow),
        {"world_size": 4, "pp": 2, "zero": 3, "ep": 2},
        pytest.param(
            {"world_size": 4, "pp": 2, "zero": 1, "virtual_stages": 2, "schedule": "zbv"}, marks=pytest.mark.slow
        ),
    ],
)
def test_sampling_between_steps_changes_no_bit_of_training(pool, mapping):
    model = {"mtp_layers": 1} if mapping == {"zero": 3} else {"tie_embeddings": True}
    cfg = tiny(model, {"capacity_factor": 1.0, "input_jitter": 0.1}, **{"world_size": 2} | mapping)
    found, expected = (pool.run(cfg.parallel.world_size, train, cfg, samples) for samples in (True, False))
    for (losses, weights, completions), (expected_losses, expected_weights, _) in zip(found, expected, strict=True):
        assert losses == expected_losses
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)
        # A generation that an error ended leaves the model as it was; a step changes the weights.
        assert completions[0::2] == completions[1::2]
        assert not completions[0] or completions[2][-1].log_probs != completions[0][-1].log_probs


def sample_and_count_casts(cfg: Config, keeps: bool) -> tuple[list[int], list[list[Completion]], bool]:
    """Casts of weights in a generation of few passes, of many, and of other weights; the completions; leftovers.

    If not `keeps`, each use of a weight casts it.
    """
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    parameters = list(model.named_parameters.values())
    engine = GenerationEngine(model, EngineSettings(slots=2), SamplingParams(seed=1))
    counts, completions = [], []
    read = CastCopy.read if keeps else lambda _, parameter, dtype: parameter.to(dtype)
    with patch.object(CastCopy, "read", read):
        for scale, max_tokens in ((1.0, 2), (1.0, 8), (1.5, 8)):
            for parameter in parameters:
                parameter.data.mul_(scale)
            requests = [Request(prompt=(i, 7, 5), prompt_number=i, max_tokens=max_tokens) for i in range(3)]
            with CountCasts(parameters) as counter:
                completions.append(engine.generate(requests))
            counts.append(counter.count)
    return counts, completions, any(vars(parameter) for parameter in parameters)


def test_a_generation_on_one_rank_casts_each_weight_once(pool):
    cfg = tiny({"tie_embeddings": True}, world_size=1, zero=0)
    cfg = replace(cfg, run=replace(cfg.run, dtype="bfloat16", kernels="plain"))
    ((counts, completions, are_left),) = pool.run(1, sample_and_count_casts, cfg, True)
    ((plain_counts, expected, _),) = pool.run(1, sample_and_count_casts, cfg, False)
    assert completions == expected
    assert completions[2] != completions[1]
    assert counts[0] == counts[1] == counts[2] > 0
    assert plain_counts[1] > plain_counts[0] > counts[0]
    assert not are_left
