"""Boxes of mappings and plans between them: partitions, covers and bounds, over random mappings."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.comm.reshard_plan import BoxTransfer, ReshardPlan, plan_reshard, split_box
from moefold.config.schema import Config
from moefold.cost.shard_boxes import Box, WeightSharding, held_bytes, whole_box
from tests.verify.recipes import legal_mappings, tiny

WORLD_SIZE = 8
TRAINED = [
    {**mapping, "zero": zero} for mapping, zero in product(legal_mappings(WORLD_SIZE, max_pp=2, max_heads=2), (0, 1))
]


def _recipe(mapping: dict[str, int], **model: object) -> Config:
    return tiny(
        model={
            "layers": 2,
            "vocab_size": 25,
            "ffn.moe.router.expert_bias": True,
            "ffn.moe.router": "sigmoid",
            **model,
        },
        train={"global_batch_size": 8},
        **mapping,
    )


def _sharding(mapping: dict[str, int], *, for_training: bool = True, **model: object) -> WeightSharding:
    return WeightSharding.from_config(_recipe(mapping, **model), for_training=for_training)


def _indices(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, a + n) for a, n in zip(box.start, box.size, strict=True))))


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=3, max_size=3).map(
    lambda dims: Box(tuple(a for a, _ in dims), tuple(n for _, n in dims))
)


@given(boxes, boxes)
def test_the_intersection_of_two_boxes_has_their_common_indices(one, other):
    common = one.intersect(other)
    assert (set() if common is None else _indices(common)) == _indices(one) & _indices(other)
    assert one.intersect(one) == one


@given(boxes, st.integers(1, 40))
def test_a_split_box_is_covered_once_by_parts_of_bounded_size(box, most):
    parts = list(split_box(box, most))
    assert max(part.numel for part in parts) <= most
    assert sum(part.numel for part in parts) == box.numel
    assert set().union(*(_indices(part) for part in parts)) == _indices(box)


def test_a_box_selects_itself_within_a_larger_one():
    assert Box((3, 4), (2, 1)).index_in(Box((2, 0), (4, 8))) == (slice(1, 3), slice(4, 5))


@pytest.mark.parametrize("mapping", TRAINED)
def test_the_boxes_of_all_ranks_are_a_partition_with_replicas(mapping):
    sharding = _sharding(mapping)
    held = [sharding.boxes(rank) for rank in range(WORLD_SIZE)]
    for name, shape in sharding.shapes.items():
        found = {rank_boxes[name] for rank_boxes in held if name in rank_boxes}
        assert sum(box.numel for box in found) == prod(shape), name
        assert all(one.intersect(other) is None for one in found for other in found if one != other), name


@settings(max_examples=30)
@given(
    st.sampled_from(TRAINED),
    st.sampled_from(TRAINED),
    st.booleans(),
    st.sampled_from([64, 1000, 10**6]),
    st.sampled_from([None, 2, 4]),
)
def test_a_plan_gives_every_rank_its_boxes_within_the_bounds(before, after, for_training, most, ranks_per_node):
    source = _sharding(before)
    target = _sharding(after, for_training=for_training)
    itemsize = {name: 4 if "router" in name else 2 for name in target.shapes}
    plan = plan_reshard(source, target, itemsize, most, ranks_per_node)
    _assert_cover(plan, source, target)
    for transfers in plan.buckets:
        assert len({itemsize[transfer.name] for transfer in transfers}) == 1
        for rank in range(WORLD_SIZE):
            for held_by in ("source", "target"):
                of_rank = [t for t in transfers if getattr(t, held_by) == rank]
                assert sum(t.box.numel * itemsize[t.name] for t in of_rank) <= most
    missing = 0
    for rank in range(WORLD_SIZE):
        have = source.boxes(rank)
        for name, box in target.boxes(rank).items():
            common = box.intersect(have[name]) if name in have else None
            missing += (box.numel - (0 if common is None else common.numel)) * itemsize[name]
        assert plan.coinciding[rank] == {name for name, box in target.boxes(rank).items() if have.get(name) == box}
    assert sum(sent.box.numel * itemsize[sent.name] for sent in plan.moved) == missing
    if ranks_per_node:
        _assert_near_senders(plan, source, ranks_per_node)


def _assert_cover(plan: ReshardPlan, source: WeightSharding, target: WeightSharding, first_target: int = 0) -> None:
    """Every index of every target box arrives once, from a rank that holds it."""
    arriving: dict[tuple[int, str], list[Box]] = {}
    for transfer in (*plan.local, *plan.moved):
        held = source.boxes(transfer.source)[transfer.name]
        assert held.intersect(transfer.box) == transfer.box
        arriving.setdefault((transfer.target, transfer.name), []).append(transfer.box)
    for rank in range(target.layout.world_size):
        for name, box in target.boxes(rank).items():
            parts = arriving.pop((first_target + rank, name))
            assert sum(part.numel for part in parts) == box.numel
            assert all(part.intersect(box) == part for part in parts)
            assert all(one.intersect(other) is None for i, one in enumerate(parts) for other in parts[:i])
    assert not arriving


@settings(max_examples=12)
@given(
    st.sampled_from(TRAINED),
    st.sampled_from(
        [{"world_size": 1}, {"world_size": 2, "ep": 2}, {"world_size": 4, "pp": 2, "ep": 2}, {"world_size": 4, "tp": 2}]
    ),
    st.sampled_from([64, 1000, 10**6]),
)
def test_disjoint_ranks_get_their_whole_boxes_within_the_bounds(before, after, most):
    source = _sharding(before)
    target = _sharding(after, for_training=False)
    itemsize = {name: 4 if "router" in name else 2 for name in target.shapes}
    plan = plan_reshard(source, target, itemsize, most, first_target=WORLD_SIZE)
    _assert_cover(plan, source, target, WORLD_SIZE)
    assert plan.local == ()
    held = (held_bytes(target.boxes(rank), itemsize) for rank in range(target.layout.world_size))
    assert sum(sent.box.numel * itemsize[sent.name] for sent in plan.moved) == sum(held)
    for transfers in plan.buckets:
        for rank in range(WORLD_SIZE + target.layout.world_size):
            received = sum(t.box.numel * itemsize[t.name] for t in transfers if t.target == rank)
            assert received <= most


def _assert_near_senders(plan: ReshardPlan, source: WeightSharding, ranks_per_node: int) -> None:
    """A part crosses nodes only if no rank of the target's node holds it."""
    for transfer in plan.moved:
        node = transfer.target // ranks_per_node
        if transfer.source // ranks_per_node != node:
            for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
                held = source.boxes(rank).get(transfer.name)
                assert held is None or held.intersect(transfer.box) is None


def test_a_mapping_to_itself_moves_nothing():
    for mapping in TRAINED[::8]:
        sharding = _sharding(mapping)
        plan = plan_reshard(sharding, sharding, dict.fromkeys(sharding.shapes, 4), 1000)
        assert plan.buckets == ()
        assert all(transfer.source == transfer.target for transfer in plan.local)


def test_replicas_share_the_sending():
    """Without ZeRO both replicas hold every part. Each sends about half of them."""
    source = _sharding({"world_size": 8, "tp": 2, "pp": 2, "zero": 0})
    target = _sharding({"world_size": 8, "pp": 1}, for_training=False)
    plan = plan_reshard(source, target, dict.fromkeys(source.shapes, 1), 10**6)
    sent = [sum(t.box.numel for t in plan.moved if t.source == rank) for rank in range(8)]
    assert max(sent) < 1.6 * min(sent)


def test_the_bytes_of_boxes():
    assert held_bytes({"a": Box((0, 1), (2, 3)), "b": whole_box((4,))}, {"a": 4, "b": 2}) == 32


def test_changes_that_cannot_be_planned():
    source = _sharding({"world_size": 8})
    sizes = dict.fromkeys(source.shapes, 4)
    for first in (0, 4):
        with pytest.raises(
            ValueError, match=f"has 4 ranks from rank {first} on, the source mapping 8 from rank 0 on: they"
        ):
            plan_reshard(source, _sharding({"world_size": 4}), sizes, 100, first_target=first)
    wider = WeightSharding.from_config(_recipe({"world_size": 8}, hidden_size=32), for_training=False)
    with pytest.raises(ValueError, match=r"the target needs embedding.weight of shape \(25, 32\)"):
        plan_reshard(source, wider, dict.fromkeys(wider.shapes, 4), 100)
    with pytest.raises(ValueError, match="max_bucket_bytes=2 is less than one element"):
        plan_reshard(source, source, sizes, 2)


def test_layers_of_multi_token_prediction_may_stay_behind():
    source = _sharding({"world_size": 8, "pp": 2}, mtp_layers=1)
    target = WeightSharding(
        replace(source.model, mtp_layers=0), source.layout, source.stage_plan, shards_data_parallel=False
    )
    plan = plan_reshard(source, target, dict.fromkeys(source.shapes, 4), 10**6)
    names = {transfer.name for transfer in (*plan.local, *plan.moved)}
    assert names == set(target.shapes)
    assert not any(name.startswith("layers.2.") for name in names)
    assert BoxTransfer("head.norm.weight", whole_box((16,)), 0, 0) not in plan.local


def test_a_transfer_takes_the_first_bucket_with_room():
    """A search over all buckets finds the same ones."""
    source = _sharding({"world_size": 4, "tp": 2, "zero": 3})
    target = _sharding({"world_size": 4, "pp": 2, "ep": 2}, for_training=False)
    most = 384
    plan = plan_reshard(source, target, dict.fromkeys(target.shapes, 4), most)
    sent: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], int] = {}
    for number, transfers in enumerate(plan.buckets):
        for transfer in transfers:
            size = transfer.box.numel * 4
            for earlier in range(number):
                is_full = sent.get((transfer.source, earlier), 0) + size > most
                assert is_full or received.get((transfer.target, earlier), 0) + size > most
        for transfer in transfers:
            size = transfer.box.numel * 4
            sent[transfer.source, number] = sent.get((transfer.source, number), 0) + size
            received[transfer.target, number] = received.get((transfer.target, number), 0) + size
    assert len(plan.buckets) > 10
