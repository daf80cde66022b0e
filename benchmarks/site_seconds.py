"""Compare the time of data parallelism with the time of two sites over a slow link: 20 Mbit/s and 50 ms.

`python -m benchmarks.site_seconds`: two hosts in network namespaces (`benchmarks/slow_link.py`, needs root), a rank on
each, preset `tiny`, 16 samples of 128 tokens for each rank and step. Steps 11 to 40 are timed, since the first exchange
connects. Bytes are counted over the whole run: at the network device, and as the metrics report them.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.site_network import PORT, StepTimes, host_address, records, run_sites, start, wait_for
from benchmarks.slow_link import sent_bytes, slow_link

FIRST, LAST = 10, 40
COMMON = (
    "run.device=cpu",
    f"run.steps={LAST}",
    "model.preset=tiny",
    "train.seq_len=128",
    "train.micro_batch_size=8",
    "data.kind=python-docs",
    "train.eval_every=0",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "faults.timeout_s=600",
)
SITES = ("train.global_batch_size=16", "sites.count=2", "sites.every=10", "sites.timeout_s=300")
ROWS: dict[str, tuple[str, ...]] = {
    "data parallelism": ("train.global_batch_size=32", "parallel.world_size=2"),
    "mean, every=10, float32": SITES,
    "mean, every=10, int8": (*SITES, "sites.precision=int8"),
    "streaming, every=10": (*SITES, "sites.method=streaming", "sites.fragment_layers=1", "sites.overlap=3"),
}
"""Settings of each row."""


class Trial(NamedTuple):
    """Result of a run."""

    seconds: float
    """Seconds of the timed steps."""
    exchange_s: float
    """Seconds of all timed rounds."""
    wait_s: float
    """Part of `exchange_s` that training waited for."""
    device_bytes: int
    """Bytes that a host has sent over the link."""
    reported_bytes: int
    """Bytes that a site reports as sent."""


def run_data_parallel(hosts: Sequence[str], words: Sequence[str], folder: Path) -> None:
    """Train one job with a rank on each host."""
    processes = [
        start(
            host,
            ["-m", "moefold", "train", str(folder / "empty.toml"), *words, f"run.dir={folder / 'site-0'}"],
            folder / f"rank-{rank}.log",
            RANK=str(rank),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            WORLD_SIZE="2",
            MASTER_ADDR=host_address(0),
            MASTER_PORT=str(PORT),
        )
        for rank, host in enumerate(hosts)
    ]
    wait_for(processes, folder)


def run_trial(words: Sequence[str], bytes_per_s: float, latency_s: float) -> Trial:
    """Train over the link, and measure."""
    with tempfile.TemporaryDirectory() as temporary, slow_link(bytes_per_s, latency_s) as hosts:
        folder = Path(temporary)
        (folder / "empty.toml").touch()
        steps = StepTimes(folder / "site-0")
        try:
            if any(word.startswith("sites.") for word in words):
                run_sites(hosts, folder / "empty.toml", (*COMMON, *words), folder)
            else:
                run_data_parallel(hosts, (*COMMON, *words), folder)
            num_sent = sent_bytes(hosts[1])
        finally:
            steps.stop()
        times = {step: time_s for time_s, step in steps.times}
        rounds = {record["step"]: record.get("sites") for record in records(folder / "site-0")}
        complete = {step: round_ for step, round_ in rounds.items() if round_}
        timed = [round_ for step, round_ in complete.items() if step > FIRST]
        return Trial(
            times[LAST] - times[FIRST],
            sum(round_["exchange_s"] for round_ in timed),
            sum(round_["wait_s"] for round_ in timed),
            num_sent,
            sum(round_["sent_bytes"] for round_ in complete.values()),
        )


def main() -> None:
    """Print a row for each setting, the median of some trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=20.0, help="rate of each direction of the link, in Mbit/s")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="added to each direction, in milliseconds")
    parser.add_argument("--trials", type=int, default=1, help="trials of each row")
    args = parser.parse_args()
    head = ("", f"steps {FIRST + 1} to {LAST}, s", "exchanges, s", "training waited, s", "hidden")
    print(f"| {' | '.join((*head, 'MB at the device', 'MB reported', 'device / reported'))} |\n|" + " --- |" * 8)
    for name, words in ROWS.items():
        trials = [run_trial(words, args.mbit * 1e6 / 8, args.latency_ms / 1e3) for _ in range(args.trials)]
        middle = sorted(trials, key=lambda trial: trial.seconds)[len(trials) // 2]
        seconds = statistics.median(trial.seconds for trial in trials)
        cells = [name, f"{seconds:.1f}"]
        if middle.exchange_s:
            hidden = max(0.0, 1 - middle.wait_s / middle.exchange_s)
            cells += [f"{middle.exchange_s:.1f}", f"{middle.wait_s:.1f}", f"{hidden:.0%}"]
        else:
            cells += [""] * 3
        cells.append(f"{middle.device_bytes / 1e6:.2f}")
        if middle.reported_bytes:
            cells += [f"{middle.reported_bytes / 1e6:.2f}", f"{middle.device_bytes / middle.reported_bytes:.3f}"]
        else:
            cells += [""] * 2
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
