"""Objectives under mappings equal the one-process float64 oracle: loss, every gradient, weights after two steps."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moefold.config.base.part import make_part
from moefold.config.base.part_registry import built_in_kinds, find_part
from moefold.config.groups.alignment import AlignmentPart, PreferencePart
from moefold.config.groups.policy import CorrectionPart, KlPart, ObjectivePart
from moefold.config.sections.data import DataConfig
from moefold.data.dataset import ProgramData
from moefold.data.sample import Sample
from moefold.data.sampler import Sampler
from moefold.objectives.policy_loss import PolicyGradientLoss
from moefold.objectives.preference_loss import PreferenceLoss
from moefold.verify.compare import NamedError, compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from moefold.verify.oracle_objectives import policy_objective, preference_objective
from tests.objectives.losses import policy, preference
from tests.slow import slow
from tests.verify.oracle import TOLERANCE, forget_the_adjoint_of_sums
from tests.verify.packed_rollouts import VOCAB, PackedRollouts, S
from tests.verify.recipes import tiny, without_mapping
from tests.verify.shared_ranks import Call, SharedRanks, run_each, selected_params

Loss = PolicyGradientLoss | PreferenceLoss
STEPS = 2


class PackedPairs(Sampler):
    """One or two pairs of completions in each sample, then padding."""

    seq_len = S
    has_annotations = True

    def __len__(self) -> int:
        return 64

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index`; the reference is near the untrained model."""
        rng = np.random.default_rng(index)
        num_sequences = 2 * (1 + index % 2)
        # The first token of a sequence is its prompt.
        sizes = rng.integers(2, 4 + S // (4 * num_sequences), num_sequences)
        documents = np.repeat(np.arange(num_sequences + 1), [*sizes, S + 1 - sizes.sum()])
        is_target = (documents[1:] == documents[:-1]) & (documents[1:] < num_sequences)
        ids = np.where(is_target, documents[1:], -1).astype(np.int64)
        counts = np.array([(ids == number).sum() for number in range(4)])
        return Sample(
            rng.integers(VOCAB, size=S + 1),
            documents.astype(np.int32),
            np.where((ids >= 0) & (ids % 2 == 0), 1 / np.maximum(counts, 1)[ids], 0.0),
            token_columns={"sequence_ids": ids},
            sample_columns={
                "reference_log_probs": -3.5 * counts + rng.normal(0, 1, 4),
                "is_desirable": rng.random(2) < 0.5,
            },
        )


MAPPINGS = {
    "one": {},
    "tp2": {"world_size": 2, "tp": 2},
    "tp2-cp2": {"world_size": 4, "tp": 2, "cp": 2},
    "pp2": {"world_size": 2, "pp": 2},
    "ep4": {"world_size": 4, "ep": 4},
    "etp2": {"world_size": 2, "etp": 2},
    "zero3": {"world_size": 2, "zero": 3},
    "interleaved": {"world_size": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "cp2-overlapped": {"world_size": 4, "cp": 2, "ep": 2, "overlap_experts": True},
    "cp2-ulysses": {"world_size": 2, "cp": 2, "context": "ulysses"},
}


def _losses() -> Iterator[tuple[Any, str]]:
    """Yield the built-in kinds of losses, found by their files, with their groups."""
    for base in (ObjectivePart, CorrectionPart, KlPart, AlignmentPart):
        for kind in built_in_kinds(base.group):
            if base is not AlignmentPart or issubclass(find_part(base.group, kind), PreferencePart):
                yield base, kind


OBJECTIVES = {
    "policy": policy(temperature=1.3),
    "clip": policy(objective="clip", kl=0.2, temperature=0.8),
    "cispo": policy(objective=make_part("objective", "cispo", clip_low=1.0, clip_high=2.0), kl=0.1, kl_kind="k2"),
    "sequence": policy(objective="sequence", kl=0.2, temperature=0.8),
    "clip-mask": policy(objective="clip", correction=make_part("correction", "mask", low=0.5)),
    "policy-sequence-mask": policy(correction=make_part("correction", "sequence_mask", low=0.8, high=1.6)),
    "sequence-clamp": policy(objective="sequence", correction="clamp"),
}
PREFERENCES = {
    "dpo": preference(method="dpo", beta=0.5),
    "ipo": preference(method="ipo", beta=0.3),
    "simpo": preference(method="simpo", beta=2.0),
    "kto": preference(method="kto", beta=0.5, desirable_weight=1.3),
}
KINDS = {f"{base.group}-{kind}": (base.key, kind) for base, kind in _losses()}
FAST = [("cp2-ulysses", "sequence"), ("interleaved", "sequence"), ("cp2-ulysses", "policy-sequence-mask")]
FAST += [("zero3", "clip"), ("tp2", "dpo"), ("pp2", "kto")]
ALL = [(mapping, objective) for mapping in MAPPINGS if mapping != "one" for objective in OBJECTIVES | PREFERENCES]


def _recipe(mapping: str):
    train = {"global_batch_size": 4, "micro_batch_size": 1, "seq_len": S}
    cfg = tiny(model={"vocab_size": VOCAB}, train=train, **MAPPINGS[mapping])
    return replace(cfg, data=DataConfig(kind="program"))


def _data(loss: Loss) -> ProgramData:
    kind = PackedRollouts if isinstance(loss, PolicyGradientLoss) else PackedPairs
    return ProgramData(kind(), kind())


def _run(cfg, steps: int, loss: Loss) -> DistributedRecord:
    return run_distributed(cfg, steps, loss=loss, data=_data(loss))


def _compare(pool, mapping: str, loss: Loss, run=_run, steps: int = STEPS) -> list[NamedError]:
    cfg = _recipe(mapping)
    return _against_the_oracle(pool.run(cfg.parallel.world_size, run, cfg, steps, loss), mapping, loss, steps)


def _against_the_oracle(
    ranks: list[DistributedRecord], mapping: str, loss: Loss, steps: int = STEPS
) -> list[NamedError]:
    cfg = _recipe(mapping)
    is_policy = isinstance(loss, PolicyGradientLoss)
    objective = policy_objective(loss) if is_policy else preference_objective(loss)
    oracle = run_oracle(without_mapping(cfg), steps, objective=objective, data=_data(loss))
    assert all(record.steps[0].loss_metrics == ranks[0].steps[0].loss_metrics for record in ranks)
    return compare_records(oracle, ranks)


def _loss_of_kind(key: str, kind: str) -> Loss:
    section, name = key.split(".")
    settings = {name: kind} | ({"kl": 0.2} if key == KlPart.key else {})
    return preference(**settings) if section == "align" else policy(**settings)


@pytest.fixture(scope="module")
def rank_of_kinds(pool) -> SharedRanks:
    """The rank that runs each kind."""
    losses = {name: _loss_of_kind(*given) for name, given in KINDS.items()}
    return SharedRanks(pool, {name: Call(1, _run, (_recipe("one"), STEPS, loss)) for name, loss in losses.items()})


@pytest.mark.parity
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_equals_the_oracle_on_one_rank(rank_of_kinds, name):
    worst = _against_the_oracle(rank_of_kinds.results(name), "one", _loss_of_kind(*KINDS[name]))[0]
    assert worst.error <= TOLERANCE, worst


@pytest.fixture(scope="module")
def ranks_of_mappings(request, pool) -> SharedRanks:
    """The ranks of the selected mappings and losses."""
    test = "test_an_objective_equals_the_oracle"
    mappings, losses = (selected_params(request, test, param) for param in ("mapping", "objective"))
    calls = {}
    for name, mapping in mappings.items():
        cfg = _recipe(mapping)
        calls[name] = Call(cfg.parallel.world_size, _run, (cfg, STEPS, (OBJECTIVES | PREFERENCES)[losses[name]]))
    return SharedRanks(pool, calls)


@pytest.mark.parity
@pytest.mark.parametrize(("mapping", "objective"), [*FAST, *slow([case for case in ALL if case not in FAST])])
def test_an_objective_equals_the_oracle(request, ranks_of_mappings, mapping, objective):
    ranks = ranks_of_mappings.results(request.node.name)
    worst = _against_the_oracle(ranks, mapping, (OBJECTIVES | PREFERENCES)[objective])[0]
    assert worst.error <= TOLERANCE, worst


@pytest.mark.parity
def test_metrics_do_not_depend_on_the_mapping(pool):
    loss = OBJECTIVES["clip-mask"]
    cfg = _recipe("pp2")
    (alone,) = pool.run(1, _run, without_mapping(cfg), 2, loss)
    expected = alone.steps[0].loss_metrics
    assert set(expected) == {metric.name for metric in loss.metrics} - {"kl"}
    assert 0 < expected["clipped"] < 1
    assert 0 < expected["corrected"] < 1
    for records in run_each(pool, 2, _run, *((_recipe(mapping), 2, loss) for mapping in ("tp2", "cp2-ulysses", "pp2"))):
        for record in records:
            for step, other in zip(alone.steps, record.steps, strict=True):
                assert other.loss_metrics == pytest.approx(step.loss_metrics, rel=1e-9)


class ScaledSamples(PackedRollouts):
    """Next-token prediction whose targets have a scale, as rows with rewards have."""

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index`."""
        sample = super().annotated_sample(index)
        scale = np.random.default_rng(index).uniform(0, 3, S)
        return Sample(sample.tokens, sample.document_ids, sample.weights, weight_scale=scale)


def _run_scaled(cfg, steps: int) -> DistributedRecord:
    return run_distributed(cfg, steps, data=ProgramData(ScaledSamples(), ScaledSamples()))


@pytest.mark.parity
@pytest.mark.parametrize("mapping", ["cp2-ulysses", *slow((name,) for name in ("tp2-cp2", "pp2", "zero3"))])
def test_scaled_losses_equal_the_oracle(pool, mapping):
    """Multi-token prediction has the scales of its targets too, and the shares do not add up to 1."""
    cfg = tiny(
        model={"mtp_layers": 1, "vocab_size": VOCAB}, train={"global_batch_size": 4, "seq_len": S}, **MAPPINGS[mapping]
    )
    cfg = replace(cfg, data=DataConfig(kind="program"))
    ranks = pool.run(cfg.parallel.world_size, _run_scaled, cfg, 2)
    data = ProgramData(ScaledSamples(), ScaledSamples())
    worst = compare_records(run_oracle(without_mapping(cfg), 2, data=data), ranks)[0]
    assert worst.error <= TOLERANCE, worst


def _run_without_context_sum(cfg, steps: int, loss: Loss) -> DistributedRecord:
    """As if each context-parallel rank took the sum over its own tokens for the sum over the sequence."""
    from moefold.parallel import context_parallel

    context_parallel.ContextParallelSum.sum_over_context = lambda self, x: x
    return _run(cfg, steps, loss)


def _run_without_adjoint(cfg, steps: int, loss: Loss) -> DistributedRecord:
    """As if the gradient of a sequence's ratio came from the tokens of one rank."""
    forget_the_adjoint_of_sums()
    return _run(cfg, steps, loss)


@pytest.mark.parity
def test_a_sequence_ratio_without_its_context_sum_is_noticed(fresh_pool):
    names = {e.name for e in _compare(fresh_pool, "cp2-ulysses", OBJECTIVES["sequence"], _run_without_context_sum, 1)
             if e.error > TOLERANCE}  # fmt: skip
    assert "step 1 loss (rank 0)" in names


@pytest.mark.parity
def test_a_sequence_ratio_without_the_adjoint_of_its_sum_is_noticed(fresh_pool):
    errors = _compare(fresh_pool, "cp2-ulysses", OBJECTIVES["sequence"], _run_without_adjoint, 1)
    names = {error.name for error in errors if error.error > TOLERANCE}
    assert "gradients head.weight" in names
    assert "step 1 loss (rank 0)" not in names
