"""Writes the distinct mappings of published measurements that `moefold plan` compares its answers with.

    python -m benchmarks.measured_mappings TABLE.csv [TABLE.csv ...]

writes `src/moefold/planner/measured.csv` from tables in the format of `moefold plan-accuracy`. That command chooses the
values that a source does not print (micro-batches, virtual stages, ZeRO stage).
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

from benchmarks.published.predictions import predict
from benchmarks.published.rows import parse_case
from moefold.planner.accuracy import SkipRowError, read_rows
from moefold.planner.mapping import OFFLOADED_OPTIMIZER
from moefold.planner.mapping_families import measured_axes

MEASURED_COLUMNS = (
    *("model", "gpu", "seq_len", "tp", "cp", "pp", "ep", "etp", "mbs", "zero", "recompute", "offload"),
    *("num_gpus", "source"),
)
"""Columns of `measured.csv`: the compared values, and the source of the measurement."""

OUTPUT = Path(__file__).parents[1] / "src/moefold/planner/measured.csv"


def measured_rows(table: Path) -> Iterator[dict[str, object]]:
    """Yield the measured mappings of a table."""
    for row in read_rows(table):
        try:
            case = parse_case(row)
            prediction = predict(case)
        except SkipRowError:
            continue
        if isinstance(prediction.measured, float):
            offloads = any(part != OFFLOADED_OPTIMIZER for part in prediction.mapping.offload)
            axes = measured_axes(prediction.mapping, case.gpu, case.model, case.workload.seq_len)
            yield {**axes, "offload": offloads, "num_gpus": prediction.mapping.world_size, "source": row["source"]}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    arguments = parser.parse_args()
    distinct: dict[tuple[object, ...], dict[str, object]] = {}
    for table in arguments.tables:
        for row in measured_rows(table):
            distinct.setdefault(tuple(row[name] for name in MEASURED_COLUMNS[:-1]), row)
    with OUTPUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, MEASURED_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(distinct.values())


if __name__ == "__main__":
    main()
