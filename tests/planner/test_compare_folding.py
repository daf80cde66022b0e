"""Folding against no folding: the spaces that are compared, and where the figures come from."""

from dataclasses import replace

import pytest

from moefold.cost.hardware import load_device
from moefold.errors import ConfigError
from moefold.planner.compare_folding import REASONS, compare_by_seq_len
from moefold.planner.cost_model.step import TIME_CATEGORIES
from moefold.planner.cost_model.workload import workload_from_config
from moefold.planner.planner import Planner, PlanRequest, read_model
from moefold.planner.search.constraints import COUPLED, COUPLED_WITH_CP, MappingConstraints, Restriction
from moefold.planner.search.space import MappingSpace

PLAIN = {"recompute": (), "offload": (), "moments": "none", "overlap": False, "dispatcher": "alltoall", "zero": 1}
"""Settings that leave few mappings to price."""


def question(
    model: str = "tiny",
    num_gpus: int = 8,
    seq_len: int = 64,
    batch: int = 8,
    *,
    gpu: str = "h200",
    fixed: dict | None = None,
) -> PlanRequest:
    cfg, shape = read_model(model)
    cfg = replace(
        cfg,
        run=replace(cfg.run, device="cuda"),
        parallel=replace(cfg.parallel, world_size=num_gpus),
        train=replace(cfg.train, seq_len=seq_len, global_batch_size=batch),
    )
    restriction = Restriction(PLAIN | (fixed or {}))
    return PlanRequest(
        cfg, shape, load_device(gpu), workload_from_config(cfg.run, cfg.moe, cfg.train, "bf16"), restriction
    )


@pytest.mark.parametrize("fixed", [{"pp": 1}, {"tp": 2, "pp": 2}])
def test_the_figures_equal_separate_plans(fixed):
    asked = question(fixed=fixed)
    (found,) = compare_by_seq_len(asked, [64])
    for method, plan in (("folding", found.folded), (COUPLED_WITH_CP, found.coupled), (COUPLED, found.within_dp)):
        alone = Planner(replace(asked, restriction=Restriction(asked.restriction.fixed, method))).best()
        assert plan.time.total_s == pytest.approx(alone.time.total_s, rel=1e-12)
        assert plan.memory.total == pytest.approx(alone.memory.total, rel=1e-12)
    assert found.gain == pytest.approx(found.coupled.time.total_s / found.folded.time.total_s - 1)
    assert found.gain_within_dp >= found.gain >= 0
    assert set(found.saved_s) == set(TIME_CATEGORIES)
    assert sum(found.saved_s.values()) == pytest.approx(found.coupled.time.total_s - found.folded.time.total_s)


def test_the_unfolded_spaces_obey_their_constraints():
    legality = MappingConstraints(question().base_config)
    folds = {
        method: [fold for fold, _ in MappingSpace(legality, Restriction(PLAIN, method)).folds]
        for method in ("folding", COUPLED_WITH_CP, COUPLED)
    }
    assert all(fold.etp == fold.tp and fold.dp * fold.cp % fold.ep == 0 for fold in folds[COUPLED_WITH_CP])
    assert all(fold.etp == fold.tp and fold.dp % fold.ep == 0 for fold in folds[COUPLED])
    assert set(folds[COUPLED]) < set(folds[COUPLED_WITH_CP]) < set(folds["folding"])
    # The measured mapping of arXiv:2504.14960 at 16k has ep over the ranks of cp.
    assert any(fold.dp % fold.ep for fold in folds[COUPLED_WITH_CP])


def test_without_tensor_parallelism_there_is_nothing_to_fold():
    (found,) = compare_by_seq_len(question(fixed={"tp": 1, "etp": 1}), [64])
    assert found.is_same_mapping
    assert found.gain == 0
    assert "sharded alike" in found.reason


def test_folding_wins_where_attention_is_cut_and_experts_need_not_be():
    """The published mapping of Mixtral 8x22B with folding, against all that keep its attention and do not fold."""
    fixed = {"tp": 2, "cp": 1, "pp": 8, "mbs": 1, "schedule": "interleaved", "vpp": 7}
    (found,) = compare_by_seq_len(question("mixtral-8x22b", 128, 4096, 256, fixed=fixed), [4096])
    assert (found.folded.mapping.ep, found.folded.mapping.etp) == (8, 1)
    assert found.coupled.mapping.etp == 2
    # Measured: 4.4 to 9.8 %, all with this attention.
    assert 0.03 < found.gain < 0.12
    assert any(found.reason.startswith(words) for words in (*REASONS.values(), "the EP all-to-all"))


def test_all_lengths_have_as_many_tokens_a_step():
    found = compare_by_seq_len(question(fixed={"pp": 1, "mbs": 1}), [64, 128, 32])
    assert [(one.seq_len, one.global_batch_size) for one in found] == [(64, 8), (128, 4), (32, 16)]
    with pytest.raises(ConfigError, match="--compare-folding 96 must divide the 512 tokens of a step"):
        compare_by_seq_len(question(), [96])


def test_nothing_that_fits_is_an_error_and_one_length_of_some_a_reason():
    asked = question(fixed={"pp": 1, "mbs": 1})
    with pytest.raises(ConfigError, match="no mapping of tiny on 8 GPUs fits"):
        compare_by_seq_len(replace(asked, device=replace(asked.device, memory_gib=3.0)), [64])
    # 512 tokens of one sample: 8 GPUs cannot share a batch of 1 without cp or tp, which are fixed.
    fitting, not_legal = compare_by_seq_len(question(fixed={"tp": 1, "cp": 1, "pp": 1}), [64, 512])
    assert fitting.folded is not None
    assert (not_legal.folded, not_legal.gain, not_legal.saved_s) == (None, None, {})
    assert "is legal for tiny" in not_legal.reason
