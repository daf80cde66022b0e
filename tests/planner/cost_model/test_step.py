"""A step's time: hand-worked parts, monotone parts, and sums."""

from dataclasses import replace

import pytest

from moefold.config.base.part_registry import find_part
from moefold.cost.flops import keys_per_token
from moefold.cost.hardware import load_device
from moefold.planner.cost_model.bubble import bubble_s
from moefold.planner.cost_model.collective import RankGroup, all_gather_s
from moefold.planner.cost_model.data_parallel import EXPOSED_ZERO3_FRACTION
from moefold.planner.cost_model.layer import LayerCostModel
from moefold.planner.cost_model.mixer import RING_KERNELS, SCAN_SHARE, attention_core_s
from moefold.planner.cost_model.network import UNPADDED_DROP_KERNELS
from moefold.planner.cost_model.step import EXPOSED_OFFLOAD_FRACTION, TIME_CATEGORIES, TUNED_HOST_FRACTION, CostModel
from moefold.planner.cost_model.workload import EXPERT_SPREAD, TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import load_model_spec, model_spec_from_config
from tests.models import model_of

FOLDED = ParallelMapping(tp=2, pp=8, vpp=7, dp=8, ep=8, edp=2)
WORK = TrainingWorkload(seq_len=4096, global_batch_size=256)


def pricer(model="mixtral-8x22b", gpu="h100", work=WORK):
    return CostModel(load_model_spec(model), load_device(gpu), work)


def seconds(mapping, **options):
    return pricer(**options).step_time(mapping).total_s


def test_the_parts_add_up_and_the_rates_follow():
    step = pricer().step_time(FOLDED)
    assert set(step.parts) == set(TIME_CATEGORIES)
    assert sum(step.parts.values()) == pytest.approx(step.total_s)
    assert min(step.parts.values()) >= 0
    assert step.num_micro_batches == 32
    assert step.tokens_per_s_per_gpu == pytest.approx(256 * 4096 / 128 / step.total_s)
    assert step.mfu == pytest.approx(step.tokens_per_s_per_gpu * pricer().flops_per_token / 989.5e12)
    assert step.bottleneck == "experts"


def test_nothing_is_faster_than_its_operations_at_the_peak():
    step = pricer().step_time(FOLDED)
    causal = replace(WORK, counts_causal_attention=True)
    least = pricer(work=causal).flops_per_token * 256 * 4096 / 128 / 989.5e12
    assert step.total_s > least


def test_float32_moves_twice_the_bytes_and_computes_at_its_rate():
    wide, narrow = (pricer(work=replace(WORK, dtype=name)) for name in ("float32", "bfloat16"))
    found, known = wide.step_time(FOLDED).parts, narrow.step_time(FOLDED).parts
    ratio = 989.5e12 / 6.7e13
    for part in ("attention", "experts", "head"):
        assert 0.8 * ratio < found[part] / known[part] <= ratio
    for part in ("tp_comm", "ep_comm", "pp_comm"):
        assert 1.7 < found[part] / known[part] <= 2
    # Gathers of parameters double; gradients are summed in float32 either way.
    assert wide.data_parallel.cost(FOLDED)[0] > 1.9 * narrow.data_parallel.cost(FOLDED)[0]
    assert wide.data_parallel.cost(FOLDED)[1] == narrow.data_parallel.cost(FOLDED)[1]
    low = [
        pricer(work=replace(WORK, dtype=name, precision="fp8")).step_time(FOLDED).parts
        for name in ("float32", "bfloat16")
    ]
    assert low[0]["attention"] > 2 * low[1]["attention"]
    assert low[0]["experts"] < 1.5 * low[1]["experts"]


@pytest.mark.parametrize("part", ["norms", "core_attention", "expert_activation", "moe", "layer"])
def test_recomputation_takes_time(part):
    assert seconds(replace(FOLDED, recompute=(part,))) > seconds(FOLDED)


def test_a_part_that_holds_others_swallows_them():
    moe = seconds(replace(FOLDED, recompute=("moe",)))
    assert seconds(replace(FOLDED, recompute=("moe", "expert_activation"))) == moe
    assert seconds(replace(FOLDED, recompute=("layer",))) > moe


def test_zero_costs_its_communication():
    times = [seconds(replace(FOLDED, zero=zero)) for zero in (1, 2, 3)]
    assert times == sorted(times)
    assert times[0] <= seconds(replace(FOLDED, zero=0))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_moments_on_the_host_take_the_way_there_and_back(zero):
    kept, away = (pricer().step_time(replace(FOLDED, zero=zero, offload=offload)) for offload in ((), ("optimizer",)))
    assert away.parts["optimizer"] > 2 * kept.parts["optimizer"] > 0


def test_virtual_stages_shrink_the_bubble():
    parts = [pricer().step_time(replace(FOLDED, vpp=vpp)).parts["bubble"] for vpp in (1, 7)]
    assert parts[0] > 5 * parts[1] > 0
    assert bubble_s(1.0, 2.0, 1.0, pp=4, vpp=1, num_micro_batches=16, schedule="1f1b") == 9.0
    assert bubble_s(1.0, 2.0, 1.0, pp=4, vpp=3, num_micro_batches=16, schedule="interleaved") == 3.0
    assert bubble_s(1.0, 2.0, 1.0, pp=4, vpp=1, num_micro_batches=16, schedule="zero-bubble") == 3.0
    assert bubble_s(1.0, 2.0, 1.0, pp=1, vpp=1, num_micro_batches=16, schedule="1f1b") == 0.0
    # docs/pipeline.md: (p-1)(F+2I-W) of a chunk, a rank's two chunks being F = I = W = 1/2 each.
    assert bubble_s(1.0, 2.0, 1.0, pp=4, vpp=2, num_micro_batches=16, schedule="dualpipev") == pytest.approx(
        3 * (0.5 + 1.0 - 0.5)
    )


@pytest.mark.parametrize(
    ("schedule", "vpp", "num_micro_batches", "bubble"),
    [
        pytest.param("1f1b", 1, 1, 9.0, id="1f1b"),
        # One micro-batch goes through all ranks, chunk after chunk, however many chunks there are.
        pytest.param("interleaved", 3, 1, 9.0, id="interleaved-1"),
        pytest.param("interleaved", 3, 2, 7.0, id="interleaved-2"),
        pytest.param("interleaved", 3, 4, 3.0, id="interleaved-4"),
        pytest.param("zero-bubble", 1, 1, 6.0, id="zero-bubble-1"),
        pytest.param("zero-bubble", 1, 2, 5.0, id="zero-bubble-2"),
        pytest.param("zero-bubble", 3, 1, 16 / 3, id="zero-bubble-1-in-chunks"),
        pytest.param("zero-bubble", 3, 2, 3.0, id="zero-bubble-2-in-chunks"),
        pytest.param("zero-bubble", 3, 8, 1.0, id="zero-bubble-8-in-chunks"),
        pytest.param("zbv", 2, 1, 6.0, id="zbv-1"),
        pytest.param("zbv", 2, 7, 1.5, id="zbv-7"),
    ],
)
def test_few_micro_batches_leave_ranks_idle(schedule, vpp, num_micro_batches, bubble):
    assert bubble_s(
        1.0, 2.0, 1.0, pp=4, vpp=vpp, num_micro_batches=num_micro_batches, schedule=schedule
    ) == pytest.approx(bubble)


def test_experts_that_leave_the_node_pay_for_it_and_overlap_hides_it():
    inside = pricer("qwen3-30b-a3b").step_time(ParallelMapping(dp=16, ep=8, edp=2))
    across = pricer("qwen3-30b-a3b").step_time(ParallelMapping(dp=16, ep=16, edp=1))
    assert across.parts["ep_comm"] > 3 * inside.parts["ep_comm"]
    hidden = pricer("qwen3-30b-a3b").step_time(ParallelMapping(dp=16, ep=16, edp=1, overlap=True))
    assert hidden.parts["ep_comm"] < 0.5 * across.parts["ep_comm"]
    rack = pricer("qwen3-30b-a3b", gpu="gb200").step_time(ParallelMapping(dp=16, ep=16, edp=1))
    assert rack.parts["ep_comm"] < 0.2 * across.parts["ep_comm"]


def test_rows_in_8_bits_shorten_one_of_four_exchanges():
    """Forward there and back, and the same for gradients: 2 + 3 x 2 bytes a value become 1 + 4/128 + 3 x 2."""
    narrow = replace(WORK, wire=find_part("wire", "fp8-blockwise")())
    for mapping in (ParallelMapping(dp=16, ep=16, edp=1), ParallelMapping(dp=16, ep=8, etp=2, edp=1)):
        wide = pricer("qwen3-30b-a3b").step_time(mapping)
        found = pricer("qwen3-30b-a3b", work=narrow).step_time(mapping)
        for part in ("ep_comm", "etp_comm"):
            # But for the latency.
            assert found.parts[part] == pytest.approx((7 + 4 / 128) / 8 * wide.parts[part], rel=0.02)
        assert found.total_s < wide.total_s


def test_folding_beats_coupling_where_context_parallelism_spreads_the_experts():
    long = replace(WORK, seq_len=16384, global_batch_size=1024)
    folded = ParallelMapping(tp=2, cp=4, pp=8, vpp=7, dp=2, ep=8, edp=2)
    coupled = replace(folded, etp=2, ep=2, edp=4)
    assert seconds(folded, work=long) < seconds(coupled, work=replace(long, is_coupled=True))


def test_rows_are_sorted_for_several_experts_and_for_etp():
    def permuted(**degrees):
        return pricer().step_time(replace(FOLDED, **degrees)).parts["permute"]

    one, two = permuted(ep=8, edp=2), permuted(ep=4, edp=4)
    cut = permuted(ep=4, etp=2, edp=2)
    # A token and its two copies; sorting reads and writes the copies, under etp=2 of both etp ranks.
    assert two / one == pytest.approx(7 / 3)
    assert cut / one == pytest.approx(11 / 3)


def test_imbalance_slows_the_experts_up_to_the_capacity():
    even = seconds(FOLDED)
    skewed = seconds(FOLDED, work=replace(WORK, imbalance=1.5))
    assert skewed > 1.1 * even
    dropped = replace(WORK, imbalance=1.5, capacity_factor=1.0)
    assert seconds(FOLDED, work=dropped) == seconds(FOLDED, work=replace(WORK, capacity_factor=1.0))


def test_lower_precision_and_graphs_are_faster():
    assert seconds(FOLDED, work=replace(WORK, precision="fp8")) < 0.85 * seconds(FOLDED)
    assert seconds(FOLDED, work=replace(WORK, cuda_graphs="full")) < seconds(FOLDED)
    partial = seconds(FOLDED, work=replace(WORK, cuda_graphs="partial"))
    assert seconds(FOLDED, work=replace(WORK, cuda_graphs="full")) < partial < seconds(FOLDED)


@pytest.mark.parametrize(
    ("kind", "tokens"), [("gated_deltanet", 3 * 3 * 128), ("gla", 0), ("short_convolution", 3 * 512)]
)
def test_linear_attention_exchanges_states_of_constant_size(kind, tokens):
    """Two segments a rank: a transition [32, 32] and an update [32, 32] of 4 heads, and three tokens."""
    heads = {} if kind == "short_convolution" else {"linear_attention.num_key_heads": 4}
    model = model_of(
        {
            "hidden_size": 512,
            "layers.attention": "linear",
            "linear_attention": kind,
            "linear_attention.num_value_heads": 4,
            **heads,
        }
    )
    states = 0 if kind == "short_convolution" else 4 * 2 * 32 * 32
    device = load_device("h100")
    for seq_len in (4096, 65536):
        costs = LayerCostModel(model_spec_from_config(model), device, replace(WORK, seq_len=seq_len))
        block = costs.mixer(0, ParallelMapping(tp=2, cp=4, mbs=3))
        (forward,) = (item.seconds for item in block.forward if item.part == "cp_comm")
        (backward,) = (item.seconds for item in block.backward if item.part == "cp_comm")
        group = RankGroup(4, 2)
        sent = [12 * numbers * size for numbers, size in ((states, 4), (tokens, 2)) if numbers]
        expected = sum(all_gather_s(device, group, num_bytes) for num_bytes in sent)
        assert forward == pytest.approx(expected)
        assert backward == pytest.approx(2 * expected)
        (alone,) = (
            item.seconds
            for item in costs.mixer(0, ParallelMapping(tp=2, cp=1, mbs=3)).forward
            if item.part == "cp_comm"
        )
        assert alone == 0


def test_context_parallelism_exchanges_latents_once_and_index_keys():
    """Values of sparse latent attention are part of the keys: a token has 512 + 64 numbers, and its index key."""
    device = load_device("h100")
    link = device.links[0]
    received = 3 * 4096 / 4 * 2 / (link.bytes_per_s * link.fraction)

    def exchange_s(index_head_dim):
        sizes = {
            "attention.kv_lora_rank": 512,
            "attention.indexer.top_k": 256,
            "attention.indexer.head_dim": index_head_dim,
        }
        model = model_of({"hidden_size": 512, "attention": "mla", "attention.qk_rope_head_dim": 64, **sizes})
        spec = model_spec_from_config(model)
        assert spec.kinds[0].core.key_value_width == 512 + 64
        block = LayerCostModel(spec, device, WORK).mixer(0, ParallelMapping(tp=1, cp=4, mbs=1))
        (forward,) = (item.seconds for item in block.forward if item.part == "cp_comm")
        return forward

    assert exchange_s(192) - exchange_s(128) == pytest.approx(64 * received)


def test_kernels_of_ring_attention_are_as_fast_as_those_of_a_sequence_of_a_rank():
    spec = load_model_spec("qwen3-235b-a22b")
    core = spec.kinds[0].core
    work = replace(WORK, seq_len=65536)
    block = LayerCostModel(spec, load_device("h100"), work).mixer(0, ParallelMapping(tp=1, cp=4))
    keys = keys_per_token(0, 65536, causal=True)
    flops = 2.0 * keys * (core.key_width + core.value_width) * core.heads * 65536 / 4
    expected, _ = attention_core_s(load_device("h100"), "bfloat16", flops, 65536 / 4, core.key_width)
    assert dict(block.recompute)["core_attention"] == pytest.approx(expected)


@pytest.mark.parametrize("tp", [1, 4])
def test_kernels_hide_the_sends_of_ring_attention_but_for_one_step(tp):
    """Within a node (tp 1) and between nodes, also where one hardware queue exposes gathers of parameters."""
    spec = load_model_spec("mixtral-8x22b")
    device = load_device("h100")
    work = replace(WORK, seq_len=65536, overlaps_dp_comm=False)
    block = LayerCostModel(spec, device, work).mixer(0, ParallelMapping(tp=tp, cp=4))
    found = next(item.seconds for item in block.forward if item.part == "cp_comm")
    link = device.links[0 if tp == 1 else 1]
    core = spec.kinds[0].core
    step = link.latency_s + 65536 / 4 * core.kv_heads / tp * core.key_value_width * 2 / link.reached_bytes_per_s
    kernels = 4 * RING_KERNELS * device.kernel_gap_s
    corrected = 4 * 12 * 65536 / 4 / tp * core.heads * core.value_width / (device.hbm_bytes_per_s * device.hbm_fraction)
    assert found == pytest.approx(step + kernels + corrected)


def test_the_backward_pass_of_linear_attention_recomputes_its_core():
    """A layer of kind L recomputes its core in any case, which `core_attention` therefore does not: Megatron's does."""
    model = load_model_spec("qwen3-next-80b-a3b")
    ours = LayerCostModel(model, load_device("h100"), WORK).mixer(model.layers[0], ParallelMapping())
    theirs = LayerCostModel(model, load_device("h100"), replace(WORK, is_megatron=True)).mixer(
        model.layers[0], ParallelMapping()
    )
    core = dict(theirs.recompute)["core_attention"]
    assert core > 0 == dict(ours.recompute)["core_attention"]
    assert ours.backward_cost.compute_s == pytest.approx(theirs.backward_cost.compute_s + core)
    assert ours.forward_cost == theirs.forward_cost


def test_context_parallelism_scans_the_segments_of_linear_attention_twice():
    """The first scan has the columns of the values and the columns of the transition: here twice as many."""
    model = load_model_spec("qwen3-next-80b-a3b")
    costs = LayerCostModel(model, load_device("h100"), replace(WORK, is_megatron=True))
    alone, shared = (
        dict(costs.mixer(model.layers[0], ParallelMapping(cp=cp, mbs=cp)).recompute)["core_attention"] for cp in (1, 2)
    )
    assert shared == pytest.approx((1 + 2 * SCAN_SHARE) * alone)


def test_the_host_delays_short_layers_and_hides_behind_long_ones():
    """Launches of a host that takes as long as the device add little; without it, a layer of few tokens is shorter."""
    device = load_device("h100")
    idle_host = replace(device, host_launch_s=1e-9)
    work = replace(WORK, capacity_factor=1.0, global_batch_size=64)
    shares = []
    for seq_len in (256, 32768):
        cost_models = [
            CostModel(load_model_spec("qwen3-30b-a3b"), gpu, replace(work, seq_len=seq_len))
            for gpu in (device, idle_host)
        ]
        layers = [cost_model.layer_time(0, ParallelMapping(dp=8, ep=8)) for cost_model in cost_models]
        shares.append((layers[0].forward_s + layers[0].backward_s) / (layers[1].forward_s + layers[1].backward_s))
    assert shares[0] > 2
    assert 1 <= shares[1] < 1.02


def test_a_tuned_host_is_a_host_whose_launches_are_shorter():
    device = load_device("h100")
    faster = replace(device, host_launch_s=TUNED_HOST_FRACTION * device.host_launch_s)
    model = load_model_spec("qwen3-30b-a3b")
    mapping = ParallelMapping(dp=8, ep=8)
    tuned, same, other = (
        CostModel(model, gpu, replace(WORK, seq_len=256, has_tuned_host=is_tuned)).layer_time(0, mapping)
        for gpu, is_tuned in ((device, True), (faster, False), (device, False))
    )
    assert (tuned.forward_s, tuned.backward_s) == (same.forward_s, same.backward_s)
    assert tuned.part_s("launch") < 0.9 * other.part_s("launch")


def test_a_layer_never_takes_less_than_its_host_or_its_device():
    cost_model = pricer("qwen3-30b-a3b")
    mapping = ParallelMapping(dp=8, ep=8)
    layer = cost_model.layer_time(0, mapping)
    mixer, ffn = cost_model.blocks(0, mapping)
    host_s = (mixer.kernels.forward + ffn.kernels.forward) * cost_model.device.host_launch_s
    device_s = sum(work.seconds for work in (*mixer.forward, *ffn.forward))
    wait_s = cost_model.device.sync_s
    assert max(host_s, device_s) + wait_s <= layer.forward_s <= host_s + device_s + 2 * wait_s


def test_recomputed_experts_launch_and_wait_again():
    launches = [
        pricer("qwen3-30b-a3b").layer_time(0, ParallelMapping(dp=8, ep=8, recompute=parts)).part_s("launch")
        for parts in ((), ("norms",), ("moe",))
    ]
    assert launches[0] > launches[1] * 0.99
    assert launches[2] > launches[0]


def test_megatron_waits_where_it_drops_tokens_without_padding():
    model = load_model_spec("qwen3-30b-a3b")
    padded = replace(WORK, capacity_factor=1.0, is_megatron=True)
    blocks = [
        LayerCostModel(model, load_device("h100"), work).feed_forward(0, ParallelMapping(dp=8, ep=8))
        for work in (padded, replace(padded, drops_unpadded=True), replace(padded, capacity_factor=0.0))
    ]
    assert [block.host_syncs for block in blocks] == [0, 1, 1]
    assert blocks[1].kernels == blocks[0].kernels.plus(UNPADDED_DROP_KERNELS)
    assert blocks[2].kernels == blocks[0].kernels


def test_full_graphs_of_megatron_copy_the_saved_tensors_of_dropless_experts():
    model = load_model_spec("qwen3-30b-a3b")
    device = load_device("gb300")
    graphs = replace(WORK, cuda_graphs="full", precision="mxfp8")

    def permuted_s(work):
        block = LayerCostModel(model, device, work).feed_forward(0, ParallelMapping(dp=8, ep=8))
        return [sum(item.seconds for item in way if item.part == "permute") for way in (block.forward, block.backward)]

    megatron = replace(graphs, is_megatron=True)
    without, copied = permuted_s(replace(megatron, cuda_graphs="partial")), permuted_s(megatron)
    # 8 rows of a token: hidden size and inner width in 8 bits, gate and up in 16; read and written.
    copy_s = 2 * 4096 * 8 * (2048 + 768 + 2 * 2 * 768) / (device.hbm_bytes_per_s * device.hbm_fraction)
    assert copied == pytest.approx([seconds + copy_s for seconds in without])
    assert permuted_s(replace(megatron, capacity_factor=1.0)) < copied
    assert permuted_s(graphs) == permuted_s(replace(graphs, cuda_graphs="partial"))


def test_the_busiest_of_more_ranks_is_busier_and_one_rank_has_its_mean():
    work = replace(WORK, expert_spread=EXPERT_SPREAD)
    loads = [work.imbalance_at(ep, 128) for ep in (1, 2, 8, 32, 128)]
    assert loads[0] == 1
    assert loads == sorted(loads)
    assert work.imbalance_at(8, 128) == pytest.approx(1.61, abs=0.01)
    assert replace(work, capacity_factor=1.1).imbalance_at(32, 128) == 1.1
    assert replace(WORK, imbalance=1.5).imbalance_at(1, 128) == 1
    assert replace(WORK, imbalance=1.5).imbalance_at(8, 128) == 1.5


def test_zero_3_exposes_a_part_of_its_gathers_and_the_first_of_a_pass():
    cost_model = pricer()
    mapping = ParallelMapping(dp=128, ep=8, edp=16, zero=3)
    comm = cost_model.data_parallel.cost(mapping)
    hidden = cost_model.data_parallel.exposed_s(mapping, comm, 1e3, 1e3, 2)
    bare = cost_model.data_parallel.exposed_s(mapping, comm, 0.0, 0.0, 2)
    moved = 2 * (2 * comm.all_gathers_s + comm.gradients_s)
    copies = 2 * (2 * comm.gather_copies_s + comm.reduce_copies_s)
    assert EXPOSED_ZERO3_FRACTION * moved < hidden - copies < 0.2 * moved
    assert bare - copies >= moved


def test_a_measured_exposure_of_the_device_takes_the_place_of_the_constant():
    mapping = ParallelMapping(dp=128, ep=8, edp=16, zero=3)
    exposed, offloaded = [], []
    for part in (None, 0.0, 0.5):
        device = replace(load_device("h100"), exposed_zero3_fraction=part, exposed_offload_fraction=part)
        cost_model = CostModel(load_model_spec("mixtral-8x22b"), device, WORK)
        comm = cost_model.data_parallel.cost(mapping)
        exposed.append(cost_model.data_parallel.exposed_s(mapping, comm, 1e3, 1e3, 2))
        offloaded.append(cost_model.exposed_offload_s(device.host_bytes_per_s, 1e3))
    moved = 2 * (2 * comm.all_gathers_s + comm.gradients_s)
    assert exposed[0] - exposed[1] == pytest.approx(EXPOSED_ZERO3_FRACTION * moved)
    assert exposed[2] - exposed[1] == pytest.approx(0.5 * moved)
    assert offloaded == [EXPOSED_OFFLOAD_FRACTION, 0.0, 0.5]


@pytest.mark.parametrize(
    ("seq_len", "cp", "natural", "forced"), [(16384, 1, 237, 295), (32768, 2, 277, 335), (65536, 4, 320, 368)]
)
def test_natural_routing_slows_a_step_as_published_pairs_say(seq_len, cp, natural, forced):
    """published/README.md: TFLOP/s of Qwen3-235B on 256 H100; the mapping is the one in the rows of 64K."""
    mapping = ParallelMapping(
        tp=4, cp=cp, pp=8, vpp=4, dp=8 // cp, ep=8, edp=4, recompute=("norms", "moe"),
        dispatcher=find_part("dispatcher", "deepep")(),
    )  # fmt: skip
    work = TrainingWorkload(seq_len=seq_len, global_batch_size=2**25 // seq_len, is_megatron=True)
    even, uneven = (
        seconds(mapping, model="qwen3-235b-a22b", work=replace(work, expert_spread=spread))
        for spread in (0.0, EXPERT_SPREAD)
    )
    assert uneven / even == pytest.approx(forced / natural, abs=0.03)
