import json
from dataclasses import replace

import numpy as np
import pytest

from moefold.cli.main import EXIT_FAILED, EXIT_USER_ERROR, main
from moefold.config.checks import check_config
from moefold.config.load import load_config
from moefold.metrics.routing_trace import TraceShape, TraceWriter

SMALL = ["plan", "tiny", "--gpu", "h100", "--num-gpus", "4", "--seq-len", "64", "--global-batch-size", "4"]
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


def test_the_table_has_ten_rows_and_says_how_many_there_were(capsys):
    assert main([*SMALL, "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "legal mappings in" in out
    assert all(title in out for title in ("step s", "MFU %", "tokens/s/GPU", "bound by", "GiB on the fullest GPU"))


def test_fixed_axes_hold(capsys):
    mappings = answer(capsys, "--fix", "tp=2,ep=2", "mbs=1")["mappings"]
    assert mappings
    assert {(m["tp"], m["ep"], m["mbs"]) for m in mappings} == {(2, 2, 1)}


def test_a_method_is_a_part(capsys):
    mappings = answer(capsys, "--method", "fsdp+ep")["mappings"]
    assert {(m["pp"], m["zero"]) for m in mappings} == {(1, 3)}
    assert all(m["etp"] == m["tp"] for m in mappings)


def test_explain_prices_one_mapping_and_ranks_it(capsys):
    best = answer(capsys)["mappings"][0]
    words = [f"{axis}={best[axis]}" for axis in ("tp", "cp", "pp", "ep", "etp", "mbs")]
    found = answer(capsys, "--explain", " ".join(words))
    assert (found["legal"], found["rank"]) == (True, 1)
    assert found["step_time_s"] == pytest.approx(best["step_time_s"])


def test_explain_says_what_the_runtime_says_of_an_illegal_mapping(capsys):
    assert main([*SMALL, "--explain", "tp=3 ep=1"]) == EXIT_FAILED
    assert "illegal: parallel.tp=3 must divide" in capsys.readouterr().out
    assert main([*SMALL, "--json", "--explain", "tp=2", "cp=2", "dp=4"]) == EXIT_FAILED
    record = json.loads(capsys.readouterr().out)
    assert record["legal"] is False
    assert "dp=1 follows" in record["reason"]


def test_explain_says_what_is_too_large(capsys):
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


def test_imbalance_costs_time_and_memory(capsys):
    fixed = ("--fix", "ep=4,tp=1,cp=1,pp=1,mbs=1,dispatcher=alltoall,recompute=none")
    even, uneven = (answer(capsys, *fixed, *more)["mappings"][0] for more in ((), ("--imbalance", "3")))
    assert uneven["step_time_s"] > even["step_time_s"]
    assert uneven["memory_gib"] > even["memory_gib"]


def test_a_trace_prices_each_ep_with_its_load(capsys, tmp_path):
    model = load_config(None, ["model.preset=tiny"]).model
    shape = TraceShape(
        layers=model.moe_layer_numbers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        global_batch_size=4,
        seq_len=16,
    )
    # All tokens go to the first experts: the first ep rank has everything.
    choices = np.broadcast_to(np.arange(model.top_k), (4, 16, model.top_k)).astype(shape.dtype)
    TraceWriter(tmp_path, shape).write(1, [choices] * len(shape.layers))
    fixed = ("--fix", "ep=4,tp=1,cp=1,pp=1,mbs=1,dispatcher=alltoall")
    even = answer(capsys, *fixed)["mappings"][0]
    traced = answer(capsys, *fixed, "--trace", str(tmp_path))["mappings"][0]
    forced = answer(capsys, *fixed, "--imbalance", str(min(4.0, model.num_experts / model.top_k)))["mappings"][0]
    assert traced["step_time_s"] == pytest.approx(forced["step_time_s"])
    assert traced["step_time_s"] > even["step_time_s"]


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
        ([*SMALL, "--fix", "tp=3"], "no mapping of 4 GPUs with tp=3 is legal"),
        ([*SMALL, "--memory-reserve", "500"], "--memory-reserve"),
        ([*SMALL, "--imbalance", "0.5"], "--imbalance"),
        ([*SMALL, "--recipe", "out.txt"], "must end in .toml"),
        ([*SMALL, "--trace", "nowhere"], "--trace"),
        (SMALL[:6], "--seq-len is missing"),
    ],
)
def test_wrong_words_are_answered(capsys, words, message):
    assert message in refusal(capsys, *words)


def test_a_budget_that_nothing_fits_says_what_would_do(capsys):
    words = ["plan", "mixtral-8x22b", "--gpu", "a100", "--num-gpus", "8", "--seq-len", "4096"]
    message = refusal(capsys, *words, "--global-batch-size", "8")
    assert "the least is" in message
    assert "GPUs or more" in message


def test_a_recipe_as_model_says_the_rest(capsys):
    found = answer(capsys, words=["plan", "recipes/quickstart.toml", "--gpu", "h100"])
    assert (found["num_gpus"], found["seq_len"], found["global_batch_size"]) == (8, 256, 16)


def test_other_commands_refuse_a_mapping_that_is_not_planned():
    cfg = load_config(None, ["parallel.mapping=auto"])
    with pytest.raises(ValueError, match="moefold train"):
        check_config(cfg)
    check_config(replace(cfg, parallel=replace(cfg.parallel, mapping="given")))
