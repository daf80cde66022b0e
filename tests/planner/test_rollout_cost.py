"""Costs of decoding and of copying weights worked by hand, and plans of recipes of reinforcement learning."""

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
from moefold.planner.rollout_cost import RolloutLengths, received_bytes, rollout_bytes, sampling_seconds
from moefold.recipe import load_config
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config
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
CACHES = ("latents", "heads")
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
    cfg = load_config(tmp_path / "rl.toml", ["model.layers=3 linear, full"])
    model = cfg.model
    found = rollout_bytes(cfg, 32)
    keys = 32 * 2 * model.attention.num_kv_heads * model.softmax_attention.head_dim * 2
    assert found == keys + 3 * model.decoder_layers[0].core.state_bytes(1, 2)


def test_a_cache_of_heads_is_priced_as_such(tmp_path):
    """Latent attention caches keys and values of all heads, padded to one width, and reads them for each token."""
    (tmp_path / "rl.toml").write_text(RECIPE)
    lengths = RolloutLengths(prompt=20, new=12)
    words = ["model.attention=mla", "model.attention.v_head_dim=40"]
    recipes = {cache: load_config(tmp_path / "rl.toml", [*words, f"rollout.cache={cache}"]) for cache in CACHES}
    found = {cache: rollout_bytes(cfg, 32) for cache, cfg in recipes.items()}
    decode_s = {cache: sampling_seconds(cfg, IDEAL, lengths)[1] for cache, cfg in recipes.items()}
    model = recipes["heads"].model
    latent = model.attention.kv_lora_rank + model.attention.qk_rope_head_dim
    heads = 2 * model.attention.num_heads * 48
    assert model.softmax_attention.head_dim == 48
    assert found["latents"] == 32 * model.num_layers * latent * 2
    assert found["heads"] == 32 * model.num_layers * heads * 2
    assert decode_s["heads"] > decode_s["latents"]


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


def test_a_rank_receives_what_the_copy_of_the_weights_sends_it(recipe):
    words = ["parallel.world_size=4", "parallel.tp=2", "parallel.ep=2", "rollout.tp=1", "rollout.pp=2"]
    cfg = load_config(recipe, words)
    sampled = rollout_config(cfg)
    itemsize = sampled_itemsize(sampled)
    reshard = plan_reshard(
        WeightSharding.from_config(cfg, for_training=True),
        WeightSharding.from_config(sampled, for_training=False),
        itemsize,
        1 << 30,
    )
    received = [sum(t.box.numel * itemsize[t.name] for t in reshard.moved if t.target == rank) for rank in range(4)]
    assert received_bytes(cfg) == max(received) > 0


def test_the_plan_of_a_recipe_says_that_sampling_is_not_priced(recipe, capsys):
    words = ["plan", str(recipe), "--gpu", "h100", "--num-gpus", "2"]
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("sampling is not priced, nor its memory: `moefold simulate ")
    assert printed.err.count("\n") == 1
    assert json.loads(printed.out)["mappings"]
    # moefold simulate has no price of a server's rounds.
    recipe.write_text(RECIPE + 'engine = "vllm"\n')
    assert main([*words, "--json"]) == 0
    assert capsys.readouterr().err == "sampling is not priced, nor its memory\n"
    assert main(["plan", "tiny", *words[2:], "--seq-len", "64", "--global-batch-size", "4", "--json"]) == 0
    assert not capsys.readouterr().err


def test_a_training_mapping_next_to_which_rollouts_cannot_be_sampled_is_not_legal(recipe, tmp_path, capsys):
    words = ["plan", str(recipe), "--gpu", "h100", "--num-gpus", "4"]
    recipe.write_text(RECIPE + "tp = 2\n")
    assert main([*words, "--json", "--top", "100"]) == 0
    # Sampling has the pipeline of training, and needs tp=2 in each of its stages.
    found = json.loads(capsys.readouterr().out)["mappings"]
    assert {mapping["pp"] for mapping in found} == {1, 2}
    assert main([*words, "--explain", "pp=4"]) == 1
    assert "illegal: rollouts cannot be sampled under tp=2 pp=4 ep=1 etp=1" in capsys.readouterr().out
    recipe.write_text(RECIPE + 'experts = "fetch"\n')
    assert main([*words, "--explain", "ep=1"]) == 1
    assert "rollout.experts='fetch' has no effect with ep=1" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["tp = 2", 'experts = "whole"'])
def test_a_planned_recipe_loads_where_training_has_the_mapping_of_sampling(recipe, tmp_path, setting):
    """A key without effect is refused: the planned recipe leaves it out."""
    recipe.write_text(f"{RECIPE}{setting}\n[parallel]\nworld_size = 2\nep = 2\n")
    fixed = ["tp=2", "pp=1", "ep=1", "etp=1"]
    words = ["plan", str(recipe), "--gpu", "h100", "--num-gpus", "4", "--fix", *fixed]
    assert main([*words, "--recipe", str(tmp_path / "planned.toml")]) == 0
    planned = load_config(tmp_path / "planned.toml")
    assert planned.parallel.tp == 2
    assert not has_rollout_mapping(planned.parallel, planned.rl, planned.rollout)
