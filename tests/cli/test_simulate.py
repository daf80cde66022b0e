"""`moefold simulate` plays a schedule, and its numbers equal the schedule's formulas."""

import json
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.cli.plan_options import parse_stragglers
from moefold.cli.simulate import run
from moefold.config.load import config_from_dict
from moefold.config.schema import config_to_dict
from moefold.cost.peak_memory import compute_rank_memory
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config

RECIPE = """
[model]
layers = 8
hidden_size = 1024
[parallel]
world_size = 16
tp = 2
pp = 4
ep = 4
[train]
global_batch_size = 16
seq_len = 1024
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return str(path)


def simulated(capsys, *words) -> dict:
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_numbers_equal_the_schedule(recipe, capsys):
    step = simulated(capsys, recipe)
    assert [rank["pp_rank"] for rank in step["ranks"]] == [0, 1, 2, 3]
    assert [rank["in_flight"] for rank in step["ranks"]] == [4, 3, 2, 1]
    assert step["step_time_s"] > step["pipeline_s"] > 0
    for rank in step["ranks"]:
        assert rank["work_s"] + rank["idle_s"] == pytest.approx(step["pipeline_s"])
    interleaved = ["parallel.schedule=interleaved", "parallel.virtual_stages=2"]
    assert simulated(capsys, recipe, *interleaved)["bubble"] < step["bubble"]


def test_a_straggler_slows_its_stage_and_jitter_is_drawn_by_the_seed(recipe, capsys):
    plain = simulated(capsys, recipe)
    # Ranks 4 to 7 are the second pipeline rank; the slowest of them counts.
    late = simulated(capsys, recipe, "--straggler", "5=1.5", "--straggler", "6=1.2")
    slower = [a["work_s"] / b["work_s"] for a, b in zip(late["ranks"], plain["ranks"], strict=True)]
    assert slower[0] == pytest.approx(1.0)
    assert 1.3 < slower[1] <= 1.5
    assert late["step_time_s"] > plain["step_time_s"]
    runs = [simulated(capsys, recipe, "--jitter", "0.05", "--seed", seed) for seed in ("1", "1", "2")]
    assert runs[0] == runs[1] != runs[2]


def test_rows_in_8_bits_are_priced(recipe, capsys):
    wide = simulated(capsys, recipe)
    assert simulated(capsys, recipe, "moe.dispatch_precision=fp8-blockwise")["step_time_s"] < wide["step_time_s"]


def test_the_precision_of_the_recipe_is_priced_and_the_option_wins(recipe, capsys):
    wide, narrow = (simulated(capsys, recipe, *more) for more in ((), ("train.precision=fp8-blockwise",)))
    assert narrow["step_time_s"] != wide["step_time_s"]
    assert simulated(capsys, recipe, "--precision", "fp8-blockwise") == narrow
    assert simulated(capsys, recipe, "train.precision=fp8-blockwise", "--precision", "bf16") == wide


def test_automatic_recompute_is_simulated_and_reported(recipe, capsys):
    words = [recipe, "train.recompute=['auto']", "run.device=cuda"]
    plain = simulated(capsys, recipe)
    assert simulated(capsys, *words) == plain
    least = load_config(Path(recipe), ["train.recompute=['layer']"])
    scarce = max(rank.total for rank in compute_rank_memory(least)) / 2**30 + 0.001
    assert run([*words, f"train.memory_budget_gib={scarce}", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["step_time_s"] > plain["step_time_s"]
    assert "train.recompute=['auto'] recomputes layer" in printed.err


def test_stragglers_are_ranks_of_the_world():
    words = ["parallel.world_size=16", "parallel.tp=2", "parallel.pp=4", "train.global_batch_size=16"]
    assert parse_stragglers(load_config(None, words).parallel, ["0=2", "3=3", "15=1.5"]) == {0: 3.0, 3: 1.5}


def test_stage_runs_at_the_speed_of_its_slowest_rank():
    cfg = load_config(None, ["parallel.world_size=4", "parallel.tp=2", "parallel.pp=2", "train.global_batch_size=4"])
    assert parse_stragglers(cfg.parallel, ["0=0.5", "1=0.8", "2=0.5", "3=1.5"]) == {0: 0.8, 1: 1.5}
    with pytest.raises(ConfigError, match=r"--straggler 3=0.5: its stage has 2 ranks"):
        parse_stragglers(cfg.parallel, ["3=0.5"])


def test_timelines_are_written_with_the_table(recipe, tmp_path, capsys):
    files = [tmp_path / "step.json", tmp_path / "step.png"]
    assert run([recipe, "--timeline", str(files[0]), "--timeline", str(files[1])]) == 0
    printed = capsys.readouterr()
    assert printed.err == "".join(f"wrote {path}\n" for path in files)
    assert "bubble" in printed.out
    assert len(json.loads(files[0].read_text())["traceEvents"]) > 100
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_an_order_from_a_file_is_played(tmp_path, capsys):
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[parallel]\nworld_size = 2\npp = 2\nschedule = {{ kind = "csv", path = "{path}" }}\n')
    step = simulated(capsys, str(recipe), "train.global_batch_size=2")
    assert [rank["in_flight"] for rank in step["ranks"]] == [2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--straggler", "x"], "--straggler x must be RANK=FACTOR, such as 17=1.3"),
        (["--straggler", "16=2"], "--straggler 16=2: ranks run from 0 to 15"),
        (["--straggler", "1=0"], "the factor must be above 0"),
        (["--straggler", "1=nan"], "the factor must be above 0"),
        (["--seed", "0"], "--seed 0 has no effect: --jitter 0 draws nothing; add --jitter 0.05, or leave --seed out"),
        (["--jitter", "-1"], "--jitter -1 must lie between 0 and 1"),
        (["--imbalance", "0.5"], "--imbalance 0.5 must be at least 1"),
        (["--gpu", "h10"], "did you mean 'h100'?"),
        (["--timeline", "step.gif"], "--timeline step.gif must end in .json"),
        (["--timeline", "no-such-folder/step.json"], "no-such-folder/step.json cannot be written: No such file"),
        (["parallel.pp=3"], "parallel.pp=3"),
        (["--overlap", "parallel.schedule=zero-bubble"], "parallel.overlap_experts=true needs a schedule"),
        (["--overlap", "parallel.zero=3"], "parallel.overlap_experts=true"),
        (["--overlap", "parallel.ep=1"], "parallel.overlap_experts=true"),
        (["--straggler", "0=0.5"], "its stage has 4 ranks and waits for the slowest one"),
        (["--precision", "mxfp8"], "--precision mxfp8 has no price here, as h100 has matrix units for bf16, fp8, fp8-"),
        (
            ["run.dtype=float64"],
            "run.dtype='float64' has no price here, as nothing is known of h100 in float64; choose",
        ),
        (["train.precision=nvfp4"], "train.precision='nvfp4' has no price here"),
        (["train.precision=fp8-blockwise", "run.kernels=plain"], "run.kernels='plain' does not use the matrix units"),
        (["train.recompute=['auto']", "--gpu", "cpu"], "train.recompute=['auto'] needs train.memory_budget_gib"),
    ],
)
def test_invalid_arguments_are_refused_in_one_message(recipe, capsys, words, message):
    with pytest.raises(ConfigError) as refused:
        run([recipe, *words])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capsys.readouterr().out == ""


def test_a_step_of_reinforcement_learning_is_simulated_without_its_rollouts(tmp_path, capsys):
    words = ["data.kind=task", "data.task=add", "rl.group_size=8", "rollout.max_tokens=16", "train.seq_len=64"]
    recipe = tmp_path / "plain.toml"
    recipe.write_text('[model]\npreset = "tiny"\n')
    step = simulated(capsys, str(recipe), "train.seq_len=64")
    assert run([str(recipe), *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "sampling is not simulated: this is the training step of a full batch\n"
    assert json.loads(printed.out) == step
    cfg = load_config(recipe, [*words, f"run.dir={tmp_path}"])
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(cfg)))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "step_time_s": 1.0}}\n' for i in range(8)))
    with pytest.raises(ConfigError, match="has rl.group_size=8: its steps have sampling, which is not simulated"):
        run(["--run", str(tmp_path)])


def test_a_run_is_simulated_whose_settings_training_refuses_now(tmp_path, capsys):
    checkpoint = {"every": 2, "keep_every": 3}
    tree = {"model": {"preset": "tiny"}, "run": {"dir": str(tmp_path)}, "checkpoint": checkpoint}
    with pytest.raises(ConfigError, match="checkpoint.keep_every=3 must be a multiple of checkpoint.every=2"):
        check_config(config_from_dict(tree))
    (tmp_path / "config.json").write_text(json.dumps(tree))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "step_time_s": 1.0}}\n' for i in range(8)))
    assert simulated(capsys, "--run", str(tmp_path))["measured"] == {"step_time_s": 1.0, "steps": 2}


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            '[model]\nattention = { indexer = { top_k = 64 } }\n[train]\nindexer_stage = "warmup"\n',
            "train.indexer_stage='warmup'",
        ),
        ("[lora]\nrank = 8\n", "lora.rank=8"),
    ],
)
def test_frozen_weights_have_no_price(tmp_path, capsys, command, text, name):
    recipe = tmp_path / "frozen.toml"
    recipe.write_text(text)
    assert main([command, str(recipe), "--gpu", "h100", *(["--num-gpus", "1"] if command == "plan" else [])]) == 2
    assert f"{name} has no predicted step time" in capsys.readouterr().err
