"""A recipe of sites and its plan."""

from dataclasses import replace
from pathlib import Path

from moefold.cost.hardware import SiteLink
from moefold.planner.sites import plan_sites
from moefold.recipe import load_config

RECIPE = """
[run]
steps = 2000
dtype = "bfloat16"
[model]
preset = "tiny"
[parallel]
world_size = 4
[train]
seq_len = 256
global_batch_size = 64
[sites]
count = 2
every = 100
"""


def planned(tmp_path: Path, words: tuple[str, ...] = (), *, step_s: float = 1.0, bytes_per_s: float, **sites: object):
    (tmp_path / "sites.toml").write_text(RECIPE)
    cfg = load_config(tmp_path / "sites.toml", ["sites.count=3", *words])
    cfg = replace(cfg, sites=replace(cfg.sites, **sites))
    return cfg, plan_sites(cfg, SiteLink(bytes_per_s=bytes_per_s, latency_s=0.0), step_s)
