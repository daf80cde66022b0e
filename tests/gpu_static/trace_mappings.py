"""Trace the CUDA step under fourteen mappings and print its counts as JSON; with --write, save them as the table.

Launches are only recorded where Triton does not interpret kernels, so this runs in a process of its own.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.cuda_layers import layer_config, trace_layer
from tests.nondeterministic_ops import NondeterministicOps

TABLE = Path(__file__).parent / "traces.json"
TOKENS = 4096
PADDED = {"capacity_factor": 1.0, "pad_to_capacity": True}
DROPPED = {"capacity_factor": 1.0}
MAPPINGS = {
    "one rank": {"part": "layer"},
    "one rank, padded": {"part": "layer", "moe": PADDED},
    "one rank, dropped": {"part": "layer", "moe": DROPPED},
    "one rank, fp8": {"part": "block", "train": {"precision": "fp8-blockwise", "global_batch_size": 2}},
    "ep8 alltoall": {"part": "layer", "parallel": {"world_size": 8, "ep": 8, "dispatcher": "alltoall"}},
    "ep8 alltoall, padded": {
        "part": "layer", "parallel": {"world_size": 8, "ep": 8, "dispatcher": "alltoall"}, "moe": PADDED,
    },
    "ep8 dedup_alltoall": {
        "part": "layer", "parallel": {"world_size": 8, "ep": 8, "dispatcher": "dedup_alltoall"},
    },
    "ep8 symm_mem": {"part": "layer", "parallel": {"world_size": 8, "ep": 8, "dispatcher": "symm_mem"}},
    "ep8 allgather": {"part": "layer", "parallel": {"world_size": 8, "ep": 8, "dispatcher": "allgather"}},
    "ep8 alltoall, dropped": {
        "part": "layer", "parallel": {"world_size": 8, "ep": 8, "dispatcher": "alltoall"}, "moe": DROPPED,
    },
    "ep8 allgather, dropped": {
        "part": "layer", "parallel": {"world_size": 8, "ep": 8, "dispatcher": "allgather"}, "moe": DROPPED,
    },
    "ep4 etp2": {"part": "layer", "parallel": {"world_size": 8, "ep": 4, "etp": 2, "dispatcher": "alltoall"}},
    "tp2 ep4": {"part": "block", "parallel": {"world_size": 8, "tp": 2, "ep": 4, "dispatcher": "alltoall"}},
    "cp2 ep4": {"part": "block", "parallel": {"world_size": 8, "cp": 2, "ep": 4, "dispatcher": "alltoall"}},
}  # fmt: skip
"""A layer of Qwen3-30B-A3B, or its whole block, under each mapping."""


def counts(name: str) -> dict[str, object]:
    """Return the counts of a mapping."""
    sections = dict(MAPPINGS[name])
    part = sections.pop("part")
    with NondeterministicOps() as nondeterministic:
        trace = trace_layer(layer_config("qwen3-30b-a3b", TOKENS, **sections), part)
    device = trace.of("op", "kernel")
    return {
        "waits": [f"{event.name} at {event.source}" for event in trace.of("wait")],
        "nondeterministic": sorted(nondeterministic.found),
        "copies": len(trace.of("copy")),
        "launches": len(device),
        "kernels": len(trace.of("kernel")),
        "moved_bytes": int(sum(event.moved_bytes for event in device)),
        "sent_bytes": int(sum(event.moved_bytes for event in trace.of("collective"))),
    }


def main() -> int:
    """Print or save the counts of all mappings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"save them in {TABLE.name}")
    text = json.dumps({name: counts(name) for name in MAPPINGS}, indent=1)
    if parser.parse_args().write:
        TABLE.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
