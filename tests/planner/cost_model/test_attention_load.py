"""Attention of documents in the price of a step: no change for equal documents, the busiest rank for uneven ones."""

from dataclasses import replace

import pytest

from moefold.config.base.part import make_part
from moefold.cost.hardware import load_device
from moefold.planner.cost_model.attention_load import attention_peers
from moefold.planner.cost_model.collective import RankGroup, exchange_s
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.lengths.distribution import load_distribution
from moefold.planner.lengths.samples import StreamedSamples
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import load_model_spec
from moefold.planner.simulator.simulate import simulate_mapping
from tests.planner.lengths.equal_documents import equal_documents

SEQ_LEN = 32768
WORK = TrainingWorkload(seq_len=SEQ_LEN, global_batch_size=32)
FOLDED = ParallelMapping(tp=2, cp=4, dp=8, ep=8, edp=8)
MAPPINGS = {
    "folded": FOLDED,
    "pipeline": ParallelMapping(tp=2, cp=2, dp=4, pp=4, ep=8, edp=2),
    "no context parallelism": ParallelMapping(tp=4, dp=16, ep=8, edp=8),
}
PLANNED = make_part("context", "planned")
BALANCED = replace(PLANNED, hosts="balanced", tolerance=0.02)


def pricer(loads=None, model="mixtral-8x7b", **options):
    return CostModel(load_model_spec(model), load_device("h100"), replace(WORK, attention=loads, **options))


def wlb(strategy=make_part("context", "ring")):  # noqa: B008 - immutable
    return DocumentLoads(StreamedSamples(load_distribution("wlb")), SEQ_LEN, strategy)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "gpt-oss-120b", "deepseek-v3"])
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_documents_as_long_as_samples_cost_the_same_as_samples(mapping, model):
    loads = DocumentLoads(equal_documents(SEQ_LEN, SEQ_LEN), SEQ_LEN)
    mapping = mapping if model != "deepseek-v3" else replace(mapping, pp=1)
    plain = pricer(model=model)
    documents = pricer(loads, model=model)
    assert documents.step_time(mapping).total_s == pytest.approx(plain.step_time(mapping).total_s, rel=1e-3)
    assert documents.flops_per_token == pytest.approx(plain.flops_per_token, rel=1e-3)


def test_short_documents_take_less_and_only_attention_changes():
    short = pricer(DocumentLoads(equal_documents(SEQ_LEN, 1024), SEQ_LEN)).step_time(FOLDED)
    whole = pricer().step_time(FOLDED)
    changed = {part for part in short.parts if short.parts[part] != pytest.approx(whole.parts[part])}
    assert changed <= {"attention", "cp_comm", "dp_comm", "launch"}
    assert short.parts["attention"] < whole.parts["attention"]


def test_the_busiest_rank_is_paid_in_every_round():
    loads = wlb()
    uneven = pricer(loads).step_time(FOLDED).parts["attention"]
    balanced = pricer(wlb(BALANCED)).step_time(FOLDED).parts["attention"]
    peers = pricer(loads).attention_peers(FOLDED)
    load = loads.load(peers, 0)
    assert load.max_over_mean > 2
    assert wlb(BALANCED).load(peers, 0).max_over_mean < 1.1
    # Only the attention core differs: norms and projections have equally many tokens on each rank.
    assert uneven > 1.2 * balanced


def test_planned_attention_pays_for_its_rows():
    peers = pricer(wlb()).attention_peers(FOLDED)
    home, balanced = wlb(PLANNED).load(peers, 0), wlb(BALANCED).load(peers, 0)
    assert home.exchange_ranks == 4
    assert balanced.exchange_ranks == 32
    assert home.sent_queries == 0 < balanced.sent_queries
    ring, rows = pricer(wlb()).step_time(FOLDED).parts, pricer(wlb(PLANNED)).step_time(FOLDED).parts
    assert 0 < rows["cp_comm"] < ring["cp_comm"]
    spec = load_model_spec("mixtral-8x7b").kinds[0].core
    model = pricer(wlb(BALANCED))
    cost, _ = model.blocks(0, FOLDED)
    (forward,) = [item.seconds for item in cost.forward if item.part == "cp_comm"]
    (backward,) = [item.seconds for item in cost.backward if item.part == "cp_comm"]
    tokens = SEQ_LEN / 4
    keys = balanced.sent_keys * spec.kv_heads / 2 * 2 * 128 * 2
    queries = balanced.sent_queries * spec.heads / 2
    # In bfloat16, but for the gradients of keys and values, in float32.
    sent = tokens * (keys + queries * 2 * 128 * 2), tokens * (3 * keys + queries * 4 * 128 * 2)
    group = RankGroup(32, 2)
    far = [
        tokens * (balanced.remote_keys * 2048 * times + balanced.remote_queries * spec.heads / 2 * query)
        for times, query in ((1, 512), (3, 1024))
    ]
    assert 0 < far[0] < sent[0]
    device = load_device("h100")
    assert forward == pytest.approx(exchange_s(device, group, sent[0], far[0]))
    assert backward == pytest.approx(exchange_s(device, group, sent[1], far[1]))
    # The rows of a sample stay in a node of eight GPUs: tp=2 x cp=4.
    assert home.remote_keys == 0 < home.sent_keys


PEERS = [
    # tp, cp, dp, ep, etp, is_coupled -> ranks of dp x cp that wait for each other
    ((1, 4, 8, 8, 1, False), 8),
    ((2, 4, 8, 8, 1, False), 4),
    ((2, 4, 8, 16, 1, False), 8),
    ((1, 3, 4, 2, 1, False), 6),
    ((4, 1, 6, 8, 1, False), 2),
    ((1, 4, 8, 32, 1, False), 32),
    ((2, 2, 8, 4, 2, False), 4),
    ((2, 4, 8, 4, 2, True), 16),
]


@pytest.mark.parametrize(("degrees", "group"), PEERS)
def test_the_ranks_that_wait_for_each_other(degrees, group):
    tp, cp, dp, ep, etp, is_coupled = degrees
    mapping = ParallelMapping(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)
    peers = attention_peers(mapping, 4 * dp, is_coupled=is_coupled, has_experts=True)
    assert (peers.group, peers.num_sets) == (group, 4)
    assert attention_peers(mapping, 4 * dp, is_coupled=is_coupled, has_experts=False).group == cp
    if not is_coupled:
        # The components of the graph that joins the ranks of each cp group and of each ep x etp group.
        ranks = tp * cp * dp
        owner = list(range(ranks))
        for size in (tp * cp, ep * etp):
            for first in range(0, ranks, size):
                joined = {owner[rank] for rank in range(first, min(first + size, ranks))}
                owner = [min(joined) if label in joined else label for label in owner]
        sizes = {owner.count(label) for label in owner}
        assert sizes == {group * tp}


def test_the_simulator_prices_each_round_by_its_own_documents():
    mapping = MAPPINGS["pipeline"]
    plain = pricer()
    equal = pricer(DocumentLoads(equal_documents(SEQ_LEN, SEQ_LEN), SEQ_LEN))
    assert simulate_mapping(equal, mapping).total_s == pytest.approx(simulate_mapping(plain, mapping).total_s, rel=1e-3)
    uneven = pricer(wlb())
    timeline = simulate_mapping(uneven, mapping)
    forward_s = dict.fromkeys(range(8), 0.0)
    for event in timeline.events:
        if event.action is not None and event.rank == 0 and event.action.kind == "F" and event.part == "attention":
            forward_s[event.action.micro_batch] += event.end_s - event.start_s
    assert len(set(forward_s.values())) == len(forward_s)
    sets = [pricer(replace(wlb(), only_set=i)).step_time(mapping).parts["attention"] for i in range(8)]
    by_micro_batch = [forward_s[i] for i in range(8)]
    assert sorted(range(8), key=sets.__getitem__) == sorted(range(8), key=by_micro_batch.__getitem__)
