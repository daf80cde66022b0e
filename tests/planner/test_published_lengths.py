"""Published effects of document lengths against the planner: their direction, and size where the setting is known.

`published/lengths.csv` says for each row what is checked, or why nothing is. Run with -s for the predictions.
"""

import csv
from pathlib import Path

import pytest

from moefold.config.base.part import make_part
from moefold.config.groups.context import ContextPart
from moefold.cost.hardware import load_device
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.lengths.distribution import load_distribution
from moefold.planner.lengths.samples import DocumentSamples, StreamedSamples
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import load_model_spec
from moefold.planner.simulator.simulate import simulate_mapping
from tests.planner.lengths.equal_documents import equal_documents

TABLE = Path(__file__).parent / "published" / "lengths.csv"
ROWS = {row["id"]: row for row in csv.DictReader(TABLE.open(encoding="utf-8"))}
K = 1024
RING = make_part("context", "ring")
PER_DOCUMENT = make_part("context", "planned", placement="documents")
WHOLE_DOCUMENTS = make_part("context", "planned", placement="balanced")
DISTCA = make_part("context", "planned", hosts="balanced")
"""Core attention disaggregation with the tolerance of the paper, 0.1."""
SIZE_TOLERANCE = 0.25


def drawn(name: str) -> DocumentSamples:
    return StreamedSamples(load_distribution(name))


def priced(samples: DocumentSamples, seq_len: int, batch: int, strategy: ContextPart, gpu: str) -> CostModel:
    loads = DocumentLoads(samples, seq_len, strategy)
    work = TrainingWorkload(seq_len=seq_len, global_batch_size=batch, attention=loads)
    return CostModel(load_model_spec("llama3-8b"), load_device(gpu), work)


def distca_s(name: str, seq_len: int, strategy: ContextPart, pp: int) -> float:
    """Seconds of a step of 2M tokens on 64 H200 with TP8, under the best of DP and CP, as the paper's baseline is."""
    batch = 2 * K * K * pp**2 // seq_len
    model = priced(drawn(name), seq_len, batch, strategy, "h200")
    found = []
    for cp in (1, 2, 4, 8):
        dp = 64 // (8 * cp * pp)
        if dp and not batch % dp:
            mapping = ParallelMapping(tp=8, cp=cp, dp=dp, pp=pp, edp=dp)
            found.append(model.step_time(mapping).total_s if pp == 1 else simulate_mapping(model, mapping).total_s)
    return min(found)


def distca_speedup(name: str, pp: int = 1) -> list[float]:
    """Over per-document CP, with samples of 128K and, without a pipeline, 512K tokens."""
    lengths = (128 * K, 512 * K) if pp == 1 else (128 * K,)
    return [distca_s(name, s, PER_DOCUMENT, pp) / distca_s(name, s, DISTCA, pp) for s in lengths]


def idle(strategy: ContextPart, dp: int) -> float:
    """Per cent of the attention time that a rank waits."""
    loads = DocumentLoads(drawn("wlb"), 512 * K, strategy)
    return 100 * (1 - 1 / loads.sets(1, dp, 1).max_over_mean)


def exchange_pct(cp: int) -> float:
    """Share of a step while the rows of documents of 32K tokens are sent, with 32K tokens a rank."""
    seq_len = 32 * K * cp
    model = priced(equal_documents(seq_len, 32 * K), seq_len, 1, PER_DOCUMENT, "h200")
    step = model.step_time(ParallelMapping(tp=8, cp=cp))
    return 100 * step.parts["cp_comm"] / step.total_s


def moved_bytes(tolerance: float) -> float:
    """Bytes for a token and layer: queries there and outputs back (4,096 values each), keys and values (1,024 each)."""
    strategy = make_part("context", "planned", hosts="balanced", tolerance=tolerance)
    found = DocumentLoads(drawn("wlb"), 128 * K, strategy).sets(1, 8, 1)
    return 2 * (2 * 4096 * found.moved_queries + 2 * 1024 * found.received_keys)


def attention_over_mlp(seq_len: int) -> float:
    model = CostModel(
        load_model_spec("llama3-8b"), load_device("a100"), TrainingWorkload(seq_len=seq_len, global_batch_size=1)
    )
    mixer = model.layer_costs.mixer(0, ParallelMapping())
    mlp = model.layer_costs.feed_forward(0, ParallelMapping())
    return sum(item.seconds for item in mixer.forward) / sum(item.seconds for item in mlp.forward)


def flexsp_speedup(seq_len: int) -> float:
    """Whole documents over all GPUs against each sample over all of them."""
    mapping = ParallelMapping(cp=64)
    ring, whole = (
        priced(drawn("wikipedia"), seq_len, 64, strategy, "a100").step_time(mapping).total_s
        for strategy in (RING, WHOLE_DOCUMENTS)
    )
    return ring / whole


def above_one(found: list[float]) -> bool:
    return min(found) > 1


CHECKS = {
    # At 128K the prices predict no gain (0.999, published 1.07): docs/cost-model.md says that it is missed.
    "distca-9-pretrain": (lambda: distca_speedup("wlb"), lambda found: found[-1] > 1),
    "distca-9-prolong": (lambda: distca_speedup("prolong"), above_one),
    "distca-10-pretrain": (lambda: distca_speedup("wlb", pp=2), above_one),
    "distca-10-prolong": (lambda: distca_speedup("prolong", pp=2), above_one),
    "distca-4b-dp4": (lambda: [idle(WHOLE_DOCUMENTS, 4)], lambda found: found[0] > 10),
    "distca-4b-dp8": (lambda: [idle(WHOLE_DOCUMENTS, dp) for dp in (4, 8)], lambda found: found[1] > 1.2 * found[0]),
    "distca-4b": (lambda: [idle(DISTCA, dp) for dp in (4, 8)], lambda found: max(found) < 10),
    "distca-3": (lambda: [exchange_pct(cp) for cp in (2, 4, 8, 16, 32)], lambda found: found == sorted(found)),
    "distca-12": (lambda: [100 * (1 - moved_bytes(0.15) / moved_bytes(0.0))], None),
    "flexsp-4-wikipedia": (lambda: [flexsp_speedup(192 * K), flexsp_speedup(384 * K)], above_one),
    "bytescale-6a-8k": (
        lambda: [attention_over_mlp(s * K) for s in (4, 8, 16, 32, 64, 128)],
        lambda found: found == sorted(found) and found[-1] > 1,
    ),
    "bytescale-6a-growth": (lambda: [attention_over_mlp(128 * K) / attention_over_mlp(8 * K)], None),
}
"""For each checked row: the prediction, and the direction that it must have; None: its size is checked."""
SLOW = {"distca-9-prolong", "distca-10-pretrain", "distca-10-prolong"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CHECKS])
def test_a_published_effect_is_predicted(name):
    row = ROWS[name]
    predict, has_direction = CHECKS[name]
    found = predict()
    print(f"\n{name}: published {row['low']} to {row['high']}, predicted {', '.join(f'{x:.3g}' for x in found)}")
    if row["check"] == "direction":
        assert has_direction is not None
        assert has_direction(found)
    else:
        assert is_near(row, found[0])


def is_near(row: dict[str, str], value: float) -> bool:
    """Return whether a prediction is within the published range, or near to it."""
    return float(row["low"]) * (1 - SIZE_TOLERANCE) <= value <= float(row["high"]) * (1 + SIZE_TOLERANCE)


def test_every_row_is_checked_or_says_why_not():
    assert {name for name, row in ROWS.items() if row["check"] != "none"} == set(CHECKS)
    for row in ROWS.values():
        assert row["check"] in ("direction", "size", "none")
        assert row["note"]
        assert row["source"]
        assert None not in row.values(), row
        low, high = (float(row[key]) if row[key] else None for key in ("low", "high"))
        assert high is not None
        assert low is None or low <= high


def test_a_size_far_off_is_noticed():
    # Rows that do not follow the tolerance save nothing; attention without its quadratic part does not outgrow the MLP.
    assert not is_near(ROWS["distca-12"], 100 * (1 - moved_bytes(0.15) / moved_bytes(0.15)))
    assert not is_near(ROWS["bytescale-6a-growth"], 1.0)
    assert not is_near(ROWS["bytescale-6a-growth"], (128 / 8) ** 2)
