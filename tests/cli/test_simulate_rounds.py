"""`moefold simulate` of reinforcement learning: rounds in turn and at once, as numbers, trace and picture."""

import json

import pytest

from moefold.cli.simulate import run
from moefold.errors import ConfigError
from tests.cli.test_simulate import simulated

RECIPE = """
[run]
dtype = "bfloat16"
[model]
preset = "tiny"
[train]
seq_len = 256
micro_batch_size = 1
global_batch_size = 64
[data]
kind = "task"
task = "add"
[rl]
group_size = 8
[rollout]
max_tokens = 32
"""
SPLIT = ["parallel.world_size=4", "rollout.ranks=2", "rl.staleness=1", "rl.objective=clip"]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text(RECIPE)
    return str(path)


def test_the_parts_of_a_round_add_up_on_the_same_ranks(recipe, capsys):
    step = simulated(capsys, recipe, "parallel.world_size=4", "--reward-s", "0.5", "--new-tokens", "16")
    found = step["rl"]
    assert found["calibrated"] is False
    parts = ["copy_s", "prefill_s", "decode_s", "reward_s", "train_s"]
    assert found["step_time_s"] == pytest.approx(sum(found[part] for part in parts))
    assert found["reward_s"] == 0.5
    assert found["train_s"] == step["step_time_s"]
    # ZeRO shards the weights, which are gathered for sampling.
    parts = ["copy of weights", "prompts", "decoding", "rewards", "training"]
    assert [phase["part"] for phase in found["phases"]] == parts
    longer = simulated(capsys, recipe, "parallel.world_size=4", "--new-tokens", "32")["rl"]
    assert longer["decode_s"] > 1.9 * found["decode_s"]


def test_short_rollouts_are_packed_into_fewer_samples(recipe, capsys):
    full = simulated(capsys, recipe)
    words = ["--prompt-tokens", "32", "--new-tokens", "32"]
    packed = simulated(capsys, recipe, *words)
    assert packed["step_time_s"] < full["step_time_s"] / 3
    # A pipeline fills the batch up with padding.
    pipeline = [recipe, "parallel.world_size=2", "parallel.pp=2"]
    assert simulated(capsys, *pipeline, *words)["step_time_s"] == simulated(capsys, *pipeline)["step_time_s"]


def test_ranks_that_only_sample_work_at_once(recipe, capsys):
    found = simulated(capsys, recipe, *SPLIT)["rl"]
    sampling = sum(found[part] for part in ("copy_s", "prefill_s", "decode_s", "reward_s"))
    assert found["rounds_ahead"] == 1
    assert found["copy_s"] > 0
    assert found["step_time_s"] == pytest.approx(max(sampling, found["train_s"]))
    assert min(found["idle_share"].values()) == pytest.approx(0, abs=1e-9)
    assert max(phase["round"] for phase in found["phases"]) == 3
    assert run([recipe, *SPLIT]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "at once on 4 ranks that train (idle" in text
    assert "decoding is not calibrated" in text


def test_another_mapping_for_sampling_copies_weights(recipe, capsys):
    words = [recipe, "parallel.world_size=2", "parallel.tp=2", "parallel.zero=0"]
    assert simulated(capsys, *words)["rl"]["copy_s"] == 0
    assert simulated(capsys, *words, "rollout.tp=1")["rl"]["copy_s"] > 0


def test_timelines_of_rounds(recipe, tmp_path, capsys):
    words = [recipe, *SPLIT, "parallel.pp=2", "--rounds", "3"]
    files = [tmp_path / name for name in ("rounds.json", "rounds.svg")]
    assert run([*words, *(word for file in files for word in ("--timeline", str(file)))]) == 0
    events = json.loads(files[0].read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"pipeline rank 0", "pipeline rank 1", "ranks that train", "ranks that sample"}
    training = [event for event in events if event.get("cat") == "training"]
    assert [event["args"]["round"] for event in training] == [0, 1, 2]
    passes = [event for event in events if event.get("cat") == "forward"]
    # The passes of each step lie within its training.
    for event in training:
        inside = [p for p in passes if event["ts"] - 1e-3 <= p["ts"] < event["ts"] + event["dur"] - 1]
        assert len(inside) == len(passes) / 3 > 0
    assert "ranks that sample" in files[1].read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--new-tokens", "0"], "--new-tokens 0 must be at least 1"),
        (["--reward-s", "-1"], "--reward-s -1 must be at least 0"),
        (["--rounds", "2000"], "--rounds 2000 must be 1 to 1000"),
        (["--rounds", "3"], "--rounds 3 has no effect without --timeline and --json"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_options_out_of_range_and_without_effect_are_refused(recipe, words, message):
    with pytest.raises(ConfigError, match=message):
        run([recipe, *words])


def test_other_recipes_refuse_the_options(tmp_path):
    (tmp_path / "plain.toml").write_text("[model]\npreset = 'tiny'\n")
    with pytest.raises(ConfigError, match="--rounds 2 has no effect: the recipe has rl.group_size=0; leave it out"):
        run([str(tmp_path / "plain.toml"), "--rounds", "2"])
