"""`moefold inspect` on a site's run: how its weights and its routing differ from the other sites."""

import json

from moefold.cli.main import main
from moefold.metrics.metric_curves import read_metric_curves
from tests.cli.unbalanced_run import write_unbalanced_run
from tests.metrics.undefined import undefined


def test_the_rounds_of_a_site_are_shown(tmp_path, capsys):
    write_unbalanced_run(tmp_path, steps=20)
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for record in lines[4::5]:
        step = record["step"]
        overlap = 0.5 + step / 100 if step in (5, 20) else None
        spike = None if step == 5 else 0.25
        record["sites"] = {"members": 2, "difference": 0.1, "agreement": 0.9, "spike": spike}
        record["sites"] |= {"router_distance": step / 1000, "routing_overlap": overlap}
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))
    assert [len(curve.values) for curve in read_metric_curves(tmp_path)["sites"]] == [4, 4, 2, 4, 3]
    picture = tmp_path / "site.svg"
    assert main(["inspect", str(tmp_path), "--json", "--picture", str(picture)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert undefined(record, "inspect") == []
    assert record["sites"]["routing_overlap"] == {"start": 0.55, "end": 0.7, "min": 0.55, "max": 0.7}
    assert main(["inspect", str(tmp_path)]) == 0
    table = {line[:15].strip(): line[15:].split() for line in capsys.readouterr().out.splitlines()}
    assert table["router distance"] == ["0.005", "0.02", "0.005", "0.02"]
    assert picture.stat().st_size > 0
