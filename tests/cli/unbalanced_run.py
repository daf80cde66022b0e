"""A run folder with unbalanced experts."""

import json

import numpy as np

from moefold.metrics.expert_counts import ExpertCountsWriter


def write_unbalanced_run(run_dir, *, layers: int = 2, experts: int = 4, steps: int = 30):
    """A run whose layer i gives expert 0 (i + 1) times the others' copies, and the last expert none at the end."""
    run_dir.mkdir(exist_ok=True)
    with ExpertCountsWriter(run_dir, range(layers), experts) as writer, (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            counts = np.full((layers, experts), 8)
            counts[:, 0] *= np.arange(1, layers + 1)
            if step > steps // 2:
                counts[:, -1] = 0
            writer.write(step, counts)
            load = (counts.max(1) / counts.mean(1)).tolist()
            file.write(json.dumps({"step": step, "expert_load": load, "dropped_fraction": 0.125}) + "\n")
    return run_dir
