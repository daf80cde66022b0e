"""Decoding costs worked by hand, and pairs of mappings for reinforcement learning."""

import json
from dataclasses import replace

import pytest

from moefold.cli.main import main
from moefold.cost.flops import count_parameters
from moefold.cost.hardware import load_device
from moefold.cost.reshard_plan import plan_reshard
from moefold.cost.rollout_memory import sampled_itemsize
from moefold.cost.shard_boxes import WeightSharding
from moefold.planner.cost_model.decode import LAUNCHES_PER_BLOCK, MAX_LAUNCH_S, DecodeCost, SamplingDegrees
from moefold.planner.planner import Planner
from moefold.planner.query import PlanQuery, plan_request
from moefold.planner.rollout import plan_rollouts
from moefold.planner.rollout_cost import RolloutLengths, SamplingCost
from moefold.recipe import load_config
from moefold.topology.rollout_mapping import rollout_config
from tests.models import edit_model, model_of

MODEL = model_of(
    {
        "num_layers": 4,
        "hidden_size": 512,
        "attention.num_heads": 8,
        "attention.num_kv_heads": 2,
        "vocab_size": 1024,
        "ffn.moe.num_experts": 16,
        "ffn.moe.top_k": 2,
        "ffn.moe.intermediate_size": 256,
    }
)
H100 = load_device("h100")
IDEAL = replace(H100, host_launch_s=0.0, sync_s=0.0)
ALONE = SamplingDegrees(1)
RECIPE = """
[run]
dtype = "bfloat16"
[model]
preset = "tiny"
[train]
seq_len = 256
global_batch_size = 64
[data]
kind = "task"
task = "add"
[rl]
group_size = 8
[rollout]
max_tokens = 32
"""


def _cost(device=IDEAL) -> DecodeCost:
    return DecodeCost(MODEL, device, "bfloat16", 2)


def test_one_token_reads_the_weights_that_it_uses_once():
    active = count_parameters(MODEL).active - MODEL.vocab_size * MODEL.hidden_size
    norms = MODEL.hidden_size
    expected = 2 * (active - norms) / (IDEAL.hbm_bytes_per_s * IDEAL.hbm_fraction)
    assert _cost().pass_s(ALONE, rows=1, keys=0) == pytest.approx(expected, rel=1e-12)


def test_keys_and_values_are_read_for_each_token():
    seconds = [_cost().pass_s(ALONE, rows=1, keys=keys) for keys in (1000, 3000)]
    cached = 2000 * MODEL.num_layers * 2 * 2 * 64 * 2
    assert seconds[1] - seconds[0] == pytest.approx(cached / (IDEAL.hbm_bytes_per_s * IDEAL.hbm_fraction))


def test_states_are_read_and_written_for_each_token_whatever_its_position():
    """Three of four layers are linear, with a state of 4 heads of 32 x 32 and the last 3 tokens of 3 x 128 channels."""
    hybrid = edit_model(MODEL, {"attention_pattern": "L3F"})
    cost = DecodeCost(hybrid, IDEAL, "bfloat16", 2)
    short, long = (cost.pass_s(ALONE, rows=1, keys=keys) for keys in (1000, 3000))
    rate = IDEAL.hbm_bytes_per_s * IDEAL.hbm_fraction
    assert long - short == pytest.approx(2000 * 2 * 2 * 64 * 2 / rate)
    state = 4 * 32 * 32 * 4 + 3 * 3 * 128 * 2
    decoded, prefilled = (cost.pass_s(ALONE, rows=1, keys=0, chunk=chunk) for chunk in (1, 64))
    assert decoded - prefilled == pytest.approx(3 * 2 * state * (1 - 1 / 64) / rate)


def test_the_cache_of_a_hybrid_rollout_has_keys_of_its_softmax_layers_and_states_of_the_others(tmp_path):
    (tmp_path / "rl.toml").write_text(RECIPE)
    lengths = RolloutLengths(prompt=20, new=12)
    words = [
        "model.layers=3 linear, full",
    ]
    cfg = load_config(tmp_path / "rl.toml", words)
    model = cfg.model
    found = SamplingCost(cfg, IDEAL, lengths).times(ALONE).rollout_bytes
    keys = 32 * 2 * model.attention.num_kv_heads * model.softmax_attention.head_dim * 2
    assert found == keys + 3 * model.decoder_layers[0].core.state_bytes(1, 2)


def test_a_cache_of_heads_is_priced_as_such(tmp_path):
    """Latent attention caches keys and values of all heads, padded to one width, and reads them for each token."""
    (tmp_path / "rl.toml").write_text(RECIPE)
    lengths = RolloutLengths(prompt=20, new=12)
    words = ["model.attention=mla", "model.attention.v_head_dim=40"]
    found = {}
    for cache in ("latents", "heads"):
        cfg = load_config(tmp_path / "rl.toml", [*words, f"rollout.cache={cache}"])
        found[cache] = SamplingCost(cfg, IDEAL, lengths).times(ALONE)
    model = cfg.model
    latent = model.attention.kv_lora_rank + model.attention.qk_rope_head_dim
    heads = 2 * model.attention.num_heads * 48
    assert model.softmax_attention.head_dim == 48
    assert found["latents"].rollout_bytes == 32 * model.num_layers * latent * 2
    assert found["heads"].rollout_bytes == 32 * model.num_layers * heads * 2
    assert found["heads"].decode_s > found["latents"].decode_s


def test_many_tokens_are_bound_by_their_flops():
    used = count_parameters(MODEL).active - MODEL.vocab_size * MODEL.hidden_size
    rate = IDEAL.peak_flops["bf16"] * IDEAL.gemm_fraction["bf16"]
    found = _cost().pass_s(ALONE, rows=1e6, keys=0)
    assert found == pytest.approx(2e6 * used / rate, rel=1e-3)


def test_launches_bound_a_small_model_and_the_host_waits_once_a_pass():
    expected = (MODEL.num_layers * LAUNCHES_PER_BLOCK + 1) * MAX_LAUNCH_S + H100.sync_s
    assert _cost(H100).pass_s(ALONE, rows=1, keys=0) == pytest.approx(expected)


def test_experts_are_read_by_the_ranks_that_hold_them():
    """Two ranks with half of the experts each read as much together as one rank with all, for the same tokens."""
    alone = _cost().pass_s(ALONE, rows=8, keys=0)
    apart = _cost().pass_s(SamplingDegrees(2, ep=2), rows=4, keys=0)
    device = IDEAL.hbm_bytes_per_s * IDEAL.hbm_fraction
    experts = 3 * 512 * 256 * 16 * (1 - (1 - 2 / 16) ** 8) * 4
    assert alone - experts * 2 / device == pytest.approx(apart - experts / device - _comm_s(IDEAL, rows=4), rel=1e-9)


def _comm_s(device, rows: int) -> float:
    from moefold.planner.cost_model.collective import RankGroup, all_to_all_s

    return MODEL.num_layers * 2 * all_to_all_s(device, RankGroup(2, 1), rows * 2 * 2 / 2 * 512 * 2)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text(RECIPE)
    return path


def _planner(recipe, num_gpus: int):
    request = plan_request(PlanQuery(model=str(recipe), gpu="h100", num_gpus=num_gpus))
    return Planner(request)


def test_pairs_are_sorted_and_have_the_copies_of_the_plan(recipe):
    planner = _planner(recipe, 8)
    lengths = RolloutLengths(prompt=64, new=32)
    plans = plan_rollouts(planner, lengths)
    assert [plan.total_s for plan in plans] == sorted(plan.total_s for plan in plans)
    assert {plan.is_in_place for plan in plans} == {False, True}
    for plan in plans:
        assert plan.fits
        sampling_s = plan.times.prefill_s + plan.times.decode_s + plan.times.copy_s
        total_s = sampling_s + plan.times.train_s
        if plan.ranks:
            # One round ahead: the longer part, or half of the way of one round through both.
            total_s = max(sampling_s, plan.times.train_s, total_s / 2)
        assert plan.total_s == pytest.approx(total_s)
        assert plan.degrees.world_size == (plan.ranks or 8)
        assert plan.training.mapping.world_size == 8 - plan.ranks
        fraction = 1 if plan.training.mapping.pp > 1 else 96 / 256
        assert plan.times.train_s == pytest.approx(plan.training.time.total_s * fraction)
    # 6 GPUs divide the batch of 64 with three stages alone, of the embedding, two layers and the loss.
    assert {plan.ranks for plan in plans} == {0, 2, 4, 6}
    assert {plan.training.mapping.pp for plan in plans if plan.ranks == 2} == {3}
    other = next(plan for plan in plans if not plan.is_in_place and not plan.ranks)
    cfg = planner.config_for(other.training)
    degrees = other.degrees
    cfg = replace(cfg, rollout=replace(cfg.rollout, tp=degrees.tp, pp=degrees.pp, ep=degrees.ep, etp=degrees.etp))
    sampled = rollout_config(cfg)
    itemsize = sampled_itemsize(sampled)
    reshard = plan_reshard(
        WeightSharding.from_config(cfg, for_training=True),
        WeightSharding.from_config(sampled, for_training=False),
        itemsize,
        1 << 30,
    )
    received = [sum(t.box.numel * itemsize[t.name] for t in reshard.moved if t.target == rank) for rank in range(8)]
    link = H100.links[0]
    assert other.times.copy_s == pytest.approx(max(received) / (link.bytes_per_s * link.fraction))


def test_longer_completions_take_longer(recipe):
    planner = _planner(recipe, 4)
    short, long = (plan_rollouts(planner, RolloutLengths(prompt=64, new=new))[0].times.decode_s for new in (32, 64))
    assert long > 1.9 * short


def test_the_command_prints_the_pairs(recipe, capsys):
    words = ["plan", str(recipe), "--gpu", "h100", "--num-gpus", "4", "--top", "2"]
    assert main([*words, "--json", "--new-tokens", "16"]) == 0
    found = json.loads(capsys.readouterr().out)["rollouts"]
    assert (found["calibrated"], found["prompt_tokens"], found["new_tokens"]) == (False, 225, 16)
    assert found["pairs"][0]["step_time_s"] <= found["pairs"][-1]["step_time_s"]
    assert main(words) == 0
    assert "decoding is not calibrated" in " ".join(capsys.readouterr().out.split())


def test_without_reinforcement_learning_there_are_no_pairs(recipe, capsys):
    words = ["plan", "tiny", "--gpu", "h100", "--num-gpus", "2", "--seq-len", "128", "--global-batch-size", "8"]
    assert main([*words, "--json"]) == 0
    assert "rollouts" not in json.loads(capsys.readouterr().out)
    assert main([*words, "--new-tokens", "5"]) == 2
    assert "--new-tokens 5 has no effect: MODEL is no recipe with rl.group_size above 0" in capsys.readouterr().err
    assert main(["plan", str(recipe), "--gpu", "h100", "--new-tokens", "5", "--explain", "tp=1"]) == 2
    assert "--new-tokens has no effect on --explain and --compare-folding" in capsys.readouterr().err
    assert main(["plan", str(recipe), "--gpu", "h100", "--prompt-tokens", "0"]) == 2
    assert "--prompt-tokens 0 must be at least 1" in capsys.readouterr().err
