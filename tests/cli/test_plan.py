"""Test that `moefold plan` prints, explains, traces and writes mappings, or says why none is legal."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from moefold.api import plan
from moefold.cli.main import main
from moefold.cost.flops import train_flops_per_token
from moefold.data.dataset import DataRequest
from moefold.data.routing_trace import RoutingTraceWriter, TraceShape
from moefold.data.validate_source import check_data
from moefold.errors import EXIT_FAILED, EXIT_USER_ERROR, ConfigError
from moefold.planner.mapping_families import STATED_ERROR
from moefold.recipe import load_config
from moefold.validate.config import check_config

SMALL = ["plan", "tiny", "--gpu", "h100", "--num-gpus", "4", "--seq-len", "64", "--global-batch-size", "4"]
FEW = ["mbs=1", "recompute=none", "offload=none", "dispatcher=alltoall", "overlap=off"]
"""Axes of a search that is to be short."""
KEYS = [
    *("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp", "mbs", "zero", "recompute"),
    *("step_time_s", "mfu", "tflops_per_gpu", "tokens_per_s_per_gpu", "memory_gib", "fits"),
]


def answer(capsys, *more: str, words: list[str] = SMALL) -> dict:
    assert main([*words, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *words: str) -> str:
    assert main(list(words)) == EXIT_USER_ERROR
    return capsys.readouterr().err


def test_json_lists_the_best_mapping_of_every_fold(capsys):
    found = answer(capsys)
    assert found["stated_error"] == asdict(STATED_ERROR)
    mappings = found["mappings"]
    assert all(set(KEYS) <= set(mapping) for mapping in mappings)
    assert len({tuple(m[axis] for axis in ("tp", "cp", "pp", "ep", "etp")) for m in mappings}) == len(mappings)
    assert found["num_legal"] > len(mappings)
    assert all(m["fits"] for m in mappings)
    times = [m["step_time_s"] for m in mappings]
    assert times == sorted(times)
    for m in mappings[:5]:
        assert sum(m["time_parts_s"].values()) == pytest.approx(m["step_time_s"])
        assert sum(m["memory_parts_gib"].values()) == pytest.approx(m["memory_gib"])
        assert m["tp"] * m["cp"] * m["dp"] * m["pp"] == m["ep"] * m["etp"] * m["edp"] * m["pp"] == 4


PRECISE = re.compile(r"\d+(\.\d+)?")


def printed(capsys, monkeypatch, columns: int | None, *words: str) -> list[str]:
    """Return the lines printed to a terminal with this number of columns; None: piped."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    assert main(list(words)) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("columns", [60, 80])
def test_the_table_fits_a_terminal_and_keeps_its_numbers(capsys, monkeypatch, columns):
    mappings = answer(capsys, "--top", "3")["mappings"]
    lines = printed(capsys, monkeypatch, columns, *SMALL, "--top", "3")
    # Only the command to copy may be longer.
    assert max(len(line) for line in lines if not line.startswith("next:")) <= columns
    assert "…" not in "".join(lines)
    assert lines[0] == "tiny on 4 x h100: 4 x 64 tokens a step, bf16"
    assert lines[2].split() == ["family", "mapping", "step,", "s", "TFLOP/s", "tokens/s", "GiB"] or columns < 80
    assert any(line.split() == ["#", "mapping", "step,", "s", "MFU,", "%", "GiB", "bound", "by"] for line in lines)
    rows = [line for line in lines if re.match(r" ?\d+  tp", line)]
    for row, m in zip(rows, mappings, strict=True):
        assert f"tp{m['tp']} pp{m['pp']}" in row
        assert all(f" {axis}{m[axis]}" in row for axis in ("ep", "dp"))
        assert all((f" {axis}{m[axis]}" in row) == (m[axis] > 1) for axis in ("cp", "etp", "mbs"))
        assert f" {m['memory_gib']:.1f} " in row
        assert float(row.split(f" {m['memory_gib']:.1f} ")[0].split()[-2]) == pytest.approx(m["step_time_s"], rel=0.01)
    text = " ".join(" ".join(lines).split())
    assert "never checked on a GPU by moefold" in text
    assert str(STATED_ERROR) in text
    assert "4.0 of 79.1 GiB of a GPU (5%) stay free" in text
    assert "seconds" not in text
    # Every degree of the first mapping, in the words of --explain.
    assert re.search(r"#1: tp=\d+ cp=\d+ pp=\d+ ep=\d+ etp=\d+ mbs=\d+ zero=\d", text)


def test_wide_and_breakdown_show_all_numbers_at_any_width(capsys, monkeypatch):
    mappings = answer(capsys, "--top", "4")["mappings"]
    words = [*SMALL, "--top", "4", "--wide", "--breakdown"]
    narrow, wide = (printed(capsys, monkeypatch, columns, *words) for columns in (80, None))
    assert max(len(line) for line in narrow if not line.startswith("next:")) <= 80
    assert "…" not in "".join(narrow + wide)
    # The same words, in one table or in several.
    assert {word for line in narrow for word in line.split() if PRECISE.fullmatch(word)} >= {
        word for line in wide for word in line.split() if PRECISE.fullmatch(word) and "(" not in line
    } - {word for line in wide if line.startswith("searched") for word in line.split()}
    assert sum(line.startswith("#  ") for line in narrow) > 1 == sum(line.startswith("#  ") for line in wide)
    row = next(line for line in wide if line.startswith("1  ")).split()
    assert row[1:11] == [str(mappings[0][axis]) for axis in KEYS[:10]]
    total = next(line for line in wide if line.startswith("total")).split()[1:]
    assert [float(word) for word in total] == pytest.approx([m["step_time_s"] for m in mappings], abs=6e-4)
    assert sum(line.startswith("total") for line in wide) == 2


def test_the_printed_next_command_works(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    line = printed(capsys, monkeypatch, 80, *SMALL, "--top", "1", "--wide")[-1]
    command = line.removeprefix("next:").split()
    assert command[:3] == ["moefold", "plan", "tiny"]
    assert "--wide" not in command
    then = printed(capsys, monkeypatch, 80, *command[1:])[-1]
    assert then.split()[1:] == ["moefold", "train", "planned.toml"]
    check_config(load_config(tmp_path / "planned.toml"))
    # fp8 with one scale cannot be trained here: no recipe is offered.
    assert printed(capsys, monkeypatch, 80, *SMALL, "--precision", "fp8")[-1].endswith("--timeline step.png")


def test_a_margin_of_memory_stays_free(capsys):
    words = ["plan", "mixtral-8x7b", "--gpu", "h100", "--num-gpus", "64", "--seq-len", "4096"]
    words += ["--global-batch-size", "256", "--top", "1", "--fix", "pp=4,cp=1,etp=1,mbs=1,overlap=off"]
    usual, all_of_it = (answer(capsys, *reserve, words=words) for reserve in ((), ("--memory-reserve", "0")))
    assert (usual["gpu_memory_gib"], usual["memory_reserve_gib"]) == (79.1, pytest.approx(0.05 * 79.1))
    assert usual["mappings"][0]["memory_gib"] <= 0.95 * 79.1
    # The best mapping of all does not fit beside a margin that is 1 GiB more than the memory it leaves free.
    filled = all_of_it["mappings"][0]["memory_gib"]
    margin = int(79.1 - filled) + 2
    more = answer(capsys, "--memory-reserve", str(margin), words=words)
    assert (all_of_it["memory_reserve_gib"], more["memory_reserve_gib"]) == (0, margin)
    assert filled <= 79.1
    assert more["mappings"][0]["memory_gib"] <= 79.1 - margin < filled


def test_the_mfu_counts_the_chosen_flops(capsys, tmp_path):
    path = tmp_path / "mtp.toml"
    path.write_text('[model]\npreset = "tiny"\nmtp_layers = 2\n')
    model = load_config(path).model
    words = ["plan", str(path), *SMALL[2:], "--fix", "tp=1,cp=1,pp=1,ep=1,etp=1,mbs=1", "--top", "1"]
    found = {}
    for flops in ("full", "causal"):
        for mtp in ("with", "without"):
            record = answer(capsys, "--flops", flops, "--mtp-flops", mtp, words=words)
            assert (record["flop_convention"], record["mtp_flops"]) == (flops, mtp)
            found[flops, mtp] = record["mappings"][0]
            counted = replace(model, mtp_layers=2 if mtp == "with" else 0)
            wanted = train_flops_per_token(counted, 64, causal=flops == "causal").total
            rate = found[flops, mtp]["tflops_per_gpu"] * 1e12 / found[flops, mtp]["tokens_per_s_per_gpu"]
            assert rate == pytest.approx(wanted, rel=1e-4)
    # They run whatever is counted.
    assert len({m["step_time_s"] for m in found.values()}) == 1
    assert answer(capsys, words=words)["mappings"][0] == found["full", "with"]
    assert main([*words, "--flops", "causal", "--mtp-flops", "without"]) == 0
    convention = "half of the attention matrix and no multi-token prediction"
    assert f"TFLOP/s count {convention}; all of it is x " in " ".join(capsys.readouterr().out.split())


def test_a_wide_recipe_is_priced_as_it_is(capsys, tmp_path):
    path, file = tmp_path / "wide.toml", tmp_path / "gpu.toml"
    path.write_text('[run]\ndtype = "float32"\n[model]\npreset = "olmoe-1b-7b"\n')
    words = ["plan", str(path), "--gpu", "h100", "--num-gpus", "8", "--seq-len", "4096", "--global-batch-size", "8"]
    words += ["--fix", "tp=1,cp=1,pp=1,ep=8,etp=1,mbs=1,dispatcher=alltoall,recompute=none,offload=none", "--top", "1"]
    wide, narrow = answer(capsys, words=words), answer(capsys, words=["plan", "olmoe-1b-7b", *words[2:]])
    assert (wide["precision"], narrow["precision"]) == ("float32", "bf16")
    for part, least in (("attention", 8), ("experts", 8), ("ep_comm", 1.7)):
        assert wide["mappings"][0]["time_parts_s"][part] > least * narrow["mappings"][0]["time_parts_s"][part]
    assert main(words) == 0
    assert " tokens a step, float32" in capsys.readouterr().out
    assert "--precision bf16 and run.dtype='float32' differ" in refusal(capsys, *words, "--precision", "bf16")
    path.write_text('[run]\ndtype = "float64"\n[model]\npreset = "olmoe-1b-7b"\n')
    assert "run.dtype='float64' has no price here, as nothing is known of h100 in float64" in refusal(capsys, *words)
    file.write_text('base = "h100"\nmemory_gib = 140.0\n[wide_flops]\nfloat64 = 3e13\n')
    assert answer(capsys, words=[*words[:3], str(file), *words[4:]])["precision"] == "float64"


def test_fixed_axes_are_in_every_mapping(capsys):
    mappings = answer(capsys, "--fix", "tp=2,ep=2", "mbs=1")["mappings"]
    assert mappings
    assert {(m["tp"], m["ep"], m["mbs"]) for m in mappings} == {(2, 2, 1)}


def test_a_method_limits_the_mappings(capsys):
    mappings = answer(capsys, "--method", "fsdp+ep")["mappings"]
    assert {(m["pp"], m["zero"]) for m in mappings} == {(1, 3)}
    assert all(m["etp"] == m["tp"] for m in mappings)


def test_explain_prices_one_mapping_and_ranks_it(capsys):
    best = answer(capsys)["mappings"][0]
    words = [f"{axis}={best[axis]}" for axis in ("tp", "cp", "pp", "ep", "etp", "mbs")]
    found = answer(capsys, "--explain", " ".join(words))
    assert (found["legal"], found["rank"]) == (True, 1)
    assert found["step_time_s"] == pytest.approx(best["step_time_s"])


def test_explain_reports_an_illegal_mapping_like_the_runtime(capsys):
    assert main([*SMALL, "--explain", "tp=3 ep=1"]) == EXIT_FAILED
    assert "illegal: parallel.tp=3 must divide" in capsys.readouterr().out
    assert main([*SMALL, "--json", "--explain", "tp=2", "cp=2", "dp=4"]) == EXIT_FAILED
    record = json.loads(capsys.readouterr().out)
    assert record["legal"] is False
    assert "dp=1 follows" in record["reason"]


def test_explain_names_the_part_that_is_too_large(capsys):
    words = [
        "plan",
        "mixtral-8x7b",
        "--gpu",
        "h100",
        "--num-gpus",
        "8",
        "--seq-len",
        "4096",
        "--global-batch-size",
        "8",
    ]
    assert main([*words, "--explain", "tp=1 cp=1 pp=1 ep=1 etp=1 zero=1"]) == EXIT_FAILED
    assert "does not fit" in capsys.readouterr().out


def test_a_recipe_is_written_that_passes_the_checks(capsys, tmp_path):
    path = tmp_path / "planned.toml"
    best = answer(capsys, "--recipe", str(path))["mappings"][0]
    cfg = load_config(path)
    check_config(cfg)
    assert (cfg.parallel.tp, cfg.parallel.ep, cfg.parallel.world_size) == (best["tp"], best["ep"], 4)
    assert (cfg.train.micro_batch_size, cfg.train.seq_len) == (best["mbs"], 64)
    again = answer(capsys, words=["plan", str(path), "--gpu", "h100"])
    assert again["mappings"][0] == best


def test_recipe_of_a_bare_model_lists_the_missing_keys(capsys, tmp_path):
    path, corpus = tmp_path / "planned.toml", tmp_path / "corpus.txt"
    answer(capsys, "--recipe", str(path))
    text = path.read_text()
    name = load_config(path).model.preset
    for line in (
        f'dir = "runs/{name}"  # your folder',
        "steps = 1000  # ",
        "lr = 0.0003  # ",
        "warmup_steps = 100  # ",
        'kind = "text"  # your data: docs/data.md',
        'path = "path/to/your/text"  # ',
        'tokenizer = "bytes"  # ',
    ):
        assert f"\n{line}" in text
    assert (Path(__file__).parents[2] / "docs" / "data.md").is_file()
    # Data is all that it lacks.
    recipe = load_config(path)
    with pytest.raises(ConfigError, match="path/to/your/text"):
        check_data(DataRequest.of(recipe))
    corpus.write_text("Words to train on. " * 1000)
    cfg = load_config(path, [f"data.path={corpus}"])
    check_config(cfg)
    check_data(DataRequest.of(cfg))
    # The values of a recipe are its own, and stay.
    path.write_text(text.replace("lr = 0.0003", "lr = 0.002"))
    again = tmp_path / "again.toml"
    answer(capsys, "--recipe", str(again), words=["plan", str(path), "--gpu", "h100"])
    assert load_config(again) == load_config(path)
    assert "  # " not in again.read_text()


def test_imbalance_costs_time_and_memory(capsys):
    fixed = ("--fix", "ep=4,tp=1,cp=1,pp=1,mbs=1,dispatcher=alltoall,recompute=none")
    even, uneven = (answer(capsys, *fixed, *more)["mappings"][0] for more in ((), ("--imbalance", "3")))
    assert uneven["step_time_s"] > even["step_time_s"]
    assert uneven["memory_gib"] > even["memory_gib"]


def test_a_trace_prices_each_ep_with_its_load(capsys, tmp_path):
    model = load_config(None, ["model.preset=tiny"]).model
    shape = TraceShape(
        layers=model.moe_layer_numbers,
        num_experts=model.ffn.moe.num_experts,
        top_k=model.ffn.moe.top_k,
        global_batch_size=4,
        seq_len=16,
    )
    # All tokens go to the first experts: the first ep rank has everything.
    choices = np.broadcast_to(np.arange(model.ffn.moe.top_k), (4, 16, model.ffn.moe.top_k)).astype(shape.dtype)
    RoutingTraceWriter(tmp_path, shape).write(1, [choices] * len(shape.layers))
    fixed = ("--fix", "ep=4,tp=1,cp=1,pp=1,mbs=1,dispatcher=alltoall")
    even = answer(capsys, *fixed)["mappings"][0]
    traced = answer(capsys, *fixed, "--trace", str(tmp_path))["mappings"][0]
    forced = answer(capsys, *fixed, "--imbalance", str(min(4.0, model.ffn.moe.num_experts / model.ffn.moe.top_k)))[
        "mappings"
    ][0]
    assert traced["step_time_s"] == pytest.approx(forced["step_time_s"])
    assert traced["step_time_s"] > even["step_time_s"]
    # Its files too are of the recorded load.
    load, steps = str(min(4.0, model.ffn.moe.num_experts / model.ffn.moe.top_k)), []
    for more in (("--trace", str(tmp_path)), ("--imbalance", load), ()):
        answer(capsys, *fixed, *more, "--force", "--timeline", str(tmp_path / "step.json"))
        steps.append((tmp_path / "step.json").read_text())
    assert steps[0] == steps[1] != steps[2]


def test_axes_can_be_fixed_by_one_option_or_by_several(capsys):
    once, twice = (answer(capsys, *words) for words in (("--fix", "tp=2", "ep=4"), ("--fix", "tp=2", "--fix", "ep=4")))
    assert once == twice
    assert all(mapping["tp"] == 2 and mapping["ep"] == 4 for mapping in once["mappings"])
    assert main([*SMALL, "--fix", "tp=2", "--fix", "tp=4"]) == 2
    assert "--fix tp=4: tp is set twice" in capsys.readouterr().err


def test_a_batch_that_is_not_given_is_assumed_and_said(capsys):
    words = [*SMALL[:6], "--fix", "tp=4", "ep=4", "etp=1", "mbs=1", "--top", "1"]
    assert main(words) == 0
    assert "assumed: --seq-len 4096 --global-batch-size 1024; give yours" in capsys.readouterr().out
    assert main([*words, "--seq-len", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["assumed"] == {"--global-batch-size": 65536}
    assert found["global_batch_size"] == 65536
    # No other number of samples of 7 tokens has many divisors near 4M tokens.
    assert main([*words[:6], "--seq-len", "7", "--top", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"] == {"--global-batch-size": 2**19}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "mixtral-8x7", *SMALL[2:]], "did you mean 'mixtral-8x7b'"),
        ([*SMALL[:3], "h10", *SMALL[4:]], "did you mean 'h100'"),
        ([*SMALL, "--fix", "tpp=2"], "did you mean tp?"),
        ([*SMALL, "--fix", "tp=0"], "must be a whole number of at least 1"),
        ([*SMALL, "--fix", "recompute=norm"], "did you mean norms?"),
        ([*SMALL, "--fix", "overlap=1"], "must be on, true, off or false"),
        ([*SMALL, "--fix", "offload=norm"], "did you mean norms?"),
        ([*SMALL, "--timeline", "out.txt"], ".json"),
        ([*SMALL, "--jitter", "2"], "--jitter"),
        ([*SMALL, "--mtp-flops", "without"], "--mtp-flops without has no effect: model.mtp_layers=0"),
        ([*SMALL, "--seed", "3", "--timeline", "x.json"], "--seed 3 has no effect: --jitter 0 draws nothing"),
        ([*SMALL, "--memory-reserve", "500"], "--memory-reserve 500 must be at least 0 and below 79.1"),
        ([*SMALL, "--wide", "--json"], "--wide has no effect on --json"),
        ([*SMALL, "--breakdown", "--explain", "tp=2"], "--breakdown has no effect on --explain"),
        *(
            ([*SMALL, "--imbalance", value], f"--imbalance {value} must be at least 1")
            for value in ("0.5", "nan", "inf")
        ),
        ([*SMALL, "--recipe", "out.txt"], "must end in .toml"),
        ([*SMALL, "--trace", "nowhere"], "--trace"),
        (SMALL[:4], "--num-gpus is missing"),
        (
            [*SMALL, "--precision", "mxfp8"],
            "--precision mxfp8 has no price here, as h100 has matrix units for bf16, fp8",
        ),
        ([*SMALL, "--precision", "fp8", "--recipe", "x.toml"], "train.precision has no fp8 with one scale"),
        ([*SMALL, "--explain", "tp=2", "--fix", "tp=4"], "--explain tp=2 and --fix tp=4 differ"),
        ([*SMALL, "--explain", "tp=2", "--top", "3"], "--top counts mappings"),
        ([*SMALL, "--method", "coupled", "--recipe", "x.toml"], "add --fix cp=1"),
        ([*SMALL, "parallel.tp=2"], "parallel.tp=2 has no effect: the search chooses it; fix it with --fix tp=2"),
        ([*SMALL, "parallel.dispatcher.kind=alltoall"], "fix it with --fix dispatcher=alltoall"),
        ([*SMALL, "parallel.dispatcher={kind='alltoall'}"], "fix it with --fix dispatcher=alltoall"),
        ([*SMALL, "train.recompute=['norms', 'layer']"], "fix it with --fix recompute=norms+layer"),
        ([*SMALL, "train.seq_len=64"], "--seq-len 64 and train.seq_len set the same; leave one of them out"),
        ([*SMALL, "parallel.world_size=8"], "--num-gpus 4 and parallel.world_size set the same"),
        ([*SMALL, "model.preset=tiny"], "model.preset=tiny and MODEL tiny name two models"),
        ([*SMALL, "model.layers=0"], "model.layers=0 must be 1 to 10000 layers"),
        ([*SMALL, "model.layers='2 moes'"], "model.layers='2 moes' names 'moes'"),
    ],
)
def test_invalid_arguments_are_reported(capsys, words, message):
    assert message in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "no-such-folder/x.toml"], "--recipe no-such-folder/x.toml cannot be written: No such file"),
        (["--timeline", "no-such-folder/x.json"], "--timeline no-such-folder/x.json cannot be written: No such file"),
        (["--timeline", "x.json", "--straggler", "4=2"], "--straggler 4=2: ranks run from 0 to 3"),
        (["--timeline", "x.json", "--straggler", "0=0.5"], "--straggler 0=0.5 must be at least 1"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_search(capsys, words, message):
    # This search would end in another message: no mapping is legal.
    assert message in refusal(capsys, *SMALL, "--fix", "tp=3", *words)


def test_recipe_has_the_precision_that_was_priced(capsys, tmp_path):
    path, fixed = tmp_path / "planned.toml", ("--fix", "tp=1,cp=1,pp=1,ep=4,mbs=1")
    words = [*SMALL[:3], "b200", *SMALL[4:]]
    narrow = answer(capsys, *fixed, "--precision", "mxfp8", "--recipe", str(path), words=words)
    assert load_config(path).train.precision == "mxfp8"
    # The recipe by itself prices as it will train; an option wins, and gives the same as a recipe with its value.
    asked = ["plan", str(path), "--gpu", "b200", *fixed]
    again = answer(capsys, words=asked)
    assert (again["precision"], again["mappings"]) == ("mxfp8", narrow["mappings"])
    wide = answer(capsys, "--precision", "bf16", "--recipe", str(path), "--force", words=asked)
    assert wide["mappings"][0]["step_time_s"] != narrow["mappings"][0]["step_time_s"]
    assert load_config(path).train.precision == "dtype"


def test_an_explained_mapping_is_written(capsys, tmp_path):
    recipe, timeline = (tmp_path / name for name in ("x.toml", "x.json"))
    files = ("--recipe", str(recipe), "--timeline", str(timeline))
    # One that is not the best.
    found = answer(capsys, "--explain", "tp=4 cp=1 pp=1 ep=2 etp=2 mbs=1", *files)
    cfg = load_config(recipe)
    assert found["rank"] > 1
    assert (cfg.parallel.tp, cfg.parallel.ep, cfg.parallel.etp) == (4, 2, 2)
    assert json.loads(timeline.read_text())["traceEvents"]
    assert main([*SMALL, "--explain", "tp=3", "--recipe", str(tmp_path / "no.toml")]) == EXIT_FAILED
    assert "no.toml is not written: the mapping is illegal" in capsys.readouterr().err


def test_without_cp_coupled_is_what_a_recipe_trains(capsys, tmp_path):
    fixed = ("--fix", "tp=2,cp=1,pp=1,ep=2,etp=2,mbs=1,dispatcher=alltoall,recompute=none,offload=none")
    coupled = answer(capsys, *fixed, "--method", "coupled", "--recipe", str(tmp_path / "x.toml"))
    assert coupled["mappings"] == answer(capsys, *fixed)["mappings"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--fix", "tp=3", *FEW], "parallel.tp=3 must divide world_size/pp="),
        (["--fix", "dp=3", *FEW], "dp=1 or 2 or 4 follows from the other degrees on 4 GPUs, not 3"),
        (["--fix", "zero=3 overlap=on"], "parallel.zero=3 frees its parameters after one"),
        (["--fix", "overlap=on pp=1 mbs=1 dp=4"], "parallel.overlap_experts=true needs two micro-batches or more"),
        (["--fix", "recompute=layer+norms"], "'layer', which recomputes it anyway"),
        (["--fix", "dispatcher=local ep=4"], "parallel.dispatcher='local' needs ep=etp=1, and parallel.ep=4"),
        (["--fix", "dispatcher=deepep etp=4"], "parallel.etp=4 shards the experts"),
        (["--gpu", "cpu", "--fix", "offload=layer"], "offload=layer needs a GPU"),
        (["--gpu", "cpu", "--fix", "offload=optimizer"], "moments=host needs a GPU"),
        (["--method", "tp+ep+dp", "--fix", "zero=3"], "zero=3 is not of method 'tp+ep+dp', which has zero=1"),
        (["--method", "fsdp+ep", "--fix", "ep=1"], "no such mapping is of method 'fsdp+ep'"),
    ],
)
def test_where_nothing_is_legal_the_reason_is_said(capsys, words, reason):
    message = refusal(capsys, *SMALL, *words)
    assert message.startswith("moefold: error: no mapping of 4 GPUs with ")
    assert reason in message.partition(" is legal for ")[2]
    assert message.endswith("; or choose fewer fixed axes\n")
    assert message.count("\n") == 1


def test_schedule_that_needs_a_pipeline_is_refused(capsys):
    message = refusal(capsys, "plan", "quickstart", *SMALL[2:], "--fix", "pp=1", "schedule=zbv")
    assert "parallel.schedule='zbv' needs parallel.pp of 2 or more" in message


def test_a_fold_with_overlap_at_only_some_sizes_is_ranked(capsys):
    found = answer(capsys, "--fix", "overlap=on")
    assert {m["overlap"] for m in found["mappings"]} == {True}
    assert len(found["mappings"]) == min(10, found["num_folds"]) > 0


def test_budget_that_nothing_fits_names_a_sufficient_one(capsys):
    words = ["plan", "mixtral-8x22b", "--gpu", "a100", "--num-gpus", "8", "--seq-len", "4096"]
    message = refusal(capsys, *words, "--global-batch-size", "8", "--fix", "tp=8,zero=1")
    assert "the least is" in message
    assert re.search(r"it would fit with \d+ GPUs", message)


def test_a_model_too_large_for_any_mapping_names_the_least_gpus(capsys):
    message = refusal(
        capsys, "plan", "deepseek-v3", "--gpu", "h100", "--num-gpus", "8", "--fix", "cp=1,etp=1,mbs=1,zero=1"
    )
    assert message.count("\n") == 1
    count = int(re.search(r"it would fit with (\d+) GPUs", message)[1])
    # 16 bytes a weight on all GPUs together are the least.
    assert count * 75 * 2**30 > 671e9 * 16
    planner = plan("deepseek-v3", "h100", num_gpus=count, fix={"cp": 1, "etp": 1, "mbs": 1, "zero": 1})
    assert planner.own_search.memory.smallest[0] <= planner.request.usable_device.memory_bytes


def test_settings_override_the_recipe_as_in_train(capsys):
    words = ["plan", "recipes/quickstart.toml", "train.global_batch_size=32", "--gpu", "h100"]
    found = answer(capsys, words=words)
    assert (found["num_gpus"], found["seq_len"], found["global_batch_size"]) == (8, 256, 32)
    one = [*SMALL[:6], "train.seq_len=128", "--top", "1", "--fix", "tp=1,cp=1,pp=1,ep=1,etp=1,mbs=1"]
    bare = answer(capsys, "train.optimizer=muon", words=one)
    assert (bare["seq_len"], bare["assumed"]) == (128, {"--global-batch-size": 2**22 // 128})
    adamw = answer(capsys, words=one)
    # Muon has one moment for each matrix.
    sizes = [one["mappings"][0]["memory_parts_gib"] for one in (bare, adamw)]
    assert sizes[0]["optimizer"] / sizes[0]["weights"] < sizes[1]["optimizer"] / sizes[1]["weights"]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("parallel.tp=2", "fix it with --fix tp=2"),
        ("train.offload_optimizer=host", "fix it with --fix offload=optimizer"),
        ("train.nonsense=1", "unknown key train.nonsense"),
    ],
)
def test_settings_that_cannot_change_a_plan_are_refused(capsys, word, reason):
    assert reason in refusal(capsys, *SMALL, word)


def test_recipe_as_model_sets_the_other_options(capsys):
    found = answer(capsys, words=["plan", "recipes/quickstart.toml", "--gpu", "h100"])
    assert (found["num_gpus"], found["seq_len"], found["global_batch_size"]) == (8, 256, 16)


def test_other_commands_refuse_a_mapping_that_is_not_planned():
    cfg = load_config(None, ["parallel.mapping=auto"])
    with pytest.raises(ValueError, match="moefold train"):
        check_config(cfg)
    check_config(replace(cfg, parallel=replace(cfg.parallel, mapping="given")))
