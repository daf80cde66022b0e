"""Compare measured exchanges between two sites over a cable of limited rate with the predictions of `moefold plan`.

`python -m benchmarks.site_link`: two sites of one rank in two network namespaces, joined by a cable whose ends send at
a limited rate (`tc qdisc ... tbf`). It needs root for `ip netns`, and changes nothing outside of the namespaces.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.site_network import DEVICE, host_address, ip, records, run_sites
from moefold.cost.hardware import SiteLink
from moefold.planner.sites import SiteCost, site_volumes
from moefold.recipe import load_config
from moefold.topology.fragments import recipe_fragments

RECIPE = """
[run]
steps = 4
device = "cpu"
[model]
preset = "tiny"
layers = 2
hidden_size = 256
ffn = { moe = { intermediate_size = 512 } }
vocab_size = 2048
[train]
seq_len = 32
global_batch_size = 2
[data]
kind = "synthetic"
[sites]
count = 2
every = 2
timeout_s = 120
[faults]
timeout_s = 600
"""


@contextmanager
def cable(bytes_per_s: float) -> Iterator[list[str]]:
    """Create two network namespaces joined by a cable of a rate in both directions and yield their names."""
    names = [f"moefold{os.getpid()}{letter}" for letter in "ab"]
    rate = f"{round(8 * bytes_per_s)}bit"
    limit = ("rate", rate, "burst", "32kb", "latency", "200ms")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", host_address(number), "peer", host_address(1 - number), "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def measured_rounds(folder: Path, bytes_per_s: float, words: Sequence[str]) -> list[dict[str, float]]:
    """Train two sites over a cable, and return the metrics of the first site's rounds after the connection."""
    folder.mkdir(parents=True)
    recipe = folder / "sites.toml"
    recipe.write_text(RECIPE)
    with cable(bytes_per_s) as hosts:
        run_sites(hosts, recipe, words, folder)
    rounds = [record["sites"] for record in records(folder / "site-0")]
    # The first exchange connects.
    return [round_ for round_ in rounds if round_][1:]


def main() -> None:
    """Print a row for each rate and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[20, 100, 400], help="rates of the cable, in Mbit/s")
    parser.add_argument("--precision", nargs="+", default=["float32", "int8", "fp4"], help="values of sites.precision")
    args = parser.parse_args()
    print("| Mbit/s | precision | MB sent | predicted, s | measured, s | measured / predicted |\n|" + " --- |" * 6)
    with tempfile.TemporaryDirectory() as temporary:
        for mbit in args.mbit:
            for precision in args.precision:
                folder = Path(temporary) / f"{mbit:g}-{precision}"
                words = [f"sites.precision={precision}"]
                rounds = measured_rounds(folder, mbit * 1e6 / 8, words)
                cfg = load_config(folder / "sites.toml", words)
                volumes = site_volumes(cfg, precision)
                assert recipe_fragments(cfg.model, cfg.sites) == len(volumes) == 1
                cost = SiteCost(SiteLink(bytes_per_s=mbit * 1e6 / 8, latency_s=0.0), 2, 1.0, {precision: volumes})
                predicted = cost.exchange_s(volumes[0])
                assert all(round_["sent_bytes"] == volumes[0].num_bytes for round_ in rounds)
                seconds = statistics.median(round_["exchange_s"] for round_ in rounds)
                row = (
                    f"{mbit:g}",
                    precision,
                    f"{volumes[0].num_bytes / 1e6:.2f}",
                    f"{predicted:.3f}",
                    f"{seconds:.3f}",
                )
                print(f"| {' | '.join(row)} | {seconds / predicted:.2f} |", flush=True)


if __name__ == "__main__":
    main()
