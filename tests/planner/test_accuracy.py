"""Measured runs of moefold are priced as a plan prices their mapping."""

import pytest

from moefold.errors import ConfigError
from moefold.planner.accuracy import COLUMNS, MeasuredRow, SkipRowError, predict_own_run, validate_predictions
from moefold.planner.axis_words import parse_axes
from moefold.planner.plan_request import PlanOptions, plan_request
from moefold.planner.planner import Planner

GOOD = dict.fromkeys(COLUMNS, "") | {
    "source": "a cluster", "model": "Mixtral-8x7B", "gpu": "H100", "n_gpus": "64", "precision": "BF16",
    "seq_len": "4096", "gbs": "256", "mbs": "1", "tp": "2", "cp": "1", "ep": "8", "pp": "1",
    "metric": "tokens_per_s_per_gpu", "value": "4000", "method": "moefold zero=1 dispatcher=alltoall",
}  # fmt: skip


def predicted(**cells):
    return predict_own_run(MeasuredRow(GOOD | cells))


def test_a_run_is_priced_as_the_plan_of_its_mapping():
    axes = parse_axes(["tp=2,cp=1,ep=8,pp=1,etp=1,mbs=1,zero=1,dispatcher=alltoall"], "--fix")
    options = PlanOptions(num_gpus=64, seq_len=4096, global_batch_size=256, fix=axes, memory_reserve=0.0)
    plan = Planner(plan_request("mixtral-8x7b", "h100", options)).best()
    found = predicted()
    assert found.mapping == plan.mapping
    assert found.predicted == plan.time.tokens_per_s_per_gpu
    assert found.error_pct == pytest.approx(100 * (plan.time.tokens_per_s_per_gpu / 4000 - 1))
    assert predicted(metric="mfu_pct").predicted == 100 * plan.time.mfu
    assert predicted(metric="tflops_per_gpu").predicted == plan.time.tflops_per_gpu


def test_the_words_of_the_method_are_axes():
    assert predicted(method="moefold zero=3").mapping.zero == 3
    assert predicted(method="Moefold zero=1 recompute=layer").mapping.recompute == ("layer",)


def test_a_run_that_does_not_fit_is_predicted_out_of_memory():
    found = predicted(n_gpus="8", gbs="8", tp="1", value="OOM", method="moefold zero=1 recompute=none")
    assert (found.measured, found.predicted, found.error_pct) == ("OOM", "OOM", None)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"method": "MCore"}, "method 'MCore' is not moefold: other software is priced by the same command of a"),
        ({"method": "moefold zoro=1"}, "method zoro=1: unknown axis 'zoro'; did you mean zero?"),
        ({"method": "moefold tp=2"}, "method tp=2: tp is set twice"),
        ({"model": "Nobody-7B"}, "model 'Nobody-7B' is unknown"),
        ({"gpu": "Abacus"}, "abacus"),
        ({"precision": "INT3"}, "precision 'INT3' is not known"),
        ({"metric": "speed"}, "metric 'speed' is not known"),
        ({"value": "fast"}, "value 'fast' is not a number"),
        ({"pp": ""}, "incomplete mapping: pp not given"),
        ({"n_gpus": "", "gbs": "-"}, "incomplete run: n_gpus, gbs not given"),
        ({"method": "moefold, zero=x"}, "method zero=x"),
        ({"method": "Moefold,zero=x"}, "method zero=x"),
        ({"tp": "3"}, "illegal: parallel.tp=3 must divide"),
        ({"tp": "two"}, "tp='two' is not an integer"),
    ],
)
def test_a_row_that_cannot_be_priced_is_skipped_with_its_reason(cells, reason):
    with pytest.raises(SkipRowError) as error:
        predicted(**cells)
    assert str(error.value).startswith(reason) or reason in str(error.value).lower()


def test_skipped_rows_are_counted_by_reason(tmp_path):
    rows = [GOOD, GOOD | {"method": "FSDP"}, GOOD | {"method": "FSDP"}]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([",".join(COLUMNS), *(",".join(row.values()) for row in rows)]) + "\n")
    accuracy = validate_predictions(path, predict_own_run)
    assert [p.row["method"] for p in accuracy.predictions] == [GOOD["method"]]
    assert list(accuracy.skipped.values()) == [2]
    assert accuracy.errors_by_kind()["all"]["unseen"] is None


def test_a_table_without_a_column_or_a_file_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("model,gpu\nx,y\n")
    with pytest.raises(ConfigError, match="lacks the columns source"):
        validate_predictions(path, predict_own_run)
    with pytest.raises(ConfigError, match="cannot be read"):
        validate_predictions(tmp_path / "absent.csv", predict_own_run)
