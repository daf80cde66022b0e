"""The log of faults."""

import json
import math

from moefold.metrics.writer import FAULTS_FILE, log_fault
from tests.metrics.faults import read_faults


def test_faults_come_back_in_order_and_are_json(tmp_path):
    assert read_faults(tmp_path) == []
    log_fault(tmp_path, {"step": 3, "loss": math.nan, "parts": {1: [math.inf, 2.5]}})
    log_fault(tmp_path, {"step": 2, "samples": (4, 5)})
    with (tmp_path / FAULTS_FILE).open("a") as file:
        file.write('{"step": 9, "torn')
    found = read_faults(tmp_path)
    assert [fault["step"] for fault in found] == [3, 2]
    assert found[0]["loss"] == "nan"
    assert found[0]["parts"] == {"1": ["inf", 2.5]}
    assert found[1]["samples"] == [4, 5]
    assert found[0]["time_s"] <= found[1]["time_s"]
    assert "NaN" not in json.dumps(found)
